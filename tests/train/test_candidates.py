"""Candidates around a trained network, and how they are placed."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.families.normal_parts import weighted_normals
from structvi.train import candidates


def loader(pair, size=40):
    return DataLoader(TensorDataset(*pair), batch_size=size)


def test_a_normal_that_is_kept_is_the_one_that_was_placed(monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x, t = torch.randn(60, 2).double(), torch.randn(60, 1).double()
    data, held_out, found = loader((x[:40], t[:40])), loader((x[40:], t[40:])), []
    for room in (2**27, 0):
        monkeypatch.setattr(candidates, "KEPT_NUMBERS", room)
        bayes = vi.variationalize(net, vi.likelihoods.Gaussian("point"))
        found.append(bayes.laplace(data, validation=held_out, progress=False).held_out)
    assert found[0] == found[1]


def test_a_width_that_is_not_known_is_an_equal_mixture_of_widths():
    """Each part is the Laplace approximation of its own width, and so is the prior's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, t = torch.randn(60, 2).double(), torch.randint(3, (60,))
    bayes = vi.variationalize(net, vi.likelihoods.Categorical())
    bayes.laplace(loader((x, t)), progress=False)
    parts = weighted_normals(bayes.family())
    assert [one.weight for one in parts] == pytest.approx([1 / candidates.PARTS] * candidates.PARTS)
    for k, (_, normal) in enumerate(parts):
        width = round(candidates.WIDTH / candidates.RATIO**k, 7)
        one = vi.variationalize(
            net, vi.likelihoods.Categorical(), vi.LowRankPrecision(25),  # the default rank is at most P/2
            candidates.relative_prior(bayes.model, bayes.space.initial, width), linearise=True,
        )  # fmt: skip
        one.laplace(loader((x, t)), progress=False)
        torch.testing.assert_close(normal.mean, one.family().mean)
        torch.testing.assert_close(normal.precision_diagonal(), one.family().precision_diagonal(), rtol=0.05, atol=0)
        prior = bayes.model.prior.priors[k]
        assert prior.scale == one.model.prior.scale
