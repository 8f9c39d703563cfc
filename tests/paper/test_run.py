"""Results, files and report of a whole run, from few steps."""

import copy
import csv
import json
import re
from dataclasses import replace
from math import isfinite

import pytest
import torch

from structvi import __version__
from structvi_paper import run, table1
from structvi_paper.commentary import commentary, number
from structvi_paper.jobs import Job
from structvi_paper.jobs import run as run_jobs
from structvi_paper.run import compute, record, reproduce, write

COLUMNS = {
    "table1": [
        "method",
        "rank",
        "kl_p_q",
        "kl_q_p",
        "optimum_kl_q_p",
        "excess",
        "excess_max",
        "paper_kl_p_q",
        "seconds",
    ],
    "table2": ["method", "rank", "log_q_true", "kl_p_q", "paper_log_q_true", "paper_kl_p_q"],
    "couplings": ["coupling", "estimator", "phase", "var_mean", "var_scale", "var_factor"],
}
RANKS = [("sN-VI", 1), ("sN-VI", 2), ("sN-VI", 4), ("sP-VI", 1), ("sP-VI", 2), ("sP-VI", 4)]


def without_seconds(value):
    if isinstance(value, dict):
        return {key: without_seconds(one) for key, one in value.items() if key != "seconds"}
    return [without_seconds(one) for one in value] if isinstance(value, list) else value


def test_results_have_the_promised_keys(report, settings):
    results = json.loads((report / "results.json").read_text())
    assert results["version"] == __version__
    assert results["seed"] == settings.seed
    assert results["settings"] == settings.record()
    for name, columns in COLUMNS.items():
        for row in results[name]["rows"]:
            assert set(columns) <= set(row)
    assert all(row["seconds"] > 0 for row in results["table1"]["rows"])
    assert isfinite(results["table2"]["exact_log_p_true"])
    assert results["figure3"]["support"] == 1024
    assert results["figure3"]["nearest_distance"] > 0
    assert len(results["couplings"]["rows"]) == 4 * 3 * 2


def test_rows_are_the_papers_methods_and_only_point_masses_are_infinite(report):
    results = json.loads((report / "results.json").read_text())
    first = [(row["method"], row["rank"]) for row in results["table1"]["rows"]]
    second = [(row["method"], row["rank"]) for row in results["table2"]["rows"]]
    assert set(first) == {
        ("MAP", None),
        ("MC dropout", None),
        ("MF-VI", 0),
        ("full", None),
        ("sN-VI", 8),
        ("sP-VI", 8),
        *RANKS,
    }
    points = {("MAP", None), ("MC dropout", None)}
    others = {("MF-VI", 0), ("full", None), ("sN-VI", 10), ("sP-VI", 10), ("sGMM-VI", 2), *RANKS}
    assert set(second) == points | others
    for row in results["table1"]["rows"] + results["table2"]["rows"]:
        infinite = row["method"] in ("MAP", "MC dropout")
        assert (row["kl_p_q"] == "inf") == infinite
    for row in results["table2"]["rows"]:
        assert (row["log_q_true"] == "-inf") == ((row["method"], row["rank"]) in points)


def test_paper_columns_are_the_papers(report):
    results = json.loads((report / "results.json").read_text())
    paper = {(row["method"], row["rank"]): row["paper_kl_p_q"] for row in results["table1"]["rows"]}
    assert (paper["MAP", None], paper["MC dropout", None]) == ("inf", None)
    assert [paper["sN-VI", rank] for rank in (1, 2, 4, 8)] == [37.9890, 25.9107, 0.8774, 0.0979]
    assert paper["MF-VI", 0] == 175.8051


def test_the_same_seed_gives_the_same_results_in_one_process_and_in_two(tiny, settings):
    _, results = tiny
    parts = ["couplings"]
    again = record(compute(parts, settings, workers=2), settings)
    for part in parts:
        assert without_seconds(again[part]) == without_seconds(results[part])


def test_another_seed_gives_others(tiny, settings):
    other = replace(settings, seed=1)
    again = record(compute(["figure3"], other, workers=1), other)
    assert again["figure3"]["nearest_distance"] != tiny[1]["figure3"]["nearest_distance"]


def test_all_files_are_written_and_nothing_else(report):
    pictures = {f"{name}.{kind}" for name in run.PICTURES for kind in ("png", "svg")}
    tables = {"table1.csv", "table2.csv", "table2_unknown_noise.csv", "couplings.csv", "figure1.csv"}
    assert {path.name for path in report.iterdir()} == pictures | tables | {"report.html", "results.json"}


def test_tables_as_csv_agree_with_the_results(report):
    results = json.loads((report / "results.json").read_text())
    with open(report / "table1.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["kl_q_p"] for row in rows] == [str(row["kl_q_p"]) for row in results["table1"]["rows"]]


def test_the_page_needs_no_network(report):
    html = (report / "report.html").read_text()
    sources = re.findall(r"""(?:src|href)\s*=\s*['"]([^'"]*)""", html)
    assert len(sources) == 1 + len(run.PICTURES)
    assert all(source.startswith("data:") for source in sources)
    assert "<script" not in html
    assert "url(" not in html
    assert "@import" not in html


def test_one_part_alone(tmp_path, settings):
    files = reproduce(["figure1"], settings, tmp_path / "new" / "folder", workers=1)
    assert {path.name for path in files} == {"figure1.png", "figure1.svg", "figure1.csv", "report.html", "results.json"}
    results = json.loads((tmp_path / "new" / "folder" / "results.json").read_text())
    assert set(results) == {"version", "seed", "settings", "figure1"}


def test_an_interrupt_while_writing_leaves_the_folder_as_it_was(tiny, settings, tmp_path, monkeypatch):
    (tmp_path / "results.json").write_text("before")
    found = {"figure1": tiny[0]["figure1"]}

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("structvi_paper.report.page", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(found, record(found, settings), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert (tmp_path / "results.json").read_text() == "before"


def test_an_interrupt_while_computing_leaves_no_file(tmp_path, monkeypatch, settings):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(table1, "optimum", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reproduce(["table1"], settings, tmp_path, workers=1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_before_computing(tmp_path, monkeypatch, settings):
    monkeypatch.setattr(run, "compute", lambda *_: pytest.fail("computed before the folder was tried"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        reproduce(["table1"], settings, tmp_path / "file", workers=1)


def test_computing_leaves_the_number_of_threads(settings):
    before = torch.get_num_threads()
    compute(["figure1"], settings, workers=1)
    assert torch.get_num_threads() == before


def test_progress_says_what_runs_and_how_far_it_is(capsys):
    jobs = [Job("a", max, (1, 2), weight=2.0), Job("b", max, (3, 4), weight=2.0)]
    assert run_jobs(jobs, workers=1) == [2, 4]
    lines = capsys.readouterr().err.splitlines()
    assert re.match(r" 50 %  b +about \d+ s left", lines[0])
    assert re.match(r"100 %  done +about 0 s left", lines[1])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        ("inf", "+∞"),
        ("-inf", "−∞"),
        (3, "3"),
        (0.0, "0"),
        (1e-30, "0"),
        (2.4e-7, "2·10⁻⁷"),
        (-1.25, "−1.250"),
        (175.8051, "175.8"),
    ],
)
def test_numbers_for_readers(value, text):
    assert number(value) == text


def test_the_words_on_couplings_follow_the_numbers(tiny):
    results = copy.deepcopy(tiny[1])
    for row in results["couplings"]["rows"]:
        row |= {"var_scale": 1.0, "var_factor": 1.0}
        if row["coupling"] == "unscented":
            row |= {"var_scale": 2.0, "var_factor": 0.5}
        if row["estimator"] == "entropy":
            row |= {"var_scale": 0.1, "var_factor": 0.1}
    words = commentary(results)["couplings"]["after"]
    late = [line for line in words if line.startswith("Late")]
    assert "holds for the factor, not for the scale" in next(line for line in late if "unscented against naive" in line)
    assert "does not hold for the scale and factor" in next(line for line in late if "closed-form entropy" in line)
    assert "no difference" in next(line for line in late if "paired against naive" in line)
