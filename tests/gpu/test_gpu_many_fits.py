"""Many fits at once on a GPU: each is what it would be alone."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

pytestmark = pytest.mark.gpu


def data(n, kind):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 3, generator=generator, dtype=kind)
    return DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=16, shuffle=True)


def made(count, family, kind, device):
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).to(kind)
        likelihood = vi.likelihoods.Gaussian("point").to(kind)
        prior = vi.priors.NormalPrior({"*": 1.0}, learn=True, by_fan_in=True).to(kind)
        found.append(vi.variationalize(net, likelihood, copy.deepcopy(family), prior).to(device))
    return found


@pytest.mark.parametrize("family", [vi.MeanField(), vi.LowRankNormal(2), vi.LowRankPrecision(2)])
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-3)])
def test_at_once_is_one_by_one(family, kind, tolerance, device):
    """Sizes that differ, two stages, averages; float32 sums in another order, and Adam makes that 1e-4 of a step."""
    loaders = [data(n, kind) for n in (40, 33, 20)]
    a, b = (made(3, family, kind, device) for _ in range(2))
    vi.fit_many(a, loaders, steps=50, progress=False)
    for m, (one, own) in enumerate(zip(b, loaders, strict=True)):
        one.fit(own, steps=50, seed=m, progress=False)
        theirs = one.learned()
        for name, x in a[m].learned().items():
            assert float((x.detach() - theirs[name].detach()).abs().max()) < tolerance, name
