"""Constraints: bijections and their log Jacobians against automatic differentiation, torch's own, and far from zero."""

from math import inf, nan

import pytest
import torch
from torch.distributions import constraints
from torch.func import jacrev

import structvi as vi

#: what is constrained, which elements of it can be chosen, torch's own constraint
CASES = {
    "positive": (vi.constraints.positive(2.0), slice(None), constraints.positive),
    "positive vector": (vi.constraints.positive(1.5, shape=3), slice(None), constraints.positive),
    "interval": (vi.constraints.interval(-1, 3), slice(None), constraints.interval(-1.0, 3.0)),
    "intervals": (vi.constraints.interval(0, torch.tensor([1.0, 10.0])), slice(None), None),
    "simplex": (vi.constraints.simplex(4), slice(3), constraints.simplex),
    "ordered": (vi.constraints.ordered(4), slice(None), None),
    "cholesky_correlation": (
        vi.constraints.cholesky_correlation(4),
        torch.tensor([4, 8, 9, 12, 13, 14]),
        constraints.corr_cholesky,
    ),
}
SIZES = {name: case[0].constraint.free(case[0].initial).numel() for name, case in CASES.items()}
each = pytest.mark.parametrize("name", CASES)


def points(name, spread=1.0, count=5):
    shape = CASES[name][0].constraint.free(CASES[name][0].initial).shape
    generator = torch.Generator().manual_seed(0)
    return spread * torch.randn(count, *shape, dtype=torch.float64, generator=generator)


def total(constraint, x):
    """log |det| of one point."""
    return constraint.log_jacobian(x).sum()


@each
def test_the_log_jacobian_and_its_gradient_are_those_of_automatic_differentiation(name):
    constrained, chosen, _ = CASES[name]
    constraint, P = constrained.constraint, SIZES[name]

    def own(x):
        return total(constraint, x)

    def by_autodiff(x):
        jacobian = jacrev(lambda x: constraint.natural(x).reshape(-1)[chosen])(x)
        return torch.linalg.slogdet(jacobian.reshape(P, P)).logabsdet

    for x in points(name):
        torch.testing.assert_close(own(x), by_autodiff(x), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(jacrev(own)(x), jacrev(by_autodiff)(x), rtol=1e-8, atol=1e-8)


@each
@pytest.mark.parametrize("spread", [1.0, 5.0])
def test_there_and_back(name, spread):
    constraint = CASES[name][0].constraint
    x = points(name, spread)
    # 5 standard deviations out, 1 − y of an interval and 1 − w² of a correlation have lost some ten of 53 bits
    torch.testing.assert_close(constraint.free(constraint.natural(x)), x, rtol=1e-6, atol=1e-6)


@each
def test_values_obey_the_constraint_also_far_from_zero_and_nothing_is_lost(name):
    constrained, _, own = CASES[name]
    for spread in (1.0, 30.0, 300.0):
        x = points(name, spread)
        x = (x.clamp(-700, 350) if name.startswith("positive") else x).requires_grad_()
        y, terms = constrained.constraint.natural(x), constrained.constraint.log_jacobian(x)
        assert bool(y.isfinite().all())
        assert bool(terms.isfinite().all())
        if own is not None:
            assert bool(own.check(y).all())
        if name == "ordered":
            assert bool((y.diff(dim=-1) >= 0).all())  # e⁻³⁰⁰ is lost beside one: equal is as near as numbers go
        for value in (y, terms):
            (gradient,) = torch.autograd.grad(value.sum(), x, retain_graph=True)
            assert bool(gradient.isfinite().all())


def test_beyond_what_numbers_hold_the_density_of_a_positive_value_is_zero():
    constraint = vi.constraints.positive().constraint
    for dtype, low, high in ((torch.float64, -708.3, 354.7), (torch.float32, -87.3, 44.2)):
        inside = torch.tensor([low, high], dtype=dtype)
        outside = (inside * 1.01).requires_grad_()
        assert torch.equal(constraint.log_jacobian(inside), inside)
        terms, y = constraint.log_jacobian(outside), constraint.natural(outside)
        assert (terms == -inf).all()
        assert bool(y.log().isfinite().all() and y.square().isfinite().all())
        assert (y > 0).all()
        (gradient,) = torch.autograd.grad((terms + y).sum(), outside)
        assert torch.equal(gradient, torch.zeros(2, dtype=dtype))


#: log densities of a positive number, and whether they can be normalised


@pytest.mark.parametrize("name", ["interval", "simplex", "cholesky_correlation"])
def test_logarithms_are_finite_at_the_boundary(name):
    """What models take the logarithm of: never of zero, however far x is."""
    constraint = CASES[name][0].constraint
    for x in (1e4 * torch.eye(SIZES[name], dtype=torch.float64), -1e4 * torch.eye(SIZES[name], dtype=torch.float64)):
        y = constraint.natural(x if name != "interval" else x.reshape(-1))
        inside = y.diagonal(dim1=-2, dim2=-1) if name == "cholesky_correlation" else y
        inside = torch.cat([y + 1, 3 - y]) if name == "interval" else inside
        assert bool(inside.log().isfinite().all())
        assert bool(constraint.log_jacobian(x).isfinite().all())


def test_parameters_of_constrained_values():
    space = vi.Parameters(
        {
            "mu": torch.zeros(()),
            "sigma": vi.constraints.positive(2.0),
            "p": vi.constraints.simplex(3),
            "L": vi.constraints.cholesky_correlation(4),
            "u": vi.constraints.interval(0, 1, 0.25, shape=2),
            "c": vi.constraints.ordered(5),
        }
    )
    assert space.dtype == torch.float64
    assert space.size == 1 + 1 + 2 + 6 + 2 + 5
    values = space.constrain(space.initial)
    assert values["sigma"].item() == pytest.approx(2)
    for name, expected in {"p": [1 / 3] * 3, "u": [0.25] * 2, "c": [-2, -1, 0, 1, 2], "L": torch.eye(4)}.items():
        torch.testing.assert_close(values[name], torch.as_tensor(expected, dtype=torch.float64))
    draws = torch.randn(3, 7, space.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert space.constrain(draws)["L"].shape == (3, 7, 4, 4)
    assert space.log_jacobian(draws).shape == (3, 7)
    named = space.unravel(draws)
    expected = sum(c.log_jacobian(named[n]).reshape(3, 7, -1).sum(-1) for n, c in space.constraints.items())
    torch.testing.assert_close(space.log_jacobian(draws), expected)
    assert [space.label(i) for i in (0, 1, 3, 10)] == ["mu", "log sigma", "free p[1]", "logit u[0]"]


def test_spaces_made_of_a_space_keep_their_constraints():
    space = vi.Parameters({"a": torch.zeros(2), "s": vi.constraints.positive(3.0), "u": vi.constraints.interval(0, 1)})
    assert set(space.subset(["s"]).constraints) == {"s"}
    assert set(space.without(["s"]).constraints) == {"u"}
    moved = space.at(space.initial + 1)
    assert moved.constrain(moved.initial)["s"].item() == pytest.approx(3 * torch.e)
    assert set(space.append({"t": vi.constraints.positive()}).constraints) == {"s", "u", "t"}
    assert space.scales.tolist() == [3.0, 3.0, 3.0]
    assert vi.Parameters({"s": vi.constraints.positive(1e-9)}).scales.tolist() == [
        3.0
    ]  # log σ = −21 is no scale of log σ


BAD = {
    "negative": lambda: vi.constraints.positive(-1.0),
    "not finite": lambda: vi.constraints.positive(nan),
    "ends": lambda: vi.constraints.interval(1, 0),
    "one end": lambda: vi.constraints.interval(0, inf),
    "outside": lambda: vi.constraints.interval(0, 1, 1.0),
    "sum": lambda: vi.constraints.simplex([0.5, 0.4]),
    "no vector": lambda: vi.constraints.simplex(3.0),
    "equal": lambda: vi.constraints.ordered([1.0, 1.0]),
    "falling": lambda: vi.constraints.ordered([2.0, 1.0]),
    "no triangle": lambda: vi.constraints.cholesky_correlation([[1.0, 0.5], [0.5, 1.0]]),
    "long rows": lambda: vi.constraints.cholesky_correlation([[2.0, 0.0], [0.0, 1.0]]),
}


@pytest.mark.parametrize("case", BAD)
def test_values_that_do_not_obey_are_refused(case):
    with pytest.raises(ValueError, match="expected finite values that obey it, got"):
        BAD[case]()


def test_a_number_is_a_scalar_that_begins_there():
    space = vi.Parameters({"a": 2, "b": 0.5})
    assert space.dtype == torch.float64
    assert space.initial.tolist() == [2.0, 0.5]
    assert space.shapes == ((), ())
    assert vi.Parameters({"a": 1.0, "w": torch.zeros(2)}).dtype == torch.float32  # as the others
    assert vi.Parameters({"a": 1.0, "s": vi.constraints.positive(1.0)}).dtype == torch.float64
