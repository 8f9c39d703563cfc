"""What may stand where a new row has no value, though the column was complete when the model was fitted.

No input says "missing" of such a column. So the prediction is a mixture over values that the row could have, given its
others: p(t | x_o) = ∫ p(t | x_o, x_m) p(x_m | x_o) dx_m. Here p(x_m | x_o) is a Gaussian copula of the fitted rows:
numbers by their ranks, as normal scores; a level's probability is linear in what else is known of the row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.distributions import Normal

from .columns import Column
from .reading import TableError

#: values that stand for a missing one, and quantiles of each number that are kept
FILLS, POINTS = 16, 64
#: with more features than this a value is drawn from its own column alone
MOST_FEATURES = 200
#: correlations are shrunk by at least this share
LEAST_SHRINKAGE = 0.01
#: stands for the levels that are not told apart
OTHER = "\0"

#: values of every column, by its name, as `values_of` gives them
Rows = Mapping[str, np.ndarray]


def normal_quantile(u: np.ndarray) -> np.ndarray:
    return Normal(0.0, 1.0).icdf(torch.as_tensor(u, dtype=torch.float64)).numpy()


def normal_cdf(z: np.ndarray) -> np.ndarray:
    return Normal(0.0, 1.0).cdf(torch.as_tensor(z, dtype=torch.float64)).numpy()


def gaps_of(columns: Sequence[Column], rows: Rows) -> np.ndarray:
    """[N, columns]: where a value is missing and none was when the column was fitted."""
    gone = [rows[c.name] == "" if c.kind == "category" else np.isnan(rows[c.name]) for c in columns]
    return np.stack([where & (not c.missing) for c, where in zip(columns, gone, strict=True)], 1)


@dataclass
class Margin:
    """One column by itself: quantiles of a number and the spread of its scores, or shares of a category's levels.

    Example:
        >>> margin = Margin.of(Column("c", "category", levels=["a", "b"]), np.array(["a", "b", "a", "a"]))
        >>> margin.levels, margin.shares
        (['a', 'b'], [0.75, 0.25])
    """

    points: list[float]
    spread: float
    levels: list[str]
    shares: list[float]

    @classmethod
    def of(cls, column: Column, values: np.ndarray) -> "Margin":
        if column.kind == "category":
            present = _told_apart(values[values != ""], column.levels)
            names, counts = np.unique(present, return_counts=True)
            return cls([], 1.0, [str(name) for name in names], [float(n / len(present)) for n in counts])
        x = values[~np.isnan(values)]
        if not len(x):
            return cls([0.0], 1.0, [], [])
        levels = (np.arange(POINTS) + 0.5) / POINTS
        found = cls([float(p) for p in np.quantile(x, levels, method="nearest")], 1.0, [], [])
        found.spread = float(found.features(x).std()) or 1.0
        return found

    @property
    def width(self) -> int:
        return 1 if self.points else len(self.levels)

    def features(self, values: np.ndarray) -> np.ndarray:
        """[N] → [N, width], of mean 0 and variance 1 over the fitted rows; 0 where missing."""
        if self.points:
            points = np.array(self.points)
            rank = (np.searchsorted(points, values, "left") + np.searchsorted(points, values, "right")) / 2
            u = np.clip(rank / len(points), 0.5 / POINTS, 1 - 0.5 / POINTS)
            return np.where(np.isnan(values), 0.0, normal_quantile(u) / self.spread)[:, None]
        shares = np.array(self.shares)
        hit = _told_apart(values, self.levels)[:, None] == np.array(self.levels)[None]
        scaled = (hit - shares) / np.sqrt(shares * (1 - shares)).clip(min=1e-6)
        return np.where(hit.any(1, keepdims=True), scaled, 0.0)

    def drawn(self, mean: np.ndarray, variance: float, u: np.ndarray) -> np.ndarray:
        """Values at the levels u [N] of their distributions; features have this mean [N, width], scores this variance.

        Example:
            >>> margin = Margin([1.0, 2.0, 3.0, 4.0], 1.0, [], [])
            >>> margin.drawn(np.zeros((2, 1)), 1.0, np.array([0.1, 0.9])).tolist()
            [1.0, 4.0]
        """
        if self.points:
            z = mean[:, 0] + np.sqrt(max(variance, 0.0)) * normal_quantile(u)
            at = (normal_cdf(z) * len(self.points)).astype(int).clip(0, len(self.points) - 1)
            return np.array(self.points)[at]
        shares = np.array(self.shares)
        p = (shares + mean * np.sqrt(shares * (1 - shares))).clip(min=1e-9)
        below = (p / p.sum(1, keepdims=True)).cumsum(1)
        return np.array(self.levels)[(below < u[:, None]).sum(1).clip(0, len(self.levels) - 1)]

    def is_sound(self) -> bool:
        if self.points:
            return bool(np.isfinite(self.points).all() and np.isfinite(self.spread) and self.spread > 0)
        texts = all(isinstance(level, str) for level in self.levels)
        shares = np.array(self.shares, dtype=np.float64)
        return (
            texts and len(shares) == len(self.levels) > 0 and bool((shares > 0).all()) and abs(shares.sum() - 1) < 1e-6
        )


@dataclass
class StandIns:
    """How the columns of the fitted rows go together, and values for what is missing in new ones.

    Attributes:
        margins: of each column, by name.
        correlation: of the features of all columns, shrunk towards none; empty where there are too many.

    Example:
        >>> x = np.linspace(0.0, 1.0, 200)
        >>> columns = [Column("a", "number"), Column("b", "number")]
        >>> together = StandIns.of(columns, {"a": x, "b": 1 - x})
        >>> copies = together.filled(columns, {"a": x[190:191], "b": np.array([np.nan])}, 0)
        >>> len(copies), bool(max(copy["b"][0] for copy in copies) < 0.2)  # where a is large, b is small
        (16, True)
    """

    margins: dict[str, Margin]
    correlation: list[list[float]]

    @classmethod
    def of(cls, columns: Sequence[Column], rows: Rows) -> "StandIns":
        """Of the values of the rows that are fitted."""
        margins = {column.name: Margin.of(column, rows[column.name]) for column in columns}
        width = sum(margin.width for margin in margins.values())
        if width > MOST_FEATURES:
            return cls(margins, [])
        x = np.concatenate([margins[column.name].features(rows[column.name]) for column in columns], 1)
        share = max(LEAST_SHRINKAGE, width / (width + len(x)))
        found = (1 - share) * (x.T @ x) / len(x) + share * np.eye(width)
        return cls(margins, [[float(f"{value:.7g}") for value in row] for row in found])

    def filled(self, columns: Sequence[Column], rows: Rows, seed: int) -> list[dict[str, np.ndarray]]:
        """`FILLS` copies of the rows, each with other values in the gaps.

        Of several gaps in a row one is drawn after the other, given those before. The levels of the draws are the same
        for all rows: what a row gets does not depend on its company.
        """
        gaps = gaps_of(columns, rows)
        copies = [dict(rows) for _ in range(FILLS)]
        generator = np.random.default_rng(seed)
        levels = np.stack([(generator.permutation(FILLS) + 0.5) / FILLS for _ in columns], 1)  # [FILLS, columns]
        for pattern in np.unique(gaps[gaps.any(1)], axis=0):
            where = np.flatnonzero((gaps == pattern).all(1))
            some = {name: np.tile(values[where], FILLS) for name, values in rows.items()}
            self._fill(columns, some, pattern, levels.repeat(len(where), 0))
            for j in np.flatnonzero(pattern).tolist():
                name = columns[j].name
                for copy, new in zip(copies, np.split(some[name], FILLS), strict=True):
                    copy[name] = _with(copy[name], where, new)
        return copies

    def _fill(self, columns: Sequence[Column], rows: dict[str, np.ndarray], pattern: np.ndarray, u: np.ndarray) -> None:
        """Rows with the same gaps, in place, at the levels u [N, columns]."""
        parts = [self.margins[column.name].features(rows[column.name]) for column in columns]
        ends = np.cumsum([0, *(part.shape[1] for part in parts)])
        at = [np.arange(start, end) for start, end in pairwise(ends)]
        known = [j for j in range(len(columns)) if not pattern[j]]
        R = np.array(self.correlation)
        for j in np.flatnonzero(pattern).tolist():
            margin, mean, variance = self.margins[columns[j].name], np.zeros_like(parts[j]), 1.0
            if len(R) and known:
                o = np.concatenate([at[k] for k in known])
                B = np.linalg.solve(R[np.ix_(o, o)], R[np.ix_(o, at[j])])  # E[x_m | x_o] = Bᵀ x_o
                mean = np.concatenate([parts[k] for k in known], 1) @ B
                variance = float(R[at[j][0], at[j][0]] - R[at[j][0], o] @ B[:, 0])
            rows[columns[j].name] = margin.drawn(mean, variance, u[:, j])
            parts[j] = margin.features(rows[columns[j].name])
            known.append(j)

    def record(self) -> dict[str, Any]:
        return {"margins": {name: asdict(one) for name, one in self.margins.items()}, "correlation": self.correlation}

    @classmethod
    def from_record(cls, record: Any, columns: Sequence[Column]) -> "StandIns":
        """From JSON; TableError where it is not what `record` gives for these columns."""
        try:
            margins = {str(name): Margin(**one) for name, one in record["margins"].items()}
            R = np.array(record["correlation"], dtype=np.float64)
            width = sum(margin.width for margin in margins.values())
            numbers = {name: bool(margin.points) for name, margin in margins.items()}
            fine = all(margin.is_sound() for margin in margins.values()) and bool(np.isfinite(R).all())
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise TableError(f"the model's description of its columns is damaged ({error})") from None
        kinds = {column.name: column.kind != "category" for column in columns}
        if not fine or numbers != kinds or R.shape not in ((0,), (width, width)):
            raise TableError("the model's description of its columns is damaged")
        return cls(margins, R.tolist())


def _told_apart(values: np.ndarray, levels: Sequence[str]) -> np.ndarray:
    """The values, those of no level as `OTHER`."""
    return np.where(np.isin(values, [*levels, ""]), values, OTHER)


def _with(values: np.ndarray, where: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The values with others at some places; texts may be longer than those that were there."""
    values = values.astype(np.result_type(values, new))
    values[where] = new
    return values
