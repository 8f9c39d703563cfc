"""Files of which nothing can be made, and files that are only odd: each gets an answer that says what to do."""

import random
import sys

import pytest

from structvi import cli
from structvi_tables import fitting
from structvi_tables.command import fit_file

pandas = pytest.importorskip("pandas")


def rows(*columns, n=40):
    """A CSV of columns name → function of the row's number."""
    names = ",".join(name for name, _ in columns)
    lines = (",".join(str(value(i)) for _, value in columns) for i in range(n))
    return "\n".join([names, *lines, ""])


def number(i):
    return round(random.Random(i).gauss(0, 1), 4)


def amount(i):
    return round(number(i) * 2 + number(i + 1000), 4)


PLAIN = ("x", number), ("y", amount)
#: name → (content, arguments, words that the answer must have)
BAD = {
    "empty": ("", [], ["is empty", "column names"]),
    "one column": (rows(("y", amount)), [], ["no column is left", "the target is the only one"]),
    "three rows": (rows(*PLAIN, n=3), [], ["3 rows", "30", "collect more"]),
    "latin-1": (
        rows(("größe", number), ("y", amount)).encode("latin-1"),
        [],
        ["not utf-8", "0xf6", "line 1", "cp1252"],
    ),
    "unknown encoding": (rows(*PLAIN), ["--encoding", "utf-9"], ["no encoding 'utf-9'"]),
    "a workbook": (b"PK\x03\x04rest", [], ["Excel", "CSV"]),
    "zero bytes": (b"x,y\n\x00\x01,2\n", [], ["zero bytes"]),
    "duplicate columns": (
        rows(("x", number), ("x", number), ("y", amount)),
        [],
        ["more than one column", "'x'", "rename"],
    ),
    "a column without a name": (rows(("x", number), ("", number), ("y", amount)), [], ["column 2 has no name"]),
    "no line of names": (
        rows(("1.5", number), ("2.5", amount)),
        ["--target", "2.5"],
        ["looks like data", "column names"],
    ),
    "a row too long": (rows(*PLAIN) + "1,2,3\n", [], ["line 42", "3 fields", "2 names"]),
    "target not there": (rows(*PLAIN), ["--target", "z"], ["no column 'z'", "'x', 'y'"]),
    "target in other case": (rows(*PLAIN), ["--target", "Y"], ["no column 'Y'", "'y'", "case"]),
    "target missing": (rows(("x", number), ("y", lambda i: "")), [], ["no values at all"]),
    "constant target": (rows(("x", number), ("y", lambda i: 7)), [], ["one value only", "'7'"]),
    "rare class": (rows(("x", number), ("y", lambda i: "b" if i == 3 else "ac"[i % 2])), [], ["'b' (1 rows)", "merge"]),
    "a class for each row": (rows(("x", number), ("y", lambda i: f"n{i}"), n=80), [], ["80 classes", "50"]),
    "percentages as target": (
        rows(("x", number), ("y", lambda i: f"{i % 13}.5 %")),
        [],
        ["with fewer than 5 rows", "%'", "12345.6"],
    ),
    "a line of totals": (rows(*PLAIN) + "Total,812.4\n", [], ["'x' has numbers", "'Total' in row 41"]),
    "the names again": (rows(*PLAIN) + rows(*PLAIN), [], ["'y' has numbers", "'y' in row 41"]),
    "text in numbers": (
        rows(("x", lambda i: "broken" if i == 7 else number(i)), ("y", amount)),
        [],
        ["'x' has numbers", "'broken' in row 8", '--category "x"'],
    ),
    "infinite values": (
        rows(("x", lambda i: "inf" if i == 4 else number(i)), ("y", amount)),
        [],
        ["infinite", "row 5"],
    ),
    "huge numbers": (
        rows(("x", lambda i: "1e200" if i == 4 else number(i)), ("y", amount)),
        [],
        ["beyond 1e+100", "row 5"],
    ),
    "all columns empty": (
        rows(("x", lambda i: ""), ("y", amount)),
        [],
        ["no column is left", "all values are missing"],
    ),
    "ids alone": (rows(("id", lambda i: 1000 - 7 * i), ("y", amount)), [], ["no column is left", "identifier"]),
    "free text alone": (rows(("x", lambda i: f"text {i}"), ("y", amount)), [], ["identifier or free text"]),
    "unknown task": (rows(*PLAIN), ["--task", "ranking"], ["--task", "regression", "'ranking'"]),
    "unknown noise": (rows(*PLAIN), ["--noise", "Cauchy"], ["noise must be", "'Cauchy'"]),
    "level of ninety": (rows(*PLAIN), ["--level", "90"], ["inside (0, 1)"]),
    "JSON": ('[{"x": 1, "y": 2}]', [], ["HTML, XML or JSON", "CSV"]),
    "spaces between columns": (rows(*PLAIN).replace(",", "  "), [], ["separated by spaces", "commas"]),
    "a comment above": (
        "# of 2024\n" + rows(*PLAIN),
        [],
        ["line 2 has 2 fields, the first line 1 names", "a title above"],
    ),
    "a quote left open": (rows(*PLAIN) + '"1,2\n', [], ["row 41", "not closed"]),
    "a column more": (
        "x,y,\n" + "\n".join(f"{number(i)},{amount(i)},1" for i in range(40)),
        [],
        ["column 3", "no name"],
    ),
    "decimal commas between commas": (
        rows(("x", number), ("y", lambda i: f'"{str(amount(i)).replace(".", ",")}"')),
        [],
        ["digits and a point"],
    ),
    "thousands": (
        rows(("x", lambda i: f'"{1000 * i * i + 12345:,}"'), ("y", amount)),
        [],
        ["such as '12,345'", "12345.6"],
    ),
    "units": (
        rows(("x", number), ("y", lambda i: f"{abs(amount(i))} kg")),
        [],
        ["with fewer than 5 rows", "without units"],
    ),
    "huge identifiers": (rows(("n", lambda i: 10**16 + i % 2), ("y", amount)), [], ["cannot be told apart"]),
    "damaged Parquet": (b"PAR1 and nothing", ["parquet"], ["Parquet"]),
    "Parquet called csv": (b"PAR1 and nothing", [], ["call a Parquet file .parquet"]),
}


@pytest.fixture
def no_fit(monkeypatch):
    monkeypatch.setattr(fitting, "chosen", lambda *_: pytest.fail("a bad file was fitted"))


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["structvi", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_answered(name, no_fit, monkeypatch, capsys, tmp_path):
    content, arguments, words = BAD[name]
    path = tmp_path / ("data.parquet" if "parquet" in arguments else "data.csv")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    arguments = [one for one in arguments if one != "parquet"]
    target = [] if "--target" in arguments else ["--target", "y"]
    code, _, err = run(monkeypatch, capsys, "fit", path, *target, *arguments, "--out", tmp_path / "out")
    assert code == 2
    assert err.startswith("structvi: ")
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err
    for word in words:
        assert word in err, err
    assert not list((tmp_path / "out").glob("*"))


class Fitted(Exception):
    """A file was read, and would be fitted now."""


#: name → (content, what is said of it), of files that can be fitted as they are
ODD = {
    "semicolons and decimal commas": (
        rows(*PLAIN).replace(",", ";").replace(".", ","),
        ["separated by semicolons", "decimal comma"],
    ),
    "tabs": (rows(*PLAIN).replace(",", "\t"), ["separated by tabs"]),
    "lines of Windows": (rows(*PLAIN).replace("\n", "\r\n"), []),
    "a separator at the end": (rows(*PLAIN).replace("\n", ",\n"), ["empty column behind it was left out"]),
    "blank lines above": ("\n\n" + rows(*PLAIN), []),
    "a line break in a field": (rows(("c", lambda i: '"one\ntwo"' if i % 2 else '"a, ""b"""'), *PLAIN), []),
    "many kinds": (rows(("c", lambda i: "ab"[i % 2]), *PLAIN), ["'c': category, 2 levels; 'x': number"]),
    "rows too short": (rows(*PLAIN) + "1.5\n", ["1 rows without a value of 'y' were left out"]),
    "dates": (rows(("d", lambda i: f"2024-{i % 12 + 1:02}-{i % 28 + 1:02}"), *PLAIN), []),
    "dates with a time, day first": (
        rows(("d", lambda i: f"{i % 28 + 1:02}.0{i % 9 + 1}.2024 1{i % 9}:30"), *PLAIN),
        ["'d': date, read as day.month.year"],
    ),
    "a code in the target": (
        rows(("x", number), ("y", lambda i: -999 if i % 9 == 0 else amount(i))),
        ["'y' is -999 in 5"],
    ),
    "a code of missing values": (
        rows(("x", lambda i: -999 if i % 9 == 0 else number(i)), ("y", amount)),
        ["'x' is -999 in 5"],
    ),
    "words of missing values": (
        rows(("x", lambda i: ["NA", "?", "null", "-"][i % 4] if i % 5 == 0 else number(i)), ("y", amount)),
        [],
    ),
    "copies of rows": (rows(*PLAIN) + rows(*PLAIN, n=20).split("\n", 1)[1], ["20 of 60 rows are copies"]),
    "the target again": (rows(*PLAIN, ("again", lambda i: 3 - 2 * amount(i))), ["'again' tells 'y' exactly"]),
    "percentages": (
        rows(("p", lambda i: f"{number(i)}%"), *PLAIN),
        ["'p' was left out: nearly every row", "of numbers digits and a point"],
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_is_read_and_what_is_odd_is_said(name, monkeypatch, tmp_path):
    def fitted(problem, *_):
        assert all(bool(x.isfinite().all()) for x in problem.x.values())
        raise Fitted

    content, words = ODD[name]
    monkeypatch.setattr(fitting, "chosen", fitted)
    (tmp_path / "data.csv").write_bytes(content.encode())
    said = []
    with pytest.raises(Fitted):
        fit_file(tmp_path / "data.csv", "y", say=said.append)
    for word in words:
        assert word in " ".join(said)


@pytest.mark.parametrize("copies", [0, 20])
def test_a_column_of_lists_is_left_out(copies, monkeypatch):
    """As a Parquet file may have one: rows are told to be copies with what is in it."""

    def fitted(*_):
        raise Fitted

    monkeypatch.setattr(fitting, "chosen", fitted)
    table = pandas.DataFrame({"x": [number(i) for i in range(40)], "z": [[i, i] for i in range(40)]})
    table["y"] = [amount(i) for i in range(40)]
    said = []
    with pytest.raises(Fitted):
        fitting.fit_table(pandas.concat([table, table.head(copies)]), "y", say=said.append)
    words = " ".join(said)
    assert "'z' was left out: its fields are lists" in words
    assert (f"{copies} of 60 rows are copies" in words) == bool(copies)


@pytest.mark.parametrize(("path", "words"), [("gone.csv", "there is no file"), (".", "is a folder")])
def test_a_file_that_is_not_there(path, words, no_fit, monkeypatch, capsys, tmp_path):
    code, _, err = run(monkeypatch, capsys, "fit", tmp_path / path, "--target", "y", "--out", tmp_path / "out")
    assert code == 2
    assert words in err


def test_pandas_is_asked_for(no_fit, monkeypatch, capsys, tmp_path):
    (tmp_path / "a.csv").write_text(rows(*PLAIN))
    monkeypatch.setitem(sys.modules, "pandas", None)
    code, _, err = run(monkeypatch, capsys, "fit", tmp_path / "a.csv", "--target", "y", "--out", tmp_path / "out")
    assert code == 2
    assert 'pip install "structvi[table]"' in err
