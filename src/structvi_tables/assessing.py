"""The quality of a fitted table on its test rows, beside scikit-learn's models."""

import warnings
from dataclasses import dataclass
from math import log, sqrt
from typing import Any

import numpy as np
import torch
from scipy.stats import norm

from .columns import values_of
from .fitting import FOLDS, TableFit
from .reading import EXTRA, Table, TableError
from .training import folds_of

BOOSTING = "gradient boosting"


@dataclass
class Difference:
    """Mean and 95 % interval of a difference, row by row.

    Example:
        >>> print(Difference.of(np.array([1.0, 3.0])))
        +2 ± 2
    """

    mean: float
    half: float

    @classmethod
    def of(cls, rows: np.ndarray) -> "Difference":
        return cls(float(rows.mean()), 1.96 * float(rows.std(ddof=1)) / sqrt(len(rows)))

    @property
    def verdict(self) -> str:
        return "worse" if self.mean + self.half < 0 else "better" if self.mean > self.half else "as good"

    def __str__(self) -> str:
        return f"{self.mean:+.3g} ± {self.half:.2g}"


@dataclass
class Baseline:
    """A model of scikit-learn's, fitted as ours.

    Attributes:
        held_out: mean log density of the folds, each under a fit to the others.
        log_prob: of the test rows, under a fit to all others, [T], in nats of the target's own unit.
        quality: RMSE or share of right classes.
    """

    name: str
    held_out: float
    log_prob: np.ndarray
    quality: float


@dataclass
class Assessment:
    """The comparison on the test rows.

    Attributes:
        predictions: the table of `TableModel.predict`, with the row's number, the target and `log_prob`.
        log_prob, quality: ours, as those of a `Baseline`.
        baselines: the best setting of each kind; `best` is what the folds choose.
        gain: our log density minus that of the best baseline.
        calibration: (probability, share, rows). For amounts the share of rows inside each interval; for classes, by
            bins of the likeliest class's probability, the share that is right.
    """

    predictions: Table
    log_prob: np.ndarray
    quality: float
    baselines: list[Baseline]
    calibration: list[tuple[float, float, int]]

    @property
    def best(self) -> Baseline:
        return max(self.baselines, key=lambda one: one.held_out)

    @property
    def gain(self) -> Difference:
        return self.against(self.best)

    def against(self, other: Baseline) -> Difference:
        return Difference.of(self.log_prob - other.log_prob)


def assess(fit: TableFit) -> Assessment:
    """Predict the test rows and compare."""
    model, test = fit.model, fit.test_table
    target, features = model.target, test.drop(columns=model.target.name)
    t, log_prob, u = target.encode(test), np.empty(len(test)), np.empty(len(test))
    for rows, mixture in model.mixtures(features):
        log_prob[rows] = mixture.log_prob(t[rows]).numpy() - log(target.scale)
        if not target.classes:
            u[rows] = mixture.cdf(t[rows]).numpy()
    table = model.predict(features)
    if target.classes:
        p = table[[f"p_{name}" for name in target.classes]].to_numpy()
        right, top = p.argmax(1) == t.numpy(), p.max(1)
        quality, bins = float(right.mean()), max(1, min(8, len(p) // 10))
        parts = np.array_split(np.argsort(top, kind="stable"), bins)
        calibration = [(float(top[some].mean()), float(right[some].mean()), len(some)) for some in parts]
    else:
        error = table["mean"].to_numpy() - values_of(test[target.name], "number", target.name)
        quality = float(np.sqrt(np.mean(error**2)))
        calibration = [(level, float((np.abs(u - 0.5) <= level / 2).mean()), len(u)) for level in (0.5, model.level)]
    table.insert(0, target.name, test[target.name].to_numpy(), allow_duplicates=True)
    table.insert(0, "row", fit.table.index[fit.test.numpy()].to_numpy() + 1, allow_duplicates=True)
    table["log_prob"] = log_prob
    return Assessment(table, log_prob, quality, baselines(fit), calibration)


def baselines(fit: TableFit) -> list[Baseline]:
    """Fit ridge or logistic regression and gradient boosting, on the same inputs, folds and test rows.

    The folds choose the settings of each. For amounts each has a normal noise, as wide as its residuals on the folds.
    """
    try:
        from sklearn import ensemble, linear_model
    except ModuleNotFoundError:
        raise TableError(f"the comparison needs scikit-learn, which is not installed: {EXTRA}") from None
    if fit.model.target.classes:
        trees, settings = ensemble.HistGradientBoostingClassifier, {"learning_rate": 0.05, "max_leaf_nodes": 7}
        linear = [linear_model.LogisticRegression(C=C, max_iter=300) for C in (0.01, 0.1, 1.0, 10.0)]
    else:
        trees = ensemble.HistGradientBoostingRegressor
        settings = {"learning_rate": 0.05, "max_iter": 300, "min_samples_leaf": 10}
        linear = [linear_model.Ridge(alpha=alpha) for alpha in (0.1, 1.0, 10.0, 100.0)]
    boosted = [trees(random_state=fit.model.seed, **own) for own in ({}, settings)]
    name = "logistic regression" if fit.model.target.classes else "ridge regression"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of convergence: what does badly on the folds is not chosen
        found = [[_judged(what, one, fit) for one in each] for what, each in ((name, linear), (BOOSTING, boosted))]
    return [max(each, key=lambda one: one.held_out) for each in found]


def _judged(name: str, model: Any, fit: TableFit) -> Baseline:
    from sklearn.model_selection import cross_val_predict

    columns, target = fit.model.columns, fit.model.target
    x = columns.inputs(columns.values(fit.table.drop(columns=target.name)))["plain"].double().numpy()
    t = target.encode(fit.table).numpy().reshape(-1)
    learned, test = fit.fit.numpy(), fit.test.numpy()
    cv = [(train.numpy(), held.numpy()) for train, held in folds_of(torch.arange(len(learned)), FOLDS)]
    method = "predict_proba" if target.classes else "predict"
    apart = cross_val_predict(model, x[learned], t[learned], cv=cv, method=method)
    predicted = getattr(model.fit(x[learned], t[learned]), method)(x[test])
    both = ((np.asarray(apart), learned), (predicted, test))
    if target.classes:
        held_out, log_prob = (
            np.log(np.maximum(p[range(len(p)), t[rows]], np.finfo(np.float32).eps)) for p, rows in both
        )
        return Baseline(name, float(held_out.mean()), log_prob, float((predicted.argmax(1) == t[test]).mean()))
    inside, error = (target.scale * (t[rows] - p) for p, rows in both)
    sd = max(float(np.sqrt(np.mean(inside**2))), 1e-9 * target.scale)
    held_out, log_prob = norm.logpdf(inside, scale=sd), norm.logpdf(error, scale=sd)
    return Baseline(name, float(held_out.mean()), log_prob, float(np.sqrt(np.mean(error**2))))
