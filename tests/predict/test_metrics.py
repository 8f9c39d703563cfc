"""Metrics against closed forms, other implementations, and the all-at-once predictive."""

import math
from typing import get_args

import pytest
import torch
from torch import nn

import structvi as vi
from structvi import likelihoods as lk
from structvi.predict.metrics import RiskHistogram, Score, ood_auroc


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def posterior(outputs, likelihood, family=None, inputs=3):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    family = vi.MeanField(initial_scale=0.5) if family is None else family
    return vi.variationalize(net, likelihood, family, num_data=100, generator=seeded())


def batches(x, t, size):
    return [(x[i : i + size], t[i : i + size]) for i in range(0, len(x), size)]


CASES = {
    "number": (lk.Gaussian("head"), 2, lambda N: randn(N, 1, seed=1)),
    "label": (lk.Categorical(), 4, lambda N: torch.randint(4, (N,), generator=seeded(1))),
    "binary": (lk.Bernoulli(), 2, lambda N: (randn(N, 2, seed=1) > 0).double()),
    "count": (lk.Poisson(), 1, lambda N: torch.randint(4, (N, 1), generator=seeded(1))),
}
FAMILIES = {
    "mean field": lambda: vi.MeanField(initial_scale=0.5),
    "mixture": lambda: vi.Mixture(vi.MeanField(initial_scale=0.5), components=3),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_batches_equal_all_at_once(kind, family):
    """Batches of 4 against one predictive of everything, in float64."""
    likelihood, outputs, make = CASES[kind]
    bayes = posterior(outputs, likelihood, FAMILIES[family]())
    if family == "mixture":
        bayes.family.raw_logits.data = torch.tensor([0.0, 5.0, 10.0], dtype=torch.float64)
        assert bayes.family().proportions.max() > 0.5
    N = 10
    x, t = randn(N, 3), make(N)
    options = {"draws": 22}
    got = bayes.evaluate(batches(x, t, 4), generator=seeded(), **options)
    pred = bayes.predict(x, generator=seeded(), **options)
    log_prob = pred.log_prob(t)
    assert (got.count, got.draws) == (log_prob.numel(), pred.draws)
    assert got.draws >= 22
    close, whole = {"rel": 1e-9, "abs": 1e-12}, RiskHistogram()
    assert got.nlpd == pytest.approx(-log_prob.mean().item(), **close)
    rows = log_prob.reshape(N, -1).mean(1)
    assert got.nlpd_se == pytest.approx(rows.std().item() / math.sqrt(N), **close)
    if kind == "label":
        p, onehot = pred.mean, nn.functional.one_hot(t, 4)
        assert got.accuracy == pytest.approx((p.argmax(1) == t).double().mean().item())
        assert got.brier == pytest.approx((p - onehot).square().sum(1).mean().item(), **close)
        whole.add(1 - p.max(1).values, (p.argmax(1) != t).double())
    elif kind == "binary":
        p = pred.mean
        assert got.accuracy == pytest.approx(((p > 0.5) == t).double().mean().item())
        assert got.brier == pytest.approx((p - t).square().mean().item(), **close)
        whole.add(torch.minimum(p, 1 - p).flatten(), ((p > 0.5) != t).double().flatten())
    else:
        square = (pred.mean - t).square()
        assert got.rmse == pytest.approx(square.mean().sqrt().item(), **close)
        for level, fraction in got.coverage.items():
            low, high = pred.interval(level)
            assert fraction == pytest.approx(((low <= t) & (t <= high)).double().mean().item())
        whole.add(pred.variance.flatten(), square.flatten())
    assert got.aurc == pytest.approx(whole.area(), **close)
    if kind == "number":
        assert got.crps == pytest.approx(pred.crps(t).mean().item(), **close)


def risk_coverage_area(uncertainty, risk):
    order = uncertainty.argsort()
    return (risk[order].cumsum(0) / torch.arange(1, len(risk) + 1)).mean().item()


def test_linear_model_against_its_closed_form():
    """t from the predictive itself, N = 2000: coverage is binomial, nlpd and CRPS have known means.

    Four standard errors of the data (of the CRPS 1.4 % each), and what S = 200 draws add: the variance of y, a third
    of the total, is right to √(2/S) = 10 %, which moves the coverage by 0.007.
    """
    N, noise = 2000, 1.0
    bayes = vi.variationalize(nn.Linear(1, 1).double(), lk.Gaussian(noise), vi.MeanField(), num_data=9)
    bayes.family.mean.data = torch.tensor([1.0, 2.0], dtype=torch.float64)
    bayes.family.log_scale.data += math.log(0.5) - bayes.family().variance.sqrt().log()
    torch.testing.assert_close(bayes.family().variance, torch.full((2,), 0.25, dtype=torch.float64))
    x = torch.ones(N, 1, dtype=torch.float64)  # y ~ N(3, ½)
    total = math.sqrt(0.5 + noise**2)
    t = 3 + total * randn(N, 1)
    got = bayes.evaluate(batches(x, t, 500), draws=200, generator=seeded())
    for level, fraction in got.coverage.items():
        assert abs(fraction - level) <= 4 * math.sqrt(level * (1 - level) / N) + 0.03
    entropy = math.log(total) + 0.5 * math.log(2 * math.pi) + 0.5
    assert abs(got.nlpd - entropy) <= 4 * got.nlpd_se + 0.01
    assert got.nlpd_se == pytest.approx(math.sqrt(0.5 / N), rel=0.1)  # Var log N(t) = ½
    assert got.crps == pytest.approx(total / math.sqrt(math.pi), rel=0.06)
    assert got.rmse == pytest.approx(total, rel=4 / math.sqrt(2 * N) + 0.005)


@pytest.mark.parametrize("kind", ["label", "binary"])
def test_calibration_error_is_that_of_its_definition(kind):
    likelihood, outputs, make = CASES[kind]
    bayes, N = posterior(outputs, likelihood), 300
    x, t = 3 * randn(N, 3), make(N)
    got = bayes.evaluate(batches(x, t, 64), draws=8, generator=seeded())
    p = bayes.predict(x, draws=8, generator=seeded()).mean
    confidence, hit = (p.max(1).values, p.argmax(1) == t) if kind == "label" else (p.flatten(), t.flatten())
    expected = 0.0
    for low in range(15):
        inside = (confidence >= low / 15) & (confidence < (low + 1) / 15)
        if inside.any():
            gap = confidence[inside].mean() - hit[inside].double().mean()
            expected += inside.double().mean().item() * abs(gap.item())
    assert got.ece == pytest.approx(expected, rel=1e-6)
    assert got.reliability.count.sum() == got.count


def test_area_under_the_risk_coverage_curve():
    """Against sorting, within the bins' resolution; ties are in random order, so their mean over orders is exact."""
    generator = seeded()
    uncertainty = torch.rand(5000, generator=generator, dtype=torch.float64).exp()
    risk = uncertainty * torch.rand(5000, generator=generator, dtype=torch.float64)
    histogram = RiskHistogram()
    for part in range(0, 5000, 700):
        histogram.add(uncertainty[part : part + 700], risk[part : part + 700])
    assert histogram.area() == pytest.approx(risk_coverage_area(uncertainty, risk), rel=1e-3)
    curve = histogram.curve()
    assert curve.coverage[-1] == 1
    assert curve.risk[-1] == pytest.approx(risk.mean().item())
    tied = RiskHistogram()
    tied.add(torch.tensor([0.5, 0.5, 0.5]), torch.tensor([1.0, 0.0, 0.0]))
    orders = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    mean = sum(risk_coverage_area(torch.arange(3.0), torch.tensor(order)) for order in orders) / 3
    assert tied.area() == pytest.approx(mean)


def test_unobserved_elements_do_not_count():
    bayes = posterior(2, lk.Gaussian(1.0))
    x, t = randn(6, 3), randn(6, 2, seed=1)
    mask = torch.ones(6, 2, dtype=torch.bool)
    mask[3:, 0] = False
    t_masked = t.masked_fill(~mask, float("nan"))
    got = bayes.evaluate([(x, (t_masked, mask))], draws=8, generator=seeded())
    pred = bayes.predict(x, draws=8, generator=seeded())
    assert got.count == 9
    assert got.nlpd == pytest.approx(-pred.log_prob(t)[mask].mean().item())
    assert got.rmse == pytest.approx((pred.mean - t).square()[mask].mean().sqrt().item())
    assert got.crps == pytest.approx(pred.crps(t)[mask].mean().item())
    net = nn.Conv2d(1, 3, 3, padding=1).double()
    pixels = vi.variationalize(net, lk.Categorical(ignore_index=9), vi.MeanField(), num_data=10)
    labels = torch.randint(3, (2, 4, 4), generator=seeded())
    labels[0] = 9
    image = randn(2, 1, 4, 4)
    got = pixels.evaluate([(image, labels)], draws=8, generator=seeded())
    pred = pixels.predict(image, draws=8, generator=seeded())
    assert got.count == 16
    assert got.accuracy == pytest.approx((pred.mean.argmax(1) == labels)[1].double().mean().item())
    with pytest.raises(ValueError, match="no observed target"):
        pixels.evaluate([(image[:1], labels[:1])], draws=2)


def test_out_of_distribution_auroc():
    """Against the fraction of pairs in the right order; a linear posterior is less certain far out."""
    bayes = posterior(3, lk.Categorical())
    near, far = 0.3 * randn(30, 3), 3 * randn(40, 3, seed=1)
    with pytest.raises(ValueError, match=r"learned by bayes\.laplace"):
        ood_auroc(bayes, [near], [far], "ood_score")
    for score in set(get_args(Score)) - {"ood_score"}:
        got = ood_auroc(bayes, [near[:10], near[10:]], [(far, torch.zeros(40))], score, draws=6, generator=seeded())
        inside, outside = (bayes.predict(x, draws=6, generator=seeded()) for x in (near, far))
        if score == "max_probability":
            a, b = (1 - p.mean.max(1).values for p in (inside, outside))
        else:
            a, b = (getattr(p, score).reshape(len(p.mean), -1).mean(1) for p in (inside, outside))
        pairs = (b[:, None] > a).double() + 0.5 * (b[:, None] == a).double()
        assert got == pytest.approx(pairs.mean().item(), abs=1e-6)
    assert ood_auroc(bayes, [near], [far], "mutual_information", draws=50, generator=seeded()) > 0.8
    numbers = posterior(1, lk.Gaussian(1.0))
    assert ood_auroc(numbers, [near], [far], "epistemic", generator=seeded()) > 0.8
    binary = posterior(2, lk.Bernoulli())
    assert 0 <= ood_auroc(binary, [near], [far], "entropy", generator=seeded()) <= 1
    with pytest.raises(TypeError, match="for class labels"):
        ood_auroc(numbers, [near], [far])
    with pytest.raises(ValueError, match="score must be one of"):
        ood_auroc(bayes, [near], [far], "surprise")
