"""From a trained network to a posterior, and from a posterior to a richer one that is never worse."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

N, D, NOISE = 40, 3, 0.5


def loader(batch_size=10):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=g, dtype=torch.float64)
    x[:, 1] += x[:, 0]
    t = (x[:, :1] - 0.5 * x[:, 1:2]).tanh() + NOISE * torch.randn(N, 1, generator=g, dtype=torch.float64)
    return DataLoader(TensorDataset(x, t), batch_size=batch_size, shuffle=True)


def network():
    return nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def bayes(family, net=None, prior=None):
    likelihood = vi.likelihoods.Gaussian(noise=NOISE)
    return vi.variationalize(network() if net is None else net, likelihood, family, prior, num_data=N)


# ----------------------------------------------------------------------------------------------------------- grow


@pytest.mark.parametrize(
    "family",
    [vi.MeanField(), vi.LowRankPrecision(1)],
    ids=repr,
)
def test_grow_rank(family):
    posterior = bayes(family)
    posterior.fit(loader(), steps=150, lr=0.05, progress=False)
    old = posterior.family
    result = posterior.grow(loader(), rank=3, steps=150, lr=0.01, progress=False)
    before, grown = result.candidates["before"].value, result.candidates["grown"].value
    assert result.kept == ("grown" if grown >= before else "before")
    assert result.elbo.value == max(before, grown)
    # two hundred steps further: all of these gain
    assert result.kept == "grown"
    assert posterior.family.rank == 3
    expected = vi.LowRankPrecision if isinstance(old, vi.LowRankPrecision) else vi.LowRankNormal
    assert type(posterior.family) is expected
    g = torch.Generator().manual_seed(1)
    assert posterior.elbo(loader(), groups=8, generator=g).value == pytest.approx(result.elbo.value, abs=1e-8)


def test_what_grows_worse_is_not_kept():
    net = network()
    posterior = vi.variationalize(net, vi.likelihoods.Gaussian("point"), vi.MeanField(), num_data=N)
    posterior.fit(loader(), steps=200, lr=0.05, progress=False)
    before = {name: tensor.detach().clone() for name, tensor in posterior.named_parameters()}
    for options in ({"rank": 2}, {"components": 2}):
        # far too high a rate: it can only do harm
        wild = {"optimizer": lambda p: torch.optim.SGD(p, 0.5), "clip": None, "schedule": vi.Schedule(warmup=0)}
        result = posterior.grow(loader(), steps=3, progress=False, **wild, **options)
        assert result.kept == "before"
        assert result.elbo.value > result.candidates["grown"].value
        after = dict(posterior.named_parameters())
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_grow_components():
    posterior = bayes(vi.MeanField())
    posterior.fit(loader(), steps=150, lr=0.05, progress=False)
    result = posterior.grow(loader(), components=2, steps=300, lr=0.03, progress=False)
    assert result.elbo.value >= result.candidates["before"].value
    assert result.kept == "grown"
    assert isinstance(posterior.family, vi.Mixture)
    again = posterior.grow(loader(), components=3, steps=100, lr=0.02, progress=False)
    assert again.elbo.value >= again.candidates["before"].value
    assert len(posterior.family.part) == (3 if again.kept == "grown" else 2)


@pytest.mark.parametrize(
    ("family", "options", "error", "message"),
    [
        (vi.MeanField(), {}, ValueError, "one of rank= and components="),
        (vi.MeanField(), {"rank": 1, "components": 2}, ValueError, "one of rank= and components="),
        (vi.MeanField(), {"rank": 0}, ValueError, "the rank is 0 already"),
        (vi.LowRankNormal(2), {"rank": 2}, ValueError, "the rank is 2 already"),
        (vi.FullNormal(), {"rank": 2}, TypeError, "not for FullNormal"),
        (vi.MeanField(), {"components": 1}, ValueError, "1 parts already"),
        (vi.MAP(), {"components": 2}, ValueError, "point masses"),
    ],
    ids=str,
)
def test_bad_growth(family, options, error, message):
    with pytest.raises(error, match=message):
        bayes(family).grow(loader(), steps=1, **options)


# ------------------------------------------------------------------------------------------------------ ensembles
