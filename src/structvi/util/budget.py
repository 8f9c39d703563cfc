"""The budget of work around a fit's steps, in passes over the data: by default a tenth of the fit's own.

A pass is the network forward over all N observations at one draw of the weights. A step with S draws on B observations
counts 3·S·B/N of them, for forward and backward. Passes, not seconds: what a fit keeps must not depend on the machine.
"""

from collections.abc import Iterable, Sized
from math import floor
from typing import Any

#: Share of the passes of a fit for the comparison at its end, and for `diagnose`.
SHARE = 0.1
#: Forward and backward take about three times as long as forward.
STEP = 3.0
#: Products of a weight and an observation that are free all the same: of dense layers milliseconds, of convolutions,
#: which use a weight at every pixel, a second or two.
FREE = 1e7


def default_passes(of_the_fit: float, N: int, P: int) -> float:
    """Return a tenth of the fit's passes, or as many as `FREE` products allow.

    Example:
        >>> default_passes(600.0, N=10_000, P=100_000), default_passes(600.0, N=1000, P=100)
        (60.0, 100.0)
    """
    return max(SHARE * of_the_fit, FREE / (N * P))


def length_of(loader: Iterable[Any]) -> int | None:
    """Return the number of batches of a loader; None if it is unknown.

    Example:
        >>> length_of([1, 2]), length_of(iter([1, 2]))
        (2, None)
    """
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader has a length, and that of a stream raises
        return None


def batches_within(passes: float, draws: int, length: int | None, most: int | None = None) -> int | None:
    """Return how many batches the budget allows to read with these draws, at least one; `most` if it allows all.

    Args:
        passes: the budget.
        draws: how many weights each batch is read with.
        length: how many batches there are; None where that is not known.
        most: no more than these; None for all.

    Example:
        >>> batches_within(60.0, draws=48, length=40), batches_within(6.0, draws=48, length=40)
        (None, 5)
    """
    if length is None or (within := floor(passes / draws * length)) >= length:
        return most
    return max(1, within if most is None else min(most, within))
