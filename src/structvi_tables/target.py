"""The target: an amount or a class, recognised from the values of its column."""

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .columns import AS_NUMBERS, centre_and_scale, kind_of, values_of
from .reading import Table, TableError, Values, listed, pandas_module

TASKS = ("auto", "regression", "classification")
#: rows that a table needs, and rows that each class needs
FEWEST_ROWS, FEWEST_OF_CLASS = 30, 5
#: the most whole numbers 0, 1, .. or 1, 2, .. that are taken for classes, if each has rows enough for one
FEW_NUMBERS = 10


@dataclass
class Target:
    """The target's column.

    Attributes:
        task: "regression" or "classification".
        classes: their names, of a classification.
        centre, scale: an amount t is fitted as (t − centre)/scale.
    """

    name: str
    task: str
    classes: list[str] = field(default_factory=list)
    centre: float = 0.0
    scale: float = 1.0

    def encode(self, table: Table) -> Tensor:
        """Return [N, 1] numbers or [N] labels; a class that was not fitted is −1."""
        if self.task == "regression":
            values = values_of(table[self.name], "number", self.name)
            return torch.as_tensor((values - self.centre) / self.scale, dtype=torch.float32).unsqueeze(-1)
        index = {name: i for i, name in enumerate(self.classes)}
        return torch.tensor([index.get(word, -1) for word in values_of(table[self.name], "category", self.name)])

    def standardise(self, y: np.ndarray, notes: list[str]) -> None:
        """Take centre and scale from these amounts, by quartiles where some are far out."""
        self.centre, self.scale, is_far = centre_and_scale(y)
        if is_far:
            notes.append(f"{self.name!r} has values far out: it is scaled by its median and quartiles.")
        if not self.scale > 1e-12 * max(1e-300, np.abs(y).max()):
            raise TableError(f"the target {self.name!r} hardly varies in the rows that are fitted: nothing to predict")

    @classmethod
    def from_record(cls, record: Any) -> "Target":
        target = cls(**record)
        numbers = isfinite(target.centre) and isfinite(target.scale) and target.scale > 0
        names = all(isinstance(name, str) for name in (target.name, *target.classes))
        if not (numbers and names and (len(target.classes) >= 2) == (target.task == "classification")):
            raise ValueError("a target that is not known")
        return target


def with_target(table: Table, name: str, notes: list[str]) -> Table:
    """Return the rows in which the target is there."""
    if name not in table.columns:
        raise TableError(f"there is no column {name!r} to predict: --target must be one of {listed(table.columns)}")
    there = table[name].notna()
    gone = int((~there).sum())
    if gone:
        notes.append(f"{gone} rows without a value of {name!r} were left out.")
        table = table[there]  # with the row numbers of the file as its index
    if len(table) < FEWEST_ROWS:
        raise TableError(
            f"the table has {len(table)} rows with a value of {name!r}, and {FEWEST_ROWS} are the fewest of which "
            "anything can be learned and checked: is it the right column? If so, collect more"
        )
    return table


def target_of(table: Table, name: str, task: str, notes: list[str]) -> Target:
    """Return an amount or a class, as `task` or the values say, with a sentence on which and why."""
    if task not in TASKS:
        raise TableError(f"--task must be one of {', '.join(TASKS)}, got {task!r}")
    series = table[name]
    if series.nunique() < 2:
        raise TableError(
            f"the target {name!r} has one value only, {str(series.iloc[0])!r}: there is nothing to predict. Is it the "
            "right column, and does the file have all rows?"
        )
    if task == "auto":
        task, why = _task_of(series, name)
        other = "classification" if task == "regression" else "regression"
        notes.append(f"{name!r} is predicted as {task}: {why} (--task {other} for the other).")
    if task == "regression":
        values_of(series, "number", name)  # TableError where they are none
        return Target(name, task)
    words, counts = np.unique(values_of(series, "category", name), return_counts=True)
    rare = [f"{str(words[i])!r} ({counts[i]} rows)" for i in np.flatnonzero(counts < FEWEST_OF_CLASS)]
    if rare:
        raise TableError(
            f"classes of {name!r} with fewer than {FEWEST_OF_CLASS} rows cannot be learned and checked: "
            f"{', '.join(rare[:5])}. Remove these rows, or merge the classes; of amounts write {AS_NUMBERS}"
        )
    return Target(name, task, [str(word) for word in words])


def _task_of(series: Values, name: str) -> tuple[str, str]:
    """Return the task, and why."""
    types = pandas_module().api.types
    if types.is_bool_dtype(series) or not types.is_numeric_dtype(series):
        kind, _ = kind_of(series, name, len(series))
        if kind == "date":
            raise TableError(f"the target {name!r} has dates: make them numbers, such as days until then, first")
        return ("regression", "its values are numbers") if kind == "number" else ("classification", "it has words")
    values, counts = np.unique(values_of(series, "number", name), return_counts=True)
    if len(values) == 2:
        return "classification", "it has two values"
    whole = values[0] in (0.0, 1.0) and (np.diff(values) == 1).all()
    if whole and len(values) <= FEW_NUMBERS and counts.min() >= FEWEST_OF_CLASS:
        return "classification", f"its values are the whole numbers {values[0]:g} to {values[-1]:g}"
    return "regression", f"it has {len(values)} different numbers"


def split(labels: Tensor | None, rows: int, seed: int, most: int) -> tuple[Tensor, Tensor]:
    """Return the rows to fit, in a random order, and a fifth to test on; of classes a fifth of each.

    A sample is taken if there are more than `most` rows.

    Example:
        >>> fit, test = split(None, 100, 0, 50)
        >>> len(fit), len(test)
        (40, 10)
    """
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:most]
    if labels is not None:
        order = order[labels[order].argsort(stable=True)]
    is_test = torch.zeros(len(order), dtype=torch.bool)
    is_test[::5] = True
    return order[~is_test], order[is_test]
