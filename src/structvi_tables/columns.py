"""What the columns of a table are, in words, and how they become a network's inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from . import dates
from .oddities import written_numbers
from .reading import Table, TableError, Values, pandas_module

#: bins of a number, levels of a category that are told apart, rows that a level must have
BINS, LEVELS, FEWEST = 32, 30, 3
#: inputs that bins may make in all: with more columns each gets fewer
MOST_INPUTS = 800
#: beyond so many standard deviations a column is read on the scale of sinh⁻¹
FAR = 10.0
#: a column with more distinct numbers than this is one of numbers, though some of it be text
MANY = 20
LARGEST = 1e100
AS_NUMBERS = "Write them with digits and a point alone, 12345.6, without units and signs of thousands"


@dataclass
class Column:
    """One input column, and all that is needed to encode it again.

    Attributes:
        kind: "number", "date" (days since 1970) or "category".
        centre, scale: of z = (x − centre)/scale, or of sinh⁻¹ of (x − middle)/width where `squash`.
        edges: of the bins of z.
        levels: that are told apart; all others share the input "other" where `other`, or none.
        missing: whether missing values occurred, and have an input of their own.
        form: of dates that are texts; `ambiguous` where no value tells which number is the day.
    """

    name: str
    kind: str
    centre: float = 0.0
    scale: float = 1.0
    squash: bool = False
    middle: float = 0.0
    width: float = 1.0
    edges: list[float] = field(default_factory=list)
    levels: list[str] = field(default_factory=list)
    other: bool = False
    missing: bool = False
    form: str = ""
    ambiguous: bool = False

    def describe(self) -> str:
        gaps = ", some missing" if self.missing else ""
        if self.kind == "category":
            more = " and others" if self.other else ""
            return f"category, {len(self.levels)} levels{more}{gaps}"
        squashed = ", with values far out: read on a logarithmic scale" if self.squash else ""
        kind = dates.described(self.form, self.ambiguous) if self.kind == "date" else self.kind
        return f"{kind}{gaps}{squashed}"

    def z(self, x: np.ndarray) -> np.ndarray:
        """Standardised, NaN where missing; beyond the fitted range it goes on for one range more, and then stays."""
        x = np.arcsinh((x - self.middle) / self.width) if self.squash else x
        z = (x - self.centre) / self.scale
        if not self.edges:
            return z
        low, high = self.edges[0], self.edges[-1]
        return np.clip(z, 2 * low - high, 2 * high - low)

    def plain(self, values: np.ndarray) -> np.ndarray:
        """[N] → [N, F]: the number itself or an indicator for each level, and one of missing values."""
        if self.kind == "category":
            parts = [values == level for level in self.levels]
            if self.other:
                known = np.isin(values, [*self.levels, ""])
                parts.append(~known)
            gone = values == ""
        else:
            z = self.z(values)
            gone = np.isnan(z)
            parts = [np.where(gone, 0.0, z)]
        return np.stack([*parts, *([gone] if self.missing else [])], 1).astype(np.float64)

    def bins(self, values: np.ndarray) -> np.ndarray:
        """[N] → [N, edges − 1]: how far z is through each bin, in [−½, ½]: a line bent at the edges is linear in it."""
        if self.kind == "category" or len(self.edges) < 3:
            return np.zeros((len(values), 0))
        z = self.z(values)
        z = np.where(np.isnan(z), 0.0, z)[:, None]
        low, high = np.array(self.edges[:-1]), np.array(self.edges[1:])
        return np.clip((z - low) / (high - low), 0.0, 1.0) - 0.5


def values_of(series: Values, kind: str, name: str, form: str = "") -> np.ndarray:
    """A column's values: float64 with NaN, or strings with "" where missing; TableError where they are no such."""
    pandas = pandas_module()

    if kind == "category":
        return _words(series)
    if kind == "date":
        return dates.days(series, form, name)
    if pandas.api.types.is_bool_dtype(series):
        series = series.astype(float)
    if not pandas.api.types.is_numeric_dtype(series):
        number = pandas.to_numeric(series, errors="coerce")
        bad = series[number.isna() & series.notna()]
        if len(bad):
            raise TableError(_text_in_numbers(name, bad))
        series = number
    x = series.to_numpy(dtype=np.float64, na_value=np.nan)
    _check_finite(name, x)
    return x


def _words(series: Values) -> np.ndarray:
    pandas = pandas_module()

    if pandas.api.types.is_float_dtype(series):  # 1.0 of a column with gaps is the 1 of one without
        whole = series.dropna() % 1 == 0
        if bool(whole.all()):
            series = series.astype("Int64")
    text = series.astype(str).str.strip()
    return np.where(series.isna().to_numpy(), "", text.to_numpy(dtype=object)).astype(str)


def _check_finite(name: str, x: np.ndarray) -> None:
    wrong = np.isinf(x) | (np.abs(x) > LARGEST)
    if wrong.any():
        first = int(np.argmax(wrong))
        what = "infinite values" if np.isinf(x).any() else f"numbers beyond {LARGEST:g}"
        raise TableError(
            f"column {name!r} has {what}, {int(wrong.sum())} of them, the first in row {first + 1}: correct them, or "
            "leave these fields empty (they then count as missing)"
        )


def _text_in_numbers(name: str, bad: Values) -> str:
    shown = ", ".join(f"{str(value)!r} in row {row + 1}" for row, value in bad.head(3).items())
    return (
        f"column {name!r} has numbers and {len(bad)} fields that are none: {shown}. Correct them, or leave them empty "
        f'(missing); for a category, --category "{name}"'
    )


def kind_of(series: Values, name: str, rows: int) -> tuple[str, str]:
    """("number", "date" or "category", "") or ("", why the column is left out)."""
    pandas = pandas_module()

    present = series.dropna()
    if not len(present):
        return "", "all values are missing"
    if pandas.api.types.is_datetime64_any_dtype(series):
        return "date", ""
    if pandas.api.types.is_bool_dtype(series):
        return ("category", "") if present.nunique() > 1 else ("", "it has one value only")
    if pandas.api.types.is_numeric_dtype(series):
        return _kind_of_numbers(present, name, rows)
    if any(isinstance(value, list | dict | tuple | np.ndarray | bytes) for value in present.head(100)):
        return "", "its fields are lists or other objects: give each number a column of its own"
    distinct = present.astype(str).str.strip().nunique()
    if distinct == 1:
        return "", "it has one value only"
    number = pandas.to_numeric(present, errors="coerce")
    if number.notna().mean() >= 0.5 and (number.nunique() > MANY or bool(number.notna().all())):
        if bool(number.notna().all()):
            return _kind_of_numbers(number, name, rows)
        raise TableError(_text_in_numbers(name, present[number.isna()]))
    if dates.form_of(series):
        return "date", ""
    example = written_numbers(present.astype(str).str.strip().unique().tolist()) if distinct > LEVELS else ""
    if example:
        return "", f"its fields look like numbers, such as {example!r}, and are text. {AS_NUMBERS}"
    if distinct > max(LEVELS, 0.5 * len(present)):
        own = f"nearly every row has a text of its own ({distinct} in {rows} rows)"
        return "", f"{own}: an identifier or free text; of dates write 2024-12-31"
    return "category", ""


def _kind_of_numbers(present: Values, name: str, rows: int) -> tuple[str, str]:
    values = present.to_numpy(dtype=np.float64)
    if np.ptp(values) == 0 and np.isfinite(values).all():
        if present.nunique() > 1:
            return "", "its numbers are so large that they cannot be told apart: an identifier"
        return "", "it has one value only"
    whole = len(values) == rows and rows > MANY and np.isfinite(values).all() and (values % 1 == 0).all()
    if whole and (np.diff(values) == 1).all():
        return "", "it counts the rows"
    if (
        whole
        and len(np.unique(values)) == rows
        and name.lower().strip("_ ").split("_")[-1] in ("id", "index", "key", "nr")
    ):
        return "", "by its name and its values, all different, it is an identifier"
    return "number", ""


def _form(series: Values) -> str:
    return "" if pandas_module().api.types.is_datetime64_any_dtype(series) else dates.form_of(series)


def fitted(name: str, kind: str, values: np.ndarray, bins: int) -> Column:
    """The column with scale, bins and levels of these values, those of the rows that are fitted."""
    if kind == "category":
        present = values[values != ""]
        levels, counts = np.unique(present, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:LEVELS]
        kept = [str(levels[i]) for i in order if counts[i] >= min(FEWEST, len(present))]
        missing = len(present) < len(values)
        return Column(name, kind, levels=kept, other=len(kept) < len(levels), missing=missing)
    x = values[~np.isnan(values)]
    column = Column(name, kind, missing=len(x) < len(values))
    if not len(x):  # all are missing in the rows that are fitted
        return column
    if np.abs(x - x.mean()).max() > FAR * max(x.std(), 1e-300):
        low, middle, high = np.quantile(x, [0.25, 0.5, 0.75])
        width = float(high - low) or float(x.std())
        column.squash, column.middle, column.width = True, float(middle), width
        x = np.arcsinh((x - middle) / width)
    column.centre, column.scale = float(x.mean()), float(x.std()) or 1.0
    z = (x - column.centre) / column.scale
    distinct = np.unique(z)
    edges = distinct if len(distinct) <= bins else np.unique(np.quantile(z, np.linspace(0, 1, bins + 1)))
    column.edges = [float(edge) for edge in edges]
    return column


@dataclass
class Columns:
    """The inputs of a table: which there are, which were left out and why, and how rows become numbers.

    Example:
        >>> import pandas
        >>> table = pandas.DataFrame({"x": [1.0, 2.0, None, 4.0] * 9, "c": ["a", "b", "b", "a"] * 9})
        >>> columns = Columns.of(table, {})
        >>> columns.describe()
        ["'x': number, some missing", "'c': category, 2 levels"]
        >>> columns.encode(table).plain.shape, columns.encode(table).bins.shape
        ((36, 4), (36, 6))
    """

    columns: list[Column]
    left_out: dict[str, str]

    @classmethod
    def of(cls, table: Table, given: Mapping[str, str], rows: Sequence[int] | None = None) -> "Columns":
        """What each column is; `given` says it for some. Scales are those of `rows`, all by default."""
        kinds: dict[str, str] = {}
        left_out: dict[str, str] = {}
        for name in table.columns:
            kind, why = (given[name], "") if name in given else kind_of(table[name], name, len(table))
            if kind:
                kinds[name] = kind
            else:
                left_out[name] = why
        if not kinds:
            why = "; ".join(f"{name!r}: {reason}" for name, reason in list(left_out.items())[:5])
            raise TableError(
                f"no column is left to predict from{': ' + why if why else ', the target is the only one'}"
            )
        bins = int(max(4, min(BINS, MOST_INPUTS // len(kinds))))
        found = []
        for name, kind in kinds.items():
            form = _form(table[name]) if kind == "date" else ""
            values = values_of(table[name], kind, name, form)
            found.append(fitted(name, kind, values if rows is None else values[np.asarray(rows)], bins))
            found[-1].form = form
            found[-1].ambiguous = dates.is_ambiguous(table[name], form)
        return cls(found, left_out)

    def describe(self) -> list[str]:
        return [f"{column.name!r}: {column.describe()}" for column in self.columns]

    def values(self, table: Table) -> dict[str, np.ndarray]:
        """The values of every column, by name, after a check that all are there."""
        gone = [column.name for column in self.columns if column.name not in table.columns]
        if gone:
            known = ", ".join(map(str, list(table.columns)[:8]))
            raise TableError(
                f"the table has no column {', '.join(map(repr, gone[:5]))}, which the model was fitted with; it has "
                f"{known}. Add {'it' if len(gone) == 1 else 'them'}, with empty fields where nothing is known; or fit "
                f"again without: structvi fit .. --without {gone[0]}"
            )
        return {c.name: values_of(table[c.name], c.kind, c.name, c.form) for c in self.columns}

    def encode(self, table: Table) -> "Encoded":
        """Rows as numbers; a value that is missing, and never was, counts as the mean of its column, or as no level."""
        return self.encoded(self.values(table))

    def encoded(self, rows: Mapping[str, np.ndarray]) -> "Encoded":
        """The same of the values that `values` gives."""
        plain = np.concatenate([column.plain(rows[column.name]) for column in self.columns], 1)
        bins = [column.bins(rows[column.name]) for column in self.columns]
        return Encoded(plain, np.concatenate([plain, *bins], 1), self.unseen(rows))

    def unseen(self, rows: Mapping[str, np.ndarray]) -> list[str]:
        """Sentences on values that were not seen when the model was fitted."""
        return [note for column in self.columns for note in _unseen(column, rows[column.name])]

    def record(self) -> dict[str, Any]:
        return {"columns": [asdict(column) for column in self.columns], "left_out": self.left_out}

    @classmethod
    def from_record(cls, record: Any) -> "Columns":
        """From JSON; TableError where it is not what `record` gives."""
        try:
            columns = [Column(**one) for one in record["columns"]]
            fine = all(_is_sound(column) for column in columns)
            left_out = {str(name): str(why) for name, why in record["left_out"].items()}
        except (TypeError, KeyError, AttributeError) as error:
            raise TableError(f"the model's description of its columns is damaged ({error})") from None
        if not fine or not columns:
            raise TableError("the model's description of its columns is damaged")
        return cls(columns, left_out)


@dataclass
class Encoded:
    """Inputs of networks without and with bins, [N, F] each, and sentences on what was not seen before."""

    plain: np.ndarray
    bins: np.ndarray
    notes: list[str]

    def inputs(self, encoding: str) -> np.ndarray:
        return self.bins if encoding == "bins" else self.plain


def _unseen(column: Column, values: np.ndarray) -> list[str]:
    notes = []
    gone = int((values == "").sum() if column.kind == "category" else np.isnan(values).sum())
    if gone and not column.missing:
        notes.append(
            f"{column.name!r} is missing in {gone} rows and was never when the model was fitted: the prediction of "
            "such a row is a mixture over values that it could have, given its others"
        )
    new = sorted(set(values[~np.isin(values, [*column.levels, ""])].tolist())) if column.kind == "category" else []
    if new:
        shown = ", ".join(map(repr, new[:5]))
        rule = (
            "these rows count as 'other', with the rare levels" if column.other else "these rows count as of no level"
        )
        notes.append(f"{column.name!r} has levels that are not told apart, {shown}: {rule}")
    return notes


def _is_sound(column: Column) -> bool:
    numbers = (column.centre, column.scale, column.middle, column.width, *column.edges)
    return (
        isinstance(column.name, str)
        and column.kind in ("number", "date", "category")
        and all(isinstance(x, int | float) and isfinite(x) for x in numbers)
        and column.scale > 0
        and column.width > 0
        and all(isinstance(level, str) for level in column.levels)
        and all(isinstance(flag, bool) for flag in (column.squash, column.other, column.missing, column.ambiguous))
        and column.form in ("", *dates.FORMS)
    )
