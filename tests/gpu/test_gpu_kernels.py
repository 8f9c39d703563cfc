"""The kernels against the plain path in float64, at sizes that divide by nothing."""

import pytest
import torch

import structvi as vi
from structvi.couplings import Noise
from structvi.families.low_rank import factors
from structvi.families.numerics import _kernels
from structvi.objective import log_q_at

pytestmark = pytest.mark.gpu

SIZES = (101, 100_003)
#: rank and draws; Triton compiles three or four kernels for a pair, about two seconds each: not all pairs
PAIRS = ((1, 1), (1, 7), (3, 2), (3, 40), (4, 2), (16, 1), (16, 7), (17, 2), (64, 1), (64, 7), (128, 2))
FORMS = (vi.LowRankNormal, vi.LowRankPrecision)
#: float32 against float64 over sums of P numbers, relative to the largest of a tensor
TOLERANCE = 1e-4


class Given:
    """A coupling that gives the same noise every time."""

    def __init__(self, S, P, K):
        generator = torch.Generator().manual_seed(5)
        self.noise = [torch.randn(S, n, generator=generator, dtype=torch.float64) for n in (P, K)]

    def __call__(self, groups, P, K, generator, dtype, device):
        return Noise(*(x.to(device, dtype) for x in self.noise))


def family(recipe, P, dtype, device):
    """A factor about as large as the scales, and units that differ from them."""
    generator = torch.Generator().manual_seed(3)
    space = vi.Parameters({"z": torch.randn(P, generator=generator, dtype=torch.float64)})
    q = recipe.bind(space, generator)
    with torch.no_grad():
        q.log_scale += 0.5 * torch.randn(P, generator=generator, dtype=torch.float64)
        for factor in factors(q):
            factor.copy_(torch.randn(factor.shape, generator=generator, dtype=torch.float64))
    return q.to(device, dtype)


def results(recipe, P, S, K, dtype, device):
    """Draws, log q and gradients: in float64 by `draw`, `log_prob` and autodiff, in float32 by the kernels."""
    q = family(recipe, P, dtype, device)
    density = q()
    if dtype == torch.float64:
        theta = density.draw(1, Given(S, P, K)).theta
        log_q = log_q_at(density, theta, path=True)
    else:
        draws, log_q = density.draw_scored(1, Given(S, P, K))
        theta = draws.theta
        assert K == 0 or _kernels(q.factor) is not None
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (theta, log_q)]
    torch.autograd.backward([theta, log_q], [x.to(device, dtype) for x in cotangents])
    return [theta.detach(), log_q.detach(), *(p.grad for p in q.parameters())]


def check(recipe, P, S, K, device):
    got, expected = (results(recipe, P, S, K, dtype, device) for dtype in (torch.float32, torch.float64))
    for one, other in zip(got, expected, strict=True):
        error = (one.double() - other).abs().max().item()
        allowed = TOLERANCE * other.abs().max().item()
        assert error <= allowed, f"off by {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize(("K", "S", "P"), [(K, S, P) for K, S in PAIRS for P in SIZES if K <= P])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_draws_and_gradients_are_those_of_the_plain_path(form, K, S, P, device):
    check(form(K), P, S, K, device)


@pytest.mark.parametrize("P", SIZES)
@pytest.mark.parametrize("S", [1, 7])
def test_without_a_factor_too(S, P, device):
    check(vi.MeanField(), P, S, 0, device)
