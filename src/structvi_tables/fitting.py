"""From a table to a fitted model: split, encode, try, choose."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from structvi.families.family import Family
from structvi.util.checks import check_seed

from .choosing import Tried, chosen
from .columns import FAR, Columns, values_of
from .members import folds_of
from .model import TableModel
from .oddities import oddities
from .reading import Table, TableError, as_table
from .recipes import NOISES, Problem, family_of
from .stand_ins import StandIns
from .target import Split, Target, split, target_of, with_target

#: rows that are fitted and tested at most, of a longer table a random sample
MOST_ROWS = 60_000
#: folds, of a long table fewer
FOLDS, FEW_FOLDS, LONG = 5, 3, 20_000
#: columns that are told one by one
SHOWN = 12


def silent(_: str) -> None:
    """Says nothing."""


@dataclass(repr=False)
class TableFit:
    """A fitted table.

    Attributes:
        model: to predict with, and to save.
        table: the rows with a target.
        split: which of them were fitted, and which are for the test.
        tried: the models that were tried, the best first.
        notes: sentences on what was found and decided.
    """

    model: TableModel
    table: Table
    split: Split
    tried: list[Tried]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        goal, best = self.model.target, self.tried[0]
        mixed = ", ".join(f"{one.weight:.2f} {one.name}" for one in self.tried if one.weight > 0)
        return "\n".join([
            f"{goal.name!r} predicted as {goal.task} from {len(self.model.columns.columns)} columns: "
            f"{len(self.split.fit)} rows fitted, {len(self.split.test)} kept for the test",
            f"the best of {len(self.tried)} models, on folds: {best.name}, {best.density:.3f} nats a row",
            f"mixed: {mixed}",
            f"next: fit.model.predict(new_rows), fit.model.save(folder) ({len(self.notes)} notes: fit.notes)",
        ])  # fmt: skip

    __repr__ = __str__  # a notebook shows what print does

    @property
    def test(self) -> Table:
        return self.table.iloc[self.split.test.numpy()].reset_index(drop=True)

    def folds(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rows to train on and rows to look at, for each fold."""
        return [(fold.train.numpy(), fold.held.numpy()) for fold in folds_of(self.split.fit, count_of(self.split))]


def count_of(parts: Split) -> int:
    return FOLDS if len(parts.fit) <= LONG else FEW_FOLDS


def fit_table(
    table: Table,
    target: str,
    *,
    task: str = "auto",
    family: str | Family | None = None,
    noise: str = "auto",
    categories: Mapping[str, str] | None = None,
    without: Sequence[str] = (),
    level: float = 0.9,
    seed: int = 0,
    say: Callable[[str], None] = silent,
) -> TableFit:
    """Read the columns, put a fifth of the rows aside for the test, try models on the others, mix the best.

    Args:
        table: a pandas table, as `read_table` gives it.
        target: the column to predict.
        task: "auto", "regression" or "classification".
        family: of a posterior over all weights; None for a full normal over the last layer of each network.
        noise: "auto", or one of `NOISES`.
        categories: column → "category" or "number", where the values do not say it.
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
        raise TableError(f'noise must be "auto" or one of {NOISES}, got {noise!r}')
    recipe = family_of(family)
    table, target = as_table(table).reset_index(drop=True), str(target)
    notes: list[str] = []
    given = dict(categories or {})
    unknown = [name for name in given if name not in table.columns]
    if unknown:
        raise TableError(f"there is no column {unknown[0]!r}, which was to be a {given[unknown[0]]}")
    table = _leaving_out(with_target(table, target, notes), target, without, notes)
    goal = target_of(table, target, task, notes)
    labels = goal.encode(table) if goal.classes else None
    parts = split(labels, len(table), seed, MOST_ROWS)
    if len(parts.fit) + len(parts.test) < len(table):
        notes.append(f"Of {len(table)} rows a random sample of {len(parts.fit) + len(parts.test)} was taken.")
    rows = parts.fit.numpy()
    features = table.drop(columns=target)
    columns = Columns.of(features, given, rows.tolist())
    notes += [f"{name!r} was left out: {why}." for name, why in columns.left_out.items()]
    notes += oddities(table, target, [column.name for column in columns.columns])
    notes.append(_split_in_words(parts, goal, seed))
    t = _encoded_target(goal, table, rows, notes)
    for note in (*notes, _columns_in_words(columns)):
        say(note)
    stand_ins = StandIns.of(columns.columns, columns.values(features.iloc[rows]))
    model = TableModel(columns, goal, [], _ranges(columns, features, rows), level, seed, stand_ins)
    inputs = model.inputs(features.iloc[rows])
    folds = folds_of(torch.arange(len(rows)), count_of(parts))
    problem = Problem(inputs, t, folds, len(goal.classes), seed, recipe)
    model.parts, tried = chosen(problem, say, noise)
    return TableFit(model, table, parts, tried, notes)


def _leaving_out(table: Table, target: str, without: Sequence[str], notes: list[str]) -> Table:
    for name in without:
        if name not in table.columns:
            shown = ", ".join(map(repr, list(table.columns)[:12]))
            raise TableError(f"there is no column {name!r} to be left out (--without): the table has {shown}")
        if name == target:
            raise TableError(f"{name!r} is the target: it cannot be left out (--without)")
        notes.append(f"{name!r} was left out, as you said.")
    return table.drop(columns=list(without))


def _encoded_target(goal: Target, table: Table, rows: np.ndarray, notes: list[str]) -> Tensor:
    if goal.task == "regression":
        y = values_of(table[goal.name], "number", goal.name)[rows]
        goal.centre, goal.scale = float(y.mean()), float(y.std())
        low, middle, high = (float(q) for q in np.quantile(y, [0.25, 0.5, 0.75]))
        if np.abs(y - goal.centre).max() > FAR * goal.scale and high > low:
            goal.centre, goal.scale = middle, (high - low) / 1.35
            notes.append(f"{goal.name!r} has values far out: it is scaled by its quartiles.")
        if not goal.scale > 1e-12 * max(1e-300, np.abs(y).max()):
            raise TableError(f"the target {goal.name!r} hardly varies in the rows that are fitted: nothing to predict")
        top = np.unique(y, return_counts=True)[1].max() / len(y)
        if top > 0.3:
            notes.append(
                f"{100 * top:.0f} % of the rows have one and the same value of {goal.name!r}: densities of such a "
                "target say little, look at the intervals; or predict first whether it has that value."
            )
    return goal.encode(table)[torch.as_tensor(rows)]


def _split_in_words(parts: Split, goal: Target, seed: int) -> str:
    alike = ", a fifth of each class" if goal.classes else ""
    return (
        f"{len(parts.test)} rows were drawn at random for the test{alike}; the other {len(parts.fit)} were dealt to "
        f"{count_of(parts)} folds: each model is fitted on all folds but one and judged by that one (seed {seed})."
    )


def _columns_in_words(columns: Columns) -> str:
    told = columns.describe()
    more = f"; and {len(told) - SHOWN} others, see the page" if len(told) > SHOWN else ""
    return f"Predicted from {'; '.join(told[:SHOWN])}{more}."


def _ranges(columns: Columns, features: Table, rows: np.ndarray) -> dict[str, tuple[float, float]]:
    found = {}
    for column in columns.columns:
        if column.kind != "category":
            values = values_of(features[column.name], column.kind, column.name, column.form)[rows]
            if not np.isnan(values).all():
                found[column.name] = (float(np.nanmin(values)), float(np.nanmax(values)))
    return found
