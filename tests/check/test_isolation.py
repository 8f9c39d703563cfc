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
from structvi_check import Ours, problem, run

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
            if one.data is not None:
                one.data.x.zero_()
                one.data.grid.zero_()
        problem.function = structvi_check.Problem.log_posterior = lambda theta: theta.sum(-1)


class Raising(Prior):
    name = "raising"

    def fit(self, problem, seed):
        raise RuntimeError("it\ndoes not work")


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

    def log_prob(self, theta):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_method_cannot_overwrite_what_it_is_compared_with():
    names = ["correlated", "linear-regression"]
    report = run([Prior(), Overwriting()], names)
    for name in names:
        assert report["overwriting", name].measures == report["prior", name].measures
        assert structvi_check.problem(name).truth.any()


def test_a_method_does_not_get_the_answer():
    question = problem("linear-regression").question()
    assert question.reference.shape == (0, 6)
    assert question.truth.isnan().all()
    assert (len(question.modes), question.log_evidence) == (0, None)

    class Looking(Prior):
        def fit(self, problem, seed):
            raise RuntimeError(f"{len(problem.reference)} draws")

    assert "0 draws" in run(Looking(), "correlated").rows[0].verdict


def test_methods_that_fail_are_rows_and_the_others_go_on(tmp_path):
    methods = [Raising(), Hanging(), Dying(), Prior()]
    report = run(methods, ["bimodal", "correlated"], timeout=LIMIT)
    died = "no result: its process died before it was done, as it does when there is not enough memory"
    says = {
        "raising": "no result: RuntimeError: it does not work",
        "hanging": "no result: not finished after 2 s: it was ended",
        "dying": died,
    }
    for name in report.problems:
        for method, words in says.items():
            row = report[method, name]
            assert row.verdict == words
            assert (row.bayesian, row.grade, row.failed, row.measures) == (None, "failed", True, None)
        assert report["prior", name].measures is not None
    assert "in fit" in report["raising", "correlated"].details
    assert "raising: failed on 2" in report.summary()
    assert subprocess.run(["pgrep", "-f", "sleep 86399.25"], capture_output=True, text=True).stdout == ""
    report.save(tmp_path)
    assert "no result: RuntimeError: it does not work" in (tmp_path / "check.html").read_text()
    assert '"grade": "failed"' in (tmp_path / "check.json").read_text()


INTERRUPTED = """
import os, pathlib, sys, time
import structvi_check
class Slow:
    name = "slow"
    def fit(self, problem, seed):
        pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
        time.sleep(1000)
    def draw(self, n, generator): ...
structvi_check.run(Slow(), "correlated")
"""


@pytest.mark.slow
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


@pytest.mark.slow
def test_where_there_is_no_fork(monkeypatch):
    """What can be pickled goes to a new process, with the same result."""
    forked = run(vi.FullNormal(), ["linear-regression"])
    monkeypatch.setattr(sys, "platform", "darwin")
    spawned = run([vi.FullNormal(), Overwriting()], ["linear-regression"])
    assert spawned.rows[0].measures == forked.rows[0].measures
    assert spawned.rows[1].measures is not None
    assert spawned.problems["linear-regression"].data.x.any()
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        run(Ours(lambda p: vi.FullNormal(), "lambda"), ["linear-regression"])
