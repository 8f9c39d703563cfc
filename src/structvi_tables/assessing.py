"""How a fitted table does on the rows that nobody has seen, beside scikit-learn's models."""

from dataclasses import dataclass, field
from math import log, sqrt
from typing import Any

import numpy as np
import torch

from .baselines import LEVELS, Baselines, crps
from .columns import values_of
from .fitting import TableFit
from .model import TableModel
from .reading import Table

#: of the intervals whose coverage is looked at
COVERAGE = (0.5, 0.8, 0.9, 0.95)
#: rows of the table that distances are taken to
REFERENCE = 5000
#: a row is far from the data where its nearest row is farther than that of this share of the fitted rows
FAR = 0.95
#: rows that the page names
NAMED_ROWS = 12


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
    def is_worse(self) -> bool:
        """Whether zero is above the interval, of a difference that should be positive."""
        return self.mean + self.half < 0

    @property
    def is_better(self) -> bool:
        return self.mean - self.half > 0

    def __str__(self) -> str:
        return f"{self.mean:+.3g} ± {self.half:.2g}"


@dataclass
class Assessment:
    """Of the test rows.

    Attributes:
        predictions: the table of `TableModel.predict`, with the target, `log_prob`, `distance` (to the nearest fitted
            row, 1 for what is far) and `why`.
        log_prob: [T], in nats of the target's own unit.
        against: our log density minus each baseline's, by name.
        quality: RMSE or share of right classes, ours and each baseline's.
        crps, crps_trees, crps_gain: ours, that of boosted quantiles, and the gain, of amounts.
        coverage: level → share of test rows inside; of classes: bins of (probability of the likeliest, share right, n).
    """

    predictions: Table
    log_prob: np.ndarray
    against: dict[str, Difference]
    best: str
    quality: dict[str, float]
    densities: dict[str, float]
    coverage: dict[float, float] = field(default_factory=dict)
    reliability: list[tuple[float, float, int]] = field(default_factory=list)
    crps: float | None = None
    crps_trees: float | None = None
    crps_gain: Difference | None = None

    @property
    def gain(self) -> Difference:
        """Over the baseline that the folds choose."""
        return self.against[self.best]


OURS = "structvi"


def assess(fit: TableFit, others: Baselines) -> Assessment:
    """Predict the test rows and compare."""
    model, test = fit.model, fit.test
    features = test.drop(columns=model.target.name)
    predictions = model.predict(features)
    log_prob, quantiles, inside = _scores(model, test)
    against = {one.name: Difference.of(log_prob - one.log_prob) for one in others.each}
    densities = {OURS: float(log_prob.mean())} | {one.name: float(one.log_prob.mean()) for one in others.each}
    t = model.target.encode(test).numpy()
    found = Assessment(predictions, log_prob, against, others.best.name, {}, densities)
    if model.target.classes:
        names = [f"p_{name}" for name in model.target.classes]
        p = predictions[names].to_numpy()
        found.quality = {OURS: float((p.argmax(1) == t).mean())}
        found.quality |= {one.name: float((one.predicted == t).mean()) for one in others.each}
        found.reliability = _reliability(p.max(1), p.argmax(1) == t)
    else:
        assert quantiles is not None
        t, scale = t.reshape(-1), model.target.scale
        y = values_of(test[model.target.name], "number", model.target.name)
        found.quality = {OURS: float(np.sqrt(np.mean((predictions["mean"] - y) ** 2)))}
        found.quality |= {one.name: float(np.sqrt(np.mean((one.predicted - t) ** 2))) * scale for one in others.each}
        found.coverage = inside
        own = crps(y, quantiles)
        found.crps = float(own.mean())
        if others.quantiles is not None:
            theirs = crps(y, others.quantiles)
            found.crps_trees, found.crps_gain = float(theirs.mean()), Difference.of(theirs - own)
    _explain(fit, found, features, test)
    return found


def _scores(model: TableModel, test: Table) -> tuple[np.ndarray, np.ndarray | None, dict[float, float]]:
    """Log densities [T], quantiles [T, Q] in the target's unit, and the share of rows inside each interval."""
    t, found = model.target.encode(test), np.empty(len(test))
    quantiles, u = np.empty((len(test), len(LEVELS))), np.empty(len(test))
    for rows, mixture in model.mixtures(test.drop(columns=model.target.name)):
        found[rows] = mixture.log_prob(t[rows]).numpy()
        if not model.target.classes:
            quantiles[rows] = mixture.quantiles(LEVELS).numpy()
            u[rows] = mixture.cdf(t[rows]).numpy()
    if model.target.classes:
        return found, None, {}
    inside = {level: float((np.abs(u - 0.5) <= level / 2).mean()) for level in COVERAGE}
    return found - log(model.target.scale), quantiles * model.target.scale + model.target.centre, inside


def _reliability(p: np.ndarray, right: np.ndarray, bins: int = 8) -> list[tuple[float, float, int]]:
    """Rows by the probability of their likeliest class, in bins of equal counts."""
    order = np.argsort(p, kind="stable")
    parts = [part for part in np.array_split(order, min(bins, max(1, len(p) // 10))) if len(part)]
    return [(float(p[part].mean()), float(right[part].mean()), len(part)) for part in parts]


def _explain(fit: TableFit, found: Assessment, features: Table, test: Table) -> None:
    """Distance to the data and a reason in words, for every test row."""
    model, table = fit.model, found.predictions
    fitted = fit.table.iloc[fit.split.fit.numpy()[:REFERENCE]].drop(columns=model.target.name)
    own, new = model.inputs(fitted)["plain"], model.inputs(features)["plain"]
    usual = float(torch.quantile(_nearest(own, own, skip_self=True), FAR))
    distance = (_nearest(new, own) / max(usual, 1e-12)).numpy()
    table.insert(0, model.target.name, test[model.target.name].to_numpy(), allow_duplicates=True)
    table.insert(0, "row", fit.table.index[fit.split.test.numpy()].to_numpy() + 1, allow_duplicates=True)
    table["distance"] = distance
    table["log_prob"] = found.log_prob
    table["why"] = [_reason(row, far) for row, far in zip(table.to_dict("records"), distance > 1, strict=True)]


def _reason(row: dict[Any, Any], far: bool) -> str:
    if "sd" in row:
        share = row["epistemic_sd"] ** 2 / max(row["sd"] ** 2, 1e-300)
    else:
        share = row["epistemic"] / max(row["entropy"], 1e-300)
    where = "far from the fitted rows" if far else "near fitted rows"
    if row["outside"]:
        where += f", beyond what was fitted in {row['outside']}"
    if share > 0.5:
        return f"{where}; mostly because the models do not know: more rows like it would help"
    return f"{where}; mostly noise: rows like it differ among themselves"


def _nearest(x: torch.Tensor, to: torch.Tensor, skip_self: bool = False) -> torch.Tensor:
    """The distance of each row to the nearest other."""
    found = []
    for rows in torch.arange(len(x)).split(512):
        distance = torch.cdist(x[rows], to)
        if skip_self:
            distance[torch.arange(len(rows)), rows] = torch.inf
        found.append(distance.amin(1))
    return torch.cat(found)
