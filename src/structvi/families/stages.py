"""A fit in two stages: mean and scales first, then the low-rank factors, which have to know the scales."""

import torch

from .family import Family
from .low_rank import STAGE_FACTOR, LowRankFamily, factors

__all__ = ["factors", "hold_factors", "is_untouched", "release_factors"]


def is_untouched(family: Family) -> bool:
    """Return whether every scale still has the value that its factor is relative to: no fit has moved it."""
    return all(own.is_untouched() for own in _with_factors(family))


@torch.no_grad()
def hold_factors(family: Family) -> None:
    """Hold all low-rank factors at zero: mean and scales learn alone, N(μ, diag(s)²)."""
    for factor in factors(family):
        factor.zero_().requires_grad_(False)


def release_factors(family: Family, generator: torch.Generator | None = None, size: float = STAGE_FACTOR) -> None:
    """Let all low-rank factors learn, from N(0, size²) relative to the present scales."""
    for own in _with_factors(family):
        own.start_factor(generator, size)


def _with_factors(family: Family) -> list[LowRankFamily]:
    return [own for own in family.modules() if isinstance(own, LowRankFamily) and own.rank]
