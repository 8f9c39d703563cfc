"""The mean of a normal of many numbers, by itself."""

import torch

import structvi as vi
from structvi.density.large_mean import better_mean
from structvi.density.low_rank_matrix import LowRankMatrix


def smooth(P, rho):
    """The precision of a first-order autoregression: narrow conditionals, wide smooth directions."""
    precision = torch.diag(torch.full((P,), 1 + rho**2, dtype=torch.float64))
    precision[0, 0] = precision[-1, -1] = 1
    beside = torch.full((P - 1,), -rho, dtype=torch.float64)
    return (precision + beside.diag(1) + beside.diag(-1)) / (1 - rho**2)


def test_the_mean_moves_along_directions_that_q_is_narrow_in():
    P, precision = 100, smooth(100, 0.98)
    generator = torch.Generator().manual_seed(0)

    def score(theta):
        way = theta - 1
        return -0.5 * (way @ precision * way).sum(-1), -way @ precision

    def noise(n):
        return torch.randn(n, P, generator=generator, dtype=torch.float64)

    mean = torch.zeros(P, dtype=torch.float64)
    covariance = LowRankMatrix.diag(1 / precision.diagonal())
    new, left = better_mean(score, mean, covariance, noise, 16)
    short = 0.5 * (new - 1) @ precision @ (new - 1)
    assert short < 1e-3
    assert left < 0.05


def test_noise_is_not_taken_for_a_gain():
    generator = torch.Generator().manual_seed(0)

    def score(theta):  # log densities of logarithms of exponential numbers
        return (theta - theta.exp()).sum(-1), 1 - theta.exp()

    def noise(n):
        return torch.randn(n, 50, generator=generator, dtype=torch.float64)

    variance = torch.full((50,), 0.8, dtype=torch.float64)
    mean = -variance / 2  # the optimum: E exp = 1
    new, left = better_mean(score, mean, LowRankMatrix.diag(variance), noise, 32)
    assert new is mean
    assert left == 0


def test_a_large_fit_that_its_model_does_not_see_is_not_called_converged():
    # of 260 numbers, correlations of 0.999 between neighbours: the mean has a way of thousands of q's deviations
    P, precision = 260, smooth(260, 0.999)

    class Smooth:
        space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})

        def log_joint(self, theta, batch=None):
            return -0.5 * ((theta - 1) @ precision * (theta - 1)).sum(-1)

    result = vi.fit_density(Smooth(), vi.MeanField(), progress=False)
    with torch.no_grad():
        off = result.family().mean - 1
    short = (0.5 * off @ precision @ off).item()
    assert short < 0.1 or not result.converged
