"""One number on top of predictions, a temperature or a scale, fitted on held-out cases and cross-fitted by folds.

The losses of every case are tabulated at a grid of log values, so that the network sees the data once and no pixel is
kept. Between the points of the grid a loss is the parabola through the nearest three.
"""

from collections.abc import Iterator
from math import exp, sqrt

import torch
from torch import Tensor

from ..models.calibration import LOG_BOUND, Adjustment, Kind

#: log T at which losses are tabulated; steps of 0.05 put the optimum within 0.2 % of a fine search
GRID = torch.linspace(-LOG_BOUND, LOG_BOUND, 101, dtype=torch.float64)
#: the point of the grid with T = 1
ONE = len(GRID) // 2
#: folds of the cross-fit
FOLDS = 5
#: fewer held-out cases say nothing of a temperature
FEWEST = 10


def temperature_losses(log_p: Tensor, labels: Tensor) -> Tensor:
    """Return −log q_t of q ∝ p^(1/T) at every temperature of `GRID`: log p [.., C], labels [..] → [.., G], float64.

    Example:
        >>> log_p = torch.tensor([[0.9, 0.1]]).log()
        >>> round(float(temperature_losses(log_p, torch.tensor([0]))[0, ONE].exp()), 3)
        1.111
    """
    return torch.stack(list(each_temperature(log_p, labels)), -1)


def each_temperature(log_p: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """Yield `temperature_losses` [..] one temperature after the other, for many pixels."""
    log_p = log_p.double().clamp(min=-1e4)  # an impossible label stays impossible at every temperature
    labels = labels.long().unsqueeze(-1)
    for u in GRID.tolist():
        scaled = log_p * exp(-u)
        yield scaled.logsumexp(-1) - scaled.gather(-1, labels).squeeze(-1)


def fit_temperature(losses: Tensor) -> float:
    """Return the temperature with the least sum of losses [n, G], tabulated at the log temperatures `GRID`.

    Example:
        >>> log_p = torch.tensor([[0.9, 0.1]]).log().expand(3, 2)  # right in two cases of three: 9^(1/T) = 2
        >>> round(fit_temperature(temperature_losses(log_p, torch.tensor([0, 0, 1]))), 2)
        3.17
    """
    total = losses.sum(0)
    best = int(total.argmin().clamp(1, len(GRID) - 2))
    below, at, above = total[best - 1 : best + 2].tolist()
    bend, step = below - 2 * at + above, float(GRID[1] - GRID[0])
    shift = 0.5 * (below - above) / bend if bend > 0 else float(below > above) - float(below < above)
    return exp(float(GRID[best]) + step * min(1.0, max(-1.0, shift)))


def losses_at(losses: Tensor, temperature: float) -> Tensor:
    """Return the losses [n] at one temperature, of losses [n, G] at those of `GRID`."""
    u = torch.tensor(temperature, dtype=torch.float64).log()
    best = int((GRID - u).abs().argmin().clamp(1, len(GRID) - 2))
    s = float((u - GRID[best]) / (GRID[1] - GRID[0]))
    below, at, above = losses[:, best - 1 : best + 2].unbind(1)
    return at + 0.5 * s * (above - below) + 0.5 * s**2 * (below - 2 * at + above)


def cross_fitted_losses(losses: Tensor, folds: int = FOLDS) -> Tensor:
    """Return every case's loss [n] at the temperature that the cases of all other folds ask for.

    Case i is in fold i mod `folds`: shuffle the rows of losses [n, G] first where their order means something.
    """
    found, fold = losses.new_empty(len(losses)), torch.arange(len(losses), device=losses.device) % folds
    for out in (fold == own for own in range(folds)):
        found[out] = losses_at(losses[out], fit_temperature(losses[~out]))
    return found


def adjust(kind: Kind, losses: Tensor, count: Tensor) -> Adjustment:
    """Return the temperature or scale with the least loss, and what it gains on cases that took no part in its fit.

    Args:
        kind: what it is a value of.
        losses: −log p of every case at every point of `GRID`, summed over its elements: [n, G], shuffled.
        count: how many elements: [n].
    """
    if not bool(losses.isfinite().all()):
        raise ValueError(
            "the log probability of some held-out cases is not finite: look at the network's outputs there, "
            "predict(x).outputs"
        )
    n = len(losses)
    if n < FEWEST:
        raise ValueError(f"a {kind} is fitted on at least {FEWEST} held-out cases with observed targets, got {n}")
    gains, total = losses[:, ONE] - cross_fitted_losses(losses), float(count.sum())
    gain = float(gains.sum()) / total
    error = sqrt(float((gains - gain * count).square().sum()) * n / (n - 1)) / total
    return Adjustment(kind, fit_temperature(losses), gain, error, n)
