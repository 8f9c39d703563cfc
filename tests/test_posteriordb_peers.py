"""Peers of the benchmark: exact where the posterior is normal, judged by one measure, and named where not installed."""

import pytest
import torch

import structvi as vi
from benchmarks import posteriordb, posteriordb_peers


class Normal:
    """N(mean, covariance) in place of one of the twelve."""

    def __init__(self):
        self.name, self.P, self.evaluations = "normal", 2, 0
        self.mean = torch.tensor([1.0, -2.0], dtype=torch.float64)
        self.covariance = torch.tensor([[1.0, 0.9], [0.9, 4.0]], dtype=torch.float64)
        self.sd = self.covariance.diagonal().sqrt()
        self.space = vi.Parameters({"u": torch.zeros(2, dtype=torch.float64)})

    def log_density(self, u):
        off = u - self.mean
        return -0.5 * (off @ torch.linalg.inv(self.covariance) * off).sum(-1)

    def log_joint(self, theta, batch=None):
        return self.log_density(theta)


def test_laplace_is_exact_on_a_normal():
    pytest.importorskip("scipy")
    target = Normal()
    found = posteriordb_peers.laplace(target, seed=0)
    torch.testing.assert_close(found["mean"], target.mean, atol=1e-4, rtol=0)
    torch.testing.assert_close(found["covariance"], target.covariance)
    row = posteriordb.judged(target, found, seed=0)
    assert row["mean max"] < 1e-4
    assert row["sd max"] < 1e-6
    assert row["k"] < 0.5
    assert 0 < row["evaluations"] < 50


def test_laplace_without_a_maximum_is_lost_and_says_so():
    pytest.importorskip("scipy")
    target = Normal()
    target.log_density = lambda u: u[..., 0].square() - u[..., 1].square()
    row = posteriordb.judged(target, posteriordb_peers.laplace(target, seed=0), seed=0)
    assert "not negative definite" in row["left out"]
    assert posteriordb.missed(row)


def test_draws_are_judged_by_their_moments():
    target = Normal()
    noise = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = noise @ torch.linalg.cholesky(target.covariance).mT + target.mean
    draws = (
        (draws - draws.mean(0)) / draws.std(0) * target.sd * 2 + target.mean + target.sd
    )  # one sd off, twice as wide
    row = posteriordb.judged(target, {"draws": draws, "evaluations": 7, "seconds": 0.1}, seed=0)
    assert row["mean max"] == pytest.approx(1.0)
    assert row["sd max"] == pytest.approx(torch.tensor(2.0).log().item())
    assert row["evaluations"] == 7


def test_a_point_asked_for_twice_is_one_evaluation():
    counted = posteriordb_peers.Counted(Normal())
    value, gradient = counted([1.0, -2.0])
    assert counted([1.0, -2.0])[0] == value == 0
    assert not gradient.any()
    assert counted.evaluations == 1


def test_peers_that_are_not_installed_are_named(monkeypatch, capsys):
    monkeypatch.setattr(posteriordb_peers, "installed", lambda module: module == "scipy")
    assert posteriordb_peers.available(["laplace", "nuts", "pathfinder"]) == ["laplace"]
    said = capsys.readouterr().out
    assert "pathfinder: left out, pymc_extras is not installed: pip install pymc-extras" in said
