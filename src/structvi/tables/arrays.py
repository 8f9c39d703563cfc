"""Tables that are arrays already: numbers without names, for the estimators of scikit-learn."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..families.family import Family
from .choosing import Tried, chosen
from .columns import BINS, MOST_INPUTS, Column, fitted
from .fitting import FEW_FOLDS, FOLDS, LONG, MOST_ROWS, silent
from .members import folds_of
from .pooled import Pooled
from .recipes import Part, Problem, pooled


@dataclass
class ArrayFit:
    """What `structvi fit` makes of a table, of an array [N, F]: the models that the folds choose, mixed."""

    columns: list[Column]
    parts: list[Part]
    tried: list[Tried]
    seed: int

    def pooled(self, X: np.ndarray, draws: int) -> Pooled:
        """The mixture for rows [B, F]."""
        return pooled(self.parts, _inputs(self.columns, X), self.seed, draws)


def fit_array(X: np.ndarray, t: Tensor, classes: int, seed: int, family: Family | None, noise: str) -> ArrayFit:
    """Try models on folds of all rows, and mix the best, as `fit_table` does.

    Args:
        X: numbers, [N, F].
        t: [N, 1] standardised amounts, or [N] labels.
        classes: how many, 0 for amounts.
        seed: of folds, starts and draws.
        family: None for posteriors over the last layers.
        noise: "auto", or one of `NOISES`.

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
    X, t = X[order.numpy()], t[order]
    bins = int(max(4, min(BINS, MOST_INPUTS // X.shape[1])))
    columns = [fitted(str(j), "number", X[:, j], bins) for j in range(X.shape[1])]
    folds = folds_of(torch.arange(len(X)), FOLDS if len(X) <= LONG else FEW_FOLDS)
    problem = Problem(_inputs(columns, X), t, folds, classes, seed, family)
    parts, tried = chosen(problem, silent, noise)
    return ArrayFit(columns, parts, tried, seed)


def _inputs(columns: list[Column], X: np.ndarray) -> dict[str, Tensor]:
    plain = np.concatenate([column.plain(X[:, j]) for j, column in enumerate(columns)], 1)
    bent = np.concatenate([plain, *(column.bins(X[:, j]) for j, column in enumerate(columns))], 1)
    return {"plain": torch.as_tensor(plain).float(), "bins": torch.as_tensor(bent).float()}
