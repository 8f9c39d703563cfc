"""Fits that are quick: a few steps show that everything is connected, not how good it is."""

import pytest

from structvi_tables import choosing, fitting, members


@pytest.fixture
def few_steps(monkeypatch):
    monkeypatch.setattr(members, "STEPS", 30)
    monkeypatch.setattr(members, "MOST_STEPS", 30)
    monkeypatch.setattr(members, "LOOK", 10)
    monkeypatch.setattr(choosing, "HIDDEN", (8, 8))
    monkeypatch.setattr(fitting, "FOLDS", 3)
