"""A file becomes a pandas table, or an answer that says what to do with the file."""

import csv
import io
import os
import re
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

#: a pandas table, and one of its columns: without stubs a type checker knows neither
Table = Any
Values = Any
#: what stands for a missing value, beside an empty field and pandas' own words (NA, NaN, null, ..)
MISSING = ("?", "-", "--", ".", "NA", "N/A", "n.a.", "na", "none", "None", "missing", "unknown value")
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
EXTRA = 'pip install "structvi[table]"'
#: a table has at most so many columns
MOST_COLUMNS = 2000
#: the first bytes of files that are no text
_KINDS = {
    b"PK\x03\x04": "a zip archive, such as an Excel workbook: export the sheet as CSV",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook: export the sheet as CSV",
    b"PAR1": "a Parquet file: call it .parquet",
    b"\x1f\x8b": "compressed: unpack it first",
    b"%PDF": "a PDF: export the table as CSV",
    b"\x89PNG": "a picture",
}


class TableError(ValueError):
    """A file, or a table, of which nothing can be made; the message says what to do."""


def read_table(path: str | os.PathLike[str], encoding: str = "utf-8", notes: list[str] | None = None) -> Table:
    """A CSV or Parquet file as a pandas table.

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
    notes = [] if notes is None else notes
    path = Path(path)
    pandas_module()
    if path.is_dir():
        raise TableError(f"{path} is a folder: give the file itself")
    if not path.exists():
        raise TableError(f"there is no file {path}: is the name right, and the folder? (here is {Path.cwd()})")
    try:
        table = _parquet(path) if path.suffix.lower() in (".parquet", ".pq") else _text(path, encoding, notes)
    except OSError as error:
        raise TableError(f"cannot read {path}: {error.strerror or error}") from None
    if len(table.columns) > MOST_COLUMNS:
        raise TableError(
            f"{path} has {len(table.columns)} columns, at most {MOST_COLUMNS} are taken: choose those that matter"
        )
    if not len(table):
        raise TableError(f"{path} has column names and no rows below them: is it the right file?")
    return table


def is_table(table: object) -> bool:
    """Whether it is a pandas table; pandas is not imported for it.

    Example:
        >>> is_table([[1.0]])
        False
    """
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(table, pandas.DataFrame)


def as_table(table: Any) -> Table:
    """A pandas table with texts as names; TypeError where it is none, TableError where two columns have one name.

    Example:
        >>> import pandas
        >>> list(as_table(pandas.DataFrame([[1, 2]])).columns)
        ['0', '1']
    """
    if not isinstance(table, pandas_module().DataFrame):
        raise TypeError(f"expected a pandas table, got {type(table).__name__}; read_table(path) makes one of a file")
    if not all(isinstance(name, str) for name in table.columns):
        table = table.rename(columns=str)
    double = sorted(set(table.columns[table.columns.duplicated()]))
    if double:
        raise TableError(f"more than one column is called {', '.join(map(repr, double[:5]))}: rename all but one")
    return table


def pandas_module() -> Any:
    """pandas, imported when it is asked for; TableError where it is not installed."""
    try:
        return import_module("pandas")
    except ModuleNotFoundError:
        raise TableError(f"tables are read by pandas, which is not installed: {EXTRA}") from None


def _parquet(path: Path) -> Table:
    pandas = pandas_module()
    try:
        table = pandas.read_parquet(path)
    except ImportError:
        raise TableError(
            f"Parquet files are read by pyarrow, which is not installed: {EXTRA}, or save as CSV"
        ) from None
    except OSError:
        raise
    except Exception as error:  # pyarrow has many
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TableError(f"{path} is not a readable Parquet file ({said}): write it again, or save as CSV") from None
    table.columns = [str(name) for name in table.columns]
    _check_names(list(table.columns), path)
    return table.reset_index(drop=True)


def _text(path: Path, encoding: str, notes: list[str]) -> Table:
    pandas = pandas_module()
    raw = path.read_bytes()
    for start, what in _KINDS.items():
        if raw.startswith(start):
            raise TableError(f"{path} is no text but {what}")
    text = _decoded(raw, encoding, path)
    if "\r" in text:  # of Windows, and of old Macs
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n", 2)
    if not text.strip():
        raise TableError(f"{path} is empty: a table has a line of column names and a line for each row")
    if (other := _other_text(text)) is not None:
        raise TableError(f"{path} is no table but {other}: export it as CSV")
    first = next((line for line in io.StringIO(text) if line.strip()), lines[0]).rstrip("\r\n")
    separator = max(SEPARATORS, key=lambda s: (len(next(csv.reader([first], delimiter=s))), s == ","))
    names = [name.strip() for name in next(csv.reader([first], delimiter=separator))]
    if separator != ",":
        notes.append(f"The columns are separated by {SEPARATORS[separator]}.")
    if len(names) == 1 and len(names[0].split()) == len(text.splitlines()[-1].split()) > 1:
        raise TableError(f"{path}: the columns seem to be separated by spaces: save it with commas between them")
    unnamed = _unnamed_end(names)
    _check_names(names[: len(names) - unnamed], path)
    decimal = "."
    if separator != "," and re.search(r"(^|[;\t|\n\"])-?\d+,\d+($|[;\t|\r\n\"])", text[len(first) : 100_000]):
        decimal = ","
        notes.append("Numbers have a decimal comma.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            table = pandas.read_csv(
                io.StringIO(text), sep=separator, decimal=decimal, na_values=list(MISSING), index_col=False,
                skipinitialspace=True, low_memory=False,
            )  # fmt: skip
    except (pandas.errors.ParserError, pandas.errors.ParserWarning, pandas.errors.EmptyDataError) as error:
        raise TableError(_ragged(path, text, separator, len(names), str(error))) from None
    table.columns = names
    if unnamed:
        if bool(table.iloc[:, -unnamed:].notna().any(axis=None)):
            raise TableError(f"{path}: column {len(names) - unnamed + 1} has no name: give it one in the first line")
        table = table.iloc[:, :-unnamed]
        notes.append("Lines end in a separator: the empty column behind it was left out.")
    if names[0] == "":  # what pandas writes above its index
        notes.append("The first column has no name: it was taken to be a row number and left out.")
        table = table.iloc[:, 1:]
    return table


def _decoded(raw: bytes, encoding: str, path: Path) -> str:
    if encoding.lower().replace("-", "") == "utf8" and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise TableError(f"{path} is UTF-16: give --encoding utf-16, or save it as UTF-8")
    try:
        text = raw.decode("utf-8-sig" if encoding.lower().replace("-", "") == "utf8" else encoding)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise TableError(
            f"{path} is not {encoding}: byte 0x{raw[error.start]:02x} in line {line}. Save it as UTF-8, or give its "
            "encoding; files from Windows are often --encoding cp1252"
        ) from None
    except LookupError:
        raise TableError(f"there is no encoding {encoding!r}: utf-8, cp1252, latin-1 and utf-16 are common") from None
    if "\x00" in text[:100_000]:
        raise TableError(f"{path} is no text: it has zero bytes. Export the table as CSV")
    return text


def _check_names(names: list[str], path: Path) -> None:
    double = sorted({name for name in names if name and names.count(name) > 1})
    if double:
        raise TableError(
            f"{path} has more than one column called {', '.join(map(repr, double[:5]))}: rename or remove all but one"
        )
    if "" in names[1:]:
        raise TableError(f"{path}: column {names.index('', 1) + 1} has no name: give it one in the first line")
    if len(names) > 1 and all(re.fullmatch(r"[-+]?\d*[.,]?\d+([eE][-+]?\d+)?", name) for name in names if name):
        raise TableError(
            f"{path}: the first line, {', '.join(names[:4])}.., looks like data: put a line of column names above it"
        )


def _other_text(text: str) -> str | None:
    """What a text is in place of a table."""
    start = text.lstrip()[:200].lower()
    if start.startswith(("<!doctype", "<html", "<?xml", "<table")):
        return "a page of HTML or XML"
    return "JSON" if re.match(r'[\[{]\s*[\[{"]', start) else None


def _unnamed_end(names: list[str]) -> int:
    """How many columns at the end have no name, of several that have."""
    count = next((i for i, name in enumerate(reversed(names)) if name), 0)
    return count if count < len(names) - 1 else 0


def _ragged(path: Path, text: str, separator: str, columns: int, said: str) -> str:
    rows = [len(row) for row in csv.reader(io.StringIO(text), delimiter=separator) if row]
    if rows[0] != (usual := max(set(rows), key=rows.count)) and usual > columns:
        return (
            f"{path}: the first line has {columns} names, most others {usual} fields: is it a title or a comment? "
            "Column names must be in the first line"
        )
    for number, row in enumerate(csv.reader(io.StringIO(text), delimiter=separator), 1):
        if len(row) > columns:
            return (
                f"{path}: line {number} has {len(row)} fields, the first line {columns} names: is a text with "
                f"{SEPARATORS[separator]} in it without quotes?"
            )
    if match := re.search(r"EOF inside string starting at row (\d+)", said):
        return f"{path}: a quote that begins in row {match[1]} is not closed: close it, or remove it"
    return f"{path} cannot be read as a table: {said.splitlines()[0]}"
