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


def target(value):
    return rows(("x", number), ("y", value))


def column(value):
    return rows(("x", value), ("y", amount))


#: name → (content, arguments, words that the answer must have)
BAD = {
    "empty": ("", [], ["is empty", "column names"]),
    "one column": (rows(("y", amount)), [], ["no column is left", "the target is the only one"]),
    "three rows": (rows(*PLAIN, n=3), [], ["3 rows", "30", "collect more"]),
    "latin-1": (rows(("größe", number), ("y", amount)).encode("latin-1"), [], ["0xf6", "line 1", "cp1252"]),
    "unknown encoding": (rows(*PLAIN), ["--encoding", "utf-9"], ["no encoding 'utf-9'"]),
    "a workbook": (b"PK\x03\x04rest", [], ["Excel", "CSV"]),
    "zero bytes": (b"x,y\n\x00\x01,2\n", [], ["is no text", "utf-16"]),
    "duplicate columns": (rows(("x", number), *PLAIN), [], ["more than one column", "'x'", "rename"]),
    "no line of names": (rows(("1.5", number), ("2.5", amount)), ["--target", "2.5"], ["looks like data"]),
    "a row too long": (rows(*PLAIN) + "1,2,3\n", [], ["line 42", "2 fields"]),
    "target not there": (rows(*PLAIN), ["--target", "Y"], ["no column 'Y'", "'x', 'y'"]),
    "target missing": (target(lambda i: ""), [], ["0 rows with a value of 'y'"]),
    "constant target": (target(lambda i: 7), [], ["one value only", "'7'"]),
    "rare class": (target(lambda i: "b" if i == 3 else "ac"[i % 2]), [], ["'b' (1 rows)", "merge"]),
    "percentages as target": (target(lambda i: f"{i % 13}.5 %"), [], ["fewer than 5 rows", "12345.6"]),
    "a line of totals": (rows(*PLAIN) + "Total,812.4\n", [], ["'x' has 1 fields", "'Total' in row 41"]),
    "text in numbers": (column(lambda i: "no" if i == 7 else number(i)), [], ["'no' in row 8", '--category "x"']),
    "infinite values": (column(lambda i: "inf" if i == 4 else number(i)), [], ["'inf' in row 5"]),
    "huge numbers": (column(lambda i: "1e200" if i == 4 else number(i)), [], ["'1e+200' in row 5"]),
    "all columns empty": (column(lambda i: ""), [], ["no column is left", "all values are missing"]),
    "ids alone": (rows(("id", lambda i: 1000 - 7 * i), ("y", amount)), [], ["no column is left", "identifier"]),
    "unknown task": (rows(*PLAIN), ["--task", "ranking"], ["--task", "regression", "'ranking'"]),
    "unknown noise": (rows(*PLAIN), ["--noise", "Cauchy"], ["noise must be", "'Cauchy'"]),
    "level of ninety": (rows(*PLAIN), ["--level", "90"], ["inside (0, 1)"]),
    "spaces between columns": (rows(*PLAIN).replace(",", "  "), [], ["no column 'y'", "'x  y'"]),
    "a comment above": ("# of 2024\n" + rows(*PLAIN), [], ["'# of 2024'", "a title above"]),
    "a quote left open": (rows(*PLAIN) + '"1,2\n', [], ["row 41", "not closed"]),
    "thousands": (column(lambda i: f'"{1000 * i * i + 12345:,}"'), [], ["such as '12,345'", "12345.6"]),
    "damaged Parquet": (b"PAR1 and nothing", ["parquet"], ["Parquet"]),
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
    options = [one for one in ("--target", "y", *arguments) if one != "parquet"]
    code, _, err = run(monkeypatch, capsys, "fit", path, *options, "--out", tmp_path / "out")
    assert code == 2
    assert err.startswith("structvi: ")
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err, err
    assert not list((tmp_path / "out").glob("*"))


class Fitted(Exception):
    """A file was read, and would be fitted now."""


def often(code, value):
    return lambda i: code if i % 9 == 0 else value(i)


#: name → (content, what is said of it), of files that can be fitted as they are
ODD = {
    "decimal commas": (rows(*PLAIN).replace(",", ";").replace(".", ","), ["by semicolons", "decimal comma"]),
    "tabs": (rows(*PLAIN).replace(",", "\t"), ["separated by tabs"]),
    "lines of Windows": ("\n\n" + rows(*PLAIN).replace("\n", "\r\n"), []),
    "a separator at the end": (rows(*PLAIN).replace("\n", ",\n"), ["without a name was left out"]),
    "a line break in a field": (rows(("c", lambda i: '"one\ntwo"' if i % 2 else '"a, ""b"""'), *PLAIN), []),
    "many kinds": (rows(("c", lambda i: "ab"[i % 2]), *PLAIN), ["'c': category, 2 levels; 'x': number"]),
    "rows too short": (rows(*PLAIN) + "1.5\n", ["1 rows without a value of 'y' were left out"]),
    "a code in the target": (target(often(-999, amount)), ["'y' is -999 in 5"]),
    "a code of missing values": (column(often(-999, number)), ["'x' is -999 in 5"]),
    "words of missing values": (column(lambda i: ["NA", "?", "null", "-"][i % 4] if i % 5 == 0 else number(i)), []),
    "copies of rows": (rows(*PLAIN) + rows(*PLAIN, n=20).split("\n", 1)[1], ["20 of 60 rows are copies"]),
    "the target again": (rows(*PLAIN, ("again", lambda i: 3 - 2 * amount(i))), ["'again' tells 'y' exactly"]),
    "percentages": (rows(("p", lambda i: f"{number(i)}%"), *PLAIN), ["'p' was left out: nearly every row"]),
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


def test_a_column_of_lists_is_left_out(monkeypatch):
    """As a Parquet file may have one."""

    def fitted(*_):
        raise Fitted

    monkeypatch.setattr(fitting, "chosen", fitted)
    table = pandas.DataFrame({"x": [number(i) for i in range(40)], "z": [[i, i] for i in range(40)]})
    table["y"] = [amount(i) for i in range(40)]
    said = []
    with pytest.raises(Fitted):
        fitting.fit_table(pandas.concat([table, table.head(20)]), "y", say=said.append)
    assert "'z' was left out: nearly every row" in " ".join(said)
    assert "20 of 60 rows are copies" in " ".join(said)


def test_pandas_is_asked_for(no_fit, monkeypatch, capsys, tmp_path):
    (tmp_path / "a.csv").write_text(rows(*PLAIN))
    monkeypatch.setitem(sys.modules, "pandas", None)
    code, _, err = run(monkeypatch, capsys, "fit", tmp_path / "a.csv", "--target", "y", "--out", tmp_path / "out")
    assert code == 2
    assert 'pip install "structvi[table]"' in err
