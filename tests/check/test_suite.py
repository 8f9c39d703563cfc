"""Running the suite: a method of the user's own, the command line, the files, and what is said of wrong input."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import structvi as vi
from structvi import cli
from structvi_check import Adapter, NotApplicable, Problem, run


class Prior:
    """A method of the user's own: it can fit and draw, and no more."""

    name = "prior"

    def fit(self, problem, seed):
        self.P = problem.P

    def draw(self, n, generator):
        return torch.randn(n, self.P, generator=generator, dtype=torch.float64)


def command(monkeypatch, capsys, *arguments):
    """Exit code, stdout and stderr of `structvi check arguments`."""
    monkeypatch.setattr(sys, "argv", ["structvi", "check", *arguments])
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return stop.value.code, captured.out, " ".join(captured.err.replace("│", " ").split())


def test_a_method_of_the_users_own():
    assert isinstance(Prior(), Adapter)
    report = run(Prior(), ["correlated", "bimodal"])
    assert [row.problem for row in report.rows] == ["correlated", "bimodal"]
    assert report["prior", "correlated"].grade == "off"
    assert report["prior", "correlated"].measures.kl_p_q is None


def test_the_method_in_the_documentation_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    namespace: dict = {}
    exec(compile(block, "check.md", "exec"), namespace)
    report = namespace["report"]
    assert report["Laplace", "linear-regression"].bayesian
    assert report["Laplace", "bimodal"].findings[0] == "1 of 2 modes missing"
    assert report["Laplace", "logistic-regression"].findings[0].startswith("biased")
    assert (tmp_path / "report" / "check.html").exists()


NORMAL = torch.distributions.Normal(torch.zeros(3, dtype=torch.float64), 2.0)


def own(reference=(8192, 3), **options):
    """A problem of the user's own, its draws from a sampler."""
    space = vi.Parameters({"z": torch.zeros(3, dtype=torch.float64)})
    draws = 2 * torch.randn(*reference, dtype=torch.float64)
    truth = torch.ones(3, dtype=torch.float64)
    return Problem("own", "three normals", space, lambda x: NORMAL.log_prob(x).sum(-1), draws, truth, **options)


def test_a_problem_of_the_users_own():
    assert run(vi.MeanField(), own()).rows[0].bayesian
    (row,) = run(vi.MeanField(), own(log_evidence=None)).rows
    assert row.bayesian
    assert (row.measures.kl_p_q, row.measures.log_p_true) == (None, None)
    assert row.measures.log_q_true == pytest.approx(NORMAL.log_prob(torch.ones(3)).sum().item(), abs=1e-3)
    with pytest.raises(ValueError, match=r"own: the space has P = 3 numbers; .* got \(10, 2\) and \(3,\)"):
        own(reference=(10, 2))


def test_not_applicable_is_said():
    class Choosy(Prior):
        def fit(self, problem, seed):
            raise NotApplicable("it does not like the problem")

    report = run(Choosy(), ["correlated"])
    assert report.rows[0].verdict == "not applicable: it does not like the problem"
    assert report.rows[0].bayesian is None
    assert "prior: not applicable on 1" in report.summary()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_report_with_one_worker_and_with_two():
    first, second = (run(["mean-field", "full"], ["correlated"], seed=3, workers=n).record() for n in (1, 2))
    for one in (*first["rows"], *second["rows"]):
        one.pop("seconds")
    assert first == second


def test_the_command_writes_table_json_and_page(monkeypatch, capsys, tmp_path):
    methods, problems = "map,mc-dropout,full", "bimodal,linear-regression,rbf-regression"
    code, out, _ = command(
        monkeypatch, capsys, "--quick", "--methods", methods, "--problems", problems, "--out", str(tmp_path)
    )
    assert code == 0
    assert out.splitlines()[-1] == str(tmp_path / "check.html")
    assert "full normal: off on 1, Bayesian on 2" in out
    assert {path.name for path in tmp_path.iterdir()} == {"check.txt", "check.json", "check.html"}
    assert (tmp_path / "check.txt").read_text() in out
    results = json.loads((tmp_path / "check.json").read_text())
    assert results["thresholds"]["mean_error"] == 0.2
    rows = {(row["method"], row["problem"]): row for row in results["rows"]}
    assert len(rows) == 9
    assert rows["MAP", "bimodal"]["measures"]["kl_p_q"]["value"] == "inf"
    assert rows["MAP", "bimodal"]["verdict"].startswith("not a posterior: 2 of 2 weights are points")
    assert rows["full normal", "linear-regression"]["bayesian"] is True
    page = (tmp_path / "check.html").read_text()
    assert "Bayesian here: the posterior of the model" in page
    assert not re.search(r"<script|https?://", page)


class Returning(Prior):
    def __init__(self, draws):
        self.draws = draws

    def draw(self, n, generator):
        return self.draws


class Lying(Prior):
    def __init__(self, values):
        self.values = values

    def log_prob(self, theta):
        return self.values(theta)


@pytest.mark.parametrize(
    ("method", "problems", "error", "says"),
    [
        (object(), ["correlated"], TypeError, "a method is an object with"),
        ([Prior(), Prior()], ["correlated"], ValueError, "two methods have the same name"),
        (Prior(), ["bogus"], ValueError, "there is no problem 'bogus'"),
    ],
)
def test_wrong_input_is_refused(method, problems, error, says):
    with pytest.raises(error, match=says):
        run(method, problems)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (Returning(torch.zeros(7, 2)), r"ValueError: draw.* must give a tensor \[n, P\] = \[8192, 2\]"),
        (Returning(torch.full((8192, 2), torch.nan)), "not finite"),
        (Lying(lambda theta: theta), r"one number for each of 16385 rows, it gave \(16385, 2\)"),
        (Lying(lambda theta: theta[:, 0] * torch.nan), "log_prob gave NaN"),
    ],
)
def test_wrong_answers_are_said(method, says):
    (row,) = run(method, ["correlated"]).rows
    assert re.search(says, row.verdict)
    assert (row.bayesian, row.grade, row.measures) == (None, "failed", None)


@pytest.mark.parametrize(
    ("method", "grade"),
    [("deep-ensemble", "not a posterior"), ("dropout-network", "not a posterior"), ("swag", "off")],
)
def test_peers_of_torch_alone(monkeypatch, method, grade):
    monkeypatch.setattr("structvi_check.peers.STEPS", 50)
    report = run(method, ["linear-regression", "bimodal"])
    assert report.rows[0].grade == grade
    assert "needs a network with data" in report.rows[1].verdict
    assert report.rows[0].measures.coverage_min < 0.5
