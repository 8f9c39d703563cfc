"""The paper "Is MC Dropout Bayesian?" redone, and the reference solutions that its fits are compared with.

`settings.toml` has the chosen numbers and the paper's own, `methods` the rows of the tables. Each table and figure is
one file with `compute`, and `draw` where it has a picture. `reproduce` computes and writes; `pages` makes pictures and
HTML.
"""
