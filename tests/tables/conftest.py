"""Fits that are quick: a few steps show that everything is connected, not how good it is."""

import pytest

from structvi_tables import choosing, fitting, training


@pytest.fixture
def few_steps(monkeypatch):
    monkeypatch.setattr(training, "STEPS", 30)
    monkeypatch.setattr(training, "LOOK", 10)
    monkeypatch.setattr(choosing, "WIDTH", 8)
    monkeypatch.setattr(fitting, "FOLDS", 3)
