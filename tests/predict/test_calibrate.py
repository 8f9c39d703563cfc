"""A temperature and a scale from held-out cases: found, applied only where they gain, consistent, kept and refused."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi import likelihoods as lk
from structvi.models.calibration import Adjustment, Calibration
from structvi.predict.calibration import (
    GRID,
    KEPT,
    cross_fitted_losses,
    each_temperature,
    fingerprint,
    fit_temperature,
    share_in,
)
from structvi.predict.predictive import Predictive

PAGE = Path(__file__).parents[2] / "docs" / "calibration.md"


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def identity(size, likelihood, dtype=torch.float64, family=None):
    """A posterior whose network gives back its input, so that its outputs can be chosen."""
    net = nn.Linear(size, size).to(dtype)
    with torch.no_grad():
        net.weight.copy_(torch.eye(size))
        net.bias.zero_()
    return vi.variationalize(net, likelihood, vi.MAP() if family is None else family, num_data=100)


def labelled(n, temperature, seed=0, C=4, dtype=torch.float64):
    """Logits of a network that is overconfident by a temperature, and labels."""
    y = 3 * torch.randn(n, C, generator=seeded(seed), dtype=torch.float64)
    t = torch.multinomial((y / temperature).softmax(1), 1, generator=seeded(seed + 1)).squeeze(1)
    return y.to(dtype), t


def numbers(n, scale, seed=0):
    """Predictions, and observations around them whose noise is `scale` times what the likelihood says."""
    y = torch.randn(n, 1, generator=seeded(seed), dtype=torch.float64)
    return y, y + scale * 0.5 * torch.randn(n, 1, generator=seeded(seed + 1), dtype=torch.float64)


def scaled(dtype=torch.float64):
    return identity(1, lk.Gaussian(0.5), dtype)


def found(kind="temperature", value=1.7):
    return Calibration(Adjustment(kind, value, 1.0, 0.1, 50))


# ------------------------------------------------------------------------------------------------------ what is found


@pytest.mark.parametrize(("true", "dtype"), [(0.6, torch.float64), (2.0, torch.float32)])
def test_temperature_is_recovered_and_gains_on_fresh_data(true, dtype):
    """3000 cases: the standard error of log T is about 0.02, by the curvature of the likelihood; four of them."""
    bayes = identity(4, lk.Categorical(), dtype)
    result = bayes.calibrate([labelled(3000, true, dtype=dtype)])
    assert abs(math.log(result.adjustment.value / true)) < 0.08
    assert result.applied is not None
    fresh = [labelled(3000, true, seed=7, dtype=dtype)]
    assert bayes.evaluate(fresh).nlpd < bayes.evaluate(fresh, calibrated=False).nlpd - 0.02
    assert bayes.evaluate(fresh).ece < bayes.evaluate(fresh, calibrated=False).ece
    assert f"temperature {result.adjustment.value:.3g}" in bayes.predict(fresh[0][0]).note


@pytest.mark.parametrize("true", [0.5, 2.0])
def test_scale_is_recovered_and_gains_on_fresh_data(true):
    """2000 numbers: the standard error of log c is 1/√4000 = 0.016; four of them."""
    bayes = scaled()
    result = bayes.calibrate([numbers(2000, true)])
    assert result.adjustment.kind == "scale"
    assert abs(math.log(result.adjustment.value / true)) < 0.064
    assert result.applied is not None
    fresh = [numbers(2000, true, seed=7)]
    before, after = bayes.evaluate(fresh, calibrated=False), bayes.evaluate(fresh)
    assert after.nlpd < before.nlpd
    assert after.crps < before.crps
    assert abs(after.coverage[0.9] - 0.9) < 0.03  # four standard errors, √(0.09/2000) each


def test_not_applied_where_the_data_set_no_bound():
    """No mistake in the held-out data asks for certainty, which the first mistake would pay for."""
    y = 4 * torch.randn(50, 3, generator=seeded(), dtype=torch.float64)
    bayes = identity(3, lk.Categorical())
    result = bayes.calibrate([(y, y.argmax(1))])
    assert result.applied is None
    assert "no bound" in str(result)
    assert bayes.predict(y).note == bayes.predict(y, calibrated=False).note


@pytest.mark.parametrize("how", ["mask", "ignore"])
def test_what_was_not_observed_takes_no_part(how):
    y, t = labelled(600, 2.0)
    junk = t.clone()
    junk[400:] = 0 if how == "mask" else 255
    mask = torch.arange(600) < 400
    bayes = identity(4, lk.Categorical(ignore_index=None if how == "mask" else 255))
    batch = (y, (junk, mask)) if how == "mask" else (y, junk)
    part = bayes.calibrate([batch], conformal=None)
    whole = identity(4, lk.Categorical()).calibrate([(y[:400], t[:400])])
    assert part.adjustment.cases == 400
    assert part.adjustment.value == pytest.approx(whole.adjustment.value, rel=1e-12)


def tabulated(true, n):
    generator = torch.Generator().manual_seed(int(10 * true))
    logits = 2 * torch.randn(n, 5, generator=generator, dtype=torch.float64)
    t = torch.multinomial((logits / true).softmax(-1), 1, generator=generator).squeeze(-1)
    return logits, t, torch.stack(list(each_temperature(logits.log_softmax(-1), t)), -1)


@pytest.mark.parametrize("true", [0.3, 1.0, 5.0])
def test_the_temperature_is_the_maximum_of_the_likelihood(true):
    logits, t, losses = tabulated(true, 2000)
    torch.testing.assert_close(losses[:, 70], nn.functional.cross_entropy(logits / GRID[70].exp(), t, reduction="none"))
    log_t = torch.tensor(fit_temperature(losses), dtype=torch.float64).log().requires_grad_()
    (slope,) = torch.autograd.grad(nn.functional.cross_entropy(logits / log_t.exp(), t), log_t, create_graph=True)
    (bend,) = torch.autograd.grad(slope, log_t)
    assert abs(slope / bend) < 0.002  # Newton's step to the optimum, relative in T


def test_no_case_is_judged_by_a_temperature_that_saw_it():
    *_, losses = tabulated(2.0, 43)
    found = cross_fitted_losses(losses)
    for i in range(43):
        others = torch.tensor([j for j in range(43) if j % 5 != i % 5])
        assert found[i] == losses[i, losses[others].sum(0).argmin()]


# ---------------------------------------------------------------------------------------- the calibrated predictive


def predictive(kind, dtype=torch.float64):
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=dtype)
    y = 2 * torch.randn(3, 7, 4, generator=seeded(), dtype=dtype)
    likelihood = {"label": lk.Categorical(), "binary": lk.Bernoulli(), "number": lk.Gaussian(0.7)}[kind]
    return Predictive(y, weights, likelihood)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.4, 3.0])
@pytest.mark.parametrize("kind", ["label", "binary"])
def test_tempered_probabilities(kind, value, dtype):
    """All that is asked of the mixture agrees with p̄^(1/T), to rounding."""
    close = {"rtol": 0, "atol": 1e-12 if dtype is torch.float64 else 2e-6}
    plain = predictive(kind, dtype)
    pred = plain.calibrated(found(value=value))
    p = plain.mean if kind == "label" else torch.stack([1 - plain.mean, plain.mean], 1)
    q = p ** (1 / value) / (p ** (1 / value)).sum(1, keepdim=True)
    torch.testing.assert_close(pred.mean, q if kind == "label" else q[:, 1], **close)
    torch.testing.assert_close(pred.entropy, -(q * q.log()).sum(1), **close)
    torch.testing.assert_close(pred.mutual_information, pred.entropy - pred.expected_entropy, **close)
    assert bool((pred.mutual_information <= plain.mutual_information + 1e-6).all())
    torch.testing.assert_close(pred.variance, pred.mean * (1 - pred.mean), **close)
    t = torch.zeros(7, dtype=torch.long) if kind == "label" else torch.zeros(7, 4, dtype=dtype)
    torch.testing.assert_close(pred.log_prob(t), q[:, 0].log(), **close)
    torch.testing.assert_close(pred.outputs, plain.outputs)


def test_certain_and_impossible_labels():
    """Logits of ±200 in float32, and classes that no draw has."""
    y = torch.tensor([[[200.0, 0.0, -200.0]], [[200.0, 0.0, -torch.inf]], [[200.0, 0.0, -200.0]]])
    pred = Predictive(y, torch.full((3,), 1 / 3), lk.Categorical()).calibrated(found(value=2.0))
    torch.testing.assert_close(pred.log_prob(torch.tensor([1])), torch.tensor([-100.0]))
    assert pred.mean.isfinite().all()
    none = Predictive(torch.tensor([[[1.0, 0.0, -torch.inf]]]), torch.ones(1), lk.Categorical())
    assert none.calibrated(found(value=2.0)).mean[0, 2] == 0
    even = Predictive(torch.zeros(2, 3, 4), torch.full((2,), 0.5), lk.Categorical()).calibrated(found(value=2.0))
    torch.testing.assert_close(even.mean, torch.full((3, 4), 0.25))
    sure = Predictive(torch.full((2, 3, 1), 300.0), torch.full((2,), 0.5), lk.Bernoulli()).calibrated(found(value=2.0))
    torch.testing.assert_close(sure.log_prob(torch.zeros(3, 1)), torch.full((3, 1), -150.0))


def test_scaled_numbers():
    plain = predictive("number")
    pred = plain.calibrated(found("scale", 2.0))
    torch.testing.assert_close(pred.mean, plain.mean)
    for part in ("epistemic", "aleatoric", "variance"):
        torch.testing.assert_close(getattr(pred, part), 4 * getattr(plain, part))
    t = plain.mean + 0.3
    torch.testing.assert_close(pred.log_prob(t), plain.log_prob(plain.mean + 0.15) - math.log(2))
    torch.testing.assert_close(pred.cdf(t), plain.cdf(plain.mean + 0.15))
    torch.testing.assert_close(pred.quantile(0.9) - pred.mean, 2 * (plain.quantile(0.9) - plain.mean))
    torch.testing.assert_close(pred.crps(t), 2 * plain.crps(plain.mean + 0.15))
    torch.testing.assert_close(pred.function_variance, plain.function_variance)


# ------------------------------------------------------------------------------------------------------------- the data


def test_fingerprints_know_cases():
    x, t = torch.randn(3000, 5, generator=seeded()), torch.arange(3000)
    whole = fingerprint([(x, t)])
    shuffled = DataLoader(TensorDataset(x, t), batch_size=77, shuffle=True)
    assert fingerprint(shuffled) == whole
    assert len(whole.split(",")) == KEPT
    assert share_in(fingerprint([(x[:900], t[:900])]), whole) == 1
    assert share_in(whole, fingerprint([(x[:1500], t[:1500])])) == pytest.approx(0.5, abs=0.1)  # 4.5 standard errors
    assert share_in(fingerprint([(x + 1, t)]), whole) == 0


def test_data_that_served_another_choice_are_refused():
    data, other = [labelled(100, 1.0)], [labelled(100, 1.0, seed=9)]
    bayes = identity(4, lk.Categorical())
    with pytest.raises(ValueError, match="random_split"):
        bayes.calibrate(data, conformal=[(data[0][0][50:], data[0][1][50:])])
    bayes.chosen_on = fingerprint(data)
    with pytest.raises(ValueError, match="that the fit chose on"):
        bayes.calibrate(other, conformal=data)
    assert "optimistic" in str(bayes.calibrate(data, conformal=other))
    assert bayes.calibration.conformal.cases == 100


# -------------------------------------------------------------------------------------------------------------- a file


def write_changed(bayes, path, monkeypatch, **fields):
    """A file that says something else of its calibration."""
    changed = {**bayes.calibration.described(), **{k: v for k, v in fields.items() if k != "values"}}
    monkeypatch.setattr(Calibration, "described", lambda self: changed)
    if "values" in fields:
        object.__setattr__(bayes.calibration.conformal, "values", fields["values"])
    bayes.save(path)
    monkeypatch.undo()


HOSTILE = {
    "kind": {"adjustment": ["code", 1.5, 0.1, 0.01, 50]},
    "value": {"adjustment": ["temperature", 0.0, 0.1, 0.01, 50]},
    "nan": {"adjustment": ["temperature", math.nan, 0.1, 0.01, 50]},
    "text": {"adjustment": ["temperature", "1.5", 0.1, 0.01, 50]},
    "short": {"adjustment": ["temperature"]},
    "form": {"conformal": ["pickle", 60]},
    "many": {"conformal": ["label", 2**60]},
    "other size": {"conformal": ["label", 61]},
    "none": {"conformal": None},
    "draws": {"draws": 0},
    "unsorted": {"values": torch.linspace(1, 0, 60, dtype=torch.float64)},
    "above": {"values": torch.linspace(0, 2, 60, dtype=torch.float64)},
    "dtype": {"values": torch.linspace(0, 1, 60)},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files(what, tmp_path, monkeypatch):
    bayes = identity(4, lk.Categorical())
    bayes.calibrate([labelled(60, 2.0)], conformal=[labelled(60, 2.0, seed=5)])
    write_changed(bayes, tmp_path / "file", monkeypatch, **HOSTILE[what])
    with pytest.raises(vi.CheckpointError):
        vi.load(tmp_path / "file", nn.Linear(4, 4).double())


def test_the_page_runs_as_written(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    exec(compile(block, "docs/calibration.md", "exec"), {})
    assert "conformal sets of labels from 300 cases" in capsys.readouterr().out
