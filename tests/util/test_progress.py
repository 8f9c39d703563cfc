"""One line that moves, in terminals and notebooks; plain lines in a log."""

import sys
import types

import pytest

import structvi as vi
from structvi.util.progress import is_live, progress_bar


class ZMQInteractiveShell:
    """Has the name of a kernel's shell."""


class TerminalInteractiveShell:
    """Has the name of a terminal's."""


def shell(monkeypatch, kind):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: kind and kind()))


@pytest.mark.parametrize(
    ("kind", "expected"), [(ZMQInteractiveShell, True), (TerminalInteractiveShell, False), (None, False)]
)
def test_a_notebook_is_known(monkeypatch, kind, expected):
    shell(monkeypatch, kind)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert is_live() is expected


def test_ipython_need_not_be_there(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert not is_live()


def test_a_bar_is_for_a_live_line_alone(monkeypatch, capsys):
    shell(monkeypatch, None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert list(progress_bar([1, 2], total=2, label="two", show=True)) == [1, 2]
    assert capsys.readouterr().err == ""
    shell(monkeypatch, ZMQInteractiveShell)
    assert list(progress_bar([1, 2], total=2, label="two", show=True)) == [1, 2]
    assert "two" in capsys.readouterr().err


def test_a_fit_in_a_notebook_is_one_line(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    data = [(torch.zeros(4, 2), torch.zeros(4, 1))]

    def fitted():
        bayes = vi.variationalize(torch.nn.Linear(2, 1), vi.likelihoods.Gaussian(1.0), vi.MeanField(), num_data=4)
        bayes.fit(data, steps=20)
        return capsys.readouterr().err

    assert len(fitted().strip().split("\n")) == 10
    shell(monkeypatch, ZMQInteractiveShell)
    text = fitted()
    assert "ELBO" in text
    assert "nan" not in text  # one group has no standard error
    shown = [line.split("\r")[-1].strip() for line in text.split("\n")]  # what a reader sees at the end
    assert len([line for line in shown if line]) == 1
