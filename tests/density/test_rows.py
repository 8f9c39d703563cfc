"""L-BFGS for every row on a plane of its own, against closed forms."""

import torch

from structvi.density.rows import ascend, tangent


def quadratic(precision):
    def function(z):
        return -0.5 * ((z @ precision) * z).sum(-1), -z @ precision

    return function


def test_rows_come_to_the_highest_points_of_their_planes():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    precision = root @ root.mT + torch.eye(5, dtype=torch.float64)
    normal = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    normal = normal / normal.norm(dim=-1, keepdim=True)
    points, values = ascend(quadratic(precision), 10 * normal, normal, tolerance=1e-8)
    # of all z with n·z = 10 the highest is 10 Λ⁻¹n / (nᵀΛ⁻¹n)
    covariance_normal = torch.linalg.solve(precision, normal.mT).mT
    exact = 10 * covariance_normal / (normal * covariance_normal).sum(-1, keepdim=True)
    torch.testing.assert_close(points, exact, atol=1e-2, rtol=0)
    torch.testing.assert_close(values, quadratic(precision)(exact)[0], atol=1e-4, rtol=0)
    torch.testing.assert_close((points * normal).sum(-1), torch.full((7,), 10.0, dtype=torch.float64))


def test_a_long_slope_is_walked_and_a_cliff_survived():
    # −y down to y = 0, where it falls like exp(−100 y); x is held
    def function(z):
        y = z[:, 1]
        value = -y - (-100 * y).exp()
        return value, torch.stack([torch.zeros_like(y), -1 + 100 * (-100 * y).exp()], dim=-1)

    start = torch.tensor([[1.0, 500.0]], dtype=torch.float64)
    normal = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    points, _ = ascend(function, start, normal)
    assert points[0, 0] == 1
    assert abs(points[0, 1].item()) < 0.2


def test_rows_without_a_value_stay_and_do_not_disturb_others():
    def function(z):
        value, gradient = quadratic(torch.eye(2, dtype=torch.float64))(z)
        return torch.where(z[:, 0] > 5, torch.nan, value), gradient

    start = torch.tensor([[2.0, 3.0], [6.0, 3.0]], dtype=torch.float64)
    normal = torch.tensor([[1.0, 0.0]] * 2, dtype=torch.float64)
    points, values = ascend(function, start, normal)
    assert values.tolist() == [-2.0, -torch.inf]
    assert points.tolist() == [[2.0, 0.0], [6.0, 3.0]]


def test_tangent_has_no_part_along_the_normal():
    normal = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    torch.testing.assert_close(tangent(3 * normal, normal), torch.zeros(1, 2, dtype=torch.float64))
