"""What scikit-learn's usual models make of the same rows: the comparison that a fit is held to."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log, pi
from typing import Any

import numpy as np

from .fitting import TableFit
from .reading import EXTRA, TableError

#: probabilities of scikit-learn's classifiers are kept above this
SMALLEST = 1e-7
#: of the quantiles by which quantile models are compared
LEVELS = (0.05, 0.15, 0.25, 0.35, 0.45, 0.5, 0.55, 0.65, 0.75, 0.85, 0.95)


@dataclass
class Baseline:
    """A model of scikit-learn's, fitted as ours.

    Attributes:
        held_out: mean log density of the folds, each under a fit to the others.
        log_prob: of the test rows, under a fit to all others, [T].
        predicted: the mean, or the likeliest class's label, [T].
        group: "linear" or "trees"; the settings of each are chosen by `held_out`.
    """

    name: str
    group: str
    held_out: float
    log_prob: np.ndarray
    predicted: np.ndarray


@dataclass
class Baselines:
    """All of them; `best` is what the folds choose. Quantiles [T, Q] are those of quantile models, of amounts alone."""

    each: list[Baseline]
    quantiles: np.ndarray | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> Baseline:
        return max(self.each, key=lambda one: one.held_out)


def baselines(fit: TableFit, seed: int = 0) -> Baselines:
    """Ridge or logistic regression and gradient boosting, on the same inputs, folds and test rows.

    Of amounts each has a normal noise, as wide as its residuals on the folds.
    """
    try:
        import sklearn  # noqa: F401
    except ModuleNotFoundError:
        raise TableError(f"the comparison needs scikit-learn, which is not installed: {EXTRA}") from None
    model = fit.model
    features = fit.table.drop(columns=model.target.name)
    rows = np.concatenate([fit.split.fit.numpy(), fit.split.test.numpy()])
    x = np.zeros((len(fit.table), 0))
    encoded = model.columns.encode(features.iloc[rows]).plain
    x = np.zeros((len(fit.table), encoded.shape[1]))
    x[rows] = encoded
    t = model.target.encode(fit.table).numpy().reshape(len(fit.table)).astype(np.float64)
    data = _Data(x, t, fit.folds(), fit.split.fit.numpy(), fit.split.test.numpy(), log(model.target.scale))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of convergence: what does badly on the folds is not chosen
        if model.target.classes:
            return Baselines(_chosen([_classes(data, *one) for one in _classifiers(seed)]))
        found = [_amounts(data, *one) for one in _regressors(seed)]
        return Baselines(_chosen(found), _quantiles(data, seed) * model.target.scale + model.target.centre)


@dataclass
class _Data:
    x: np.ndarray
    t: np.ndarray
    folds: Sequence[tuple[np.ndarray, np.ndarray]]
    fit: np.ndarray
    test: np.ndarray
    log_scale: float


Make = Callable[[], Any]


def _regressors(seed: int) -> list[tuple[str, str, Make]]:
    from sklearn.ensemble import HistGradientBoostingRegressor as Trees
    from sklearn.linear_model import Ridge

    found: list[tuple[str, str, Make]] = [
        ("ridge regression", "linear", lambda a=a: Ridge(alpha=a)) for a in (0.1, 1.0, 10.0, 100.0)
    ]
    return [
        *found,
        ("gradient boosting", "trees", lambda: Trees(random_state=seed)),
        (
            "gradient boosting",
            "trees",
            lambda: Trees(learning_rate=0.05, max_iter=300, min_samples_leaf=10, random_state=seed),
        ),
    ]


def _classifiers(seed: int) -> list[tuple[str, str, Make]]:
    from sklearn.ensemble import HistGradientBoostingClassifier as Trees
    from sklearn.linear_model import LogisticRegression

    found: list[tuple[str, str, Make]] = [
        ("logistic regression", "linear", lambda c=c: LogisticRegression(C=c, max_iter=300))
        for c in (0.01, 0.1, 1.0, 10.0)
    ]
    return [
        *found,
        ("gradient boosting", "trees", lambda: Trees(random_state=seed)),
        ("gradient boosting", "trees", lambda: Trees(learning_rate=0.05, max_leaf_nodes=7, random_state=seed)),
    ]


def _amounts(data: _Data, name: str, group: str, make: Make) -> Baseline:
    residuals = np.concatenate(
        [data.t[held] - make().fit(data.x[train], data.t[train]).predict(data.x[held]) for train, held in data.folds]
    )
    sd = max(float(np.sqrt(np.mean(residuals**2))), 1e-9)

    def log_prob(r: np.ndarray) -> np.ndarray:
        return -0.5 * (r / sd) ** 2 - log(sd) - 0.5 * log(2 * pi) - data.log_scale

    predicted = make().fit(data.x[data.fit], data.t[data.fit]).predict(data.x[data.test])
    return Baseline(name, group, float(log_prob(residuals).mean()), log_prob(data.t[data.test] - predicted), predicted)


def _classes(data: _Data, name: str, group: str, make: Make) -> Baseline:
    def log_probs(model: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p = np.clip(model.predict_proba(data.x[rows]), SMALLEST, 1.0)
        p /= p.sum(1, keepdims=True)
        index = np.searchsorted(model.classes_, data.t[rows])
        return np.log(p[np.arange(len(rows)), index]), model.classes_[p.argmax(1)]

    held = [log_probs(make().fit(data.x[train], data.t[train]), rows)[0] for train, rows in data.folds]
    test, predicted = log_probs(make().fit(data.x[data.fit], data.t[data.fit]), data.test)
    return Baseline(name, group, float(np.concatenate(held).mean()), test, predicted)


def _quantiles(data: _Data, seed: int) -> np.ndarray:
    from sklearn.ensemble import HistGradientBoostingRegressor as Trees

    found = []
    for p in LEVELS:
        model = Trees(loss="quantile", quantile=p, random_state=seed).fit(data.x[data.fit], data.t[data.fit])
        found.append(model.predict(data.x[data.test]))
    return np.sort(np.stack(found, 1), 1)


def _chosen(found: list[Baseline]) -> list[Baseline]:
    """The best setting of each group."""
    groups = dict.fromkeys(one.group for one in found)
    return [max((one for one in found if one.group == group), key=lambda one: one.held_out) for group in groups]


def crps(t: np.ndarray, quantiles: np.ndarray) -> np.ndarray:
    """2 ∫ pinball loss dp of quantiles [T, Q] at `LEVELS`, by the rule of trapezoids with flat ends: [T].

    Example:
        >>> crps(np.array([0.0]), np.zeros((1, len(LEVELS)))).tolist()
        [0.0]
    """
    p = np.array(LEVELS)
    above = t[:, None] - quantiles
    loss = np.maximum(p * above, (p - 1) * above)
    edges = np.concatenate([[0.0], (p[1:] + p[:-1]) / 2, [1.0]])
    return 2 * (loss * np.diff(edges)).sum(1)
