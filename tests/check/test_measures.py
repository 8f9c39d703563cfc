"""The numbers, against closed forms."""

from math import log

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

from structvi_check import problem
from structvi_check.measures import count_points, measure, points


def gaussian(name="gaussian-10-100"):
    p = problem(name)
    (exact,) = p.modes
    return p, MultivariateNormal(exact.mean, exact.covariance())


def test_kl_and_the_probability_of_the_true_model():
    """A wider normal: KL in closed form, estimates within five standard errors."""
    p, exact = gaussian()
    q = MultivariateNormal(exact.mean + 0.1, 1.5 * exact.covariance_matrix)
    theta = q.sample((8192,))
    m = measure(p, theta, q.log_prob(torch.cat([points(p), theta])))
    assert m.kl_p_q is not None
    assert m.kl_q_p is not None
    kl_p_q = torch.distributions.kl_divergence(exact, q).item()
    kl_q_p = torch.distributions.kl_divergence(q, exact).item()
    assert abs(m.kl_p_q.value - kl_p_q) < 5 * m.kl_p_q.standard_error < 0.2
    assert abs(m.kl_q_p.value - kl_q_p) < 5 * m.kl_q_p.standard_error < 0.2
    assert m.log_q_true == pytest.approx(q.log_prob(p.truth).item())
    assert m.log_p_true == pytest.approx(exact.log_prob(p.truth).item())


def test_errors_of_moments_and_intervals():
    """Moved by half a standard deviation of every axis and with half the variance: what is measured is that.

    Tolerances: 8192 draws on both sides, the largest of 20 quantities.
    """
    p, exact = gaussian()
    values, axes = torch.linalg.eigh(exact.covariance_matrix)
    mean = exact.mean + 0.5 * axes @ values.sqrt()
    m = measure(p, MultivariateNormal(mean, 0.5 * exact.covariance_matrix).sample((8192,)), None)
    assert 0.45 < m.mean_error < 2.0  # along an axis 0.5, in a weight the axes add up
    assert abs(m.log_variance_error - log(0.5)) < 0.1
    unmoved = measure(p, MultivariateNormal(exact.mean, 0.5 * exact.covariance_matrix).sample((8192,)), None)
    z = Normal(0.0, 1.0).icdf(torch.tensor(0.95)) * 0.5**0.5
    expected = (2 * Normal(0.0, 1.0).cdf(z) - 1).item()
    assert abs(unmoved.coverage - expected) < 0.01
    assert unmoved.coverage_max - unmoved.coverage_min < 0.06
    assert unmoved.kl_p_q is None  # without log_prob


def test_points_are_counted_by_weight():
    theta = torch.randn(1000, 4)
    theta[:, 1] = 3.0
    theta[:, 2] = torch.randint(2, (1000,)).float()
    assert count_points(theta) == 2


def test_modes_are_found_by_mass_in_their_region():
    p = problem("bimodal")
    wide, narrow = (MultivariateNormal(mode.mean, mode.covariance()) for mode in p.modes)
    assert measure(p, p.reference[:4000], None).modes_found == 2
    assert measure(p, wide.sample((4000,)), None).modes_found == 1
    far = MultivariateNormal(torch.tensor([50.0, 50.0], dtype=torch.float64), narrow.covariance_matrix)
    assert measure(p, far.sample((4000,)), None).modes_found == 0


def test_total_variation_of_predictions_of_two_classes():
    """All weights zero but the bias: q says sigmoid(3) everywhere, whatever the posterior says is averaged."""
    p = problem("logistic-regression")
    theta = torch.zeros(2000, p.P, dtype=torch.float64)
    theta[:, -1] = 3.0
    exact = p.outputs(p.reference).sigmoid().mean(0)
    m = measure(p, theta, None)
    # the posterior's own probabilities are averaged over 1000 of the reference draws
    assert m.total_variation == pytest.approx((exact - 0.9526).abs().mean().item(), abs=0.01)
    assert m.agreement == pytest.approx((exact > 0.5).double().mean().item(), abs=0.03)


def test_total_variation_of_predictions_of_a_number():
    """A posterior far off has total variation one; the posterior's own draws next to none."""
    p = problem("network")
    near = measure(p, p.reference[1::2], None)
    far = p.reference.clone()
    far[:, -1] += 10
    assert near.total_variation is not None
    assert near.total_variation < 0.03
    assert near.agreement == 1.0
    assert measure(p, far, None).total_variation == pytest.approx(1, abs=0.01)
    assert near.kl_p_q is None
    assert near.log_q_true is None
