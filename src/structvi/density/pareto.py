"""Pareto-smoothed importance weights, and k̂."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..objective import NonFiniteError

#: From this k̂ on, importance weights cannot be trusted at any practical number of draws.
K_LIMIT = 0.7
#: Fewer draws have no tail to fit a Pareto distribution to.
FEWEST = 25


def psis(log_weights: Tensor) -> tuple[Tensor, float]:
    """Pareto-smoothed importance sampling: weights that sum to one, and k̂, the shape of their tail.

    The largest weights, min(S/5, 3√S) of them, are replaced by quantiles of a generalised Pareto distribution fitted to
    them (Vehtari et al., JMLR 25:72, 2024). Its shape k̂ says how many moments the weights have: fewer than 1/k̂. Below
    0.5 their variance is finite, below 0.7 estimates are good in practice, from 0.7 on they are not, and from 1 on not
    even the weights' mean exists. Weights that are equal to the rounding of log densities have no tail: k̂ is 0 then.

    Args:
        log_weights: log p − log q at independent draws of q, [S], up to a constant; −inf where p is zero.

    Example:
        >>> weights, k = psis(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
        >>> round(weights.sum().item(), 6), k < 0.7
        (1.0, True)
    """
    psislw = psislw_of_arviz()
    if not isinstance(log_weights, Tensor) or log_weights.ndim != 1 or log_weights.shape[0] < FEWEST:
        came = tuple(log_weights.shape) if isinstance(log_weights, Tensor) else type(log_weights).__name__
        raise ValueError(f"psis expects log weights [S] of S ≥ {FEWEST} draws, got {came}")
    values = log_weights.detach().double().cpu()
    highest = values.max().item()
    if not -torch.inf < highest < torch.inf:
        raise NonFiniteError(
            f"the log weights have a maximum of {highest}: look at where the log density is not finite"
        )
    spread = highest - values.min().item()
    if spread <= 1e-6 * (1 + values.abs().max().item()):
        return torch.softmax(values, 0).to(log_weights.device), 0.0
    with warnings.catch_warnings():  # it takes 1/∞ for the zero that it is
        warnings.filterwarnings("ignore", "overflow encountered in exp", RuntimeWarning)
        smoothed, k = psislw((values - highest).numpy())
    return torch.as_tensor(smoothed).exp().to(log_weights.device), float(k)


def psislw_of_arviz() -> Callable[..., Any]:
    """arviz's, or an error that says how to get it."""
    try:
        from arviz import psislw
    except ImportError:
        raise ImportError('k̂ and smoothed weights need arviz: pip install "structvi[diagnostics]"') from None
    return psislw
