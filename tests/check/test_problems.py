"""The problems: their log joint is the model's, their posterior is normalised, their reference draws are its draws."""

import pytest
import torch

from structvi import BayesianModel
from structvi.models.priors import NormalPrior
from structvi_check import PROBLEMS, problem

WITH_DATA = ["linear-regression", "rbf-regression", "logistic-regression", "network"]


@pytest.mark.parametrize("name", WITH_DATA)
def test_the_log_joint_is_that_of_the_network_with_its_data(name):
    p = problem(name)
    assert p.data is not None
    model = BayesianModel(p.data.build(), p.data.likelihood, NormalPrior(p.data.scale), len(p.data.x))
    theta = torch.randn(5, p.P, dtype=torch.float64)
    torch.testing.assert_close(p.log_joint(theta), model.log_joint(theta, (p.data.x, p.data.t)))


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "network"])
def test_the_reference_draws_are_draws_of_the_posterior(name):
    """E_p ∇ log p = 0 and −E_p θ·∇ log p = P, by parts; at five standard errors over independent draws."""
    p = problem(name)
    theta = p.reference.clone().requires_grad_()
    (score,) = torch.autograd.grad(p.log_joint(theta).sum(), theta)
    error = score.std(0) / len(score) ** 0.5
    assert (score.mean(0).abs() < 5 * error).all()
    centred = p.reference - p.reference.mean(0)
    products = -(centred * score)
    assert ((products.mean(0) - 1).abs() < 5 * products.std(0) / len(products) ** 0.5).all()


def test_functions_of_the_network_at_its_reference_draws_fit_the_data():
    """Stein's identity as above, but only in sum: weights of different chains are not independent of their signs."""
    p = problem("network")
    theta = p.reference.clone().requires_grad_()
    (score,) = torch.autograd.grad(p.log_joint(theta).sum(), theta)
    products = -(p.reference * score).sum(-1)
    assert abs(products.mean() - p.P) < 5 * products.std() / len(products) ** 0.5


@pytest.mark.parametrize("name", ["correlated", "bimodal"])
def test_the_posterior_is_normalised(name):
    p = problem(name)
    low, high = p.reference.min(0).values - 2, p.reference.max(0).values + 2
    axes = [torch.linspace(low[i], high[i], 401, dtype=torch.float64) for i in range(2)]
    points = torch.cartesian_prod(*axes)
    total = p.log_posterior(points).exp().sum() * (axes[0][1] - axes[0][0]) * (axes[1][1] - axes[1][0])
    assert abs(total - 1) < 1e-3


def test_the_evidence_of_the_logistic_regression():
    """By importance sampling from the normal with the draws' moments, widened; the file's is accurate to 10⁻³."""
    p = problem("logistic-regression")
    root = 1.3 * torch.linalg.cholesky(torch.cov(p.reference.mT))
    q = torch.distributions.MultivariateNormal(p.reference.mean(0), scale_tril=root)
    theta = q.sample((100_000,))
    weight = (p.log_posterior(theta) - q.log_prob(theta)).exp()
    assert abs(weight.mean() - 1) < 5 * weight.std() / len(weight) ** 0.5
    assert weight.std() / len(weight) ** 0.5 < 0.02
