"""What the law suite cannot ask of every family: KL between shapes, closed-form optima, memory, large P."""

import copy
from itertools import product

import pytest
import torch

import structvi as vi
from structvi.testing import dense_moments

P = 6
SPACE = vi.Parameters(
    {"a.weight": torch.zeros(2, 2, dtype=torch.float64), "b.bias": torch.ones(2, dtype=torch.float64)}
)
SHAPES = {
    "mean field": vi.MeanField(),
    "structured": vi.LowRankNormal(2),
    "structured, rank P": vi.LowRankNormal(P),
    "precision": vi.LowRankPrecision(2),
    "full": vi.FullNormal(),
}


def generic(recipe, seed):
    generator = torch.Generator().manual_seed(seed)
    family = recipe.bind(SPACE, generator)
    with torch.no_grad():
        for parameter in family.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return family


def test_kl_between_any_two_shapes_equals_the_dense_one():
    for left, right in product(SHAPES.values(), repeat=2):
        q, p = generic(left, 0), generic(right, 1)
        dense = torch.distributions.kl_divergence(
            *(torch.distributions.MultivariateNormal(*dense_moments(density)) for density in (q(), p()))
        )
        assert vi.kl(q(), p()).item() == pytest.approx(dense.item(), rel=1e-9)


@pytest.mark.parametrize("name", SHAPES)
def test_kl_gradient_equals_that_of_the_dense_formula(name):
    q, p = generic(SHAPES[name], 0), generic(vi.FullNormal(), 1)
    covariance = q().covariance()
    truth = torch.distributions.kl_divergence(
        torch.distributions.MultivariateNormal(q().mean, covariance),
        torch.distributions.MultivariateNormal(p().mean, p().covariance()),
    )
    for family in (q, p):
        expected = torch.autograd.grad(truth, list(family.parameters()), retain_graph=True)
        actual = torch.autograd.grad(vi.kl(q(), p()), list(family.parameters()))
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("recipe", [vi.LowRankNormal(3), vi.LowRankPrecision(3)])
def test_a_value_computed_without_gradients_is_not_used_for_them(recipe):
    """The K×K factor is kept for one step: a first look under no_grad must not cut the graph of the second."""
    family = generic(recipe, 0)
    theta = torch.ones(2, P, dtype=torch.float64)
    fresh = torch.autograd.grad(family().log_prob(theta).sum(), family.factor)[0]
    density = family()
    with torch.no_grad():
        density.log_prob(theta)
        density.entropy()
    again = torch.autograd.grad(density.log_prob(theta).sum(), family.factor)[0]
    torch.testing.assert_close(fresh, again, rtol=1e-12, atol=0)


@pytest.mark.parametrize("recipe", [vi.LowRankNormal(4), vi.LowRankPrecision(4), vi.MeanField()])
def test_float32_sums_over_many_weights_keep_their_digits(recipe):
    """P = 50,001, blocks added in float64: what is left is the rounding of single terms, 6e-8 of their sum."""
    space = vi.Parameters({"z": torch.zeros(50_001)})
    single = recipe.bind(space, torch.Generator().manual_seed(0))
    double = copy.deepcopy(single).double()
    theta = single().draw(3, vi.couplings.naive, torch.Generator().manual_seed(1)).theta.detach()
    for value, truth in (
        (single().log_prob(theta), double().log_prob(theta.double())),
        (single().entropy(), double().entropy()),
    ):
        torch.testing.assert_close(value.double(), truth, rtol=0, atol=1e-7 * 3 * 50_001)


@pytest.mark.parametrize("recipe", [vi.LowRankNormal(32), vi.LowRankPrecision(32)])
@pytest.mark.parametrize("graph", [True, False])
def test_memory_is_linear_in_draws_and_rank(recipe, graph, peak_bytes):
    """P = 2·10⁵, K = 32, S = 8: draw, log_prob, score and entropy hold at most 1.5 (PK + 3SP) numbers at once."""
    count, K, S = 200_000, 32, 8
    family = recipe.bind(vi.Parameters({"z": torch.zeros(count)}), torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(graph), peak_bytes() as tracker:
        density = family()
        theta = density.draw(S, vi.couplings.naive, torch.Generator().manual_seed(0)).theta
        density.log_prob(theta)
        density.score(theta.detach())
        density.entropy()
    allowed = 1.5 * (count * K + 3 * S * count) * 4
    assert tracker.peak <= allowed, f"{tracker.peak / allowed:.2f} of what is allowed"
    assert tracker.peak >= 2 * S * count * 4  # the tracker saw at least the draws and their noise
