"""The fused passes against the plain ones: draws and log q through `draw`, `log_prob` and automatic differentiation."""

import pytest
import torch

import structvi as vi
from structvi.families.numerics import algebra, fused
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


def thin_gradient(q: vi.Family, coupling, groups: int) -> fused.LowRankGradient:
    """Of the factor, by draws that are leaves."""
    detached = q().draw_detached(groups, coupling, torch.Generator().manual_seed(5))
    assert detached is not None
    uneven_function(detached.draws.theta, detached.log_q).backward()
    ((factor, gradient),) = detached.pull(detached.draws.theta.grad, detached.log_q.grad)[2:]
    assert factor is q.factor
    return gradient


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
    return draws.theta.detach(), value.detach(), *[p.grad for p in q.parameters()]


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
def test_slabs_of_any_size_give_the_same(form, monkeypatch):
    q = family(form(3))
    whole = gradients(q, True, vi.couplings.paired, 2)
    monkeypatch.setattr(fused, "_SLAB", 8)
    for got, expected in zip(gradients(q, True, vi.couplings.paired, 2), whole, strict=True):
        close(got, expected, 1e-12)


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_detached_draws_pull_the_same_gradients(recipe):
    q = family(recipe)
    theta, log_q, *expected = gradients(q, True, vi.couplings.paired, 2)
    detached = q().draw_detached(2, vi.couplings.paired, torch.Generator().manual_seed(5))
    assert detached is not None
    assert detached.draws.theta.is_leaf
    close(detached.draws.theta.detach(), theta, 1e-13)
    close(detached.log_q.detach(), log_q, 1e-13)
    uneven_function(detached.draws.theta, detached.log_q).backward()
    pairs = detached.pull(detached.draws.theta.grad, detached.log_q.grad)
    dense = [x.dense() if isinstance(x, fused.LowRankGradient) else x for _, x in pairs]
    for got, wanted in zip(dense, expected, strict=False):
        close(got, wanted, 1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_a_thin_gradient_is_the_factors(form):
    q = family(form(3))
    expected = gradients(q, True, vi.couplings.paired, 2)[-1]
    gradient = thin_gradient(q, vi.couplings.paired, 2)
    torch.testing.assert_close(gradient.dense(), expected)
    torch.testing.assert_close(gradient.squared_norm(), expected.square().sum())


@pytest.mark.parametrize("form", FORMS)
def test_a_factor_that_does_not_learn_gets_no_gradient(form):
    q = family(form(3))
    expected = gradients(q, False, vi.couplings.paired, 2)[:-1]
    q.factor.requires_grad_(False)
    *got, none = gradients(q, True, vi.couplings.paired, 2)
    assert none is None
    for one, other in zip(got, expected, strict=True):
        close(one, other, 1e-9)


@pytest.mark.parametrize("recipe", [vi.MeanField(), *(form(3) for form in FORMS)], ids=repr)
def test_slices_of_the_weights_with_summed_sums_are_the_whole(recipe):
    """Two halves of the weights, each with its own noise, and one sum over both: as on two ranks."""
    q = family(recipe)
    density = q()
    noise = vi.couplings.paired(2, P, density.rank, torch.Generator().manual_seed(1), torch.float64)
    state = density.state()
    assert state is not None
    whole_theta, whole = fused.draw(state, *noise)
    halves = [slice(0, 20), slice(20, P)]
    seen: list[torch.Tensor] = []
    for at in halves:  # first what each adds, then the sum of both
        part = state._replace(
            mean=state.mean[at], log_scale=state.log_scale[at], factor=state.factor[at], unit=state.unit[at]
        )
        fused.draw(part._replace(reduce=lambda x: seen.append(x) or x), noise.diagonal[:, at], noise.low_rank)
    totals = [a + b for a, b in zip(seen[: len(seen) // 2], seen[len(seen) // 2 :], strict=True)]
    for at in halves:
        part = state._replace(
            mean=state.mean[at], log_scale=state.log_scale[at], factor=state.factor[at], unit=state.unit[at]
        )
        answers = iter(totals)
        theta, value = fused.draw(
            part._replace(reduce=lambda x, answers=answers: next(answers)), noise.diagonal[:, at], noise.low_rank
        )
        torch.testing.assert_close(theta, whole_theta[:, at])
        torch.testing.assert_close(value, whole)


def test_exponentials_of_base_two_have_the_precision_of_float32():
    """x/log 2 is rounded: an error of |x| ulp/2 of the result, and two of the powers themselves."""
    x = torch.linspace(-20, 5, 10_001)
    exact = x.double().exp()
    ulp = torch.finfo(torch.float32).eps
    assert ((fused._exp(x) - exact).abs() <= (0.5 * x.abs() + 2) * ulp * exact).all()
    assert torch.equal(fused._exp(x.double()), exact)


@pytest.mark.parametrize("shape", [(), (7,), (2**20 + 3,), (5, 3)])
def test_squares_on_the_host(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert algebra.square_on_host(x) == pytest.approx(x.double().square().sum().item(), rel=1e-4)  # of a million, 3e-5
