"""Lower bounds of masses, against exact ones."""

from math import log, pi

import pytest
import torch
from torch.distributions import StudentT

from structvi.density.plane_mass import mass_bound


def start(P, value=0.0):
    return torch.full((P,), value, dtype=torch.float64)


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("P", [1, 4])
def test_the_mass_of_a_normal_of_any_scale(scale, P):
    bound = mass_bound(lambda v: -0.5 * (v / scale).square().sum(-1), start(P))
    exact = P * (log(scale) + log(2 * pi) / 2)
    # 64 fresh draws: their mean of ½|ε|² is off by √(P/2)/8
    assert abs(bound - exact) < 4 * (P / 2) ** 0.5 / 8 + 0.1


def test_the_mass_of_correlated_normals():
    root = torch.tensor([[1.0, 0.0], [0.999, 0.01]], dtype=torch.float64)
    bound = mass_bound(lambda v: -0.5 * torch.linalg.solve(root, v.mT).square().sum(0), start(2, 0.1))
    assert abs(bound - log(2 * pi) - log(0.01)) < 0.6


def test_it_is_a_bound():
    # the mass is one; 64 draws add some noise
    assert -1 < mass_bound(lambda v: StudentT(2.0).log_prob(v).sum(-1), start(3)) < 0.3


def test_no_value_anywhere_is_no_mass():
    assert mass_bound(lambda v: v.sum(-1) * torch.nan, start(2)) == -torch.inf
