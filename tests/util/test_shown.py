"""What takes long tells that it goes on in a terminal, and says nothing elsewhere."""

import sys

from structvi.util.shown import Stages, shown


class Terminal:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def test_a_bar_counts_the_parts_and_names_the_present_one(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Stages(2, "diagnose", show=True) as stages:
        stages.begin("ELBO")
        assert stages.bar is not None
        assert stages.bar.n == 0
        stages.begin("k̂")
        assert stages.bar.n == 1
    assert "diagnose" in terminal.text
    assert "k̂" in terminal.text


def test_nothing_is_said_elsewhere(capsys, monkeypatch):
    with Stages(2, "diagnose", show=True) as stages:
        stages.begin("ELBO")
    assert list(shown([1, 2], 2, "two", True)) == [1, 2]
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Stages(2, "diagnose", show=False) as stages:
        stages.begin("ELBO")
    assert capsys.readouterr().err == terminal.text == ""
