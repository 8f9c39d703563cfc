"""Families as approximations of a normal: closed forms, gradients, and optima that contain the normal."""

import pytest
import torch

import structvi as vi
from structvi.density.approximation import Approximation, normal_of
from structvi.density.coordinates import Moved, standard
from structvi.density.newton import Normal
from structvi.families.full import FullNormalDensity
from structvi.families.low_rank import profile


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(P=5):
    root = numbers(P, P, seed=1)
    return root @ root.mT + 0.2 * torch.eye(P, dtype=torch.float64)


def approximation(recipe, P=5):
    space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})
    target = vi.LogDensity(lambda p: -p["z"].square().sum(), space)
    generator = torch.Generator().manual_seed(0)
    place = Moved(target, numbers(P, seed=2), torch.linalg.inv(covariance(P)).diagonal().rsqrt())
    q = standard(recipe, place.space, generator)
    return Approximation(q, place, lambda: torch.randn(P, generator=generator, dtype=torch.float64), lambda *_: 0.0)


@pytest.mark.parametrize("of_precision", [False, True])
def test_the_profile_is_the_kl_of_the_family_and_has_its_gradient(of_precision):
    precision, log_scale = torch.linalg.inv(covariance()), 0.3 * numbers(5, seed=3)
    found = profile(log_scale, precision, 2, of_precision)
    family = vi.LowRankPrecision(2) if of_precision else vi.LowRankNormal(2)
    q = family.bind(vi.Parameters({"z": torch.zeros(5, dtype=torch.float64)}))
    q.take_scales(log_scale, precision)
    exact = FullNormalDensity(q.mean.detach(), torch.linalg.cholesky(covariance()))
    # columns that gain nothing are kept at 0.01, not at zero
    assert abs(vi.kl(q(), exact).item() - found.kl) < 1e-3
    step = 1e-6
    for i in range(5):
        unit = step * torch.eye(5, dtype=torch.float64)[i]
        up, down = (profile(log_scale + sign * unit, precision, 2, of_precision).kl for sign in (1, -1))
        assert abs((up - down) / (2 * step) - found.gradient[i].item()) < 1e-5


@pytest.mark.parametrize("of_precision", [False, True])
@pytest.mark.parametrize("size", [200.0, 400.0])
def test_scales_that_overflow_have_no_kl(of_precision, size):
    log_scale = size * torch.tensor([1.0, -1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    found = profile(log_scale, torch.linalg.inv(covariance()), 2, of_precision)
    assert found.kl == float("inf")
    assert not found.gradient.any()


@pytest.mark.parametrize("recipe", [vi.LowRankNormal(5), vi.LowRankPrecision(5)])
def test_a_family_that_holds_the_normal_becomes_it(recipe):
    normal = Normal(numbers(5, seed=4), torch.linalg.cholesky(covariance()))
    shape = approximation(recipe)
    found = shape(normal)
    torch.testing.assert_close(found.mean, normal.mean)
    torch.testing.assert_close(found.root @ found.root.mT, covariance(), atol=1e-3, rtol=1e-3)
    family = shape.family(found)
    torch.testing.assert_close(normal_of(family).root @ normal_of(family).root.mT, found.root @ found.root.mT)


def test_mean_field_is_its_closed_form():
    normal = Normal(numbers(5, seed=4), torch.linalg.cholesky(covariance()))
    found = approximation(vi.MeanField())(normal)
    torch.testing.assert_close(found.root, torch.diag(torch.linalg.inv(covariance()).diagonal().rsqrt()))


def test_hops_find_what_starts_have_missed():
    shape = approximation(vi.LowRankNormal(1))
    normal = Normal(numbers(5, seed=4), torch.linalg.cholesky(covariance()))
    shape(normal)
    assert shape.hop(normal) >= -1e-6
    assert 0 <= shape.elsewhere <= 1
