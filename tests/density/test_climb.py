"""Climbs end on the hills of a log density, with the covariance that they have met."""

import pytest
import torch

import structvi as vi
from structvi.density.climb import climb, inverse_hessian_root


def target(function, P):
    space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})
    return vi.LogDensity(lambda p: function(p["z"]), space)


def test_bfgs_finds_the_inverse_hessian_of_a_quadratic():
    # exact line searches along conjugate directions: P steps determine H⁻¹
    A = torch.tensor([[4.0, 1.0, 0.0], [1.0, 3.0, 0.5], [0.0, 0.5, 1.0]], dtype=torch.float64)
    x, points = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64), []
    direction = -A @ x
    for _ in range(4):
        points.append(x)
        gradient = A @ x
        x = x - (gradient @ direction) / (direction @ A @ direction) * direction
        new = A @ x
        direction = -new + (new @ A @ direction) / (direction @ A @ direction) * direction
    rows = torch.stack(points)
    root = inverse_hessian_root(rows, rows @ A)
    torch.testing.assert_close(root @ root.mT, torch.linalg.inv(A), atol=1e-8, rtol=0)
    assert (root.triu(1) == 0).all()


def test_two_hills_are_two_and_one_is_one():
    starts = torch.tensor([[-6.0, 0.0], [-4.0, 1.0], [4.0, 0.0], [7.0, -1.0]], dtype=torch.float64)
    one = climb(target(lambda z: -0.5 * z.square().sum(), 2), starts)
    assert len(one) == 1
    two = climb(target(lambda z: torch.logaddexp(-(z - 5).square().sum(), -(z + 5).square().sum() - 1), 2), starts)
    assert [round(end[0].theta[0].item()) for end in two] == [5, -5]  # the highest first


def test_where_there_is_no_value_there_is_no_climb():
    edge = target(lambda z: z.log().sum() - z.sum(), 1)
    starts = torch.tensor([[-1.0], [0.5], [-3.0]], dtype=torch.float64)
    (hill,) = climb(edge, starts)
    # the mode, to what four steps of less than 0.2 nats leave
    assert abs(hill[0].theta.item() - 1) < 0.5
    assert climb(edge, starts[:1]) == []


def test_a_distribution_that_refuses_values_far_away_is_no_error():
    """Climbs of a funnel try v = −1500, where exp(v/2) is zero, and Normal takes no scale of zero."""
    space = vi.Parameters({"v": torch.zeros((), dtype=torch.float64), "x": torch.zeros(2, dtype=torch.float64)})

    def log_density(p):
        x = torch.distributions.Normal(0.0, (p["v"] / 2).exp()).log_prob(p["x"]).sum()
        return torch.distributions.Normal(0.0, 1.0).log_prob(p["v"]) + x

    result = vi.fit_density(vi.LogDensity(log_density, space), vi.FullNormal(), progress=False)
    assert result.converged
    assert abs(result.family().mean[0]) < 0.1


def test_a_distribution_that_refuses_values_nearby_is_one():
    space = vi.Parameters({"s": torch.ones((), dtype=torch.float64)})
    target = vi.LogDensity(lambda p: torch.distributions.Normal(0.0, p["s"]).log_prob(torch.ones(5)).sum(), space)
    with pytest.raises(ValueError, match="given as positive"):
        vi.fit_density(target, vi.FullNormal(), progress=False)
