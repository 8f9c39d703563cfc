"""A temperature or a scale of held-out cases: fitted on a table of losses, and cross-fitted by folds.

The losses of every case are tabulated at a grid of log values, so that the network sees the data once and no pixel is
kept.
"""

from collections.abc import Iterator
from math import exp

import torch
from torch import Tensor

from ..models.calibration import LOG_BOUND

#: log T at which losses are tabulated; a parabola between its points is within 0.2 % of a fine search
GRID = torch.linspace(-LOG_BOUND, LOG_BOUND, 101, dtype=torch.float64)
#: the point of the grid with T = 1
ONE = int(GRID.abs().argmin())
#: folds of the cross-fit
FOLDS = 5
#: fewer held-out cases say nothing of a temperature
FEWEST = 10


def each_temperature(log_p: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """Yield −log q_t [..] of q ∝ p^(1/T) at every temperature of `GRID`: log p [.., C], labels [..], in float64.

    Example:
        >>> log_p = torch.tensor([[0.9, 0.1]]).log()
        >>> round(float(list(each_temperature(log_p, torch.tensor([0])))[ONE].exp()), 3)
        1.111
    """
    log_p = log_p.double().clamp(min=-1e4)  # an impossible label stays impossible at every temperature
    labels = labels.long().unsqueeze(-1)
    for u in GRID.tolist():
        scaled = log_p * exp(-u)
        yield scaled.logsumexp(-1) - scaled.gather(-1, labels).squeeze(-1)


def fit_temperature(losses: Tensor) -> float:
    """Return the temperature with the least sum of losses [n, G], tabulated at the log temperatures `GRID`.

    Example:
        >>> log_p = torch.tensor([[0.9, 0.1]]).log().expand(3, 2)  # right in two cases of three: 9^(1/T) = 2
        >>> losses = torch.stack(list(each_temperature(log_p, torch.tensor([0, 0, 1]))), -1)
        >>> round(fit_temperature(losses), 2)
        3.17
    """
    total = losses.sum(0)
    best = int(total.argmin().clamp(1, len(GRID) - 2))
    below, at, above = total[best - 1 : best + 2].tolist()
    bend, step = below - 2 * at + above, float(GRID[1] - GRID[0])
    shift = 0.5 * (below - above) / bend if bend > 0 else float(below > above) - float(below < above)
    return exp(float(GRID[best]) + step * min(1.0, max(-1.0, shift)))


def cross_fitted_losses(losses: Tensor) -> Tensor:
    """Return every case's loss [n] at the point of the grid that the cases of all other folds ask for.

    Case i is in fold i mod 5: shuffle the rows of losses [n, G] first where their order means something.
    """
    found, fold = losses.new_empty(len(losses)), torch.arange(len(losses), device=losses.device) % FOLDS
    for out in (fold == own for own in range(FOLDS)):
        found[out] = losses[out, losses[~out].sum(0).argmin()]
    return found
