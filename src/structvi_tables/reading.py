"""A file becomes a pandas table, or an answer that says what to do with the file."""

import csv
import io
import os
import re
import warnings
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

#: a pandas table, and one of its columns: without stubs a type checker knows neither
Table = Any
Values = Any
#: what stands for a missing value, beside an empty field and pandas' own words (NA, NaN, null, ..)
MISSING = ("?", "-", "--", ".", "n.a.", "na", "none", "missing")
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
EXTRA = 'pip install "structvi[table]"'
#: the first bytes of workbooks, Parquet, compressed files and PDF
_BINARY = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0", b"PAR1", b"\x1f\x8b", b"%PDF")
_NUMBER = r"[-+]?\d*[.,]?\d+([eE][-+]?\d+)?"


class TableError(ValueError):
    """An unusable file, table or choice; the message says what to do."""


def read_table(path: str | os.PathLike[str], encoding: str = "utf-8", notes: list[str] | None = None) -> Table:
    """Return a CSV or Parquet file as a pandas table.

    Args:
        path: .parquet and .pq are Parquet, everything else text with a line of column names.
        encoding: of the text.
        notes: takes sentences on what was found: the separator, the decimal comma.

    Raises:
        TableError: there is no such file, or it is no table.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.csv"
        >>> _ = path.write_text("x;y\\n1,5;a\\n2,5;b\\n")
        >>> read_table(path)["x"].tolist()
        [1.5, 2.5]
    """
    path, pandas = Path(path), pandas_module()
    if not path.is_file():
        raise TableError(f"there is no file {path}: is the name right, and the folder? (here is {Path.cwd()})")
    if path.suffix.lower() in (".parquet", ".pq"):
        try:
            table = pandas.read_parquet(path).reset_index(drop=True)
        except (ImportError, ValueError, OSError, NotImplementedError) as error:
            raise TableError(f"{path} is not read as Parquet ({str(error).splitlines()[0]}): save it as CSV") from None
    else:
        table = _text(path, encoding, [] if notes is None else notes)
    if not len(table):
        raise TableError(f"{path} has column names and no rows below them: is it the right file?")
    return table


def as_table(table: Any) -> Table:
    """Return a pandas table with texts as names; TypeError for anything else.

    Example:
        >>> import pandas
        >>> list(as_table(pandas.DataFrame([[1, 2]])).columns)
        ['0', '1']
    """
    if not isinstance(table, pandas_module().DataFrame):
        raise TypeError(f"expected a pandas table, got {type(table).__name__}; read_table(path) makes one of a file")
    table = table.rename(columns=str)
    double = sorted(set(table.columns[table.columns.duplicated()]))
    if double:
        raise TableError(f"more than one column is called {listed(double)}: rename all but one")
    return table


def listed(names: Iterable[Any], most: int = 8) -> str:
    """Return the first of some names, quoted, in one text.

    Example:
        >>> listed("abc", most=2)
        "'a', 'b', .."
    """
    shown = [repr(str(name)) for name in names]
    return ", ".join(shown[:most]) + (", .." if len(shown) > most else "")


def pandas_module() -> Any:
    """Return pandas, imported when it is asked for."""
    try:
        return import_module("pandas")
    except ModuleNotFoundError:
        raise TableError(f"tables are read by pandas, which is not installed: {EXTRA}") from None


def _text(path: Path, encoding: str, notes: list[str]) -> Table:
    pandas = pandas_module()
    text = _decoded(path.read_bytes(), encoding, path)
    if not text:
        raise TableError(f"{path} is empty: a table has a line of column names and a line for each row")
    first = text.split("\n", 1)[0]
    separator = max(SEPARATORS, key=lambda one: len(next(csv.reader([first], delimiter=one))))
    names = [name.strip() for name in next(csv.reader([first], delimiter=separator))]
    if separator != ",":
        notes.append(f"The columns are separated by {SEPARATORS[separator]}.")
    decimal = "."
    if separator != "," and re.search(r"(^|[;\t|\n\"])-?\d+,\d+($|[;\t|\n\"])", text[len(first) :]):
        decimal = ","
        notes.append("Numbers have a decimal comma.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            table = pandas.read_csv(
                io.StringIO(text), sep=separator, decimal=decimal, na_values=list(MISSING), index_col=False,
                skipinitialspace=True, low_memory=False,
            )  # fmt: skip
    except (pandas.errors.ParserError, pandas.errors.ParserWarning) as error:
        raise TableError(
            f"{path} cannot be read as a table with the columns {listed(names)}: {str(error).strip()}. Is a quote not "
            f"closed, a text with {SEPARATORS[separator]} in it without quotes, or a title above the column names?"
        ) from None
    table.columns = names
    if "" in names:  # what pandas writes above its index, or a separator at the end of each line
        notes.append("A column without a name was left out.")
        table = table.drop(columns="")
    names = list(table.columns)
    if len(names) > 1 and all(re.fullmatch(_NUMBER, name) for name in names):
        raise TableError(f"{path}: the first line, {listed(names)}, looks like data: put a line of column names above")
    return table


def _decoded(raw: bytes, encoding: str, path: Path) -> str:
    if raw.startswith(_BINARY) or (b"\x00" in raw and "16" not in encoding):
        raise TableError(
            f"{path} is no text but an Excel workbook, a PDF, a Parquet or a compressed file: export the table as CSV, "
            "or call a Parquet file .parquet; of UTF-16 give --encoding utf-16"
        )
    try:
        text = raw.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise TableError(
            f"{path} is not {encoding}: byte 0x{raw[error.start]:02x} in line {line}. Save it as UTF-8, or give its "
            "encoding; files from Windows are often --encoding cp1252"
        ) from None
    except LookupError:
        raise TableError(f"there is no encoding {encoding!r}: utf-8, cp1252, latin-1 and utf-16 are common") from None
    return text.replace("\r\n", "\n").replace("\r", "\n").strip("\n ")
