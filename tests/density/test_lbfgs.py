"""L-BFGS: minima that are known, walls without a value, and what it says of itself."""

from math import inf

import pytest
import torch

from structvi.density.lbfgs import Curvature, minimise


def differentiated(function):
    """Value and gradient; no value where it is not a number."""

    def both(x):
        x = x.clone().requires_grad_()
        value = function(x)
        (gradient,) = torch.autograd.grad(value, x)
        return (value.item() if torch.isfinite(value) else inf), gradient

    return both


def start(size, value=0.0):
    return torch.full((size,), value, dtype=torch.float64)


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1].square()).square() + (1 - x[:-1]).square()).sum()


def test_the_curved_valley():
    x, value, converged = minimise(differentiated(rosenbrock), start(20, -1.2), tolerance=1e-10)
    assert converged
    assert value < 1e-9
    torch.testing.assert_close(x, torch.ones_like(x), atol=1e-4, rtol=0)


@pytest.mark.parametrize("exponent", [2, 4])
def test_an_ill_conditioned_quadratic(exponent):
    d = torch.logspace(0, exponent, 30, dtype=torch.float64)
    x, _, converged = minimise(differentiated(lambda x: 0.5 * (d * (x - 1).square()).sum()), start(30), tolerance=1e-12)
    assert converged
    torch.testing.assert_close(x, torch.ones_like(x), atol=1e-4, rtol=0)


def test_points_without_a_value_are_backed_away_from():
    # Σ cx − log x has a value for x > 0 alone, its minimum at 1/c; first steps end far beyond the wall
    c = torch.logspace(-2, 3, 20, dtype=torch.float64)
    x, _, converged = minimise(differentiated(lambda x: (c * x - x.log()).sum()), start(20, 1.0), tolerance=1e-10)
    assert converged
    torch.testing.assert_close(c * x, torch.ones_like(x), atol=1e-4, rtol=0)


def test_a_start_without_a_value_is_given_back():
    x, value, converged = minimise(differentiated(lambda x: x.log().sum()), start(2, -1.0), tolerance=1e-6)
    assert (x.tolist(), value, converged) == ([-1.0, -1.0], inf, False)


def test_a_function_without_minimum_is_not_called_converged():
    *_, converged = minimise(differentiated(lambda x: -x.sum()), start(2), tolerance=1e-6, iterations=30)
    assert not converged


def test_curvature_learned_on_one_function_serves_its_neighbour():
    d = torch.logspace(0, 4, 30, dtype=torch.float64)
    calls = 0

    def shifted(by):
        def function(x):
            nonlocal calls
            calls += 1
            return 0.5 * (d * (x - by).square()).sum()

        return differentiated(function)

    curvature = Curvature()
    x, *_ = minimise(shifted(1.0), start(30), tolerance=1e-8, curvature=curvature)
    first, calls = calls, 0
    minimise(shifted(1.1), x, tolerance=1e-8, curvature=curvature)
    assert calls < first / 3
