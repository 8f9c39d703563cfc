"""The exact posteriors against quadrature, autodiff and their own joint densities."""

from math import log

import pytest
import torch

from structvi_paper.regression import CENTRES, NOISE, RATE, RATIO, SHAPE, NormalInverseGamma, data_set, features
from structvi_paper.settings import Settings


@pytest.fixture(scope="module")
def data():
    return data_set(Settings(), 0)


def points(S=5, P=CENTRES):
    return torch.randn(S, P, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_log_joint_is_likelihood_times_prior(data):
    theta = points()
    output = theta @ features(data.x).mT
    likelihood = torch.distributions.Normal(output, NOISE).log_prob(data.t).sum(-1)
    prior = torch.distributions.Normal(0.0, 1.0).log_prob(theta).sum(-1)
    torch.testing.assert_close(data.log_joint(theta), likelihood + prior)


def test_posterior_is_the_joint_up_to_the_evidence(data):
    theta = points()
    difference = data.log_joint(theta) - data.posterior().log_prob(theta)
    torch.testing.assert_close(difference, difference[:1].expand(5), rtol=1e-10, atol=1e-6)


def test_posteriors_are_of_the_papers_kind():
    values = []
    for index in range(10):
        data = data_set(Settings(), index)
        values.append(data.posterior().log_prob(data.theta.unsqueeze(0)).item())
    assert sum(values) / 10 == pytest.approx(15, abs=2)  # each has a standard deviation of about √5


def test_dropout_optimum_is_a_stationary_point_of_the_sum_over_all_masks(data):
    keep = 0.7
    point = data.dropout_optimum(keep).requires_grad_()
    z = (torch.arange(2**CENTRES).unsqueeze(-1) >> torch.arange(CENTRES)) & 1
    z = z.double()
    probability = (keep ** z.sum(-1)) * ((1 - keep) ** (CENTRES - z.sum(-1)))
    objective = (probability * data.log_joint(point * z)).sum()
    (gradient,) = torch.autograd.grad(objective, point)
    assert gradient.abs().max() < 1e-8


def test_normal_inverse_gamma_is_the_joint_up_to_the_evidence(data):
    exact = NormalInverseGamma(data)
    theta, log_noise = points(), 0.1 * points(5, 1).squeeze(-1) + log(NOISE)
    sigma = log_noise.exp()
    likelihood = torch.distributions.Normal(theta @ features(data.x).mT, sigma.unsqueeze(-1)).log_prob(data.t).sum(-1)
    prior = torch.distributions.Normal(0.0, RATIO**0.5 * sigma.unsqueeze(-1)).log_prob(theta).sum(-1)
    noise = torch.distributions.InverseGamma(SHAPE, RATE).log_prob(sigma**2) + log(2) + 2 * log_noise
    joint = likelihood + prior + noise
    difference = joint - exact.log_prob(torch.cat([theta, log_noise.unsqueeze(-1)], dim=-1))
    torch.testing.assert_close(difference, difference[:1].expand(5), rtol=1e-9, atol=1e-6)


def test_normal_inverse_gamma_is_normalised(data):
    # integrating θ out of the density leaves that of log σ: at θ = m it is the density over the normal's peak
    exact = NormalInverseGamma(data)
    log_noise = torch.linspace(-2.2, -0.6, 2001, dtype=torch.float64)
    peak = -0.5 * CENTRES * log(2 * torch.pi) + 0.5 * torch.linalg.slogdet(exact.precision).logabsdet
    at_mean = torch.cat([exact.mean.expand(2001, -1), log_noise.unsqueeze(-1)], dim=-1)
    marginal = (exact.log_prob(at_mean) - (peak - CENTRES * log_noise)).exp()
    assert torch.trapezoid(marginal, log_noise).item() == pytest.approx(1.0, abs=1e-6)
