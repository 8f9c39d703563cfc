"""Importance weights against closed forms, and where there are none."""

from math import log, pi, sqrt

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import structvi as vi
from structvi import likelihoods as lk
from structvi.diagnostics import Unavailable, importance, psis
from structvi.predict.sample import IndependentDraws


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def scaled(q, mean, scale):
    with torch.no_grad():
        q.mean.fill_(mean)
        q.log_scale.fill_(log(scale))
    return q


@pytest.mark.parametrize("k", [0.2, 0.5, 0.9])
def test_k_of_pareto_weights_is_their_shape(k):
    # w = u^−k has P(w > x) = x^(−1/k). k̂ of the 3√S = 300 largest has a standard error of (1 + k)/√300 ≈ 0.1; its weak
    # prior pulls it towards ½ by 3 %. Three of them
    log_weights = -k * torch.rand(10_000, generator=seeded(), dtype=torch.float64).log()
    weights, found = psis(log_weights)
    assert found == pytest.approx(k, abs=0.3)
    assert weights.sum().item() == pytest.approx(1.0)
    assert weights.max() < log_weights.softmax(0).max() * (1 + 1e-9)  # smoothing never exceeds the largest raw weight


@pytest.mark.parametrize(("scale", "low", "high"), [(0.5, 0.55, 0.95), (0.8, 0.16, 0.56), (1.5, -2.5, -1.2)])
def test_k_of_a_gaussian_that_is_too_narrow(gaussian_target, scale, low, high):
    # log w = ½ε²(1 − s²) for q = N(0, s²) and p = N(0, 1): P(w > x) ~ x^(−1/(1 − s²)), so k = 1 − s²: 0.75, 0.36, and
    # ±0.2 is three standard errors at 20000 draws. For s > 1 weights are bounded, P(w > max − δ) ~ √δ: k = −2
    target = gaussian_target([0.0], [[1.0]])
    q = scaled(vi.MeanField().bind(target.space), 0.0, scale)
    assert low < importance(q, target, draws=20_000).k < high


def test_weights_that_are_equal_have_no_tail(gaussian_target, full_normal):
    covariance = [[1.0, 0.8], [0.8, 2.0]]
    target = gaussian_target([1.0, -1.0], covariance)
    weighted = importance(full_normal(target.space, [1.0, -1.0], covariance), target, draws=100, tails=False)
    assert weighted.k == 0.0
    assert weighted.effective == pytest.approx(100, rel=1e-6)
    assert weighted.log_evidence == pytest.approx(3.0, abs=1e-9)


def test_corrected_moments_of_a_misfit_are_the_truth(gaussian_target):
    target = gaussian_target([0.0, 1.0], [[1.0, 0.3], [0.3, 0.5]])
    q = scaled(vi.MeanField().bind(target.space), 0.3, 1.4)
    weighted = importance(q, target, draws=20_000, seed=3)
    assert weighted.k < 0.5
    moments = weighted.moments()
    # four standard errors of the self-normalised estimate
    assert ((moments.mean - torch.tensor([0.0, 1.0])).abs() < 4 * moments.standard_error).all()
    assert (moments.standard_error < 0.02).all()
    # sd: relative error √(1/2n) ≈ 0.008 at n > 8000 effective draws
    assert weighted.effective > 8000
    torch.testing.assert_close(moments.sd, torch.tensor([1.0, sqrt(0.5)], dtype=torch.float64), rtol=0.03, atol=0)
    torch.testing.assert_close(moments.q_sd, torch.full((2,), 1.4, dtype=torch.float64), rtol=0.03, atol=0)
    torch.testing.assert_close(moments.shift, (moments.mean - moments.q_mean) / moments.sd)
    product = weighted.moments(lambda p: p["z"].prod(-1))  # E z₁z₂ = 0.3 + 0·1
    assert (product.mean - 0.3).abs() < 4 * product.standard_error
    assert weighted.log_evidence == pytest.approx(3.0, abs=0.05)
    with pytest.raises(ValueError, match="one row for each"):
        weighted.moments(lambda p: p["z"].sum())


def test_tails_correct_what_draws_of_q_do_not_reach():
    """p is a Laplace distribution of sd √2; q = N(0, 0.8²) has next to no draws where p's variance comes from."""
    space = vi.Parameters({"z": torch.zeros(1, dtype=torch.float64)})
    target = vi.LogDensity(lambda p: -p["z"].abs().sum(), space)
    q = scaled(vi.MeanField().bind(space), 0.0, 0.8)
    plain, tailed = (importance(q, target, draws=4000, tails=tails).moments().sd.item() for tails in (False, True))
    assert plain < 0.9 * sqrt(2)
    # some 4000 draws of a kurtosis of 6 weigh about evenly: a standard error of √(5/4000)/2 ≈ 0.02 of it; three of them
    assert tailed == pytest.approx(sqrt(2), rel=0.06)


@pytest.mark.parametrize("bend", [0.3, 1.0])
def test_rounds_of_tails_find_a_bent_posterior(bend):
    """x ~ N(0, 1), y ~ N(b x², 1): means 0 and b, sds 1 and √(1 + 2b²); q is the best full normal."""
    space = vi.Parameters({"z": torch.zeros(2, dtype=torch.float64)})
    target = vi.LogDensity(
        lambda p: -0.5 * p["z"][0].square() - 0.5 * (p["z"][1] - bend * p["z"][0].square()).square(), space
    )
    q = vi.fit_density(target, vi.FullNormal(), progress=False).family
    weighted = importance(q, target, draws=10_000)
    moments = weighted.moments()
    sd = torch.tensor([1.0, sqrt(1 + 2 * bend**2)], dtype=torch.float64)
    off = (moments.mean - torch.tensor([0.0, bend])) / sd
    # the limits that `diagnose` holds q to; q itself is up to 0.3 sd and 40 % off
    assert off.abs().max() < 0.1
    assert (moments.sd / sd).log().abs().max() < log(1.1)
    assert weighted.k_weights < 0.7
    assert len(weighted.weights) == 50_000


def test_points_far_out_at_which_a_density_is_no_number_weigh_nothing():
    space = vi.Parameters({"z": torch.zeros(1, dtype=torch.float64)})
    target = vi.LogDensity(lambda p: -0.5 * p["z"].square().sum() + (36 - p["z"].square().sum()).sqrt() * 0, space)
    weighted = importance(scaled(vi.MeanField().bind(space), 0.0, 1.0), target, draws=4000)
    assert weighted.weights[weighted.theta.squeeze(-1).abs() > 6].sum() == 0
    assert abs(weighted.moments().sd.item() - 1) < 0.02


def test_a_network_over_all_data_has_its_evidence_as_weights(linear):
    # q is the posterior: log p(data, θ) − log q(θ) is the log evidence at every draw, whatever the batches
    weighted = importance(linear.posterior, linear.loader, draws=30)
    expected = torch.full((30,), linear.log_evidence, dtype=torch.float64)
    torch.testing.assert_close(weighted.log_weights, expected, rtol=0, atol=1e-6)


def test_draws_of_a_mixture_are_independent_draws_of_it():
    space = vi.Parameters({"z": torch.zeros(1, dtype=torch.float64)})
    parts = [scaled(vi.MeanField().bind(space), mean, 1.0) for mean in (-5.0, 5.0)]
    mixture = vi.Mixture(parts)
    with torch.no_grad():
        mixture.raw_logits.copy_(torch.tensor([0.2, 0.8]).log() / 0.2)
    draws = next(iter(IndependentDraws(mixture(), 5000, seeded())))
    # a fraction of 0.8 has a standard error of 0.0057
    assert (draws.theta > 0).double().mean().item() == pytest.approx(0.8, abs=0.02)
    density = mixture()
    target = vi.LogDensity(lambda p: density.log_prob(p["z"].unsqueeze(0)).squeeze(0), space)
    assert importance(mixture, target, draws=200).k == 0.0


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(2), torch.zeros(1))])


BATCH = torch.zeros(6, 2), torch.zeros(6, 1)


@pytest.mark.parametrize(
    ("family", "options", "loader", "reason"),
    [
        (vi.MAP(), {}, [BATCH], "point mass"),
        (vi.MCDropout(keep=0.5), {}, [BATCH], "point mass"),
        (vi.PerLayer({"weight": vi.MAP(), "*": vi.MeanField()}), {}, [BATCH], "point mass"),
        (vi.MeanField(), {"dropout": "on"}, [BATCH], "dropout is on"),
        (vi.MeanField(), {"batch_norm": "reestimated"}, [BATCH], "how the data are batched"),
        (vi.MeanField(), {}, DataLoader(Stream()), "does not know its length"),
        (vi.MeanField(), {}, [(BATCH[0][:4], BATCH[1][:4])], "4 of the N = 6"),
    ],
)
def test_where_there_are_no_weights_the_reason_is_given(family, options, loader, reason):
    bayes = vi.variationalize(nn.Linear(2, 1), lk.Gaussian(1.0), family, num_data=6, **options)
    with pytest.raises(Unavailable, match=reason):
        importance(bayes, loader, draws=30)


def test_unnormalised_and_impossible_draws_are_weighed():
    space = vi.Parameters({"z": torch.zeros(1, dtype=torch.float64)})
    target = vi.LogDensity(lambda p: torch.where(p["z"] > 0, -0.5 * p["z"].square(), -torch.inf).sum(), space)
    q = scaled(vi.MeanField().bind(space), 0.0, 1.0)
    weighted = importance(q, target, draws=4000)
    assert weighted.log_weights.isinf().any()
    # half a normal: log integral ½ log(2π) − log 2, mean √(2/π); the fraction of positive draws is ½ ± 0.008
    assert weighted.log_evidence == pytest.approx(0.5 * log(2 * pi) - log(2), abs=0.05)
    assert weighted.moments().mean.item() == pytest.approx(sqrt(2 / pi), abs=0.05)


def test_a_whole_data_set_through_a_shuffled_loader_with_drop_last(linear):
    loader = DataLoader(TensorDataset(linear.x, linear.t), batch_size=16, shuffle=True, drop_last=True)
    whole = importance(linear.posterior, [(linear.x, linear.t)], draws=30)
    torch.testing.assert_close(importance(linear.posterior, loader, draws=30).log_weights, whole.log_weights)
