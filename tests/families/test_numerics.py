"""Draws with log q in closed form against `draw`, `log_prob` and automatic differentiation."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import structvi as vi
from structvi.families import numerics
from structvi.objective import log_q_at

P = 37
FORMS = [vi.LowRankNormal, vi.LowRankPrecision]


def family(recipe: vi.Family, dtype=torch.float64) -> vi.Family:
    """Bound, with a factor as large as the scales and units that differ from them."""
    generator = torch.Generator().manual_seed(3)
    space = vi.Parameters({"z": torch.randn(P, generator=generator, dtype=torch.float64).to(dtype)})
    q = recipe.bind(space, generator)
    with torch.no_grad():
        q.log_scale += 0.5 * torch.randn(P, generator=generator, dtype=torch.float64).to(dtype)
        if hasattr(q, "factor"):
            q.factor *= 10
    return q


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Relative to the largest number of the whole tensor."""
    size = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * size)


def uneven_function(theta: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    uneven = torch.arange(1.0, len(log_q) + 1, dtype=log_q.dtype)
    return ((theta**3).sum(-1).sin() * uneven).sum() + (log_q * uneven.sqrt()).sum()


def gradients(q: vi.Family, fused_path: bool, coupling, groups: int) -> tuple[torch.Tensor, ...]:
    """Draws, log q, and the gradient of an uneven function of both."""
    density, generator = q(), torch.Generator().manual_seed(5)
    if fused_path:
        draws, value = density.draw_scored(groups, coupling, generator)
        assert value is not None
    else:
        draws = density.draw(groups, coupling, generator)
        value = log_q_at(density, draws.theta, path=True)
    q.zero_grad()
    uneven_function(draws.theta, value).backward()
    return draws.theta.detach(), value.detach(), *[p.grad for p in q.parameters() if p.numel()]


RECIPES = [vi.MeanField(), vi.LowRankNormal(0), *(form(rank) for form in FORMS for rank in (1, 3, 8))]


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
@pytest.mark.parametrize(
    ("coupling", "groups"), [(vi.couplings.naive, 1), (vi.couplings.paired, 2), (vi.couplings.unscented, 1)]
)
def test_values_and_gradients_equal_the_plain_path(recipe, coupling, groups):
    q = family(recipe)
    for got, expected in zip(gradients(q, True, coupling, groups), gradients(q, False, coupling, groups), strict=True):
        close(got, expected, 1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_a_factor_that_does_not_learn_gets_no_gradient(form):
    q = family(form(3))
    expected = gradients(q, False, vi.couplings.paired, 2)[:-1]
    q.factor.requires_grad_(False)
    *got, none = gradients(q, True, vi.couplings.paired, 2)
    assert none is None
    for one, other in zip(got, expected, strict=True):
        close(one, other, 1e-9)


class Ranks:
    """A sum over threads that take part in it, as ranks do."""

    def __init__(self, size):
        self.barrier, self.parts = threading.Barrier(size), {}

    def __call__(self, x):
        self.parts[threading.get_ident()] = x
        self.barrier.wait()
        total = torch.stack(list(self.parts.values())).sum(0)
        self.barrier.wait()
        return total


@pytest.mark.parametrize("recipe", [vi.MeanField(), *(form(3) for form in FORMS)], ids=repr)
def test_slices_of_the_weights_with_summed_sums_are_the_whole(recipe):
    """Each of two threads has a slice of the weights and of the noise."""
    density = family(recipe)()
    noise = vi.couplings.paired(2, P, density.rank, torch.Generator().manual_seed(1), torch.float64)
    g, g_q = torch.randn(4, P, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    ranks = Ranks(2)

    def results(at, reduce):
        own = [x[at].detach().requires_grad_() for x in (density.mean, density.log_scale, density.factor)]
        drawn = numerics.draw(
            *own, density.unit[at], density.of_precision, P, reduce, noise.diagonal[:, at], noise.low_rank
        )
        torch.autograd.backward(drawn, (g[:, at], g_q))
        return [*(x.detach() for x in drawn), *(x.grad for x in own)]

    whole = results(slice(0, P), None)
    slices = [slice(0, 20), slice(20, P)]
    with ThreadPoolExecutor(2) as pool:
        halves = [future.result() for future in [pool.submit(results, at, ranks) for at in slices]]
    for at, (theta, log_q, *gradients) in zip(slices, halves, strict=True):
        torch.testing.assert_close(theta, whole[0][:, at])
        torch.testing.assert_close(log_q, whole[1])
        for one, other in zip(gradients, whole[2:], strict=True):
            torch.testing.assert_close(one, other[at])
