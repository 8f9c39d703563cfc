"""What is odd about a table that can be fitted: said, and left as it is, for only its owner knows what it means."""

import re
from collections.abc import Sequence

import numpy as np

from .reading import Table, Values, pandas_module


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
    types = pandas_module().api.types
    if not (types.is_numeric_dtype(series) and types.is_numeric_dtype(target)):
        return bool((series.astype(str) == target.astype(str)).all())
    x, y = (np.asarray(one.astype(float)) for one in (series, target))
    if not np.isfinite(x).all() or np.ptp(x) == 0 or len(np.unique(y)) < 3:
        return bool((x == y).all())
    with np.errstate(all="ignore"):
        return bool(abs(np.corrcoef(x, y)[0, 1]) > 1 - 1e-12)


def _code(series: Values, name: str) -> list[str]:
    """Say where -9, -99, .. or 99, 999, .. is far from all other numbers: it may stand for a missing value."""
    if not pandas_module().api.types.is_numeric_dtype(series):
        return []
    x = np.asarray(series.dropna().astype(float))
    for code in np.unique(x[[re.fullmatch(r"-9+|99+", f"{value:g}") is not None for value in x]]):
        count, others = int((x == code).sum()), x[x != code]
        if count < 3 or len(others) < 3:
            continue
        low, high = others.min(), others.max()
        if min(abs(code - low), abs(code - high)) > max(high - low, 1) and not low <= code <= high:
            return [f"{name!r} is {code:g} in {count} rows, far from all others: if it means missing, leave it empty."]
    return []
