"""One number on top of predictions, a temperature or a scale, from losses of held-out cases at a grid of its values.

Between the points of the grid losses are interpolated by a polynomial.
"""

from collections.abc import Iterator
from math import exp, prod, sqrt

import torch
from torch import Tensor

from ..models.calibration import LOG_BOUND, Adjustment, Kind

#: log T at which losses are kept; 0 is among them
GRID = torch.linspace(-LOG_BOUND, LOG_BOUND, 41, dtype=torch.float64)
ONE = 20
#: points of the grid through which a polynomial goes
POINTS = 7
FOLDS = 5
#: fewer cases say nothing of a temperature
FEWEST = 10


def label_losses(log_p: Tensor, labels: Tensor, is_binary: bool) -> Iterator[Tensor]:
    """At every temperature of `GRID` −log q_t, [B, ..], of q ∝ p^(1/T), with log p [B, .., C] and labels [B, ..].

    Example:
        >>> log_p = torch.tensor([[0.9, 0.1]]).double().log()
        >>> losses = torch.stack(list(label_losses(log_p, torch.tensor([0]), False)))
        >>> round(float(losses[ONE].exp()), 3)
        1.111
    """
    log_p = log_p.clamp(min=-1e4)  # a label that is impossible is so at every temperature
    labels = (labels > 0.5 if is_binary else labels).long().unsqueeze(-1)
    for u in GRID.tolist():
        scaled = log_p * exp(-u)
        yield scaled.logsumexp(-1) - scaled.gather(-1, labels).squeeze(-1)


def fitted(kind: Kind, losses: Tensor, count: Tensor, order: list[str] | None = None) -> Adjustment:
    """The value with the least loss, and what it gains on cases that were left out of its fit.

    Args:
        kind: what it is a value of.
        losses: −log p of every case at every point of `GRID`, summed over its elements: [n, G].
        count: how many elements: [n].
        order: a text for each case, by which the cases are dealt to the folds; as they come if not given.
    """
    if not bool(losses.isfinite().all()):
        raise ValueError(
            "the log probability of some held-out cases is not finite: look at the network's outputs there, "
            "predict(x).outputs"
        )
    n = len(losses)
    if n < FEWEST:
        raise ValueError(f"a {kind} is fitted on at least {FEWEST} held-out cases, got {n}")
    if order is not None:
        rank = torch.tensor(sorted(range(n), key=order.__getitem__))
        losses, count = losses[rank], count[rank]
    gains = losses[:, ONE] - left_out(losses)
    total = float(count.sum())
    gain = float(gains.sum()) / total
    error = sqrt(float((gains - gain * count).square().sum()) * n / (n - 1)) / total
    return Adjustment(kind, exp(least(losses)), gain, error, n)


def left_out(losses: Tensor) -> Tensor:
    """The loss of every case [n], of losses [n, G], at the value that the cases of other folds ask for."""
    found, fold = losses.new_empty(len(losses)), torch.arange(len(losses)) % FOLDS
    for own in range(FOLDS):
        out = fold == own
        found[out] = at(losses[out], least(losses[~out]))
    return found


def at(losses: Tensor, u: float) -> Tensor:
    """Losses [n, G] between the points of the grid, at log T = u: [n]."""
    return losses @ _at(u)


def least(losses: Tensor) -> float:
    """log T with the least sum of losses [n, G].

    It lies between the neighbours of the best point, where the polynomial's slope is zero: by its slope, for values
    tell a minimum to the root of rounding only.
    """
    losses = losses.sum(0)
    best = int(losses.argmin())
    start, nodes = _around(float(GRID[best]))
    values = losses[start : start + POINTS].tolist()
    low, high = float(GRID[max(0, best - 1)]), float(GRID[min(len(GRID) - 1, best + 1)])
    for _ in range(60):
        middle = (low + high) / 2
        rises = sum(w * v for w, v in zip(_slopes(middle, nodes), values, strict=True)) > 0
        low, high = (low, middle) if rises else (middle, high)
    return (low + high) / 2


def _at(u: float) -> Tensor:
    """Weights [G] of the grid's values in that of a polynomial at log T = u."""
    start, nodes = _around(u)
    weights = torch.zeros_like(GRID)
    weights[start : start + POINTS] = torch.tensor(_shares(u, nodes), dtype=torch.float64)
    return weights


def _around(u: float) -> tuple[int, list[float]]:
    """The points of the grid nearest to u: where they start, and what they are."""
    start = min(max(0, int((GRID - u).abs().argmin()) - POINTS // 2), len(GRID) - POINTS)
    return start, GRID[start : start + POINTS].tolist()


def _shares(u: float, nodes: list[float]) -> list[float]:
    """Lagrange's polynomials at u."""
    return [prod((u - other) / (own - other) for other in nodes if other != own) for own in nodes]


def _slopes(u: float, nodes: list[float]) -> list[float]:
    """Their derivatives."""
    return [
        sum(prod(u - one for one in nodes if one not in (own, other)) for other in nodes if other != own)
        / prod(own - other for other in nodes if other != own)
        for own in nodes
    ]
