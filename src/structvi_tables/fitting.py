"""From a table to a fitted model: split, encode, try, choose."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from structvi.util.checks import check_seed

from .choosing import NOISES, Part, Problem, Say, chosen
from .columns import Columns, values_of
from .model import TableModel
from .reading import Table, TableError, Values, as_table, listed, pandas_module
from .target import split, target_of, with_target
from .training import folds_of

#: rows that are fitted and tested at most, of a longer table a random sample
MOST_ROWS = 60_000
FOLDS = 5


def silent(_: str) -> None:
    """Say nothing."""


@dataclass(repr=False)
class TableFit:
    """A fitted table.

    Attributes:
        model: to predict with, and to save.
        table: the rows with a target.
        fit, test: which of them were fitted, and which are for the test.
        tried: the models that were tried, the best first.
        notes: sentences on what was found and decided.
    """

    model: TableModel
    table: Table
    fit: Tensor
    test: Tensor
    tried: list[Part]
    notes: list[str] = field(default_factory=list)

    @property
    def test_table(self) -> Table:
        return self.table.iloc[self.test.numpy()].reset_index(drop=True)


def fit_table(
    table: Table,
    target: str,
    *,
    task: str = "auto",
    noise: str = "auto",
    kinds: Mapping[str, str] | None = None,
    without: Sequence[str] = (),
    level: float = 0.9,
    seed: int = 0,
    say: Say = silent,
) -> TableFit:
    """Read the columns, put a fifth of the rows aside for the test, try models on the others, mix the best.

    Args:
        table: a pandas table, as `read_table` gives it.
        target: the column to predict.
        task: "auto", "regression" or "classification".
        noise: "auto", or one of `NOISES`.
        kinds: column → "category" or "number", where the values do not say it.
        without: columns to leave out: what is not known when a prediction is wanted, or tells the target.
        level: of the intervals.
        seed: of split, starts and draws.
        say: called with sentences on the progress.

    Raises:
        TableError: nothing can be made of the table; the message says what to do.
    """
    check_seed(seed)
    if not 0 < level < 1:
        raise TableError(f"level must lie inside (0, 1), got {level}")
    if noise != "auto" and noise not in NOISES:
        raise TableError(f'noise must be "auto" or one of {tuple(NOISES)}, got {noise!r}')
    table, target, notes = as_table(table).reset_index(drop=True), str(target), []
    for name in (*(kinds or ()), *without):
        if name not in table.columns:
            raise TableError(f"there is no column {name!r}: the table has {listed(table.columns)}")
    if target in without:
        raise TableError(f"{target!r} is the target: it cannot be left out (--without)")
    notes += [f"{name!r} was left out, as you said." for name in without]
    table = with_target(table, target, notes).drop(columns=list(without))
    goal = target_of(table, target, task, notes)
    fit, test = split(goal.encode(table) if goal.classes else None, len(table), seed, MOST_ROWS)
    if len(fit) + len(test) < len(table):
        notes.append(f"Of {len(table)} rows a random sample of {len(fit) + len(test)} was taken.")
    rows, features = fit.numpy(), table.drop(columns=target)
    columns = Columns.of(features, kinds, rows.tolist())
    notes += [f"{name!r} was left out: {why}." for name, why in columns.left_out.items()]
    notes += oddities(table, target, [column.name for column in columns.each])
    notes.append(
        f"{len(test)} rows were drawn at random for the test{', a fifth of each class' if goal.classes else ''}; the "
        f"other {len(fit)} were dealt to {FOLDS} folds: each model is fitted on all folds but one and judged by that "
        f"one (seed {seed})."
    )
    if not goal.classes:
        y = values_of(table[target], "number", target)[rows]
        goal.standardise(y, notes)
    for note in (*notes, f"Predicted from {'; '.join(map(str, columns.each))}."):
        say(note)
    x, t = columns.inputs(columns.values(features.iloc[rows])), goal.encode(table)[fit]
    problem = Problem(x, t, folds_of(torch.arange(len(rows)), FOLDS), len(goal.classes), seed)
    parts, tried = chosen(problem, say, noise)
    return TableFit(TableModel(columns, goal, parts, level, seed), table, fit, test, tried, notes)


def oddities(table: Table, target: str, columns: Sequence[str]) -> list[str]:
    """Return sentences on copies of rows, columns that are the target, and numbers that stand for missing ones."""
    notes = []
    copies = int(table.map(repr).duplicated().sum())
    if copies:
        notes.append(
            f"{copies} of {len(table)} rows are copies of others. If each is an observation of its own, fine; if not, "
            "copies on both sides of the test make every figure too good: remove them first."
        )
    for name in (target, *columns):
        if name != target and _is_target(table[name], table[target]):
            notes.append(f"{name!r} tells {target!r} exactly: leave it out (--without) if it is not known beforehand.")
        notes += _code(table[name], name)
    return notes


def _is_target(series: Values, target: Values) -> bool:
    """Return whether a column is the target under another name: the same values, or a line of them."""
    if bool((series.astype(str) == target.astype(str)).all()):
        return True
    types = pandas_module().api.types
    if not (types.is_numeric_dtype(series) and types.is_numeric_dtype(target)):
        return False
    with np.errstate(all="ignore"):  # NaN where one is constant or has gaps
        return bool(abs(np.corrcoef(series.astype(float), target.astype(float))[0, 1]) > 1 - 1e-12)


def _code(series: Values, name: str) -> list[str]:
    """Say where -9, -99, .. or 99, 999, .. is far from all other numbers: it may stand for a missing value."""
    if not pandas_module().api.types.is_numeric_dtype(series):
        return []
    x = np.unique(series.dropna().astype(float))
    for code, others in ((x[0], x[1:]), (x[-1], x[:-1])):
        if re.fullmatch("-9+|99+", f"{code:g}") and len(others) > 1 and np.abs(others - code).min() > np.ptp(others):
            count = int((series == code).sum())
            return [f"{name!r} is {code:g} in {count} rows, far from all others: if it means missing, leave it empty."]
    return []
