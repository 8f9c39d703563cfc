"""What can be said of a captured step without a GPU: torch's graphs are stood in for by what runs at once."""

import gc
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.train.cuda_graph import CapturedStep
from structvi.train.step import Step

BATCH = (torch.ones(4, 3), torch.ones(4, 1))


class Stream:
    def wait_stream(self, other):
        pass


class Graph:
    def register_generator_state(self, generator):
        pass


@pytest.fixture
def collecting(monkeypatch):
    """Whether the collector of garbage was on, for each capture."""
    seen = []

    @contextmanager
    def capture(graph):
        seen.append(gc.isenabled())
        yield

    stand_ins = {"Stream": Stream, "current_stream": Stream, "CUDAGraph": Graph, "graph": capture}
    for name, one in {**stand_ins, "stream": lambda stream: nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, one)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    return seen


def made():
    net, likelihood = nn.Linear(3, 1), vi.likelihoods.Gaussian(noise=1.0)
    bayes = vi.variationalize(net, likelihood, vi.MeanField(), num_data=8, generator=torch.Generator().manual_seed(0))
    adam = torch.optim.Adam(bayes.parameters(), lr=0.01, fused=True)
    return Step(bayes, adam, torch.Generator().manual_seed(1)), adam


def captured(step):
    return CapturedStep(step, BATCH, 1.0)


def test_no_garbage_is_collected_in_a_capture(collecting):
    """It may hold an older graph, whose end is not permitted there: the capture would fail."""
    captured(made()[0])
    assert collecting == [False]
    assert gc.isenabled()


def test_a_step_and_its_graphs_go_when_nobody_holds_them(collecting):
    step, _ = made()
    step._graphs["a key"] = captured(step)
    graph = weakref.ref(step._graphs["a key"])
    gc.disable()
    try:
        del step
        assert graph() is None
    finally:
        gc.enable()
