"""The paper "Is MC Dropout Bayesian?" redone, and the reference solutions it is measured against."""
