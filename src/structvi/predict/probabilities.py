"""Probabilities of mixtures: inside their range, and their entropy."""

import torch
from torch import Tensor


def as_probability(p: Tensor) -> Tensor:
    """A sum of weighted probabilities, without what rounding may add: in [0, 1]."""
    return p.clamp(0.0, 1.0)


def as_log_probability(log_p: Tensor, discrete: bool) -> Tensor:
    """log of a sum of weighted probabilities, at most 0; of densities as it is."""
    return log_p.clamp(max=0.0) if discrete else log_p


def label_entropy(p: Tensor, binary: bool) -> Tensor:
    """−Σ_c p_c log p_c in nats, of probabilities [B, C, ..], or of those of 1 [B, ..]: [B, ..]."""
    if binary:
        return -torch.xlogy(p, p) - torch.xlogy(1 - p, 1 - p)
    return -torch.xlogy(p, p).sum(1)
