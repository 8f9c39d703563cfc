"""Newton's method to single maxima: exact for parabolas, and honest where there is no maximum."""

from math import log, pi

import torch

from structvi.density.peaks import Peak, settle


def rows(function):
    """Value and gradient of a function of rows."""

    def at(z):
        z = z.detach().requires_grad_()
        value = function(z)
        (gradient,) = torch.autograd.grad(value.sum(), z)
        return value.detach(), gradient

    return at


def unit(P):
    return 0.1 * torch.eye(P, dtype=torch.float64)


def covariance(P=3, seed=0):
    root = torch.randn(P, P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.mT + 0.1 * torch.eye(P, dtype=torch.float64)


def test_a_parabola_is_exact():
    sigma, mean = covariance(), torch.tensor([1.0, -2.0, 30.0], dtype=torch.float64)
    inverse = torch.linalg.inv(sigma)
    peak = settle(rows(lambda z: 5 - ((z - mean) @ inverse * (z - mean)).sum(-1) / 2), torch.zeros_like(mean), unit(3))
    assert peak is not None
    torch.testing.assert_close(peak.at, mean, atol=1e-6, rtol=0)
    # differences of gradients over 1e-4 of a unit, rounded: some digits of 1e-16/1e-4 are lost
    torch.testing.assert_close(peak.root @ peak.root.mT, sigma, atol=1e-6, rtol=1e-6)
    assert abs(peak.log_mass - (5 + 1.5 * log(2 * pi) + sigma.logdet().item() / 2)) < 1e-6


def test_distance_is_in_standard_deviations():
    peak = Peak(torch.zeros(2, dtype=torch.float64), 0.0, torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64)))
    z = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(peak.distance(z), torch.tensor([3.0, 1.0], dtype=torch.float64))


def test_a_saddle_is_left():
    # two maxima at ±2 on the first axis; from the saddle between them
    double = rows(lambda z: -((z[:, 0].square() - 4).square()) / 16 - z[:, 1].square() / 2)
    peak = settle(double, torch.zeros(2, dtype=torch.float64), unit(2))
    assert peak is not None
    torch.testing.assert_close(peak.at.abs(), torch.tensor([2.0, 0.0], dtype=torch.float64), atol=1e-4, rtol=0)


def test_no_maximum_no_peak():
    assert settle(rows(lambda z: z.sum(-1)), torch.zeros(2, dtype=torch.float64), unit(2)) is None
    assert settle(rows(lambda z: z.sum(-1) * torch.nan), torch.zeros(2, dtype=torch.float64), unit(2)) is None


def test_a_top_without_value_is_that_of_the_parabola_around():
    def holed(z):
        value = -(z - 1).square().sum(-1) / 2
        return torch.where(value > -2, -torch.inf, value)

    peak = settle(rows(holed), torch.full((3,), 6.0, dtype=torch.float64), unit(3))
    assert peak is not None
    torch.testing.assert_close(peak.at, torch.ones(3, dtype=torch.float64), atol=1e-3, rtol=0)
    assert abs(peak.value) < 1e-3
