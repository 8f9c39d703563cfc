"""A normal fitted on draws that are new at every step, where so many parameters fit any fixed draws too well.

At draws of q the gradients tell the mean curvature A and slope b with noise (`newton.py`). A share ρ of the natural
gradient's step, in coordinates z of q,

    precision I ← (1 − ρ)I + ρA,  mean ← ρ (new precision)⁻¹ b

is linear in A: noise has mean zero, and with shares 1/t the end is an average over all draws. (Shares in the
exponent, as in `newton.stepped`, average logarithms of noisy eigenvalues, which are too small: q becomes too wide.)
"""

from collections.abc import Callable
from math import inf
from statistics import fmean, stdev
from typing import NamedTuple

from torch import Tensor

from ..models.target import Target
from .coordinates import Limit
from .newton import Local, Normal, averaged, full, is_far, local

#: up to here draws are multiplied by four whatever they gain, and they must gain less
FEW = 512
#: nats that new draws may promise a fit that goes only part of the way to them, and most draws that it averages over
AVERAGED, MOST_AVERAGED = 0.1, 1 << 13
#: the same where draws are new at every step
MOST_FRESH = 1 << 16
#: most draws that a fit takes at once by itself
MAX_DRAWS = 1 << 12
#: share of ten tolerances that may be left, on few draws and on many
LEFT_FEW, LEFT = 0.2, 0.5
#: share of a step while the ELBO rises, and the least one: where steps fail it is halved
SHARE, LEAST_SHARE = 0.1, 0.01
#: steps whose mean ELBO is compared with that of as many before
WINDOW = 20
#: standard errors and nats that a window must be above the one before
RISES, NATS = 1.0, 0.1
#: nats below the best window at which a step has failed, beside ten standard deviations
FAILED = 10.0


def more_draws(before: int, left: float) -> int:
    """How many more draws, a power of two, leave enough of what an average over `before` of them leaves.

    Example:
        >>> more_draws(1280, left=1.0)  # 2560 in all
        2048
    """
    wanted = max(0.0, before * (left / LEFT - 1))
    return min(MAX_DRAWS, max(2 * FEW, 1 << int(wanted).bit_length()))


class Averaged(NamedTuple):
    """Where it ended, its ELBO on draws it has not been fitted to, and the nats that noise has left."""

    normal: Normal
    elbo: float
    left: float


def ascend_on_fresh_draws(
    target: Target,
    normal: Normal,
    draws: Callable[[int], Tensor],
    each: Callable[[Local], None],
    *,
    enough: float,
    most: int,
) -> Averaged:
    """A full normal by steps on the draws of their index: of one share while the ELBO rises, then of shares 1/t.

    Noise promises c/S on S draws, and leaves c/N of an average over N: it ends where that is `enough`, after `most`
    draws that are averaged over, or where no evaluation is left.

    Example:
        >>> import torch
        >>> from structvi import LogDensity, Parameters
        >>> from structvi.density.fixed_draws import FixedDraws
        >>> space = Parameters({"z": torch.zeros(2, dtype=torch.float64)})
        >>> target = LogDensity(lambda p: -0.5 * (p["z"] - 3).square().sum(), space)
        >>> start = Normal(space.initial, torch.eye(2, dtype=torch.float64))
        >>> draws = lambda step: FixedDraws(16, step)(1, 2, 0, dtype=torch.float64).diagonal
        >>> end = ascend_on_fresh_draws(target, start, draws, lambda at: None, enough=1e-3, most=4096)
        >>> [round(x, 2) for x in end.normal.mean.tolist()]
        [3.0, 3.0]
    """
    share, seen, noise, kept, before = SHARE, [], [], normal, -inf
    step, steady, left = 0, 0, inf  # steady: steps of shares 1/t
    while True:
        z = draws(step)
        try:
            at = local(target, normal, z)
        except Limit:
            break
        step += 1
        if at is None or _failed(at.elbo, seen) or is_far(at.normal, target.space):
            normal, share, seen, noise, steady = kept, share / 2, [], [], 0
            if share < LEAST_SHARE:
                break
            continue
        each(at)
        seen.append(at.elbo)
        noise.append(at.noise * len(z))
        if steady:
            steady += 1
            left = fmean(noise[-WINDOW:]) / (len(z) * (1 / share + steady))
            if left < enough or steady * len(z) >= most:
                normal = averaged(at, full, 1 / (1 / share + steady))
                break
        elif len(seen) % WINDOW == 0:
            now, error = fmean(seen[-WINDOW:]), stdev(seen[-WINDOW:]) / WINDOW**0.5
            steady = int(now < before + max(NATS, RISES * error))
            kept, before = at.normal, now
        normal = averaged(at, full, 1 / (1 / share + steady) if steady else share)
    return Averaged(normal, fmean(seen[-WINDOW:]) if seen else -inf, left)


def _failed(elbo: float, seen: list[float]) -> bool:
    last = seen[-WINDOW:]
    return len(last) > 1 and elbo < fmean(last) - FAILED - 10 * stdev(last)
