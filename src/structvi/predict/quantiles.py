"""Quantiles and the CRPS of mixtures over draws, element by element."""

from collections.abc import Callable
from math import pi, sqrt

import torch
from torch import Tensor


def continuous_quantile(
    p: float, cdf: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, tolerance: Tensor
) -> Tensor:
    """t with P(T ≤ t) = p between low and high, [B, ..], by bisection to the tolerance.

    Example:
        >>> zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        >>> round(continuous_quantile(0.25, lambda t: t, zero, one, 1e-9 * one).item(), 8)
        0.25
    """
    for _ in range(200):  # rounding may stop it short of the tolerance
        if not bool((high - low > tolerance).any()):
            break
        middle = (low + high) / 2
        below = cdf(middle) < p
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def count_quantile(p: float, cdf: Callable[[Tensor], Tensor], guess: Tensor) -> Tensor:
    """The smallest whole number t ≥ 0 with P(T ≤ t) ≥ p, [B, ..]; of counts beyond 2⁵³ to rounding.

    Example:
        >>> count_quantile(0.5, lambda t: (t + 1) / 10, torch.ones(1, dtype=torch.float64)).item()
        4.0
    """
    low, high = torch.full_like(guess, -1.0), guess.ceil()
    while bool((short := (cdf(high) < p) & high.isfinite()).any()):
        high = torch.where(short, 2 * high, high)
    while True:
        middle = ((low + high) / 2).floor()
        between = (low < middle) & (middle < high)
        if not bool(between.any()):
            return high
        below = cdf(middle) < p
        low, high = torch.where(between & below, middle, low), torch.where(between & ~below, middle, high)


def poisson_cdf(t: Tensor, rate: Tensor) -> Tensor:
    """P(T ≤ t) = Γ(⌊t⌋ + 1, rate)/Γ(⌊t⌋ + 1)."""
    k = t.to(rate.dtype).floor()
    return torch.where(k < 0, 0.0, torch.special.gammaincc(k.clamp(min=0) + 1, rate))


def normal_mixture_crps(mean: Tensor, scale: Tensor, weight: Tensor, t: Tensor) -> Tensor:
    """E|T − t| − ½ E|T − T'| under Σ_s w_s N(m_s, σ_s²): [S, E], [S, E], [S], [E] → [E].

    E|N(m, σ²)| = σ √(2/π) exp(−m²/2σ²) + m erf(m/σ√2). The second term runs over all S(S + 1)/2 pairs, S of them at
    a time.
    """

    def absolute(m: Tensor, s: Tensor) -> Tensor:
        return s * sqrt(2 / pi) * (-0.5 * (m / s).square()).exp() + m * torch.erf(m / (s * sqrt(2)))

    weight = weight.to(mean)
    crps = torch.tensordot(weight, absolute(mean - t, scale), dims=1)
    for s in range(mean.shape[0]):
        pairs = absolute(mean[s] - mean[s:], (scale[s].square() + scale[s:].square()).sqrt())
        own = weight[s] * weight[s:]
        own[0] /= 2  # every other pair stands for two
        crps = crps - torch.tensordot(own, pairs, dims=1)
    return crps
