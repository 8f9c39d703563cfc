"""Methods that overwrite, raise, hang or die: their rows say so, and nothing happens to others."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import structvi as vi
import structvi_check
from structvi_check import isolation, problem, run

#: seconds of a method that hangs; the others need a tenth of it
LIMIT = 2.0


class Prior:
    """N(0, I), whatever the posterior."""

    name = "prior"

    def fit(self, problem, seed):
        self.P = problem.P

    def draw(self, n, generator):
        return torch.randn(n, self.P, generator=generator, dtype=torch.float64)


class Overwriting(Prior):
    """It makes the reference what its own draws are, and what else there is zero."""

    name = "overwriting"

    def fit(self, problem, seed):
        super().fit(problem, seed)
        for one in (problem, structvi_check.problem(problem.name)):
            one.reference.copy_(torch.randn(one.reference.shape, dtype=torch.float64))
            one.truth.zero_()
            for mode in one.modes:
                mode.mean.zero_()
            if one.data is not None:
                one.data.x.zero_()
                one.data.grid.zero_()
        problem.function = structvi_check.Problem.log_posterior = lambda theta: theta.sum(-1)


class Raising(Prior):
    name = "raising"

    def fit(self, problem, seed):
        raise RuntimeError("it\ndoes not work")


class Leaving(Prior):
    name = "leaving"

    def draw(self, n, generator):
        raise SystemExit(3)


class Hanging(Prior):
    """Not to be ended by asking, and with a process of its own."""

    name = "hanging"

    def fit(self, problem, seed):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if os.fork() == 0:
            os.execlp("sleep", "sleep", "86399.25")
        while True:
            time.sleep(1)


class Dying(Prior):
    name = "dying"

    def fit(self, problem, seed):
        os._exit(7)


class DyingLater(Prior):
    name = "dying later"

    def log_prob(self, theta):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_method_cannot_overwrite_what_it_is_compared_with():
    names = ["correlated", "linear-regression"]
    honest, other = run([Prior(), Overwriting()], names, progress=False), run(Prior(), names, progress=False)
    for name in names:
        before, after = honest["prior", name], honest["overwriting", name]
        assert not after.bayesian
        assert after.measures == before.measures == other["prior", name].measures
        assert structvi_check.problem(name).truth.any()


def test_a_method_does_not_get_the_answer():
    seen = problem("linear-regression").question()
    assert seen.reference.shape == (0, 6)
    assert seen.truth.isnan().all()
    assert (len(seen.modes), seen.log_evidence) == (0, None)
    theta = torch.zeros(2, 6, dtype=torch.float64)
    assert torch.equal(seen.log_joint(theta), problem("linear-regression").log_joint(theta))

    class Looking(Prior):
        def fit(self, problem, seed):
            raise RuntimeError(f"{len(problem.reference)} draws")

    assert "0 draws" in run(Looking(), "correlated", progress=False).rows[0].verdict


def test_methods_that_fail_are_rows_and_the_others_go_on():
    methods = [Raising(), Leaving(), Hanging(), Dying(), DyingLater(), Prior()]
    began = time.monotonic()
    report = run(methods, ["gaussian-2-1", "correlated"], timeout=LIMIT, progress=False)
    assert time.monotonic() - began < 2 * LIMIT + 20  # the hanging one takes its time twice
    says = {
        "raising": "no result: RuntimeError: it does not work",
        "leaving": "no result: SystemExit: 3",
        "hanging": "no result: not finished after 2 s: it was ended",
        "dying": "no result: its process ended with exit code 7 before it was done",
        "dying later": "no result: its process died: SIGKILL, as it is when there is not enough memory",
    }
    for name in report.problems:
        for method, words in says.items():
            row = report[method, name]
            assert row.verdict == words
            assert (row.bayesian, row.grade, row.failed, row.measures) == (None, "failed", True, None)
        assert report["prior", name].measures is not None
    assert "in fit" in report["raising", "correlated"].details
    assert "raising: Bayesian on 0 of 2 problems, no result on 2" in report.summary()
    assert "it does not work" in str(report)
    assert subprocess.run(["pgrep", "-f", "sleep 86399.25"], capture_output=True, text=True).stdout == ""


def test_a_report_of_failures_is_written(tmp_path):
    run([Raising(), Prior()], ["correlated"], progress=False).save(tmp_path)
    assert "no result: RuntimeError: it does not work" in (tmp_path / "check.html").read_text()
    assert '"grade": "failed"' in (tmp_path / "check.json").read_text()


def test_a_problem_that_raises_is_a_row():
    def function(theta):
        raise RuntimeError("no density")

    p = problem("correlated")
    own = structvi_check.Problem("own", "own", p.space, function, p.reference, p.truth)
    report = run(Prior(), [own, "correlated"], progress=False)
    assert report.rows[0].verdict == "no result: its draws could not be measured: RuntimeError: no density"
    assert report.rows[1].measures is not None


def test_a_parent_with_threads_is_forked():
    """Of several threads only the one that forks goes on in the child: torch there must not wait for the others."""
    code = """
import torch
torch.set_num_threads(4)
torch.randn(600, 600) @ torch.randn(600, 600)
torch.linalg.svd(torch.randn(300, 300))
torch.randn(10**6).exp().sum()
import structvi as vi
import structvi_check
family = vi.FullNormal()
report = structvi_check.run([family, structvi_check.Ours(lambda p: family, "lambda")], "gaussian-10-100", timeout=60)
print([row.bayesian for row in report.rows])
"""
    environment = os.environ | {"OMP_NUM_THREADS": "4"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout == "[True, True]\n", done.stderr


INTERRUPTED = """
import os, pathlib, sys, time
import torch
import structvi as vi
import structvi_check
class Slow:
    name = "slow"
    def fit(self, problem, seed):
        pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
        time.sleep(1000)
    def draw(self, n, generator): ...
structvi_check.run(Slow(), "correlated")
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_process_of_a_method_ends_with_its_parent(tmp_path, how):
    path = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(path)], stderr=subprocess.PIPE, text=True)
    _until(lambda: path.exists() and path.read_text())
    parent.send_signal(how)
    _, err = parent.communicate(timeout=30)
    assert ("KeyboardInterrupt" in err) == (how == signal.SIGINT)
    _until(lambda: not _is_alive(int(path.read_text())))


def _until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def _is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_where_there_is_no_fork(monkeypatch):
    """Names, and what can be pickled, go to a new process; of the rest it is said what to do."""
    forked = run("structured", ["linear-regression"], progress=False)
    monkeypatch.setattr(isolation, "start_method", lambda *_: "spawn")
    lambdas = structvi_check.Ours(lambda p: vi.FullNormal(), "lambda")
    spawned = run(["structured", Overwriting(), lambdas], ["linear-regression"], progress=False)
    assert spawned.rows[0].measures == forked.rows[0].measures
    assert spawned.rows[1].measures is not None
    assert spawned.problems["linear-regression"].data.x.any()
    assert spawned.rows[2].verdict.startswith("no result: cannot be sent to a process of its own (")
    assert "define its class in a module that can be imported" in spawned.rows[2].verdict


class Notebook(Prior):
    __module__ = "__main__"


@pytest.mark.parametrize(
    ("platform", "gpu", "method", "expected"),
    [
        ("linux", False, Notebook(), "fork"),
        ("linux", False, "full", "fork"),
        ("linux", True, "full", "spawn"),  # autograd does not survive a fork there
        ("linux", True, Prior(), "spawn"),
        ("linux", True, Notebook(), "fork"),  # a new process would not have its class
        ("linux", True, structvi_check.Ours(lambda p: vi.FullNormal(), "lambda"), "fork"),
        ("darwin", False, "full", "spawn"),
        ("win32", False, Notebook(), "spawn"),
    ],
)
def test_how_a_process_is_started(monkeypatch, platform, gpu, method, expected):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert isolation.start_method(method, problem("correlated")) == expected
