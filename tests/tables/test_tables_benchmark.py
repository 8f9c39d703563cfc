"""`python -m benchmarks.tables` runs, and prints what it found."""

import json

import pytest
import torch

pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from benchmarks import tables
from structvi.tables.target import split


def test_a_table_is_fitted_and_its_line_printed(few_steps, capsys, tmp_path):
    (row,) = tables.main(["--tables", "iris", "--missing", "--out", str(tmp_path / "a.json")])
    out = capsys.readouterr().out
    assert "a column missing: complete" in out
    assert set(row["missing"]) == {"complete", "mean", "alone", "mixture"}
    assert row["missing"]["complete"][0] == pytest.approx(row["ours"])
    assert row["missing"]["mean"] != row["missing"]["mixture"]
    assert "iris" in out
    assert "worse at 95 %" in out
    assert row["gain"] == pytest.approx(row["ours"] - row["theirs"])
    assert json.loads((tmp_path / "a.json").read_text())[0]["rows"] == 150


def test_the_uci_tables_need_a_folder():
    with pytest.raises(SystemExit, match="--data"):
        tables.load("boston", None)


def test_an_inner_run_has_no_row_that_is_tested_elsewhere(tmp_path):
    path = tmp_path / "a.csv"
    rows = [f"{i},{0.1 * i},{'abc'[i % 3]}" for i in range(150)]
    path.write_text("\n".join(["x,z,target", *rows]))
    labels = torch.tensor([i % 3 for i in range(150)])
    kept = tables.without_test_rows(path, 3)
    tested = split(labels, 150, 3, 10_000).test
    assert len(kept) == 120
    assert not set(kept.tolist()) & set(tested.tolist())
    assert path.read_text().split()[1:] == [rows[i] for i in kept]
