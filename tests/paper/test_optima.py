"""The deterministic optima against closed forms and against dense optimisation of the full objective."""

import pytest
import torch

from structvi_paper.optima import best_kl, random_gaussians

P = 5


@pytest.fixture(scope="module")
def covariances():
    return random_gaussians(6, P, torch.Generator().manual_seed(0))[1]


def dense_kl(sigma, precision):
    """KL[N(0, Σ)‖N(0, Λ⁻¹)]."""
    product = precision @ sigma
    trace = product.diagonal(dim1=-2, dim2=-1).sum(-1)
    return 0.5 * (trace - P - torch.linalg.slogdet(product).logabsdet)


def test_mean_field_is_the_diagonal_of_the_precision(covariances):
    precision = torch.linalg.inv(covariances)
    sigma = torch.diag_embed(1 / precision.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(best_kl(covariances, 0, "covariance"), dense_kl(sigma, precision))


@pytest.mark.parametrize("form", ["covariance", "precision"])
def test_more_rank_is_never_worse(covariances, form):
    values = torch.stack([best_kl(covariances, rank, form, starts=8, steps=200) for rank in range(P + 1)])
    assert (values[1:] <= values[:-1] + 1e-6).all()
    assert (values[-1] == 0).all()


@pytest.mark.parametrize("form", ["covariance", "precision"])
def test_a_target_of_the_family_is_reached(form):
    # diagonal plus rank one in the covariance or in the precision: the optimum is zero
    generator = torch.Generator().manual_seed(2)
    factor = torch.randn(4, P, 1, generator=generator, dtype=torch.float64)
    scale = torch.randn(4, P, generator=generator, dtype=torch.float64).exp()
    matrix = torch.diag_embed(scale) + factor @ factor.mT
    covariance = matrix if form == "covariance" else torch.linalg.inv(matrix)
    assert best_kl(covariance, 1, form).max() < 1e-8


@pytest.mark.parametrize("form", ["covariance", "precision"])
@pytest.mark.parametrize("rank", [1, 2])
def test_gradient_descent_on_all_parameters_finds_nothing_better(covariances, form, rank):
    precision = torch.linalg.inv(covariances)
    best = best_kl(covariances, rank, form)
    generator = torch.Generator().manual_seed(3)
    log_scale = torch.zeros(6, 6, P, dtype=torch.float64).requires_grad_()
    factor = torch.randn(6, 6, P, rank, generator=generator, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([log_scale, factor], lr=0.1)
    for _ in range(700):
        optimizer.zero_grad()
        matrix = torch.diag_embed((2 * log_scale).exp()) + factor @ factor.mT
        value = dense_kl(matrix if form == "covariance" else torch.linalg.inv(matrix), precision)
        value.sum().backward()
        optimizer.step()
    found = value.detach().amin(0)
    assert (best <= found + 1e-6).all()
    # and it comes near: the two agree on the objective, not only on a bound
    assert (found - best).median() < 0.02
