"""The kernels against the plain path in float64, at sizes that divide by nothing."""

import pytest
import torch

import structvi as vi
from structvi.couplings import Noise
from structvi.families.numerics.fused import LowRankGradient, kernels_serve
from structvi.objective import log_q_at

pytestmark = pytest.mark.gpu

RANKS, DRAWS, SIZES = (1, 3, 16, 17, 64), (1, 2, 7), (101, 100_003)
#: rank and draws: each of them, both sides of every switch, and more draws than a program takes. Triton compiles three
#: or four kernels for a pair, about two seconds each: not all pairs
PAIRS = ((1, 1), (1, 2), (1, 7), (3, 2), (3, 7), (3, 40), (4, 2), (16, 1), (16, 7), (17, 2), (64, 1), (64, 7), (128, 2))
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
        for factor in q.factors():
            factor.parameter.copy_(torch.randn(factor.parameter.shape, generator=generator, dtype=torch.float64))
    return q.to(device, dtype)


def cotangents(S, P, dtype, device):
    generator = torch.Generator().manual_seed(7)
    g = torch.randn(S, P, generator=generator, dtype=torch.float64)
    g_q = torch.randn(S, generator=generator, dtype=torch.float64)
    return g.to(device, dtype), g_q.to(device, dtype)


def plain(recipe, P, S, K, device):
    """Draws, log q and gradients by `draw`, `log_prob` and autodiff in float64."""
    q = family(recipe, P, torch.float64, device)
    density = q()
    theta = density.draw(1, Given(S, P, K)).theta
    value = log_q_at(density, theta, path=True)
    torch.autograd.backward([theta, value], cotangents(S, P, torch.float64, device))
    return [theta.detach(), value.detach(), *(p.grad for p in q.parameters())]


def by_kernels(recipe, P, S, K, device):
    q = family(recipe, P, torch.float32, device)
    detached = q().draw_detached(1, Given(S, P, K), None)
    pairs = detached.pull(*cotangents(S, P, torch.float32, device))
    gradients = [x.dense() if isinstance(x, LowRankGradient) else x for _, x in pairs]
    thin = [x for _, x in pairs if isinstance(x, LowRankGradient)]
    return q, thin, [detached.draws.theta.detach(), detached.log_q.detach(), *gradients]


def check(got, expected):
    for one, other in zip(got, expected, strict=True):
        error = (one.double() - other).abs().max().item()
        allowed = TOLERANCE * other.abs().max().item()
        assert error <= allowed, f"off by {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize(("K", "S", "P"), [(K, S, P) for K, S in PAIRS for P in SIZES if K <= P])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_draws_and_gradients_are_those_of_the_plain_path(form, K, S, P, device):
    q, thin, got = by_kernels(form(K), P, S, K, device)
    assert device.type != "cuda" or kernels_serve(q.factor)
    check(got, plain(form(K), P, S, K, device))
    # its norm, summed up by the pass that made it where draws are few
    exact = got[-1].double().square().sum()
    torch.testing.assert_close(thin[0].squared_norm().double(), exact, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("P", SIZES)
@pytest.mark.parametrize("S", DRAWS)
def test_without_a_factor_too(S, P, device):
    _, _, got = by_kernels(vi.MeanField(), P, S, 0, device)
    expected = plain(vi.MeanField(), P, S, 0, device)
    check(got[: len(expected)], expected)


@pytest.mark.parametrize("R", [1, 2, 14])
@pytest.mark.parametrize("K", RANKS)
def test_adam_with_a_thin_gradient_is_torchs(K, R, gpu):
    """Three steps with clipping, and a fourth that is to leave everything as it is."""
    from structvi.families.numerics import triton_adam

    P, generator = 1001, torch.Generator().manual_seed(0)
    factor, A, Z = (torch.randn(*n, generator=generator).to(gpu) for n in ((P, K), (R, P), (R, K)))
    dense = torch.nn.Parameter(factor.double())
    adam = torch.optim.Adam([dense], lr=0.01)
    first, second = torch.zeros_like(factor), torch.zeros_like(factor)
    lr, clip, make = torch.tensor(0.01, device=gpu), torch.tensor(0.5, device=gpu), torch.ones((), device=gpu)
    for step in (1.0, 2.0, 3.0):
        dense.grad = 0.5 * step * A.double().mT @ Z.double()
        adam.step()
        count = torch.tensor(step, device=gpu)
        triton_adam.adam(factor, first, second, step * A, Z, count, lr, clip, make, (0.9, 0.999), 1e-8)
    torch.testing.assert_close(factor.double(), dense.detach(), rtol=1e-4, atol=1e-5)
    before = factor.clone(), first.clone(), second.clone()
    triton_adam.adam(factor, first, second, A, Z, count, lr, clip, 0 * make, (0.9, 0.999), 1e-8)
    assert all(map(torch.equal, before, (factor, first, second)))


@pytest.mark.parametrize(("n", "w"), [(1, 3), (58_241, 8), (58_241, 3), (2_640, 393)])
def test_rows_of_partial_sums(n, w, gpu):
    from structvi.families.numerics.triton_rows import fold_rows, sum_rows

    partial = torch.randn(n, w, generator=torch.Generator().manual_seed(0)).to(gpu)
    for got in (fold_rows(partial).sum(0), sum_rows(partial)):
        torch.testing.assert_close(got, partial.double().sum(0), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "on the device"])
@pytest.mark.parametrize(("S", "groups"), [(1, 1), (8, 8), (14, 7), (7, 1)])
def test_numbers_of_draws_are_those_of_torch(S, groups, on_device, gpu):
    from structvi.train import by_hand, triton_terms

    generator = torch.Generator().manual_seed(0)
    weight, log_likelihood, log_q = (torch.randn(S, generator=generator).to(gpu) for _ in range(3))
    log_prior = 1e5 * torch.randn(S, generator=generator, dtype=torch.float64).to(gpu)
    numbers = [torch.tensor(x, dtype=torch.float64, device=gpu) if on_device else x for x in (-0.123456789, 0.3)]
    given = weight, *numbers, 390.6257, -0.7
    for got, expected in zip(triton_terms.shares(*given), by_hand._Terms.shares(*given), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=0.0)
    given = log_likelihood, log_prior, log_q, weight, 50_000 / 128.3, groups
    torch.testing.assert_close(triton_terms.told(*given), by_hand._Terms.told(*given), rtol=1e-13, atol=1e-8)
