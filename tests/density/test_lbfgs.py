"""L-BFGS of rows: maxima that are known, walls without a value, and what it says of itself."""

from math import inf

import pytest
import torch

from structvi.density.lbfgs import Pairs, ascend


def rows_of(function):
    """Values and gradients of rows; no value where it is not a number."""

    def both(x):
        x = x.clone().requires_grad_()
        value = function(x)
        (gradient,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), gradient

    return both


def start(size, value=0.0, n=1):
    return torch.full((n, size), value, dtype=torch.float64)


def test_the_curved_valley_for_rows_of_several_starts():
    def rosenbrock(x):
        return -(100 * (x[:, 1:] - x[:, :-1].square()).square() + (1 - x[:, :-1]).square()).sum(-1)

    z = torch.cat([start(10, -0.5), start(10, 0.5)])
    ended = ascend(rows_of(rosenbrock), z, tolerance=1e-12, iterations=1000, memory=50)
    assert ended.converged.all()
    torch.testing.assert_close(ended.z, torch.ones_like(z), atol=1e-4, rtol=0)


@pytest.mark.parametrize("exponent", [2, 4])
def test_an_ill_conditioned_quadratic(exponent):
    d = torch.logspace(0, exponent, 30, dtype=torch.float64)
    bowl = rows_of(lambda x: -0.5 * (d * (x - 1).square()).sum(-1))
    ended = ascend(bowl, start(30), tolerance=1e-12, iterations=1000, memory=50)
    assert ended.converged.all()
    torch.testing.assert_close(ended.z, torch.ones_like(ended.z), atol=1e-4, rtol=0)


def test_points_without_a_value_are_backed_away_from():
    # log x − cx has a value for x > 0 alone, its maximum at 1/c; first steps end far beyond the wall
    c = torch.logspace(-2, 3, 20, dtype=torch.float64)
    log = rows_of(lambda x: (x.log() - c * x).sum(-1))
    ended = ascend(log, start(20, 1.0), tolerance=1e-10, iterations=1000, memory=50)
    assert ended.converged.all()
    torch.testing.assert_close(c * ended.z, torch.ones_like(ended.z), atol=1e-4, rtol=0)


def test_a_start_without_a_value_stays_and_others_go_on():
    z = torch.tensor([[-1.0], [2.0]], dtype=torch.float64)
    ended = ascend(rows_of(lambda x: (x.log() - x).sum(-1)), z, tolerance=1e-6)
    assert ended.z[0].item() == -1.0
    assert ended.value[0].item() == -inf
    assert ended.converged.tolist() == [False, True]
    assert ended.z[1].item() == pytest.approx(1.0, abs=1e-3)


def test_a_function_without_maximum_is_not_called_converged():
    assert not ascend(rows_of(lambda x: x.sum(-1)), start(2), tolerance=1e-6, iterations=30).converged.any()


def test_rows_stay_on_their_planes():
    root = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    precision = root @ root.mT + torch.eye(4, dtype=torch.float64)
    normal = torch.nn.functional.normalize(torch.eye(4, dtype=torch.float64) + 0.1, dim=-1)
    z = 5 * normal
    ended = ascend(rows_of(lambda x: -0.5 * (x @ precision * x).sum(-1)), z, normal, tolerance=1e-12, memory=20)
    torch.testing.assert_close((ended.z * normal).sum(-1), torch.full((4,), 5.0, dtype=torch.float64))
    covariance = torch.linalg.inv(precision)  # the highest point with n·z = 5 is 5 Σn/(nᵀΣn)
    exact = 5 * normal @ covariance / (normal @ covariance * normal).sum(-1, keepdim=True)
    torch.testing.assert_close(ended.z, exact, atol=1e-5, rtol=0)


def test_pairs_of_a_quadratic_give_its_inverse():
    root = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    H, pairs = root @ root.mT + torch.eye(3, dtype=torch.float64), Pairs(10)
    directions = torch.linalg.eigh(H).eigenvectors.mT
    for s in directions:
        pairs.add(s.unsqueeze(0), (s @ H).unsqueeze(0), torch.ones(1))
    torch.testing.assert_close(pairs.newton(torch.eye(3, dtype=torch.float64)), torch.linalg.inv(H))
    pairs.forget(torch.tensor([True]), torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(pairs.newton(torch.ones(1, 3).double()), torch.ones(1, 3, dtype=torch.float64))
