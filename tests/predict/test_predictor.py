"""A posterior kept as drawn networks: the predictions of `predict`, from threads, files and programs too."""

import pytest
import torch
from torch import nn

import structvi as vi

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


def test_its_memory_is_stated():
    """S·P drawn numbers, S weights, and the network: 50 weights of four bytes."""
    served = make("labels").predictor(DRAWS)
    assert served.nbytes == 4 * (DRAWS * 50 + DRAWS + 50)
