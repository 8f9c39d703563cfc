"""Signal and noise of gradients against their closed form on a quadratic."""

from math import log, sqrt

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.diagnostics import gradient_noise
from structvi.diagnostics.gradients import GradientNoise, Ratio

MEAN, SCALE = (0.5, 2.0), (0.4, 1.5)
PRECISION = (2.0, 0.5)


def quadratic():
    """log p = −½ Σ λ_i θ_i² and q = N(m, diag s²), each number its own tensor."""
    space = vi.Parameters({name: torch.zeros(1, dtype=torch.float64) for name in ("a", "b")})
    target = vi.LogDensity(
        lambda p: -0.5 * (PRECISION[0] * p["a"].square() + PRECISION[1] * p["b"].square()).sum(), space
    )
    q = vi.MeanField().bind(space)
    with torch.no_grad():
        q.mean.copy_(torch.tensor(MEAN))
        q.log_scale.copy_(torch.tensor(SCALE).log())
    return q, target


def exact(estimator):
    """(E g, Var g) for one naive draw θ = m + sε, by group and tensor.

    entropy: g_m = −λθ, g_log s = −λθsε + 1. path adds the score's part through θ: g_m = −λθ + ε/s, and for log s that
    times sε.
    """
    result = {}
    for name, m, s, precision in zip("ab", MEAN, SCALE, PRECISION, strict=True):
        c = precision * s - (1 / s if estimator == "path" else 0.0)  # g_m = −λm − cε
        result["mean", name] = (-precision * m, c**2)
        constant = 0.0 if estimator == "path" else 1.0  # g_log s = constant − λmsε − csε²
        result["log_scale", name] = (constant - c * s, (precision * m * s) ** 2 + 2 * (c * s) ** 2)
    return result


@pytest.mark.parametrize("estimator", ["entropy", "path"])
def test_signal_and_noise_are_those_of_a_quadratic(estimator):
    repeats, evaluations = 1500, 4
    found = gradient_noise(
        *quadratic(),
        couplings={"naive": vi.couplings.naive},
        evaluations=evaluations,
        repeats=repeats,
        estimator=estimator,
    )
    assert found.draws == {"naive": 4}
    truth = exact(estimator)
    for group in ("mean", "log_scale"):
        signal = sqrt(sum(truth[group, name][0] ** 2 for name in "ab"))
        noise = sqrt(sum(truth[group, name][1] / evaluations for name in "ab"))
        ratio = found.groups["naive"][group]
        # the mean of 1500 has an error of noise/39; a noise has one of ½√(κ/1500), 5 % with kurtosis κ < 14. Three each
        assert ratio.signal == pytest.approx(signal, abs=4 * noise / sqrt(repeats) + 1e-12)
        assert ratio.noise == pytest.approx(noise, rel=0.15)


def test_pairs_cancel_the_noise_of_the_mean_on_a_quadratic():
    found = gradient_noise(*quadratic(), repeats=8)
    assert found.draws == {"naive": 16, "paired": 16}
    assert found.groups["paired"]["mean"].noise < 1e-12
    assert found.groups["naive"]["mean"].noise > 0.1
    assert found.groups["paired"]["mean"].snr > 1e10


def test_minibatches_add_noise(linear):
    bayes = linear.another(vi.LowRankNormal(rank=1))
    whole = gradient_noise(bayes, [(linear.x, linear.t)], repeats=64)
    batched = gradient_noise(bayes, linear.loader, repeats=64)
    assert set(whole.groups) == set(batched.groups) == {"naive", "paired", "unscented"}
    assert batched.groups["paired"]["mean"].noise > 3 * whole.groups["paired"]["mean"].noise


def test_what_likelihood_and_prior_learn_is_measured_too():
    bayes = vi.variationalize(
        nn.Linear(2, 1),
        vi.likelihoods.Gaussian("point"),
        vi.MeanField(),
        vi.priors.NormalPrior(1.0, learn=True),
        num_data=6,
    )
    found = gradient_noise(bayes, [(torch.randn(6, 2), torch.randn(6, 1))], repeats=3, evaluations=2)
    assert set(found.groups["paired"]) == {"mean", "log_scale", "likelihood.log_noise", "prior.log_scale"}


def test_a_mixture_counts_its_parts_together():
    space = vi.Parameters({"z": torch.zeros(2)})
    target = vi.LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
    found = gradient_noise(vi.Mixture(vi.MeanField(), components=2).bind(space), target, repeats=3, evaluations=4)
    assert set(found.groups["paired"]) == {"mean", "log_scale", "raw_logits"}


def noise(paired, unscented):
    groups = {
        "paired": {"mean": Ratio(1.0, 1.0), "factor": Ratio(*paired)},
        "unscented": {"mean": Ratio(1.0, 1.2), "factor": Ratio(*unscented)},
    }
    return GradientNoise(groups, {"paired": 16, "unscented": 32}, 8)


def test_the_advice_that_follows():
    noisy = noise((0.05, 1.0), (0.05, 0.4))
    assert "mostly noise: the gradient of factor (0.05)" in noisy.advice[0]
    assert "groups=4" in noisy.advice[0]
    assert "accumulate=4" in noisy.advice[0]
    # half the noise variance for twice the draws: 0.16 · 2
    assert noisy.better == {"unscented": pytest.approx({"mean": 2.88, "factor": 0.32})}
    assert noisy.advice[1] == (
        "coupling=unscented at as many draws has of the present noise variance 2.9 for mean, 0.32 for factor"
    )
    (nothing,) = noise((1.0, 1.0), (1.0, 1.0)).advice
    assert nothing.startswith("no group is mostly noise")
    table = str(noisy).splitlines()
    assert table[1].split() == ["coupling", "draws", "mean", "factor"]
    assert table[2].split() == ["paired", "16", "1", "0.05"]


def test_without_noise_the_ratio_is_infinite():
    assert Ratio(1.0, 0.0).snr == float("inf")
    assert log(Ratio(1.0, 1.0).snr) == 0
