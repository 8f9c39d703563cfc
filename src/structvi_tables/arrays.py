"""Rows without a file, for the estimators of scikit-learn: arrays of numbers, and pandas tables without the target."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structvi.families.family import Family

from .choosing import Tried, chosen
from .columns import BINS, MOST_INPUTS, Columns, fitted
from .fitting import FEW_FOLDS, FOLDS, LONG, MOST_ROWS, silent
from .members import folds_of
from .model import over_gaps, taken, tensors
from .pooled import Pooled
from .reading import as_table, is_table, pandas_module
from .recipes import Part, Problem, pooled
from .stand_ins import Rows, StandIns, gaps_of


@dataclass
class ArrayFit:
    """What `structvi fit` makes of a table, of an array or a table [N, F]: the models that the folds choose, mixed.

    Attributes:
        names: of all columns of the table, used or left out; empty where an array was fitted.
    """

    columns: Columns
    parts: list[Part]
    tried: list[Tried]
    seed: int
    stand_ins: StandIns
    names: list[str]

    @property
    def notes(self) -> list[str]:
        """How the columns of a table were read."""
        if not self.names:
            return []
        left_out = [f"{name!r} was left out: {why}" for name, why in self.columns.left_out.items()]
        return [*left_out, f"predicted from {'; '.join(self.columns.describe())}"]

    def rows(self, X: Any) -> Rows:
        """Values by column, of an array or a table as `fit_array` took it; of a table also from an array."""
        if not self.names:
            return _rows(X)
        if not is_table(X):
            X = pandas_module().DataFrame(X, columns=self.names).infer_objects()
        return self.columns.values(as_table(X).reset_index(drop=True))

    def gaps(self, rows: Rows) -> np.ndarray:
        """[N]: whether a value is missing in a column in which none was."""
        return np.asarray(gaps_of(self.columns.columns, rows).any(1))

    def pooled(self, rows: Rows, draws: int, gaps: bool) -> Pooled:
        """The mixture for rows without `gaps`, or all with them; those have draws of their own number."""
        if gaps:
            return over_gaps(self.parts, self.columns, self.stand_ins, rows, self.seed)
        return pooled(self.parts, tensors(self.columns.encoded(rows)), self.seed, draws)


def fit_array(X: Any, t: Tensor, classes: int, seed: int, family: Family | None, noise: str) -> ArrayFit:
    """Try models on folds of all rows, and mix the best, as `fit_table` does.

    Args:
        X: numbers, [N, F], or a pandas table, whose columns are read as those of `fit_table`.
        t: [N, 1] standardised amounts, or [N] labels.
        classes: how many, 0 for amounts.
        seed: of folds, starts and draws.
        family: None for posteriors over the last layers.
        noise: "auto", or one of `NOISES`.

    Raises:
        TableError: nothing can be made of the table; the message says what to do.

    Example:
        >>> fit = fit_array(np.zeros((0, 2)), torch.zeros(0, 1), 0, 0, None, "auto")
        Traceback (most recent call last):
        ValueError: models are tried on folds of the rows: 15 are the fewest, got 0
    """
    if len(X) < 3 * FOLDS:
        raise ValueError(f"models are tried on folds of the rows: {3 * FOLDS} are the fewest, got {len(X)}")
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))[:MOST_ROWS]
    if classes:
        order = order[t[order].argsort(stable=True)]
    if is_table(X):
        table = as_table(X).reset_index(drop=True)
        columns, names = Columns.of(table, {}, order.tolist()), list(table.columns)
        rows = taken(columns.values(table), order.numpy())
    else:
        rows, names = _rows(X[order.numpy()]), []
        bins = int(max(4, min(BINS, MOST_INPUTS // X.shape[1])))
        columns = Columns([fitted(name, "number", values, bins) for name, values in rows.items()], {})
    folds = folds_of(torch.arange(len(order)), FOLDS if len(order) <= LONG else FEW_FOLDS)
    problem = Problem(tensors(columns.encoded(rows)), t[order], folds, classes, seed, family)
    stand_ins = StandIns.of(columns.columns, rows)
    parts, tried = chosen(problem, silent, noise)
    return ArrayFit(columns, parts, tried, seed, stand_ins, names)


def _rows(X: np.ndarray) -> dict[str, np.ndarray]:
    return {str(j): X[:, j] for j in range(X.shape[1])}
