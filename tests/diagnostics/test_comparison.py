"""Two posteriors against closed forms: evidence, divergence, total variation."""

from math import erf, exp, sqrt

import pytest
import torch
from torch import nn

import structvi as vi
from structvi import likelihoods as lk
from structvi.diagnostics import compare
from structvi.diagnostics.comparison import _predictives
from structvi.predict.predictive import Predictive


def test_elbo_divergence_and_scales_of_gaussians(linear):
    other = linear.another(vi.MeanField())
    with torch.no_grad():
        other.family.mean.copy_(linear.mean + 0.05)
        other.family.log_scale.copy_(0.5 * linear.covariance.diagonal().log() + 0.1)
    found = compare(linear.posterior, other, linear.loader, linear.x, groups=2000)
    divergence = vi.kl(other.family(), linear.posterior.family()).item()
    # a is the posterior, so ELBO(b) − ELBO(a) is −KL[b‖a]; four standard errors
    assert found.elbo.value == pytest.approx(-divergence, abs=4 * found.elbo.standard_error)
    assert found.elbo.standard_error < 0.1 * divergence
    assert found.kl_ba == pytest.approx(divergence)
    assert found.kl_ab == pytest.approx(vi.kl(linear.posterior.family(), other.family()).item())
    assert found.sd_ratio == pytest.approx({"weight": exp(0.1), "bias": exp(0.1)})
    assert found.shift["bias"] == pytest.approx(0.05 / linear.covariance[2, 2].sqrt().item())
    assert found.verdict.startswith("a is nearer to the posterior than b")
    assert compare(other, linear.posterior, linear.loader, groups=500).verdict.startswith("b is nearer")
    assert 0 < found.total_variation < 1
    assert found.agreement is None
    assert "KL[a‖b]" in str(found)


def test_equal_posteriors_are_not_told_apart(linear):
    found = compare(linear.posterior, linear.posterior, linear.loader, linear.x, groups=16)
    assert (found.elbo.value, found.total_variation) == (0.0, 0.0)
    assert "does not tell them apart" in found.verdict


def predicted(likelihood, outputs):
    """One draw for each row of the outputs."""
    outputs = torch.tensor(outputs, dtype=torch.float64)
    return Predictive(outputs, torch.full((len(outputs),), 1 / len(outputs)), likelihood)


def test_total_variation_of_numbers():
    # of N(0, 1) and N(d, 1): 2Φ(d/2) − 1 = erf(d/√8); of far ones 1
    a, b = (predicted(lk.Gaussian(1.0), [[m]]) for m in ([0.0, 0.0, 0.0], [0.0, 1.0, 50.0]))
    expected = (0 + erf(1 / sqrt(8)) + 1) / 3
    assert _predictives(a, b)["total_variation"] == pytest.approx(expected, abs=1e-3)


def test_total_variation_and_agreement_of_labels():
    a = predicted(lk.Bernoulli(), [[[0.0], [2.0]]])
    b = predicted(lk.Bernoulli(), [[[0.0], [-2.0]]])
    p = 1 / (1 + exp(-2.0))
    assert _predictives(a, b) == pytest.approx({"total_variation": (p - (1 - p)) / 2, "agreement": 0.5})
    a = predicted(lk.Categorical(), [[[0.0, 0.0, -50.0]], [[0.0, -50.0, -50.0]]])  # probabilities ¾, ¼, 0
    b = predicted(lk.Categorical(), [[[-50.0, -50.0, 0.0]]])
    assert _predictives(a, b) == pytest.approx({"total_variation": 1.0, "agreement": 0.0})
    c = predicted(lk.Categorical(), [[[0.0, 0.0, -50.0]]])
    assert _predictives(a, c)["total_variation"] == pytest.approx(0.25)


def test_where_there_is_no_closed_form_and_no_bound():
    net, batch = nn.Linear(2, 1), (torch.randn(9, 2), torch.randn(9, 1))
    families = (vi.MeanField(), vi.Mixture(vi.MeanField(), components=2), vi.MAP())
    a, b, point = (vi.variationalize(net, lk.Gaussian(1.0), q, num_data=9) for q in families)
    assert compare(a, b, [batch], groups=4).kl_ab is None
    found = compare(a, point, [batch], groups=4)
    assert "cannot be ranked" in found.verdict
    assert found.sd_ratio["weight"] < 1e-10
