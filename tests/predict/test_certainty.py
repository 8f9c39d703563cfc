"""Where a network is certain: every quantity is a number, and probabilities are probabilities, in every precision."""

import math

import pytest
import torch
from torch import nn

import structvi as vi
from structvi import likelihoods as lk
from structvi.predict.metrics import evaluate, ood_auroc
from structvi.predict.predictive import Predictive

LOGITS = (1e4, -1e4, 200.0, -200.0, 0.0, 20.0, 3.0)
#: log rates: e⁸⁸ is the last that float32 has
LOG_RATES = (-1e4, -200.0, 0.0, 20.0, 40.0, 80.0)
DRAWS = (1, 10)
DTYPES = (torch.float32, torch.bfloat16)


def predictive(kind, S, dtype, agreed):
    """Outputs at S draws that all agree, or of which every other says the opposite."""
    rows = torch.tensor(LOG_RATES if kind == "count" else LOGITS)
    signs = torch.ones(S) if agreed else 1 - 2 * (torch.arange(S) % 2)
    if kind == "count":
        outputs = rows.expand(S, -1).unsqueeze(-1)
    elif kind == "label":
        outputs = torch.stack([signs[:, None] * rows, torch.zeros(S, len(rows)), torch.zeros(S, len(rows))], -1)
    elif kind == "head":  # mean and log σ
        outputs = torch.stack([signs[:, None] * rows, rows.flip(0).expand(S, -1)], -1)
    else:
        outputs = (signs[:, None] * rows).unsqueeze(-1)
    likelihood = {
        "number": lk.Gaussian(0.5), "head": lk.Gaussian("head"), "label": lk.Categorical(), "binary": lk.Bernoulli(),
        "count": lk.Poisson(),
    }[kind]  # fmt: skip
    return Predictive(outputs.to(dtype), torch.full((S,), 1 / S, dtype=dtype), likelihood)


def targets(pred, kind):
    if kind == "label":
        return [torch.full((len(LOGITS),), c) for c in (0, 1)]
    return [torch.full_like(pred.mean, t) for t in (0.0, 1.0)]


@pytest.mark.parametrize("agreed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", DRAWS)
@pytest.mark.parametrize("kind", ["number", "head", "label", "binary", "count"])
def test_every_quantity_is_a_number_and_every_probability_one(kind, S, dtype, agreed):
    pred = predictive(kind, S, dtype, agreed)
    for name in ("mean", "variance", "std", "epistemic", "aleatoric", "function_mean", "function_variance"):
        value = getattr(pred, name)
        # the square of a rate of e⁸⁰ is no number of float32; it overflows to infinity, never to NaN
        assert value.isfinite().all() or (kind == "count" and not value.isnan().any()), name
        assert name in ("mean", "function_mean") or (value >= 0).all(), name
    for t in targets(pred, kind):
        log_prob = pred.log_prob(t)
        # 20 from a mean with σ = e⁻²⁰⁰ is too far for float32: −∞
        assert (log_prob.isfinite() | ((log_prob == -math.inf) & (kind == "head"))).all()
        assert (log_prob <= 0).all() or kind in ("number", "head")
        assert pred.joint_log_prob(t) <= 0 or kind in ("number", "head")
        if kind != "label":
            cdf = pred.cdf(t)
            assert ((cdf >= 0) & (cdf <= 1)).all()
        if kind in ("number", "head"):
            crps = pred.crps(t)
            assert crps.isfinite().all()
    if kind != "label":
        low, high = pred.interval(0.9)
        assert low.isfinite().all()
        assert high.isfinite().all()
        assert (low <= high).all()
        assert pred.quantile(0.5).isfinite().all()


@pytest.mark.parametrize("agreed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", DRAWS)
@pytest.mark.parametrize("kind", ["label", "binary"])
def test_entropies_of_labels(kind, S, dtype, agreed):
    """0 ≤ I ≤ H ≤ log C, and H = 0 where all draws are certain of the same label; 1e-6 is rounding of float32."""
    pred = predictive(kind, S, dtype, agreed)
    classes = 3 if kind == "label" else 2
    p, entropy, mutual = pred.probabilities, pred.entropy, pred.mutual_information
    assert ((p >= 0) & (p <= 1)).all()
    if kind == "label":
        torch.testing.assert_close(p.sum(1), torch.ones(len(LOGITS)), rtol=0, atol=1e-6)
    for value in (entropy, pred.expected_entropy, mutual):
        assert ((value >= 0) & (value <= math.log(classes) + 1e-6)).all()
    assert (mutual <= entropy).all()
    if agreed:
        certain = entropy[[0, 2]] if kind == "label" else entropy[:4]
        torch.testing.assert_close(certain, torch.zeros_like(certain), rtol=0, atol=3e-6)
        torch.testing.assert_close(mutual, torch.zeros_like(mutual), rtol=0, atol=3e-6)


def test_small_rates_keep_their_logarithm():
    """P(1) = rate e^{−rate}: of rates that are zero in float32 too."""
    pred = Predictive(torch.tensor([[[-200.0]]]), torch.ones(1), lk.Poisson())
    assert pred.log_prob(torch.ones(1, 1)).item() == -200


class Certain(nn.Module):
    """Logits ±1e4 by the sign of x, 0 at 0, and NaN where x is."""

    def __init__(self, outputs):
        super().__init__()
        self.scale = nn.Parameter(torch.full((outputs,), 1e4))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(("likelihood", "outputs"), [(lk.Bernoulli(), 1), (lk.Categorical(), 2)])
@pytest.mark.parametrize("draws", [3, 64])
def test_an_unfamiliar_input_is_told_from_certain_ones(likelihood, outputs, draws):
    """Familiar inputs are certain, unfamiliar ones toss a coin: AUROC 1 by every score that sees noise."""
    bayes = vi.variationalize(Certain(outputs), likelihood, vi.MeanField(initial_scale=1e-3), num_data=9)
    sign = torch.tensor([[1.0, -1.0]])[:, :outputs]
    familiar, unfamiliar = sign * torch.tensor([[1.0], [2.0], [-1.0]]), torch.zeros(4, outputs)
    for score in ("entropy", "expected_entropy", "max_probability", "variance"):
        seed = torch.Generator().manual_seed(0)
        got = ood_auroc(bayes, [familiar], [unfamiliar], score, draws=draws, generator=seed)
        assert got == 1.0, score
    seed = torch.Generator().manual_seed(0)
    assert ood_auroc(bayes, [familiar], [unfamiliar], "mutual_information", draws=draws, generator=seed) == 0.5


def test_scores_that_are_no_numbers_are_refused():
    bayes = vi.variationalize(Certain(1), lk.Bernoulli(), vi.MeanField(initial_scale=1e-3), num_data=9)
    fine, broken = torch.ones(3, 1), torch.tensor([[1.0], [torch.nan], [torch.nan]])
    for sides, name in (((broken, fine), "in_loader"), ((fine, broken), "out_loader")):
        with pytest.raises(
            ValueError, match=rf"2 of 3 scores \(entropy\) of {name} are not finite.*predict\(x\).outputs"
        ):
            ood_auroc(bayes, [sides[0]], [sides[1]], draws=3)
    with pytest.raises(ValueError, match=r"2 of 3 .* are NaN"):
        evaluate(bayes, [(broken, torch.ones(3, 1))], draws=3)
    numbers = vi.variationalize(Certain(1), lk.Gaussian(1.0), vi.MeanField(initial_scale=1e-3), num_data=9)
    with pytest.raises(ValueError, match="2 of 3 uncertainties are NaN"):
        evaluate(numbers, [(broken, torch.ones(3, 1))], draws=3)
