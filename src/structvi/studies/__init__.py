"""Studies made with the library: the paper redone, and whether a method is Bayesian. Loaded by name alone."""
