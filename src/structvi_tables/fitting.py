"""From a table to a fitted model: split, encode, try, choose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from structvi.util.checks import check_seed

from .choosing import NOISES, Part, Problem, Say, chosen
from .columns import Columns, values_of
from .model import TableModel
from .oddities import oddities
from .reading import Table, TableError, as_table
from .target import split, target_of, with_target
from .training import folds_of

#: rows that are fitted and tested at most, of a longer table a random sample
MOST_ROWS = 60_000
#: folds, of a table with more rows than `LONG` fewer
FOLDS, FEW_FOLDS, LONG = 5, 3, 20_000
#: columns that are told one by one
SHOWN = 12


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

    def __str__(self) -> str:
        mixed = ", ".join(f"{one.weight:.2f} {one.recipe}" for one in self.tried if one.weight > 0)
        rows = f"{len(self.fit)} rows fitted, {len(self.test)} kept for the test"
        return f"{self.model.target.name!r} predicted as {self.model.target.task}: {rows}\nmixed: {mixed}"

    __repr__ = __str__  # a notebook shows what print does

    @property
    def test_table(self) -> Table:
        return self.table.iloc[self.test.numpy()].reset_index(drop=True)


def fold_count(rows: int) -> int:
    return FOLDS if rows <= LONG else FEW_FOLDS


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
        say: is told what goes on.

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
            shown = ", ".join(map(repr, list(table.columns)[:12]))
            raise TableError(f"there is no column {name!r}: the table has {shown}")
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
    count = fold_count(len(fit))
    notes.append(
        f"{len(test)} rows were drawn at random for the test{', a fifth of each class' if goal.classes else ''}; the "
        f"other {len(fit)} were dealt to {count} folds: each model is fitted on all folds but one and judged by that "
        f"one (seed {seed})."
    )
    if not goal.classes:
        y = values_of(table[target], "number", target)[rows]
        goal.standardise(y, notes)
        top = np.unique(y, return_counts=True)[1].max() / len(y)
        if top > 0.3:
            notes.append(
                f"{100 * top:.0f} % of the rows have one and the same value of {target!r}: densities of such a target "
                "say little, look at the intervals; or predict first whether it has that value."
            )
    told = "; ".join(map(str, columns.each[:SHOWN]))
    more = f"; and {len(columns.each) - SHOWN} others, see the page" if len(columns.each) > SHOWN else ""
    for note in (*notes, f"Predicted from {told}{more}."):
        say(note)
    x, t = columns.inputs(columns.values(features.iloc[rows])), goal.encode(table)[fit]
    problem = Problem(x, t, folds_of(torch.arange(len(rows)), count), len(goal.classes), seed)
    parts, tried = chosen(problem, say, noise)
    return TableFit(TableModel(columns, goal, parts, level, seed), table, fit, test, tried, notes)
