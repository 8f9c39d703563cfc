"""What is odd about a table that can be fitted: said, and left as it is, for only its owner knows what it means."""

import re
from collections.abc import Sequence

import numpy as np

from .reading import Table, Values, pandas_module

#: numbers that often stand for a missing value
CODES = (-9, -99, -999, -9999, -99999, 99, 999, 9999, 99999)
#: share of texts that look like numbers from which on a column is taken to be of such
MOSTLY = 0.9
_WRITTEN = (
    r"[-+]?\d{1,3}([,' ]\d{3})+(\.\d+)?",  # 12,345.6
    r"[-+]?\d{1,3}(\.\d{3})*,\d+",  # 12.345,6
    r"[-+]?\d{1,3}(\.\d{3}){2,}",  # 1.234.567
    r"[-+]?\s?[$€£¥]\s?[-+]?\d[\d.,' ]*|[-+]?\d[\d.,' ]*\s?[$€£¥%‰]",  # $12, 12 %
    r"\(\d[\d.,' ]*\)",  # (12), of bookkeepers
)
_WITH_UNIT = re.compile(r"[-+]?\d+(?:[.,]\d+)?\s?(?P<unit>[^\W\d_][^\d]*)")


def written_numbers(texts: Sequence[str]) -> str:
    """One of the texts, where nearly all are numbers as people write them and as no program reads them; or "".

    Example:
        >>> written_numbers(["1,200", "900"]), written_numbers(["12 kg", "7 kg"]), written_numbers(["A1", "B2"])
        ('1,200', '12 kg', '')
    """
    distinct = sorted(set(texts))
    odd = [text for text in distinct if any(re.fullmatch(one, text) for one in _WRITTEN)]
    if not odd:
        found = [(text, match["unit"].strip()) for text in distinct if (match := _WITH_UNIT.fullmatch(text))]
        odd = [text for text, _ in found] if len({unit for _, unit in found}) == 1 else []
    plain = sum(re.fullmatch(r"[-+]?\d+(\.\d+)?", text) is not None for text in distinct)
    return odd[0] if odd and len(odd) + plain >= MOSTLY * len(distinct) else ""


def oddities(table: Table, target: str, columns: Sequence[str]) -> list[str]:
    """Sentences on rows that are copies, columns that are the target, and numbers that stand for missing ones."""
    notes = []
    copies = _copies(table)
    if copies:
        notes.append(
            f"{copies} of {len(table)} rows are copies of others. If each is an observation of its own, fine; if not, "
            "copies on both sides of the test make every figure too good: remove them first."
        )
    notes += _code(table[target], target) + _spellings(table[target], target)
    for name in columns:
        if _is_target(table[name], table[target]):
            notes.append(f"{name!r} tells {target!r} exactly: leave it out (--without) if it is not known beforehand.")
        notes += _code(table[name], name)
        notes += _spellings(table[name], name)
    return notes


def _copies(table: Table) -> int:
    try:
        return int(table.duplicated().sum())
    except TypeError:  # lists and other objects, which cannot be compared as they are
        return int(table.apply(lambda column: column.map(repr)).duplicated().sum())


def _is_target(series: Values, target: Values) -> bool:
    """Whether a column is the target under another name: the same values, or a line of them."""
    types = pandas_module().api.types
    if types.is_numeric_dtype(series) and types.is_numeric_dtype(target):
        x, y = (np.asarray(one.astype(float)) for one in (series, target))
        if np.isnan(x).any() or not np.isfinite(x).all() or np.ptp(x) == 0 or len(np.unique(y)) < 3:
            return bool((x == y).all())
        with np.errstate(all="ignore"):
            return bool(abs(np.corrcoef(x, y)[0, 1]) > 1 - 1e-12)
    return bool((series.astype(str) == target.astype(str)).all())


def _code(series: Values, name: str) -> list[str]:
    """Where a column's least or greatest number is one that often stands for a missing value, far from all others."""
    if not pandas_module().api.types.is_numeric_dtype(series):
        return []
    x = np.asarray(series.dropna().astype(float))
    for code in CODES:
        count, others = int((x == code).sum()), x[x != code]
        if count < 3 or len(others) < 3:
            continue
        low, high = others.min(), others.max()
        if min(abs(code - low), abs(code - high)) > max(high - low, 1) and not low <= code <= high:
            return [f"{name!r} is {code} in {count} rows, far from all others: if that means missing, leave it empty."]
    return []


def _spellings(series: Values, name: str) -> list[str]:
    """Levels that differ by case or spaces alone."""
    types = pandas_module().api.types
    if types.is_numeric_dtype(series) or types.is_bool_dtype(series) or types.is_datetime64_any_dtype(series):
        return []
    levels = {text.strip() for text in series.dropna().astype(str).unique()[:1000]}
    first: dict[str, str] = {}
    for level in sorted(levels):
        other = first.setdefault(" ".join(level.casefold().split()), level)
        if other != level:
            return [
                f"{name!r} has levels that differ by case or spaces alone, {other!r} and {level!r}: they count as two."
            ]
    return []
