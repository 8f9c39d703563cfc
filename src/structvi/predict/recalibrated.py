"""The components of a predictive mixture, changed so that the mixture is the calibrated one.

With the components changed, everything asked of the mixture follows from them, and agrees: mean, log probability,
entropy, intervals, samples.

A temperature is one of the averaged probabilities, q ∝ p̄^(1/T). The draws follow through one channel, the same for all,
that takes p̄ to q and moves no more probability than it must: of class c the share (1 − q_c/p̄_c)₊ is taken, and given to
the classes with q > p̄ in proportion to q − p̄. It is linear, so Σ_s w_s p'_s = q; and what goes through a channel tells
no more of the weights than before: the mutual information is at most that of the draws.

A scale c stretches the mixture around its mean m: the deviation of each component's mean from m, and its standard
deviation, are multiplied by c. Epistemic and aleatoric variance are both c² times what they were.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Normal
from torch.nn.functional import logsigmoid

from ..models.calibration import Adjustment, Kind


def kind_for(d: Distribution) -> Kind | None:
    """What can be fitted on top of a mixture of such components."""
    if isinstance(d, Categorical | Bernoulli):
        return "temperature"
    return "scale" if type(d) is Normal else None


def recalibrated(d: Distribution, weights: Tensor, adjustment: Adjustment) -> Distribution:
    """The components [S, B, ..] after a temperature or a scale."""
    if kind_for(d) != adjustment.kind:
        raise ValueError(f"a {adjustment.kind} cannot be applied to {type(d).__name__}")
    if isinstance(d, Normal):
        mean = torch.tensordot(weights.to(d.loc), d.loc, dims=1)
        loc = mean + adjustment.value * (d.loc - mean)
        return Normal(loc, (adjustment.value * d.scale).expand_as(loc), validate_args=False)
    log_p = log_probabilities(d)
    changed = _through_channel(log_p, weights, adjustment.value)
    if isinstance(d, Categorical):
        return Categorical(logits=changed, validate_args=False)
    most = torch.finfo(changed.dtype).max
    return Bernoulli(logits=(changed[..., 1] - changed[..., 0]).clamp(-most, most), validate_args=False)


def log_probabilities(d: Any) -> Tensor:
    """log p(c | y_s) with the classes last, [S, B, .., C]; of 0 and 1 for Bernoulli."""
    if isinstance(d, Bernoulli):
        return torch.stack([logsigmoid(-d.logits), logsigmoid(d.logits)], -1)
    return d.logits


def log_average(log_p: Tensor, weights: Tensor) -> Tensor:
    """log Σ_s w_s p_s of log p_s [S, ..]."""
    return (weights.to(log_p).log().reshape(-1, *[1] * (log_p.ndim - 1)) + log_p).logsumexp(0)


def _through_channel(log_p: Tensor, weights: Tensor, temperature: float) -> Tensor:
    """log p'_s of log p_s, [S, B, .., C]."""
    log_mean = log_average(log_p, weights)
    log_q = (log_mean / temperature).log_softmax(-1)
    change = (log_q - log_mean).masked_fill(log_mean.isneginf(), 0.0)  # a class that no draw has stays so
    kept = change.clamp(max=0.0)
    lost = _log_one_minus_exp(kept)
    gained = (log_q + _log_one_minus_exp(-change.clamp(min=0.0))).masked_fill(change <= 0, -torch.inf)
    total = gained.logsumexp(-1, keepdim=True)
    share = (gained - total).masked_fill(gained.isneginf(), -torch.inf)  # of what is given, to each class
    taken = (log_p + lost).logsumexp(-1, keepdim=True)  # [S, B, .., 1]
    # as much is taken as is given; of a label that is nearly certain rounding knows only the latter
    average = log_average(taken, weights)
    taken = torch.where(average.isneginf(), total, taken + (total - average))
    return torch.logaddexp(log_p + kept, share + taken)


def _log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 − eˣ) of x ≤ 0; −∞ at 0."""
    return torch.log(-torch.expm1(x))
