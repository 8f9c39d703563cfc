"""Draws with tails: their density, and what becomes of a covariance that has no root."""

from math import log, sqrt

import pytest
import torch
from torch.distributions import StudentT

from structvi.density.tails import MixedTails, Tails
from structvi.families.density import NormalPart


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_draws_with_tails_have_the_density_that_they_say():
    """In whitened coordinates independent Student-t's: torch's density, and their moments to 4 standard errors."""
    covariance = [[1.0, 0.8], [0.8, 2.0]]
    mean = torch.tensor([1.0, -1.0], dtype=torch.float64)
    tails = Tails(mean, torch.tensor(covariance), [20_000], seeded())
    (draws,) = tails
    root = torch.linalg.cholesky(torch.tensor(covariance, dtype=torch.float64))
    t = torch.linalg.solve(root, (draws.theta - torch.tensor([1.0, -1.0])).mT).mT
    expected = StudentT(torch.tensor(5.0, dtype=torch.float64)).log_prob(t).sum(-1) - root.diagonal().log().sum()
    torch.testing.assert_close(tails.log_prob(draws.theta), expected)
    # the variance is 5/3, the kurtosis 9: standard errors √(5/3/S) of means and 5/3·√(8/S) of variances
    assert (t.mean(0).abs() < 4 * sqrt(5 / 3 / 20_000)).all()
    assert ((t.square().mean(0) - 5 / 3).abs() < 4 * 5 / 3 * sqrt(8 / 20_000)).all()
    assert torch.equal(draws.theta, next(iter(tails)).theta)
    assert not draws.theta.requires_grad


def test_a_covariance_lost_to_rounding_leaves_its_diagonal():
    covariance = torch.tensor([[1.0, 2.0], [2.0, 4.0 - 1e-6]], dtype=torch.float64)  # not positive definite
    tails = Tails(torch.zeros(2, dtype=torch.float64), covariance, [4], seeded())
    torch.testing.assert_close(tails.root, covariance.diagonal().sqrt().diag())
    assert tails.log_prob(next(iter(tails)).theta).isfinite().all()


def parts():
    """A quarter at −50, narrow, and three quarters at 5: so far apart that tails of one are nothing at the other."""
    at = ((0.25, -50.0, 0.04), (0.75, 5.0, 1.0))
    return [NormalPart(log(w), torch.tensor([x], dtype=torch.float64), torch.tensor([[v]])) for w, x, v in at]


def test_draws_around_parts_have_the_density_that_they_say():
    S = 20_000
    tails = MixedTails(parts(), [S // 2, S // 2], seeded())
    theta = torch.cat([draws.theta for draws in tails])
    share = (theta < 0).double().mean().item()
    assert abs(share - 0.25) < 4 * sqrt(0.25 * 0.75 / S)
    grid = torch.linspace(-80, 80, 160_001, dtype=torch.float64).unsqueeze(-1)
    assert abs(tails.log_prob(grid).exp().sum().item() * 1e-3 - 1) < 1e-3
    assert torch.equal(theta, torch.cat([draws.theta for draws in tails]))


def test_parts_take_the_moments_of_the_draws_that_are_theirs():
    """Weights of a target with other shares, places and widths; a part with too few draws stays as it was."""
    tails = MixedTails(parts(), [20_000], seeded())
    (draws,) = tails
    theta = draws.theta
    at, sd, w = (torch.tensor(x, dtype=torch.float64) for x in ([-49.8, 5.5], [0.3, 0.8], [0.6, 0.4]))
    log_p = (w.log() - sd.log() - 0.5 * ((theta - at) / sd).square()).logsumexp(-1)
    weights = (log_p - tails.log_prob(theta)).softmax(0)
    first, second = tails.moved(theta, weights, least=50)
    # thousands are effective: 0.05 is five standard errors and more
    for part, share, mean, spread in ((first, 0.6, -49.8, 0.3), (second, 0.4, 5.5, 0.8)):
        assert abs(torch.tensor(part.log_weight).exp().item() - share) < 0.05
        assert abs(part.mean.item() - mean) < 0.05
        assert abs(part.covariance.sqrt().item() - spread) < 0.05
    stays, _ = tails.moved(theta, torch.where(theta.squeeze(-1) < 0, 0.0, weights), least=50)
    assert torch.equal(stays.mean, parts()[0].mean)
    assert stays.log_weight == pytest.approx(log(0.25 / 4))
