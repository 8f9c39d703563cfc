"""The mean of a normal of many numbers, by itself."""

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from .lbfgs import minimise
from .low_rank_matrix import LowRankMatrix

#: pairs of draws on which it is searched for, steps of that and its tolerance
PAIRS, STEPS, TOLERANCE = 4, 200, 1e-9

#: log p [n] and its gradient [n, P] at rows [n, P]; None where one is not finite
Score = Callable[[Tensor], tuple[Tensor, Tensor] | None]


def better_mean(
    score: Score, mean: Tensor, covariance: LowRankMatrix, noise: Callable[[int], Tensor], pairs: int
) -> tuple[Tensor, float]:
    """The mean by L-BFGS on a few mirrored draws that stay the same, in units of q; and the nats that are left.

    Along directions that q is narrow in and the log density is wide in, slopes are small and ways long; a model of the
    curvature may not have met them. What is found is kept where it gains two standard errors on draws that it has not
    been fitted to. Where the steps do not end by themselves, as much may be left as the second half of them has gained.

    Args:
        score: log p and its gradient.
        mean: where it begins, [P].
        covariance: that of q.
        noise: so many standard normal rows.
        pairs: of draws that judge.
    """
    steps, values = covariance.root(noise(PAIRS)), []
    steps = torch.cat([steps, -steps])

    def function(x: Tensor) -> tuple[float, Tensor]:
        found = score(mean + covariance.root(x.unsqueeze(0)) + steps)
        if found is None:
            return inf, torch.zeros_like(x)
        value, gradient = found
        values.append(max([value.mean().item(), *values[-1:]]))
        return -value.mean().item(), -covariance.root_transposed(gradient.mean(0, keepdim=True)).squeeze(0)

    x, _, converged = minimise(function, torch.zeros_like(mean), tolerance=TOLERANCE, iterations=STEPS)
    new = mean + covariance.root(x.unsqueeze(0)).squeeze(0)
    steps = covariance.root(noise(pairs))
    before, after = (score(torch.cat([centre + steps, centre - steps])) for centre in (mean, new))
    if before is None or after is None or not values:
        return mean, 0.0
    gains = (after[0] - before[0]).view(2, -1).mean(0)
    if gains.mean().item() < 2 * gains.std().item() / len(gains) ** 0.5:
        return mean, 0.0
    return new, 0.0 if converged else values[-1] - values[len(values) // 2]
