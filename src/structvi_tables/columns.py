"""Columns of a table, recognised and described, and their way into a network's inputs.

Own code instead of scikit-learn's transformers: a model is saved as JSON, and nothing that a file says is ever run.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .reading import Table, TableError, Values, listed, pandas_module

#: values of every column, by its name, as `values_of` gives them
Rows = Mapping[str, np.ndarray]
#: bins of a number, and of all numbers together: with more columns each gets fewer
BINS, MOST_BINS = 32, 800
#: levels of a category with an input each, the most frequent
LEVELS = 30
#: standard deviations: a column with values beyond is read on the scale of sinh⁻¹
FAR = 10.0
#: values that stand for one that is missing for the first time
FILLS = 16
AS_NUMBERS = "digits and a point alone, 12345.6, without units and signs of thousands"
ISO = "ISO8601"


@dataclass
class Column:
    """One input column, and all that is needed to encode it again.

    Attributes:
        kind: "number", "date" (days since 1970) or "category".
        centre, scale: of z = (x − centre)/scale; with `squash` of z = sinh⁻¹((x − centre)/scale).
        edges: of the bins of z.
        levels: with an input each; all others have none.
        missing: whether missing values occurred, and have an input of their own.
        form: of dates that are texts.
        low, high: ends of the values that were fitted.
        fills: quantiles of the values, for one that is missing for the first time.
    """

    name: str
    kind: str
    centre: float = 0.0
    scale: float = 1.0
    squash: bool = False
    edges: list[float] = field(default_factory=list)
    levels: list[str] = field(default_factory=list)
    missing: bool = False
    form: str = ""
    low: float = 0.0
    high: float = 0.0
    fills: list[Any] = field(default_factory=list)

    def __str__(self) -> str:
        gaps = ", some missing" if self.missing else ""
        if self.kind == "category":
            return f"{self.name!r}: category, {len(self.levels)} levels{gaps}"
        form = self.form.replace("%d", "day").replace("%m", "month").replace("%Y", "year").split(" ")[0]
        read = f", read as {form}" if form not in ("", ISO) else ""
        squashed = ", with values far out: read on a logarithmic scale" if self.squash else ""
        return f"{self.name!r}: {self.kind}{read}{gaps}{squashed}"

    def gone(self, values: np.ndarray) -> np.ndarray:
        return values == "" if self.kind == "category" else np.isnan(values)

    def outside(self, values: np.ndarray) -> np.ndarray:
        """Return where a value is beyond what was fitted, or missing without an input for it: [N]."""
        new = self.gone(values) & (not self.missing)
        if self.kind == "category":
            return new | ~np.isin(values, [*self.levels, ""])
        return new | (values < self.low) | (values > self.high)

    def z(self, x: np.ndarray) -> np.ndarray:
        """Standardise; beyond the fitted range z goes on for one range more, and then stays."""
        z = (x - self.centre) / self.scale
        z = np.arcsinh(z) if self.squash else z
        if not self.edges:
            return z
        low, high = self.edges[0], self.edges[-1]
        return np.clip(z, 2 * low - high, 2 * high - low)

    def plain(self, values: np.ndarray) -> np.ndarray:
        """Return the number itself or an indicator for each level, and one of missing values: [N] → [N, F]."""
        gone = self.gone(values)
        if self.kind == "category":
            parts = [values == level for level in self.levels]
        else:
            parts = [np.where(gone, 0.0, self.z(values))]
        parts += [gone] if self.missing else []
        return np.stack(parts, 1).astype(np.float64) if parts else np.zeros((len(values), 0))

    def bins(self, values: np.ndarray) -> np.ndarray:
        """Return how far z is through each bin, in [−½, ½]: a line bent at the edges is linear in it: [N] → [N, F]."""
        if self.kind == "category" or len(self.edges) < 3:
            return np.zeros((len(values), 0))
        z = np.nan_to_num(self.z(values), nan=0.0)[:, None]
        low, high = np.array(self.edges[:-1]), np.array(self.edges[1:])
        return np.clip((z - low) / (high - low), 0.0, 1.0) - 0.5

    def is_sound(self) -> bool:
        fills = [] if self.kind == "category" else self.fills
        numbers = np.array([self.centre, self.scale, self.low, self.high, *self.edges, *fills], dtype=float)
        return (
            self.kind in ("number", "date", "category")
            and bool(np.isfinite(numbers).all())
            and self.scale > 0
            and len(self.fills) in (0, FILLS)
        )


def values_of(series: Values, kind: str, name: str, form: str = "") -> np.ndarray:
    """Return a column's values: float64 with NaN, or strings with "" where missing; TableError where they are none."""
    pandas = pandas_module()
    if kind == "category":
        if pandas.api.types.is_float_dtype(series) and bool((series.dropna() % 1 == 0).all()):
            series = series.astype("Int64")  # 1.0 of a column with gaps is the 1 of one without
        text = series.astype(str).str.strip()
        return np.where(series.isna().to_numpy(), "", text.to_numpy(dtype=object)).astype(str)
    if kind == "date":
        read = series if pandas.api.types.is_datetime64_any_dtype(series) else _parsed(series, form)
        wanted = "dates of one form, such as 2024-12-31"
        numbers = (read.dt.tz_localize(None) - pandas.Timestamp(0)) / pandas.Timedelta(days=1)
    else:
        wanted = f'numbers; of a category give --category "{name}"'
        numbers = pandas.to_numeric(series, errors="coerce").astype(float)
        numbers = numbers.where(numbers.abs() <= np.finfo(np.float32).max)
    bad = series[numbers.isna() & series.notna()]
    if len(bad):
        shown = ", ".join(f"{str(value)!r} in row {row + 1}" for row, value in bad.head().items())
        raise TableError(
            f"column {name!r} has {len(bad)} fields that cannot be read: {shown}. Correct them, or leave them empty "
            f"(missing); it must have {wanted}"
        )
    return numbers.to_numpy(dtype=np.float64, na_value=np.nan)


def form_of(series: Values) -> str:
    """Return the form of a column of dates; "" where not every text is a date of one form.

    Of dates that can be read in both ways those with points have the day first, the others the month.

    Example:
        >>> import pandas
        >>> form_of(pandas.Series(["03.12.2024 08:30", "31.12.2024 17:00"])), form_of(pandas.Series(["a", "b"]))
        ('%d.%m.%Y %H:%M', '')
    """
    from pandas.tseries.api import guess_datetime_format

    if pandas_module().api.types.is_datetime64_any_dtype(series):
        return ISO
    text = series.dropna().astype(str).str.strip()
    if not len(text) or not text.str.match(r"^\d{1,4}[./-]\d{1,2}[./-]\d{4}|^\d{4}[./-]\d{1,2}[./-]\d{1,2}").all():
        return ""
    has_points = "." in text.iloc[0][:3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the order that was not asked for
        guesses = [guess_datetime_format(text.iloc[0], dayfirst=first) for first in (has_points, not has_points)]
    return next((form for form in (ISO, *guesses) if form and _parsed(text, form).notna().all()), "")


def _parsed(text: Values, form: str) -> Values:
    """Return times, missing where a text has another form."""
    texts = text.astype(str).str.strip().where(text.notna())
    return pandas_module().to_datetime(texts, errors="coerce", format=form, utc=True)


def kind_of(series: Values, name: str, rows: int) -> tuple[str, str]:
    """Return ("number", "date" or "category", "") or ("", why the column is left out)."""
    pandas = pandas_module()
    present = series.dropna()
    text = present.astype(str).str.strip()
    distinct = text.nunique()
    if distinct < 2:
        return "", "it has one value only" if distinct else "all values are missing"
    if pandas.api.types.is_bool_dtype(series):
        return "category", ""
    if form_of(series):
        return "date", ""
    number = pandas.to_numeric(present, errors="coerce")
    if bool(number.notna().all()):
        last = name.lower().strip("_ ").split("_")[-1]
        is_key = last in ("id", "index", "key", "nr") or bool((number.diff()[1:] == 1).all())
        if is_key and distinct == rows > LEVELS and bool((number % 1 == 0).all()):
            return "", "it counts the rows, or is an identifier by its name and its values, all different"
        return "number", ""
    if number.notna().mean() >= 0.5 and number.nunique() > LEVELS:
        return "number", ""  # and an error where it is read
    if distinct > max(LEVELS, 0.5 * len(present)):
        own = f"nearly every row has a text of its own, such as {text.iloc[0]!r}"
        return "", f"{own}: an identifier or free text; of dates write 2024-12-31, of numbers {AS_NUMBERS}"
    return "category", ""


def fitted(name: str, kind: str, values: np.ndarray, bins: int, form: str = "") -> Column:
    """Return the column with scale, bins and levels of these values, which are from the fitted rows."""
    column = Column(name, kind, form=form)
    present = np.sort(values[~column.gone(values)])
    column.missing = len(present) < len(values)
    if not len(present):  # all are missing in the rows that are fitted
        return column
    column.fills = present[((np.arange(FILLS) + 0.5) / FILLS * len(present)).astype(int)].tolist()
    if kind == "category":
        levels, counts = np.unique(present, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:LEVELS]
        column.levels = [str(levels[i]) for i in order]
        return column
    column.low, column.high = float(present[0]), float(present[-1])
    column.centre, scale, column.squash = centre_and_scale(present)
    column.scale = scale or 1.0
    z = column.z(present)
    distinct = np.unique(z)
    edges = distinct if len(distinct) <= bins else np.unique(np.quantile(z, np.linspace(0, 1, bins + 1)))
    column.edges = edges.tolist()
    return column


def centre_and_scale(x: np.ndarray) -> tuple[float, float, bool]:
    """Return mean and standard deviation; or, with True, median and spread of the quartiles if values lie far out."""
    centre, scale = float(x.mean()), float(x.std())
    if np.abs(x - centre).max() <= FAR * max(scale, 1e-300):
        return centre, scale, False
    low, middle, high = (float(q) for q in np.quantile(x, [0.25, 0.5, 0.75]))
    return middle, (high - low) / 1.35 or scale, True


@dataclass
class Columns:
    """The inputs of a table: which there are, which were left out and why, and how rows become numbers.

    Example:
        >>> import pandas
        >>> table = pandas.DataFrame({"x": [1.0, 2.0, None, 4.0] * 9, "c": ["a", "b", "b", "a"] * 9})
        >>> columns = Columns.of(table)
        >>> print(*columns.each, sep="; ")
        'x': number, some missing; 'c': category, 2 levels
        >>> {name: tuple(x.shape) for name, x in columns.inputs(columns.values(table)).items()}
        {'plain': (36, 4), 'bins': (36, 6)}
    """

    each: list[Column]
    left_out: dict[str, str]

    @classmethod
    def of(cls, table: Table, kinds: Mapping[str, str] | None = None, rows: Sequence[int] | None = None) -> "Columns":
        """Find what each column is; `kinds` says it for some. Scales come from `rows`, all by default."""
        given, left_out = dict(kinds or {}), {}
        found: dict[str, str] = {}
        for name in table.columns:
            kind, why = (given[name], "") if name in given else kind_of(table[name], name, len(table))
            (found if kind else left_out)[name] = kind or why
        if not found:
            why = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
            raise TableError(f"no column is left to predict from: {why or 'the target is the only one'}")
        bins, each = int(max(4, min(BINS, MOST_BINS // len(found)))), []
        for name, kind in found.items():
            form = form_of(table[name]) if kind == "date" else ""
            values = values_of(table[name], kind, name, form)
            each.append(fitted(name, kind, values if rows is None else values[np.asarray(rows)], bins, form))
        return cls(each, left_out)

    def values(self, table: Table) -> dict[str, np.ndarray]:
        """Return the values of every column, by name, after a check that all are there."""
        gone = [column.name for column in self.each if column.name not in table.columns]
        if gone:
            raise TableError(
                f"the table has no column {listed(gone)}, which the model was fitted with; it has "
                f"{listed(table.columns)}. Add what is missing, with empty fields where nothing is known; or fit again "
                f"without: structvi fit .. --without {gone[0]}"
            )
        return {c.name: values_of(table[c.name], c.kind, c.name, c.form) for c in self.each}

    def inputs(self, rows: Rows) -> dict[str, Tensor]:
        """Return inputs of networks without and with bins, [N, F] each."""
        plain = np.concatenate([column.plain(rows[column.name]) for column in self.each], 1)
        bins = [column.bins(rows[column.name]) for column in self.each]
        both = {"plain": plain, "bins": np.concatenate([plain, *bins], 1)}
        return {name: torch.as_tensor(x, dtype=torch.float32) for name, x in both.items()}

    def gaps(self, rows: Rows) -> np.ndarray:
        """Return where a value is missing for the first time: [N, columns]."""
        return np.stack([c.gone(rows[c.name]) & (not c.missing) for c in self.each], 1)

    def filled(self, rows: Rows, seed: int) -> list[dict[str, np.ndarray]]:
        """Return `FILLS` copies of the rows, each with another quantile of its column in every gap."""
        generator, copies = np.random.default_rng(seed), [dict(rows) for _ in range(FILLS)]
        for column, gap in zip(self.each, self.gaps(rows).T, strict=True):
            for copy, k in zip(copies, generator.permutation(FILLS), strict=True):
                if gap.any():
                    copy[column.name] = np.where(gap, column.fills[k], rows[column.name])
        return copies

    @classmethod
    def from_record(cls, record: Any) -> "Columns":
        """Read what `asdict` gave, from JSON; ValueError or TypeError where it is something else."""
        columns = [Column(**one) for one in record["each"]]
        if not columns or not all(column.is_sound() for column in columns):
            raise ValueError("a column that is not known")
        return cls(columns, {str(name): str(why) for name, why in record["left_out"].items()})
