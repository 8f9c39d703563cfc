"""Results, files and report of a whole run, from few steps."""

import csv
import json
import re

import pytest
import torch

from structvi_paper.pages import number
from structvi_paper.reproduce import compute, record, reproduce

PICTURES = ("figure1", "figure2", "figure3", "couplings")
RANKS = [("sN-VI", 1), ("sN-VI", 2), ("sN-VI", 4), ("sP-VI", 1), ("sP-VI", 2), ("sP-VI", 4)]


def test_rows_are_the_papers_methods_and_only_point_masses_are_infinite(report):
    results = json.loads((report / "results.json").read_text())
    first = {(row["method"], row["rank"]): row for row in results["table1"]["rows"]}
    second = {(row["method"], row["rank"]): row for row in results["table2"]["rows"]}
    points, gaussians = {("MAP", None), ("MC dropout", None)}, {("MF-VI", 0), ("full", None), *RANKS}
    assert set(first) == points | gaussians | {("sN-VI", 8), ("sP-VI", 8)}
    assert set(second) == points | gaussians | {("sN-VI", 10), ("sP-VI", 10), ("sGMM-VI", 2)}
    for key, row in (*first.items(), *second.items()):
        assert (row["kl_p_q"] == "inf") == (key in points)
    assert all((row["log_q_true"] == "-inf") == (key in points) for key, row in second.items())
    paper = {key: row["paper_kl_p_q"] for key, row in first.items()}
    assert (paper["MAP", None], paper["MC dropout", None], paper["MF-VI", 0]) == ("inf", None, 175.8051)
    assert [paper["sN-VI", rank] for rank in (1, 2, 4, 8)] == [37.9890, 25.9107, 0.8774, 0.0979]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_results_in_one_process_and_in_two(tiny, settings):
    again = record(compute(["couplings"], settings, workers=2), settings)
    assert again["couplings"] == tiny[1]["couplings"]


def test_all_files_are_written_and_nothing_else(report):
    pictures = {f"{name}.png" for name in PICTURES}
    tables = {"table1.csv", "table2.csv", "table2_unknown_noise.csv", "couplings.csv", "figure1.csv"}
    assert {path.name for path in report.iterdir()} == pictures | tables | {"report.html", "results.json"}
    results = json.loads((report / "results.json").read_text())
    with open(report / "table1.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["kl_q_p"] for row in rows] == [str(row["kl_q_p"]) for row in results["table1"]["rows"]]


def test_the_page_needs_no_network(report):
    html = (report / "report.html").read_text()
    sources = re.findall(r"""(?:src|href)\s*=\s*['"]([^'"]*)""", html)
    assert len(sources) == 1 + len(PICTURES)
    assert all(source.startswith("data:") for source in sources)
    assert not re.search(r"<script|url\(|@import", html)
    assert html.count("<tr>") > 60


def test_one_part_alone(tmp_path, settings):
    before = torch.get_num_threads()
    files = reproduce(["figure1"], settings, tmp_path / "new" / "folder", workers=1)
    assert torch.get_num_threads() == before
    assert {path.name for path in files} == {"figure1.png", "figure1.csv", "report.html", "results.json"}
    results = json.loads((tmp_path / "new" / "folder" / "results.json").read_text())
    assert set(results) == {"version", "seed", "settings", "figure1"}


@pytest.mark.parametrize("where", ["structvi_paper.table1.optimum", "structvi_paper.reproduce.render"])
def test_an_interrupt_leaves_the_folder_as_it_was(where, settings, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    (tmp_path / "results.json").write_text("before")
    monkeypatch.setattr(where, interrupted)
    part = "table1" if "table1" in where else "figure1"
    with pytest.raises(KeyboardInterrupt):
        reproduce([part], settings, tmp_path, workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert (tmp_path / "results.json").read_text() == "before"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        ("inf", "+∞"),
        (float("-inf"), "−∞"),
        (3, "3"),
        (0.0, "0"),
        (1e-30, "0"),
        (2.4e-7, "2.4e−07"),
        (-1.25, "−1.25"),
        (175.8051, "175.8"),
    ],
)
def test_numbers_for_readers(value, text):
    assert number(value) == text
