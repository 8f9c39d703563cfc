"""Sums over ranks; ranks are played by the calls themselves."""

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


def test_a_sum_of_parts_leaves_them_alone(second_of_two):
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    assert reduce_scatter(parts).tolist() == [6, 8]
    assert parts[1].tolist() == [3, 4]


def test_a_closed_connection_is_a_lost_rank(second_of_two, monkeypatch):
    def closed(*_):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(collectives.dist, "all_reduce", closed)
    with pytest.raises(LostRankError, match="rank 1 of 2 has lost another rank"):
        reduce_scatter([torch.zeros(2), torch.zeros(2)])
