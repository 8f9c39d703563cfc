"""Draws with tails: their density, and what becomes of a covariance that has no root."""

from math import sqrt

import torch
from torch.distributions import StudentT

from structvi.correcting.tails import Tails


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
