"""The noise of a regression whose network's residuals on its own data are far too small."""

from itertools import pairwise
from math import log, pi, sqrt

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.train.noise import PULL, between, factors_around, highest, pull

lk = vi.likelihoods
#: of residuals on training data; those on held-out data are twenty times as large
NOISE, TIMES = 0.05, 20.0


def regression(seed=0, rows=400):
    """A network that is the truth, training data with little noise, held-out and test data with twenty times of it."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    parts = []
    for noise in (NOISE, TIMES * NOISE, TIMES * NOISE):
        x = torch.randn(rows, 3)
        parts.append((x, net(x).detach() + noise * torch.randn(rows, 1)))
    return net, parts


def loader(part):
    return DataLoader(TensorDataset(*part), 100)


def residual(net, part):
    """The root mean square, that is the best noise of Gaussian errors."""
    with torch.no_grad():
        return float((net(part[0]) - part[1]).square().mean().sqrt())


@pytest.mark.parametrize("likelihood", [lk.Gaussian("point"), lk.StudentT("point", df=5.0)], ids=["normal", "t"])
def test_the_noise_is_that_of_held_out_residuals(likelihood):
    net, (train, held_out, test) = regression()
    bayes = vi.variationalize(net, likelihood)
    result = bayes.laplace(loader(train), validation=loader(held_out), progress=False)
    density = bayes.predict(test[0]).log_prob(test[1]).mean().item()
    wanted = residual(net, held_out)
    assert wanted / residual(net, train) > 15  # beyond every factor of a fixed list
    if isinstance(likelihood, lk.Gaussian):
        # the network with the noise of its held-out residuals, in closed form
        alone = -0.5 * (residual(net, test) / wanted) ** 2 - log(wanted) - 0.5 * log(2 * pi)
        assert result.network == pytest.approx(-0.5 - log(wanted) - 0.5 * log(2 * pi), abs=1e-5)
        assert density > alone - 0.01
        total = bayes.predict(held_out[0]).variance.mean().sqrt().item()
        # what the posterior adds is within the margin of .005 nats: 2·(log ratio)² of these is below .01
        assert abs(log(total / wanted)) < 0.07
    else:
        assert density > -log(TIMES * NOISE) - 0.5 * log(2 * pi) - 0.5 - 0.1  # t of 5 degrees for normal errors


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.13, 7.7, 20.0, 3e4])
def test_the_search_finds_any_factor(factor):
    # −½ r²/c² − log c of residuals r: the maximum is at c = r
    found = highest(lambda c: -0.5 * (factor / c) ** 2 - log(c))
    assert abs(log(found / factor)) < 1e-3


def test_factors_of_posteriors_go_up_to_the_networks():
    for network in (0.8, 1.0, 1.02, 3.0, 20.0):
        factors = factors_around(network)
        assert factors[-1] == network
        assert factors[0] == min(1.0, network)
        assert list(factors) == sorted(set(factors))
        # steps near the network's are so small that what they lose, (half a step)² nats, is below .002
        top = [b / a for a, b in pairwise(factors)][-2:]
        assert all(log(step) < 2 * sqrt(0.002) for step in top)


def test_finer_factors_lie_between_the_neighbours():
    finer = between(3.0, [1.0, 2.0, 3.0, 5.0])
    assert all(2.0 < one < 5.0 for one in finer)
    assert between(1.0, [1.0])[0] > 1 / 1.1


def with_residuals(times, rows, likelihood):
    """The network's held-out density where residuals are so many times those on the training data, in size alike."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    parts = []
    for n, size in ((200, 1.0), (rows, times)):
        x = torch.randn(n, 3, dtype=torch.float64)
        signs = 1.0 - 2.0 * (torch.arange(n) % 2).unsqueeze(1)
        parts.append((x, net(x).detach() + NOISE * size * signs))
    train, held_out = (loader(part) for part in parts)
    result = vi.variationalize(net, likelihood).laplace(train, validation=held_out, progress=False)
    assert result.network is not None
    return result.network


@pytest.mark.parametrize(("times", "rows"), [(0.3, 5), (0.6, 20), (0.6, 200), (1.0, 5), (1.4, 5), (10.0, 20)])
def test_few_small_held_out_residuals_hardly_lower_the_noise(times, rows):
    square = times**2 if times > 1 else (PULL + rows * times**2) / (PULL + rows)  # of the factor, in closed form
    expected = -0.5 * times**2 / square - 0.5 * log(square) - log(NOISE) - 0.5 * log(2 * pi)
    # the factor is searched to a thousandth, and the density's slope by its logarithm is below one
    assert with_residuals(times, rows, lk.Gaussian("point")) == pytest.approx(expected, abs=1e-3)


def test_noise_of_a_students_t_is_weighed_against_the_scale_of_that_variance():
    ways = {df: with_residuals(0.3, 5, lk.StudentT("point", df=df)) for df in (1e6, 4.0)}
    # of many degrees it is that of a normal; errors of ν = 4 have twice the variance σ²
    normal = with_residuals(0.3, 5, lk.Gaussian("point"))
    assert ways[1e6] == pytest.approx(normal, abs=1e-3)  # each factor to a thousandth
    assert ways[4.0] > normal + 0.1  # the noise may be smaller by √2


def test_the_pull_is_smooth_at_the_expected_factor_and_none_above():
    assert pull(0.999, 1) == pytest.approx(0.0, abs=1e-4)  # −PULL (log c)² to second order
    assert pull(0.9, 1) < pull(0.95, 1) < 0
    assert pull(1.5, 1) == pull(0.01, 1, expected=0.0) == 0.0  # a variance that is infinite says nothing
