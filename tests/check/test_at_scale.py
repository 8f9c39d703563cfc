"""Is it Bayesian, at scale: known answers are measured as what they are, every method runs, and the page is written."""

import json
from math import log, pi

import pytest
import torch

from structvi_check import at_scale
from structvi_check.at_scale import methods, suite
from structvi_check.at_scale.ivon import fit_ivon
from structvi_check.at_scale.problem import teacher


class Prior:
    """What it must come to is known: the prior's ELBO is E log likelihood."""

    name = "the prior"

    def fit(self, problem, seed):
        self.P = problem.P

    def draw(self, n, generator):
        return torch.randn(n, self.P, generator=generator, dtype=torch.float64)

    def log_prob(self, theta):
        return -0.5 * theta.square().sum(-1) - 0.5 * theta.shape[-1] * log(2 * pi)


def test_the_prior_is_measured_as_what_it_is():
    truth = teacher(width=6, size=40, test=200, seed=3)
    row = suite.examine(Prior(), truth, seed=0)
    theta = Prior.draw(type("P", (), {"P": truth.problem.P}), suite.DRAWS, torch.Generator().manual_seed(0))
    with torch.no_grad():
        likelihood = truth.model.log_likelihood(theta, (truth.data.x, truth.data.t)).mean()
    assert row.elbo == pytest.approx(float(likelihood))
    assert row.moved is None
    # intervals of the prior are far wider than 90 % of one truth needs
    assert row.coverage > 0.8
    assert row.width > 0.5


def test_the_truth_is_not_in_what_methods_get():
    truth = teacher(width=4, size=20, test=5, seed=0)
    assert truth.problem.truth.isnan().all()
    assert torch.equal(teacher(4, 20, 5, 0).p, truth.p)
    assert not torch.equal(teacher(4, 20, 5, 1).p, truth.p)


def test_every_method_runs_and_the_page_is_written(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(methods, "EPOCHS", 2)
    monkeypatch.setattr("structvi_check.peers.STEPS", 3)
    monkeypatch.setattr("structvi_check.peers.COLLECTED", 30)
    monkeypatch.setattr(suite, "DRAWS", 8)
    report = at_scale.run(width=3, size=60, test=10, progress=False)
    assert report.methods == list(methods.methods())
    without = {row.method for row in report.rows if row.elbo is None}
    assert without == {"deep ensemble", "dropout network"}
    moved = {row.method for row in report.rows if row.moved is not None}
    assert moved == {name for name in report.methods if name.startswith(("ours", "IVON"))}
    report.save(tmp_path)
    assert json.loads((tmp_path / "at_scale.json").read_text())["teachers"] == 1
    page = (tmp_path / "at_scale.html").read_text()
    assert page.count("data:image/png") == 2
    assert all(name in str(report) for name in report.methods)


def test_unknown_methods_are_refused():
    with pytest.raises(ValueError, match="there is no method 'SGLD'"):
        at_scale.run(["SGLD"])


def test_ivon_reaches_the_posterior_of_a_quadratic():
    """½ h (θ − 1)² a datum, N of them, prior precision N δ: mean h/(h + δ), scale 1/√(N (h + δ)).

    The rate falls to zero and β₂ averages 1000 curvatures, whose noise is √2 of their size: 5 % is two of its errors.
    """
    net = torch.nn.Linear(40, 1, bias=False).double()
    N, h, delta = 100, 4.0, 0.5

    class Loader(list):
        pass

    x = torch.eye(40, dtype=torch.float64)
    target = torch.ones(40, 1, dtype=torch.float64)
    mean, scale, details = fit_ivon(
        net, Loader([(x, target)] * 4000), 1, lr=0.5, ess=N, h0=1.0, decay=delta, beta1=0.9, beta2=0.999, warmup=0.05,
        seed=0, loss=lambda y, t: 0.5 * h * (y - t).square().sum(),
    )  # fmt: skip
    assert float((mean - h / (h + delta)).abs().mean()) < 0.05 / (N * (h + delta)) ** 0.5 * 10
    torch.testing.assert_close(scale.mean().item(), (N * (h + delta)) ** -0.5, rtol=0.05, atol=0)
    assert details["moved"] > 0.3
