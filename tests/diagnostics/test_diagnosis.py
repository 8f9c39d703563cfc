"""The report: what is sound passes, what is not is flagged, and every finding has its words."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import structvi as vi
from structvi import likelihoods as lk
from structvi.diagnostics import Finding, Report, diagnose

P = 5


def random_gaussian(seed, gaussian_target):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(P, P, generator=generator, dtype=torch.float64)
    covariance = A @ A.mT + 0.5 * torch.eye(P)
    mean = torch.randn(P, generator=generator, dtype=torch.float64)
    return gaussian_target(mean, covariance), mean, covariance, generator


def test_sound_fits_are_not_flagged_and_others_are(gaussian_target, full_normal):
    # sound: moved by at most 0.05 sd in a random direction and 5 % too narrow; unsound: by 0.3 sd, or 25 % too narrow
    flagged = {"sound": 0, "moved": 0, "narrow": 0}
    runs = 3
    for seed in range(runs):
        target, mean, covariance, generator = random_gaussian(seed, gaussian_target)
        sd = covariance.diagonal().sqrt()
        sign = torch.sign(torch.randn(P, generator=generator, dtype=torch.float64))
        root = torch.linalg.cholesky(covariance)
        step = root @ (sign / P**0.5)  # one standard deviation along a random direction
        cases = {
            "sound": (mean + 0.05 * step / (step / sd).abs().max(), 0.95**2 * covariance),
            "moved": (mean + 0.3 * step / (step / sd).abs().max(), covariance),
            "narrow": (mean, 0.75**2 * covariance),
        }
        for name, (at, spread) in cases.items():
            report = diagnose(full_normal(target.space, at, spread), target, seed=seed)
            flagged[name] += not report.sound
    assert flagged["sound"] <= 0.2 * runs
    assert flagged["moved"] == flagged["narrow"] == runs


def test_what_is_wrong_is_said(gaussian_target, full_normal):
    target, mean, covariance, _ = random_gaussian(0, gaussian_target)
    good = diagnose(full_normal(target.space, mean, covariance), target)
    assert good.sound
    assert good.verdict.startswith("sound")
    assert good["ELBO"].value == "3.00 ± 0.00 nats"
    moved = diagnose(
        full_normal(target.space, mean + 0.3 * torch.eye(P)[2] * covariance[2, 2].sqrt(), covariance), target
    )
    assert moved["mean"].level == "bad"
    assert "z[2]" in moved["mean"].value
    narrow = diagnose(full_normal(target.space, mean, 0.7**2 * covariance), target)
    assert "too narrow" in narrow["standard deviation"].meaning
    wide = diagnose(full_normal(target.space, mean, 1.2**2 * covariance), target)
    assert not wide.sound
    assert "too wide" in wide["standard deviation"].meaning


def test_modes_of_a_fit_are_told():
    space = vi.Parameters({"z": torch.zeros(1, dtype=torch.float64)})
    both = torch.tensor([[4.0], [-4.0]], dtype=torch.float64)
    target = vi.LogDensity(lambda p: (-0.5 * (p["z"] - both).square().sum(-1)).logsumexp(0), space)
    result = vi.fit_density(target, vi.Mixture(vi.MeanField(), 2), progress=False)
    report = diagnose(result.family, target, result=result)
    assert report.sound
    one = vi.fit_density(target, vi.Mixture(vi.MeanField(), 1), progress=False)
    report = diagnose(one.family, target, result=one)
    assert report["fit"].level == "bad"
    assert report.sound is False


def test_a_log_density_that_is_not_finite_is_unsound():
    space = vi.Parameters({"z": torch.zeros(1)})
    q = vi.MeanField().bind(space)
    report = diagnose(q, vi.LogDensity(lambda p: p["z"].log().sum(), space))  # nan below zero
    assert report.sound is False
    assert report["ELBO"].value == "not finite"
    assert "is not a number at" in report["k̂"].meaning


def test_a_point_mass_has_no_verdict():
    space = vi.Parameters({"z": torch.zeros(1)})
    report = diagnose(vi.MAP().bind(space), vi.LogDensity(lambda p: -p["z"].square().sum(), space))
    assert report.sound is None
    assert "no verdict: k̂ is not available, for part of q is a point mass" in report.verdict
    assert "no bound" in report["ELBO"].meaning


def regression(family, noise="point", seed=0):
    torch.manual_seed(seed)
    x = torch.linspace(-2, 2, 64).unsqueeze(-1)
    data = TensorDataset(x, torch.sin(2 * x) + 0.1 * torch.randn_like(x))
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    return vi.variationalize(net, lk.Gaussian(noise), family), DataLoader(data, batch_size=32, shuffle=True)


def test_a_network(linear):
    bayes, loader = regression(vi.LowRankNormal(rank=2))
    result = bayes.fit(loader, steps=150, lr=0.05, progress=False)
    report = bayes.diagnose(loader, result=result, draws=100, progress=False)
    names = [finding.name for finding in report.findings]
    assert names == ["ELBO", "k̂", "fit", "stuck"]
    assert report["k̂"].level == "note"  # no Gaussian is the posterior of a network
    assert "does not say that predictions are bad" in report["k̂"].meaning
    assert report["fit"].value == result.verdict
    assert result.status is vi.Status.UNCLEAR
    assert report.sound is None  # an unfinished fit is not called sound
    assert report.verdict.startswith("no verdict: the fit had not converged (not shown to have converged")
    ended = replace(result, status=vi.Status.CONVERGED)
    assert bayes.diagnose(loader, result=ended, draws=100).sound
    assert set(report.parts) == {"elbo", "importance", "learned"}
    text = str(report)
    assert text.splitlines()[-1] == report.verdict
    assert max(map(len, text.splitlines()[:-1])) <= 130
    exact = linear.posterior.diagnose(linear.loader, draws=200)
    assert exact["k̂"].level == "good"
    assert exact["mean"].level == exact["standard deviation"].level == "good"


def test_a_stuck_network_is_unsound():
    bayes, loader = regression(vi.MeanField())
    bayes.model.num_data = 64
    with torch.no_grad():  # what mean field gets stuck at: incoming weights at the prior, outgoing ones at zero
        bayes.family.mean.zero_()
        bayes.family.log_scale.zero_()
        bayes.family.log_scale[bayes.space.slice("2.weight")] = -7.0
        bayes.family.log_scale[bayes.space.slice("2.bias")] = -7.0
    report = bayes.diagnose(loader, draws=30)
    assert report.sound is False
    assert report["stuck"].value.startswith("0 % of variance explained, noise 1.")
    assert "start again" in report["stuck"].meaning


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(1), torch.zeros(1)), (torch.ones(1), torch.ones(1))])


@pytest.mark.parametrize(
    ("family", "loader", "reason"),
    [
        (vi.MAP(), [(torch.zeros(2, 1), torch.arange(2.0).unsqueeze(-1))], "point mass"),
        (vi.MeanField(), DataLoader(Stream(), batch_size=2), "does not know its length"),
    ],
)
def test_what_is_not_available_is_said_with_its_reason(family, loader, reason):
    bayes, _ = regression(family, noise=1.0)
    bayes.model.num_data = 2
    report = bayes.diagnose(loader)
    assert report["k̂"].level == "not available"
    assert reason in report["k̂"].meaning
    assert "k̂" not in report.verdict  # it does not count against the network


@pytest.mark.parametrize(
    "family",
    [
        vi.MAP(),
        vi.MCDropout(keep=0.9),
        vi.Mixture(vi.LowRankPrecision(rank=1), components=2),
        vi.PerLayer({"0.*": vi.MAP(), "*": vi.LowRankNormal(rank=2)}),
        vi.PerLayer({"0.*": vi.MeanField(), "*": vi.LowRankNormal(rank=2)}),
    ],
)
def test_every_family_has_a_report(family):
    bayes, loader = regression(family, noise=1.0)
    bayes.model.num_data = 64
    stream = torch.get_rng_state()
    report = bayes.diagnose(loader, draws=30)
    assert torch.equal(stream, torch.get_rng_state())
    assert str(bayes.diagnose(loader, draws=30)) == str(report)


def test_evaluations_are_bounded(gaussian_target, full_normal, monkeypatch):
    """A five-dimensional Gaussian that is fitted exactly: 128 for the ELBO, 7 · 2000 for k̂."""
    target, mean, covariance, _ = random_gaussian(0, gaussian_target)
    spent, original = [], vi.LogDensity.log_joint

    def counting(self, theta, *arguments):
        spent.append(len(theta))
        return original(self, theta, *arguments)

    monkeypatch.setattr(vi.LogDensity, "log_joint", counting)
    assert diagnose(full_normal(target.space, mean, covariance), target).sound
    assert sum(spent) <= 16_000


def test_without_arviz_the_rest_is_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz_stats.base", None)
    bayes, loader = regression(vi.MeanField(), noise=1.0)
    bayes.model.num_data = 64
    report = bayes.diagnose(loader)
    assert "structvi[diagnostics]" in report["k̂"].meaning
    assert report["ELBO"].level == "good"


def test_a_finding_that_was_not_made():
    report = Report([Finding("ELBO", "1", "good", "")], True, "sound")
    with pytest.raises(KeyError, match="was not looked at"):
        report["k̂"]
    assert str(report) == "✓ ELBO  1\n\nsound"
