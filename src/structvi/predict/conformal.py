"""Conformal sets, intervals and masks, and their scores. The exchangeable unit is a case, a row of a batch.

- One label a case: the score is 1 − p of the label that came; the set has all labels with a score up to the quantile.
- Numbers: the score is |t − mean|/std, the largest of the case where it has several; intervals are mean ± quantile·std,
  and with the promised probability *all* numbers of a case lie in theirs.
- Masks, several labels a case: conformal risk control. A label is kept where its probability reaches a threshold; the
  loss of a case is the share of its pixels whose label is not kept: of 0 and 1 of the pixels that are 1, of C classes
  the average over the classes that the case has. Cases without such pixels have no loss, and do not count.
"""

import torch
from torch import Tensor

from ..models.calibration import THRESHOLDS, Conformal, Form

#: by how much a score may exceed the quantile: rounding differs between batches of different sizes
SLACK = 1e-6


def form_of(labels: bool, t: Tensor) -> Form:
    """Return the form of a target t [B, ..]."""
    if not labels:
        return "number"
    return "label" if t[:1].numel() == 1 else "mask"


def label_scores(p: Tensor, t: Tensor, observed: Tensor) -> Tensor:
    """1 − p_t of the cases with a label: p [B, C] (or those of 1, in the shape of t), t [B, ..] → [n]."""
    both = _both(p, p.shape == t.shape)
    return (1 - both.gather(1, t.reshape(-1, 1).long()).squeeze(1))[observed.reshape(-1)]


def number_scores(mean: Tensor, std: Tensor, t: Tensor, observed: Tensor) -> Tensor:
    """The largest |t − mean|/std of each case with a number: [B, ..] each → [n]."""
    score = (t.double() - mean.double()).abs() / std.double()
    seen = observed.reshape(len(t), -1)
    return score.reshape(len(t), -1).masked_fill(~seen, 0.0).amax(1)[seen.any(1)]


def mask_losses(p: Tensor, t: Tensor, observed: Tensor) -> Tensor:
    """Return the loss at every threshold of each case with labels: p [B, C, ..] or [B, ..] of 1 → [n, G]."""
    B, G, t = len(t), len(THRESHOLDS), t.long()
    if p.shape == t.shape:  # of 0 and 1: one class, the pixels that are 1
        observed, own, t, C = observed & (t == 1), p, torch.zeros_like(t), 1
    else:
        own, C = p.gather(1, t.unsqueeze(1)).squeeze(1), p.shape[1]  # of the label that came
    row = torch.arange(B, device=t.device).reshape(-1, *[1] * (t.ndim - 1)).expand_as(t)
    # a label is missed at all thresholds above its probability
    first = torch.bucketize(own.double().clamp(0, 1), THRESHOLDS.to(t.device), right=True)
    where = ((row * C + t) * (G + 1) + first)[observed]
    found = torch.bincount(where, minlength=B * C * (G + 1)).cpu().reshape(B, C, G + 1).double()
    number = found.sum(-1)  # [B, C]
    missed = found[..., :G].cumsum(-1) / number.clamp(min=1).unsqueeze(-1)
    shown = (number > 0).sum(1)
    return (missed.sum(1) / shown.clamp(min=1).unsqueeze(-1))[shown > 0]


def label_sets(p: Tensor, binary: bool, conformal: Conformal, level: float) -> Tensor:
    """[B, C], True for the labels in the set; of 0 and 1 [B, 2]."""
    return 1 - _both(p, binary) <= conformal.quantile(level) + SLACK


def intervals(mean: Tensor, std: Tensor, conformal: Conformal, level: float) -> tuple[Tensor, Tensor]:
    """Lower and upper ends, [B, ..] each."""
    half = conformal.quantile(level) * (1 + SLACK) * std.double()
    return (mean.double() - half).to(mean.dtype), (mean.double() + half).to(mean.dtype)


def masks(p: Tensor, conformal: Conformal, level: float) -> Tensor:
    """Return a mask of the labels whose probability reaches the threshold: [B, C, ..], or [B, ..] of 1."""
    return p.double() >= conformal.threshold(level) * (1 - SLACK)


def joined(form: Form, parts: list[Tensor]) -> Conformal:
    """Return the scores of all cases as one value."""
    values = torch.cat(parts).double()
    if not bool(values.isfinite().all()):
        raise ValueError("some conformal scores are not finite: look at predict(x).outputs there, and predict(x).std")
    if form == "mask":  # rounding of an average must not break its order
        return Conformal(form, values.mean(0).clamp(0, 1).cummax(0).values, len(values))
    return Conformal(form, values.clamp(min=0).sort().values, len(values))


def _both(p: Tensor, binary: bool) -> Tensor:
    """Probabilities [B, C], of 0 and 1 where only that of 1 is given."""
    p = p.double()
    return torch.stack([1 - p.reshape(-1), p.reshape(-1)], 1) if binary else p.reshape(len(p), -1)
