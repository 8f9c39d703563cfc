"""Dates as people write them: which form a column has, and its days since 1970.

The form is that of all values of a column, and kept with the model: 03/04/2025 of a new row is what it was in the
table, whatever the other new rows are.
"""

from itertools import product

import numpy as np

from .reading import TableError, Values, pandas_module

ISO = "ISO8601"
#: that are tried, in this order; month/day before day/month, which is said where no day tells
DAYS = ("%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%m/%d/%y", "%d/%m/%y")
TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
FORMS = (ISO, *(day + time for day, time in product(DAYS, TIMES)))
#: what is neither a number nor a word
_LOOKS_LIKE_ONE = r"^\d{4}[-/]\d{1,2}[-/]\d{1,2}|^\d{1,2}[./-]\d{1,2}[./-]\d{2,4}"
#: texts that are tried before all of them are
FIRST = 50


def form_of(series: Values) -> str:
    """The form of a column of texts; "" where not every text is a date, or not all have one form.

    Example:
        >>> import pandas
        >>> form_of(pandas.Series(["03.12.2024 08:30", "31.12.2024 17:00"])), form_of(pandas.Series(["a", "b"]))
        ('%d.%m.%Y %H:%M', '')
    """
    text = series.dropna().astype(str).str.strip()
    if not len(text) or not text.str.match(_LOOKS_LIKE_ONE).all():
        return ""
    return next((form for form in FORMS if _fits(text.head(FIRST), form) and _fits(text, form)), "")


def is_ambiguous(series: Values, form: str) -> bool:
    """Whether no value tells which of two numbers is the day."""
    if not form.startswith("%m/%d/"):
        return False
    return _fits(series.dropna().astype(str).str.strip(), form.replace("%m/%d/", "%d/%m/"))


def described(form: str, ambiguous: bool) -> str:
    """Words on a form that a reader may doubt."""
    if not form or form == ISO:
        return "date"
    day = form.split(" ")[0]
    for code, word in {"%d": "day", "%m": "month", "%Y": "year", "%y": "year"}.items():
        day = day.replace(code, word)
    doubt = " (no day is above 12: if the day comes first, write 2024-12-31)" if ambiguous else ""
    return f"date, read as {day}{doubt}"


def days(series: Values, form: str, name: str) -> np.ndarray:
    """Days since 1970, NaN where missing; TableError where not all are dates of this form, or of ISO 8601."""
    pandas = pandas_module()
    if not pandas.api.types.is_datetime64_any_dtype(series):
        text = series.astype(str).str.strip().where(series.notna())
        if not text.notna().any():
            return np.full(len(series), np.nan)
        known = next((one for one in (form or form_of(series), ISO) if one and _fits(text.dropna(), one)), None)
        if known is None:
            first = next(one for one in text.dropna() if not form or not _fits(pandas.Series([one]), form))
            raise TableError(
                f"column {name!r} had dates when the model was fitted, and now not all of it are, or not in one "
                f"form; look at {first!r}. Write them as 2024-12-31, or leave the fields empty"
            )
        series = pandas.to_datetime(text, format=known, utc=True)
    found = (series.dt.tz_localize(None) - pandas.Timestamp(0)) / pandas.Timedelta(days=1)
    return found.to_numpy(dtype=np.float64, na_value=np.nan)


def _fits(text: Values, form: str) -> bool:
    return bool(pandas_module().to_datetime(text, errors="coerce", format=form, utc=True).notna().all())
