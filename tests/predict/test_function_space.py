"""J Σ Jᵀ against dense Jacobians and covariances, in float64."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import structvi as vi

NETS = {
    "dense": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), (4, 3)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 2)).eval(),
        (4, 1, 5, 5),
    ),
}
FAMILIES = [vi.MeanField(), vi.LowRankNormal(2), vi.LowRankPrecision(2), vi.FullNormal()]


def moved(bayes):
    with torch.no_grad():
        for parameter in bayes.family.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return bayes


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)
@pytest.mark.parametrize("linearise", [True, False])
def test_mean_and_covariance(name, family, linearise):
    make, shape = NETS[name]
    net, x = make().double(), torch.randn(shape, dtype=torch.float64)
    bayes = moved(vi.variationalize(net, vi.likelihoods.Gaussian(1.0), family, num_data=9, linearise=linearise))
    density, space = bayes.family(), bayes.space
    at = space.initial if linearise else density.mean.detach()
    J = jacrev(lambda theta: functional_call(net, space.unravel(theta), (x,)))(at)
    y = functional_call(net, space.unravel(at), (x,)).detach()
    dense = J.flatten(1, -2)  # [B, O, P]
    mean, covariance = bayes.output_moments(x)
    expected = y + (J @ (density.mean.detach() - at))
    assert mean.shape == y.shape
    assert torch.allclose(mean, expected, rtol=1e-8, atol=1e-8)
    assert torch.allclose(covariance, dense @ density.covariance().detach() @ dense.mT, rtol=1e-8, atol=1e-8)


def test_a_network_that_vmap_cannot_run_one_row_at_a_time():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x) if float(x.sum()) > 0 else 2 * self.layer(x)

    net, x = Branches().double(), torch.randn(5, 2, dtype=torch.float64)
    bayes = vi.variationalize(net, vi.likelihoods.Gaussian(1.0), vi.MeanField(), num_data=9)
    _, covariance = bayes.output_moments(x)
    s2 = bayes.space.unravel(bayes.family().variance.detach())
    factor = torch.where(x.sum(1) > 0, 1.0, 4.0)
    expected = factor * (x.square() @ s2["layer.weight"][0] + s2["layer.bias"][0])
    assert torch.allclose(covariance[:, 0, 0], expected, rtol=1e-10)
    assert torch.allclose(covariance[:, 0, 1], torch.zeros(5, dtype=torch.float64))


def test_a_few_rows_at_a_time(monkeypatch):
    net, x = nn.Linear(3, 2).double(), torch.randn(7, 3, dtype=torch.float64)
    bayes = vi.variationalize(net, vi.likelihoods.Gaussian(1.0), vi.LowRankNormal(1), num_data=9)
    whole = bayes.output_moments(x)
    monkeypatch.setattr("structvi.predict.function_space.JACOBIAN_NUMBERS", 40)
    parts = bayes.output_moments(x)
    assert torch.allclose(whole.mean, parts.mean)
    assert torch.allclose(whole.covariance, parts.covariance)


def test_the_spread_of_draws_is_that_covariance():
    """20,000 draws: a variance has a relative standard error of 1 %; five of them are allowed."""
    net, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(4, 3)
    bayes = vi.variationalize(net, vi.likelihoods.Gaussian(1.0), vi.LowRankPrecision(2), num_data=9, linearise=True)
    drawn = bayes.predict(x, draws=20_000, generator=torch.Generator().manual_seed(0))
    mean, covariance = bayes.output_moments(x)
    variance = covariance.diagonal(dim1=1, dim2=2)
    assert torch.allclose(drawn.function_variance, variance, rtol=0.05)
    assert bool(((drawn.function_mean - mean).abs() < 5 * (variance / 20_000).sqrt()).all())


@pytest.mark.parametrize(
    "family", [vi.MCDropout(0.5), vi.MAP(), vi.Mixture(vi.MeanField(), 2)], ids=["masks", "point", "several means"]
)
def test_families_without_a_normal_are_refused(family):
    bayes = vi.variationalize(nn.Linear(2, 1), vi.likelihoods.Gaussian(1.0), family, num_data=9)
    with pytest.raises(TypeError, match="closed form for Gaussian families"):
        bayes.output_moments(torch.zeros(2, 2))


def test_batches_of_a_users_own_form_are_refused():
    bayes = vi.variationalize(
        nn.Linear(2, 1), vi.likelihoods.Gaussian(1.0), vi.MeanField(), num_data=9, forward=lambda net, batch: batch
    )
    with pytest.raises(ValueError, match="forward="):
        bayes.output_moments(torch.zeros(2, 2))
