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
    "only blank lines": ("\n\n \n", [], ["is empty"]),
    "names without rows": ("x,y\n", [], ["no rows"]),
    "one column": (rows(("y", amount)), [], ["no column is left", "the target is the only one"]),
    "three rows": (rows(*PLAIN, n=3), [], ["3 rows", "30", "collect more"]),
    "latin-1": (
        rows(("größe", number), ("y", amount)).encode("latin-1"),
        [],
        ["not utf-8", "0xf6", "line 1", "cp1252"],
    ),
    "utf-16": (rows(*PLAIN).encode("utf-16"), [], ["UTF-16", "--encoding utf-16"]),
    "unknown encoding": (rows(*PLAIN), ["--encoding", "utf-9"], ["no encoding 'utf-9'"]),
    "a workbook": (b"PK\x03\x04rest", [], ["Excel", "CSV"]),
    "gzip": (b"\x1f\x8b\x08rest", [], ["compressed", "unpack"]),
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
    "one class": (rows(("x", number), ("y", lambda i: "a")), ["--task", "classification"], ["one class only", "'a'"]),
    "rare class": (rows(("x", number), ("y", lambda i: "b" if i == 3 else "ac"[i % 2])), [], ["'b' (1 rows)", "merge"]),
    "a class for each row": (rows(("x", number), ("y", lambda i: f"n{i}"), n=80), [], ["80 classes", "50"]),
    "words as amounts": (rows(("x", number), ("y", lambda i: "ab"[i % 2])), ["--task", "regression"], ["'a' in row 1"]),
    "dates as target": (rows(("x", number), ("y", lambda i: f"2024-01-{i % 28 + 1:02}")), [], ["dates", "days"]),
    "percentages as target": (
        rows(("x", number), ("y", lambda i: f"{i % 13}.5 %")),
        [],
        ["target 'y'", "look like numbers", "%'", "12345.6"],
    ),
    "a line of totals": (rows(*PLAIN) + "Total,812.4\n", [], ["'x' has numbers", "'Total' in row 41"]),
    "the names again": (rows(*PLAIN) + rows(*PLAIN), [], ["'y' has numbers", "'y' in row 41"]),
    "text in numbers": (
        rows(("x", lambda i: "broken" if i == 7 else number(i)), ("y", amount)),
        [],
        ["'x' has numbers", "'broken' in row 8", '--category "x"'],
    ),
    "text in the target": (
        rows(("x", number), ("y", lambda i: "oops" if i == 2 else amount(i))),
        [],
        ["'oops' in row 3"],
    ),
    "infinite values": (
        rows(("x", lambda i: "inf" if i == 4 else number(i)), ("y", amount)),
        [],
        ["infinite", "row 5"],
    ),
    "infinite target": (
        rows(("x", number), ("y", lambda i: "-inf" if i == 4 else amount(i))),
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
    "row numbers alone": (rows(("n", lambda i: i), ("y", amount)), [], ["counts the rows"]),
    "free text alone": (rows(("x", lambda i: f"text {i}"), ("y", amount)), [], ["identifier or free text"]),
    "constant column alone": (rows(("x", lambda i: 3), ("y", amount)), [], ["one value only"]),
    "unknown task": (rows(*PLAIN), ["--task", "ranking"], ["--task", "regression", "'ranking'"]),
    "unknown noise": (rows(*PLAIN), ["--noise", "Cauchy"], ["noise must be", "'Cauchy'"]),
    "unknown category": (rows(*PLAIN), ["--category", "q"], ["no column 'q'"]),
    "level of ninety": (rows(*PLAIN), ["--level", "90"], ["inside (0, 1)"]),
    "a page": ("<!DOCTYPE html>\n<table>..</table>\n", [], ["HTML", "CSV"]),
    "JSON": ('[{"x": 1, "y": 2}]', [], ["JSON", "CSV"]),
    "spaces between columns": (rows(*PLAIN).replace(",", "  "), [], ["separated by spaces", "commas"]),
    "a comment above": ("# of 2024\n" + rows(*PLAIN), [], ["the first line has 1 names", "title or a comment"]),
    "a quote left open": (rows(*PLAIN) + '"1,2\n', [], ["row 41", "not closed"]),
    "a total below": (rows(*PLAIN) + "Total,12\n", [], ["'Total' in row 41"]),
    "units below the names": (rows(*PLAIN).replace("x,y\n", "x,y\n[m],[s]\n"), [], ["'[s]' in row 1"]),
    "a column more": (
        "x,y,\n" + "\n".join(f"{number(i)},{amount(i)},1" for i in range(40)),
        [],
        ["column 3", "no name"],
    ),
    "decimal commas between commas": (
        rows(("x", number), ("y", lambda i: f'"{str(amount(i)).replace(".", ",")}"')),
        [],
        ["look like numbers", "a point"],
    ),
    "thousands": (rows(("x", lambda i: f'"{1000 * i * i + 12345:,}"'), ("y", amount)), [], ["such as '1,", "12345.6"]),
    "percent signs": (rows(("x", lambda i: f"{number(i)} %"), ("y", amount)), [], ["look like numbers", " %'"]),
    "currency": (rows(("x", number), ("y", lambda i: f"€ {abs(amount(i))}")), [], ["look like numbers", "'€ "]),
    "units": (rows(("x", number), ("y", lambda i: f"{abs(amount(i))} kg")), [], ["look like numbers", "units"]),
    "huge identifiers": (rows(("n", lambda i: 10**16 + i % 2), ("y", amount)), [], ["cannot be told apart"]),
    "damaged Parquet": (b"PAR1 and nothing", ["parquet"], ["Parquet"]),
    "Parquet called csv": (b"PAR1 and nothing", [], ["call it .parquet"]),
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
    "a mark of the byte order": ("\ufeff" + rows(*PLAIN), []),
    "semicolons and decimal commas": (
        rows(*PLAIN).replace(",", ";").replace(".", ","),
        ["separated by semicolons", "decimal comma"],
    ),
    "tabs": (rows(*PLAIN).replace(",", "\t"), ["separated by tabs"]),
    "lines of Windows": (rows(*PLAIN).replace("\n", "\r\n"), []),
    "lines of old Macs": (rows(*PLAIN).replace("\n", "\r"), []),
    "a separator at the end": (rows(*PLAIN).replace("\n", ",\n"), ["empty column behind it was left out"]),
    "blank lines above": ("\n\n" + rows(*PLAIN), []),
    "spaces in names": (rows((" height of x ", number), (" y ", amount)), []),
    "names in other scripts": (rows(("größe [m²]", number), ("年齢", number), ("y", amount)), []),
    "a line break in a field": (rows(("c", lambda i: '"one\ntwo"' if i % 2 else '"a, ""b"""'), *PLAIN), []),
    "many kinds": (rows(("c", lambda i: "ab"[i % 2]), *PLAIN), ["'c': category, 2 levels; 'x': number"]),
    "an empty column": (rows(("gone", lambda i: ""), *PLAIN), ["'gone' was left out: all values are missing"]),
    "a constant column": (rows(("c", lambda i: 5), *PLAIN), ["'c' was left out: it has one value only"]),
    "rows too short": (rows(*PLAIN) + "1.5\n", ["1 rows without a value of 'y' were left out"]),
    "true and false": (rows(("b", lambda i: i % 2 == 0), ("x", number), ("y", lambda i: i % 3 == 0)), ["true and"]),
    "few whole numbers": (rows(("x", number), ("y", lambda i: i % 3)), ["classification", "whole numbers 0 to 2"]),
    "few other numbers": (rows(("x", number), ("y", lambda i: 0.5 + i % 3)), ["regression: it has 3 different"]),
    "dates": (rows(("d", lambda i: f"2024-{i % 12 + 1:02}-{i % 28 + 1:02}"), *PLAIN), []),
    "dates with a time, day first": (
        rows(("d", lambda i: f"{i % 28 + 1:02}.0{i % 9 + 1}.2024 1{i % 9}:30"), *PLAIN),
        ["'d': date, read as day.month.year"],
    ),
    "dates of several time zones": (
        rows(("d", lambda i: f"2024-03-{i % 28 + 1:02}T08:00:00{'Z' if i % 2 else '+01:00'}"), *PLAIN),
        ["'d': date"],
    ),
    "spellings of a class": (
        rows(("x", number), ("y", lambda i: ["Yes", "yes", "no"][i % 3])),
        ["'Yes' and 'yes'"],
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
    "two spellings": (rows(("c", lambda i: ["Yes", "yes", "no"][i % 3]), *PLAIN), ["'Yes' and 'yes'"]),
    "percentages": (rows(("p", lambda i: f"{number(i)}%"), *PLAIN), ["'p' was left out: its fields look like"]),
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
