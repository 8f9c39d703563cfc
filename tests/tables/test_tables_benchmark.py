"""`python -m benchmarks.tables` runs, and prints what it found."""

import json

import pytest

pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from benchmarks import tables


def test_a_table_is_fitted_and_its_line_printed(few_steps, capsys, tmp_path):
    (row,) = tables.main(["--tables", "iris", "--missing", "--out", str(tmp_path / "a.json")])
    out = capsys.readouterr().out
    assert "a column missing: complete" in out
    assert set(row["missing"]) == {"complete", "mean", "mixture"}
    assert row["missing"]["complete"][0] == pytest.approx(row["ours"])
    assert row["missing"]["mean"] != row["missing"]["mixture"]
    assert "iris" in out
    assert "worse at 95 %" in out
    assert row["gain"] == pytest.approx(row["ours"] - row["theirs"])
    assert json.loads((tmp_path / "a.json").read_text())[0]["rows"] == 150


def test_the_uci_tables_need_a_folder():
    with pytest.raises(SystemExit, match="--data"):
        tables.load("boston", None)
