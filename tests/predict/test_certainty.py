"""Where a network is certain: every quantity is a number, and probabilities are probabilities, in every precision."""

import math

import pytest
import torch

from structvi import likelihoods as lk
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


def test_small_rates_keep_their_logarithm():
    """P(1) = rate e^{−rate}: of rates that are zero in float32 too."""
    pred = Predictive(torch.tensor([[[-200.0]]]), torch.ones(1), lk.Poisson())
    assert pred.log_prob(torch.ones(1, 1)).item() == -200
