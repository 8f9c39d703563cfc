"""Sums over ranks where a backend lacks one of the calls; ranks are played by the calls themselves."""

import pytest
import torch

from structvi.distributed import collectives
from structvi.distributed.collectives import LostRankError, reduce_scatter


@pytest.fixture
def second_of_two(monkeypatch):
    """This is rank 1, and rank 0 has the same parts."""
    monkeypatch.setattr(collectives.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(collectives.dist, "all_reduce", lambda x: x.mul_(2))


def refused(words):
    def call(*_):
        raise RuntimeError(words)

    return call


def test_a_backend_without_reduce_scatter_sums_everything(second_of_two, monkeypatch):
    """gloo of torch 2.6."""
    words = "ProcessGroupGloo does not support reduce_scatter"
    monkeypatch.setattr(collectives.dist, "reduce_scatter", refused(words))
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    assert reduce_scatter(parts).tolist() == [6, 8]
    assert parts[1].tolist() == [3, 4]  # what was given is left alone


def test_another_failure_is_a_lost_rank(second_of_two, monkeypatch):
    monkeypatch.setattr(collectives.dist, "reduce_scatter", refused("Connection closed by peer"))
    with pytest.raises(LostRankError, match="rank 1 of 2 has lost another rank"):
        reduce_scatter([torch.zeros(2), torch.zeros(2)])
