"""Is it Bayesian, at scale: known answers are measured as what they are, and every method runs."""

import json
from math import log, pi

import pytest
import torch

from structvi_check import at_scale
from structvi_check.at_scale import teacher
from structvi_check.peers import SWAG


class Prior:
    """Its ELBO is known: E log likelihood."""

    name = "the prior"

    def fit(self, problem, seed):
        self.P = problem.P

    def draw(self, n, generator):
        return torch.randn(n, self.P, generator=generator, dtype=torch.float64)

    def log_prob(self, theta):
        return -0.5 * theta.square().sum(-1) - 0.5 * theta.shape[-1] * log(2 * pi)


def test_the_prior_is_measured_as_what_it_is():
    truth = teacher(width=6, size=40, test=200, seed=3)
    row, data = at_scale.examine(Prior(), truth, seed=0), truth.problem.data
    theta = torch.randn(
        at_scale.DRAWS, truth.problem.P, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    y = data.outputs(theta, data.x)
    likelihood = data.likelihood(y, data.t.flatten().expand_as(y)).sum(-1).mean()
    assert row.elbo == pytest.approx(float(likelihood))
    # intervals of the prior are far wider than 90 % of one truth needs
    assert row.coverage > 0.8
    assert row.width > 0.5


def test_the_truth_is_not_in_what_methods_get():
    truth = teacher(width=4, size=20, test=5, seed=0)
    assert truth.problem.truth.isnan().all()
    assert torch.equal(teacher(4, 20, 5, 0).p, truth.p)
    assert not torch.equal(teacher(4, 20, 5, 1).p, truth.p)


def test_every_method_runs_and_leaves_the_global_stream(tmp_path, monkeypatch):
    monkeypatch.setattr("structvi_check.methods.STEPS", 3)
    monkeypatch.setattr("structvi_check.peers.STEPS", 3)
    monkeypatch.setattr(SWAG, "collected", 30)
    monkeypatch.setattr(at_scale, "DRAWS", 8)
    before = torch.get_rng_state()
    report = at_scale.run(width=3, size=60, test=10, teachers=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(report.rows) == 2 * len(at_scale.NAMES)
    assert {row.method for row in report.rows if row.elbo is None} == {"deep ensemble", "dropout network"}
    report.save(tmp_path)
    assert json.loads((tmp_path / "at_scale.json").read_text())["teachers"] == 2
    assert all(row.method in (tmp_path / "at_scale.txt").read_text() for row in report.rows)
