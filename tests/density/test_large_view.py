"""The check of many numbers: the same view as with a dense root."""

from math import log

import torch

import structvi as vi
from structvi.density.large_view import LowRankView, diagonal_mass
from structvi.density.low_rank_matrix import LowRankMatrix
from structvi.density.units import View


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_it_sees_what_a_view_with_a_dense_root_sees():
    P = 8
    covariance = LowRankMatrix(
        numbers(P).exp(), torch.linalg.qr(numbers(P, 2, seed=1)).Q, torch.tensor([9.0, -0.7], dtype=torch.float64)
    )
    target = vi.LogDensity(lambda p: -p["z"].square().sum(), vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)}))
    root = covariance.root(torch.eye(P, dtype=torch.float64)).mT
    dense, view = View(target, numbers(P, seed=2), root), LowRankView(target, numbers(P, seed=2), covariance)
    z, which = numbers(3, P, seed=3), torch.tensor([0, 5])
    torch.testing.assert_close(view.theta(z), dense.theta(z))
    torch.testing.assert_close(view.z(z[0]), dense.z(z[0]))
    torch.testing.assert_close(view.scale, dense.scale)
    torch.testing.assert_close(view.normals(which), dense.normals(which))
    assert bool((view.size(z) >= dense.theta(z).abs() - 1e-12).all())
    assert view.most == 2


def test_the_mass_of_a_plane_follows_its_width():
    scale = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    at = numbers(4, seed=4)

    def mass(width):
        return diagonal_mass(lambda x: -0.5 * ((x - at) / width).square().sum(-1), at, scale)

    # three numbers are free, each a thousand times as wide
    assert abs(mass(1000.0) - mass(1.0) - 3 * log(1000)) < 0.01
