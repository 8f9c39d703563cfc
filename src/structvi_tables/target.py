"""What is to be predicted: an amount or a class, by the values of the target's column, in words."""

from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .columns import AS_NUMBERS, kind_of, values_of
from .oddities import written_numbers
from .reading import Table, TableError, pandas_module

TASKS = ("auto", "regression", "classification")
#: rows that a table needs, classes that it may have, rows that each class needs
FEWEST_ROWS, MOST_CLASSES, FEWEST_OF_CLASS = 30, 50, 5
#: whole numbers 0, 1, .. or 1, 2, .. up to so many are taken for classes, where each has rows enough for one
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
        """[N, 1] numbers or [N] labels; a class that was not fitted is −1."""
        if self.task == "regression":
            values = values_of(table[self.name], "number", self.name)
            return torch.as_tensor((values - self.centre) / self.scale, dtype=torch.float32).unsqueeze(-1)
        words = values_of(table[self.name], "category", self.name)
        index = {name: i for i, name in enumerate(self.classes)}
        return torch.tensor([index.get(word, -1) for word in words])

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Any) -> "Target":
        try:
            target = cls(**record)
            sound = target.task in TASKS[1:] and isfinite(target.centre) and isfinite(target.scale) and target.scale > 0
            sound = sound and isinstance(target.name, str) and all(isinstance(name, str) for name in target.classes)
            sound = sound and (len(target.classes) >= 2) == (target.task == "classification")
        except TypeError:
            sound = False
        if not sound:
            raise TableError("the model's description of its target is damaged")
        return target


def with_target(table: Table, name: str, notes: list[str]) -> Table:
    """The rows in which the target is there."""
    if name not in table.columns:
        near = [column for column in table.columns if column.lower().strip() == name.lower().strip()]
        shown = ", ".join(map(repr, near or list(table.columns)[:12]))
        more = " (names are told apart by case)" if near else ""
        raise TableError(f"there is no column {name!r} to predict: --target must be one of {shown}{more}")
    there = table[name].notna()
    if not bool(there.any()):
        raise TableError(f"the target {name!r} has no values at all: is it the right column?")
    gone = int((~there).sum())
    if gone:
        notes.append(f"{gone} rows without a value of {name!r} were left out.")
        table = table[there]  # with the row numbers of the file as its index
    if len(table) < FEWEST_ROWS:
        raise TableError(
            f"the table has {len(table)} rows with a target, and {FEWEST_ROWS} are the fewest of which anything can be "
            "learned and checked: collect more, or look at the rows themselves"
        )
    return table


def target_of(table: Table, name: str, task: str, notes: list[str]) -> Target:
    """Amount or class: as `task` says, or as the values say, with a sentence on which and why."""
    if task not in TASKS:
        raise TableError(f"--task must be one of {', '.join(TASKS)}, got {task!r}")
    series, rows = table[name], len(table)
    if series.nunique() < 2:
        what = "class" if task == "classification" else "value"
        raise TableError(
            f"the target {name!r} has one {what} only, {str(series.iloc[0])!r}: there is nothing to predict. Is it the "
            "right column, and does the file have all rows?"
        )
    if task == "auto":
        task, why = _task_of(series, name, rows)
        other = "classification" if task == "regression" else "regression"
        notes.append(f"{name!r} is predicted as {task}: {why} (--task {other} for the other).")
    if task == "regression":
        values_of(series, "number", name)  # TableError where they are none
        return Target(name, task)
    words, counts = np.unique(values_of(series, "category", name), return_counts=True)
    if len(words) > MOST_CLASSES:
        raise TableError(
            f"the target {name!r} has {len(words)} classes, at most {MOST_CLASSES} are taken: merge some, or give "
            "--task regression if they are amounts"
        )
    rare = [
        f"{str(word)!r} ({count} rows)" for word, count in zip(words, counts, strict=True) if count < FEWEST_OF_CLASS
    ]
    if rare:
        example = written_numbers([str(word) for word in words])
        if example:
            raise TableError(
                f"the target {name!r} cannot be read: its fields look like numbers, such as {example!r}, and are text. "
                f"{AS_NUMBERS}"
            )
        raise TableError(
            f"classes of {name!r} with fewer than {FEWEST_OF_CLASS} rows cannot be learned and checked: "
            f"{', '.join(rare[:5])}. Remove these rows, merge the classes, or give --task regression for amounts"
        )
    return Target(name, task, [str(word) for word in words])


def _task_of(series: Any, name: str, rows: int) -> tuple[str, str]:
    pandas = pandas_module()

    if not pandas.api.types.is_numeric_dtype(series) or pandas.api.types.is_bool_dtype(series):
        if pandas.api.types.is_bool_dtype(series):
            return "classification", "its values are true and false"
        kind, why = kind_of(series, name, rows)
        if AS_NUMBERS in why:
            raise TableError(f"the target {name!r} cannot be read: {why}")
        if kind == "number":
            return "regression", "its values are numbers"
        if kind == "date":
            raise TableError(f"the target {name!r} has dates: make them numbers, such as days until then, first")
        return "classification", "its values are words"
    values, counts = np.unique(values_of(series, "number", name), return_counts=True)
    if len(values) == 2:
        return "classification", "it has two values"
    whole = bool((values % 1 == 0).all()) and values[0] in (0.0, 1.0) and values[-1] - values[0] == len(values) - 1
    if whole and len(values) <= FEW_NUMBERS and counts.min() >= FEWEST_OF_CLASS:
        return "classification", f"its values are the whole numbers {values[0]:g} to {values[-1]:g}"
    return "regression", f"it has {len(values)} different numbers"


@dataclass
class Split:
    """Rows to fit, in the order in which they are dealt to the folds, and rows to test on."""

    fit: Tensor
    test: Tensor


def split(labels: Tensor | None, rows: int, seed: int, most: int) -> Split:
    """A fifth of the rows, drawn at random, is for the test; of classes a fifth of each. Of more than `most` a sample.

    Example:
        >>> parts = split(None, 100, 0, 50)
        >>> len(parts.fit), len(parts.test)
        (40, 10)
    """
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:most]
    if labels is not None:
        order = order[labels[order].argsort(stable=True)]
    is_test = torch.zeros(len(order), dtype=torch.bool)
    is_test[::5] = True
    return Split(order[~is_test], order[is_test])
