"""The paper "Is MC Dropout Bayesian?" redone, and the reference solutions it is measured against.

`settings` has every chosen number, `methods` the rows of the tables; each table and figure is one file with its jobs
and how their results are put together; `run` computes and writes; `report`, `commentary` and `figures` present.
"""
