"""A posterior kept as drawn networks: the predictions of `predict`, from threads, files and programs too."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import structvi as vi
from tests.predict.test_threads import together

DRAWS = 6


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


def mlp(outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, outputs))


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


LABELS = vi.likelihoods.Categorical()
#: network, likelihood, family, further arguments
CASES = {
    "labels": (mlp, LABELS, vi.LowRankNormal(2), {}),
    "a point": (mlp, LABELS, vi.MAP(), {}),
    "a mixture": (mlp, LABELS, vi.Mixture(vi.MeanField(), 2), {}),
    "linearised": (mlp, LABELS, vi.MeanField(), {"linearise": True}),
    "dropout": (mlp, LABELS, vi.MeanField(), {"dropout": "on"}),
    "batch norm": (normed, LABELS, vi.MeanField(), {}),
}


def make(name):
    network, likelihood, family, options = CASES[name]
    return vi.variationalize(network(), likelihood, family, num_data=20, generator=seeded(1), **options)


def x(n=5):
    return torch.randn(n, 3, generator=seeded(n))


@pytest.mark.parametrize("name", CASES)
def test_it_predicts_as_the_posterior_does(name):
    """The same bits, as often as asked, whatever becomes of the posterior."""
    bayes = make(name)
    expected = bayes.predict(x(), DRAWS, generator=seeded())
    served = bayes.predictor(DRAWS, generator=seeded())
    with torch.no_grad():
        for tensor in [*bayes.parameters(), *bayes.net.parameters(), *bayes.net.buffers()]:
            tensor.zero_()
    before = torch.get_rng_state()
    for _ in range(2):
        got = served(x())
        assert torch.equal(got.outputs, expected.outputs)
        assert torch.equal(got.weights, expected.weights)
        assert torch.equal(got.mean, expected.mean)
    assert torch.equal(before, torch.get_rng_state())
    assert served.draws == expected.draws


def test_the_posterior_may_go():
    bayes = make("labels")
    family = weakref.ref(bayes.family)
    served = bayes.predictor(DRAWS)
    del bayes
    gc.collect()
    assert family() is None
    assert served(x()).draws == DRAWS


def test_its_memory_is_stated():
    """S·P drawn numbers, S weights, and the network: 50 weights of four bytes."""
    served = make("labels").predictor(DRAWS)
    assert served.nbytes == 4 * (DRAWS * 50 + DRAWS + 50)


@pytest.mark.parametrize("name", ["labels", "dropout", "batch norm"])
def test_threads_may_call_it_side_by_side(name):
    served = make(name).predictor(DRAWS, generator=seeded())
    inputs = [x(n) for n in range(2, 6)]
    expected = [served(one).mean for one in inputs]
    for index, got in enumerate(together(lambda i: served(inputs[i % 4]).mean, threads=6, calls=6)):
        assert torch.equal(got, expected[index % 4])


def test_it_stays_a_network_of_its_own():
    """What the user does to the network does not reach it, and it does nothing to the network."""
    bayes = make("batch norm")
    served, before = bayes.predictor(DRAWS), copy.deepcopy(bayes.net.state_dict())
    first = served(x()).mean
    bayes.net.train()
    bayes.net(x(9))  # moves the running statistics
    assert torch.equal(served(x()).mean, first)
    assert any(not torch.equal(a, b) for a, b in zip(before.values(), bayes.net.state_dict().values(), strict=True))
    assert all(not p.requires_grad for p in served.drawn.posterior.net.parameters())
