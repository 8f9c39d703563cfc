"""The log scale of a heteroscedastic head is bounded: nothing that a draw does makes a fit fail."""

from math import isfinite

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.models.likelihoods import Gaussian, StudentT


@pytest.mark.parametrize("make", [Gaussian, StudentT])
def test_no_output_of_a_network_has_an_infinite_density(make):
    """Without a bound e^±1000 is zero or infinite."""
    output = torch.tensor([[0.3, raw] for raw in (-1e3, -50.0, 50.0, 1e3)], requires_grad=True)
    value = make("head")(output, torch.full((4, 1), 30.0))
    assert bool(value.isfinite().all())
    (gradient,) = torch.autograd.grad(value.sum(), output)
    assert bool(gradient.isfinite().all())
    drawn = make("head").distribution(output.detach().unsqueeze(0))
    assert torch.allclose(drawn.log_prob(torch.full((1, 4, 1), 30.0)), value.detach().unsqueeze(0), rtol=1e-4)


@pytest.mark.slow
def test_tiny_noise_and_outliers_at_a_high_learning_rate():
    """What boston and energy have: half of the targets next to exact, and some far off; no step is left out."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 3, generator=generator)
    noise = torch.where(x[:, :1] > 0, 1e-5, 0.05) * torch.randn(120, 1, generator=generator)
    t = x[:, :1].sin() + x[:, 1:2] + noise
    t[::25] += torch.tensor([30.0, -40.0, 8.0, 20.0, -20.0]).unsqueeze(-1)
    loader = DataLoader(TensorDataset(x, (t - t.mean()) / t.std()), batch_size=60, shuffle=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Linear(30, 2))
    bayes = vi.variationalize(
        net, Gaussian("head", bound=7.0), vi.MeanField(), vi.priors.NormalPrior(1.0, by_fan_in=True)
    )
    result = bayes.fit(loader, steps=200, lr=0.05, progress=False)
    assert not result.skipped
    assert isfinite(result.elbo.value)
    assert all(bool(x.isfinite().all()) for x in bayes.learned().values())
