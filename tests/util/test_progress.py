"""One line that moves, in terminals and notebooks; plain lines in a log."""

import sys
import types

import pytest
import torch

import structvi as vi
from structvi.util.progress import Progress, is_live, progress_bar


class ZMQInteractiveShell:
    """Has the name of a kernel's shell."""


class TerminalInteractiveShell:
    """Has the name of a terminal's."""


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)


def shell(monkeypatch, kind):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: kind and kind()))


def test_a_notebook_is_known(monkeypatch):
    for kind, expected in ((ZMQInteractiveShell, True), (TerminalInteractiveShell, False), (None, False)):
        shell(monkeypatch, kind)
        assert is_live() is expected
    monkeypatch.delitem(sys.modules, "IPython")
    assert not is_live()


def test_a_bar_is_for_a_live_line_alone(monkeypatch, capsys):
    shell(monkeypatch, None)
    assert list(progress_bar([1, 2], total=2, label="two", show=True)) == [1, 2]
    assert capsys.readouterr().err == ""
    shell(monkeypatch, ZMQInteractiveShell)
    assert list(progress_bar([1, 2], total=2, label="two", show=True)) == [1, 2]
    assert "two" in capsys.readouterr().err


def test_a_fit_is_ten_plain_lines_or_one_live_line(monkeypatch, capsys):
    def fitted(**options):
        net, likelihood = torch.nn.Linear(2, 1), vi.likelihoods.Gaussian(1.0)
        bayes = vi.variationalize(net, likelihood, vi.MeanField(), num_data=4)
        bayes.fit([(torch.zeros(4, 2), torch.zeros(4, 1))], steps=20, **options)
        return capsys.readouterr().err

    assert fitted(progress=False) == ""
    lines = fitted().splitlines()
    assert len(lines) == Progress.LINES
    assert lines[-1].startswith("step 20/20: ELBO -")
    assert "s left" in lines[0]
    shell(monkeypatch, ZMQInteractiveShell)
    text = fitted()
    assert "ELBO" in text
    assert "nan" not in text  # one group has no standard error
    shown = [line.split("\r")[-1].strip() for line in text.split("\n")]  # what a reader sees at the end
    assert len([line for line in shown if line]) == 1
