"""Conformal sets, intervals and masks: their guarantee over many simulated splits, and the levels that can be had."""

import math

import pytest
import torch
from torch import nn

import structvi as vi
from structvi import likelihoods as lk
from structvi.models.calibration import THRESHOLDS, Conformal
from structvi.predict import conformal as cf


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def all_of(t):
    return torch.ones_like(t, dtype=torch.bool)


# ------------------------------------------------------------------------------------------------- over many splits


@pytest.mark.parametrize("n", [19, 50])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_labels_are_in_their_sets(n, level):
    """4000 splits of n cases and one new one, predictions wrong by a temperature of 3.

    The probability lies in [level, level + 1/(n + 1)]; the tolerance is four standard errors of 4000 tosses.
    """
    R, C = 4000, 5
    y = 3 * torch.randn(R, n + 1, C, generator=seeded(n), dtype=torch.float64)
    t = torch.multinomial((y / 3).softmax(-1).flatten(0, 1), 1, generator=seeded(1)).reshape(R, n + 1)
    p = y.softmax(-1)
    inside = 0
    for r in range(R):
        conformal = cf.joined("label", [cf.label_scores(p[r, :n], t[r, :n], all_of(t[r, :n]))])
        inside += bool(cf.label_sets(p[r, n:], False, conformal, level)[0, t[r, n]])
    noise = 4 * math.sqrt(level * (1 - level) / R)
    assert level - noise <= inside / R <= level + 1 / (n + 1) + noise


@pytest.mark.parametrize("n", [19, 50])
@pytest.mark.parametrize("D", [1, 3])
def test_numbers_are_in_their_intervals(n, D):
    """As above, at the level 0.9, with standard deviations that are wrong and noise that is not normal."""
    R, level = 4000, 0.9
    mean = torch.randn(R, n + 1, D, generator=seeded(n), dtype=torch.float64)
    std = 0.1 + torch.rand(R, n + 1, D, generator=seeded(1), dtype=torch.float64)
    t = mean + std.sqrt() * torch.randn(R, n + 1, D, generator=seeded(2), dtype=torch.float64) ** 3
    inside = 0
    for r in range(R):
        conformal = cf.joined("number", [cf.number_scores(mean[r, :n], std[r, :n], t[r, :n], all_of(t[r, :n]))])
        low, high = cf.intervals(mean[r, n:], std[r, n:], conformal, level)
        inside += bool(((low <= t[r, n:]) & (t[r, n:] <= high)).all())  # all numbers of the case
    noise = 4 * math.sqrt(level * (1 - level) / R)
    assert level - noise <= inside / R <= level + 1 / (n + 1) + noise


@pytest.mark.parametrize("classes", [1, 3])
def test_masks_miss_no_more_than_promised(classes):
    """600 splits of 40 pictures and 10 new ones, whose pixels depend on each other: the average loss is ≤ 1 − level.

    Pictures differ in how far they are off, so that pixels are far from exchangeable. The tolerance is four standard
    errors over the splits.
    """
    R, n, m, level = 600, 40, 10, 0.85
    losses = []
    for r in range(R):
        generator = seeded(r)
        off = torch.randn(n + m, 1, 1, 1, generator=generator, dtype=torch.float64)
        y = off + 2 * torch.randn(n + m, classes, 6, 6, generator=generator, dtype=torch.float64)
        if classes == 1:
            t = torch.bernoulli((y - 2 * off).sigmoid(), generator=generator)
            p = y.sigmoid()
        else:
            p = y.softmax(1)
            flat = (0.4 * y).softmax(1).movedim(1, -1).reshape(-1, classes)
            t = torch.multinomial(flat, 1, generator=generator).reshape(n + m, 6, 6)
        conformal = cf.joined("mask", [cf.mask_losses(p[:n], t[:n], all_of(t[:n]))])
        kept = cf.masks(p[n:], conformal, level)
        new = t[n:].long()
        if classes == 1:
            missed = [(~kept[b])[new[b] == 1].double().mean() for b in range(m) if bool((new[b] == 1).any())]
        else:
            own = kept.gather(1, new.unsqueeze(1)).squeeze(1)
            missed = [
                torch.stack([(~own[b])[new[b] == c].double().mean() for c in new[b].unique().tolist()]).mean()
                for b in range(m)
            ]
        losses.append(torch.stack(missed).mean())
    found = torch.stack(losses)
    error = float(found.std()) / math.sqrt(R)
    assert float(found.mean()) <= 1 - level + 4 * error
    assert float(found.mean()) >= 1 - level - 2 / (n + 1) - 4 * error  # and not by keeping everything


# ---------------------------------------------------------------------------------------------- through the front door


@pytest.mark.parametrize("kind", ["label", "binary", "binary [B, 1]", "number"])
def test_shapes_and_coverage(kind):
    """One split of 2000 and 2000: coverage has a standard error of √(0.09/2000 + 0.09/2000) = 0.0095; four of them."""
    n, C = 4000, 4 if kind == "label" else 1
    y = 2 * torch.randn(n, C, generator=seeded(), dtype=torch.float64)
    likelihood = {"label": lk.Categorical(), "number": lk.Gaussian(0.5)}.get(kind, lk.Bernoulli())
    if kind == "label":
        t = torch.multinomial((y / 2).softmax(1), 1, generator=seeded(1)).squeeze(1)
    elif kind == "number":
        t = y + torch.randn(n, 1, generator=seeded(1), dtype=torch.float64)
    else:
        t = torch.bernoulli((y / 2).sigmoid(), generator=seeded(1))
    net = nn.Sequential(nn.Linear(C, C), nn.Flatten(0)) if kind == "binary" else nn.Sequential(nn.Linear(C, C))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(C))
        net[0].bias.zero_()
    bayes = vi.variationalize(net, likelihood, vi.MAP(), num_data=9)
    t = t.flatten() if kind == "binary" else t
    dtype = torch.float32
    y, t = y.to(dtype), t if kind == "label" else t.to(dtype)
    bayes.calibrate([(y[:200], t[:200])], conformal=[(y[200:2200], t[200:2200])])
    found = bayes.predict(y[2200:]).conformal(0.9)
    rest = t[2200:]
    if kind == "number":
        assert found[0].shape == rest.shape
        assert found[0].dtype == dtype
        inside = (found[0] <= rest) & (rest <= found[1])
    else:
        assert found.shape == (1800, 4 if kind == "label" else 2)
        assert found.dtype == torch.bool
        inside = found.gather(1, rest.reshape(-1, 1).long())
    assert abs(float(inside.double().mean()) - 0.9) < 0.038


# --------------------------------------------------------------------------------------------------------------- levels


@pytest.mark.parametrize("level", [0.5, 0.99])
def test_too_few_cases(level):
    needed = round(level / (1 - level))
    for form, size in (("label", None), ("mask", len(THRESHOLDS))):
        values = torch.zeros(size or needed, dtype=torch.float64)
        enough = Conformal(form, values, needed)
        assert (enough.quantile if form == "label" else enough.threshold)(level) >= 0
        few = Conformal(form, values[: size or needed - 1], needed - 1)
        with pytest.raises(ValueError, match=f"needs {needed} cases, and calibrate had {needed - 1}"):
            (few.quantile if form == "label" else few.threshold)(level)
