"""Noise that S draws share. A coupling is any callable (groups, P, K, generator, dtype, device) → Noise.

Every row of a coupling's noise is standard normal, (ε, z) ~ N(0, I_{P+K}): any function of one draw is estimated
without bias. Couplings choose how the rows of one group depend on each other. Rows come group by
group, and groups are independent: standard errors are taken over groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from .util.checks import check_integer


class Noise(NamedTuple):
    """Standard normal noise: one number per weight and one per low-rank direction."""

    diagonal: Tensor  # [S, P]
    low_rank: Tensor  # [S, K]


Coupling = Callable[..., Noise]
Dtype = torch.dtype | None
Device = torch.device | str | None


def naive(
    groups: int, P: int, K: int, generator: Generator | None = None, dtype: Dtype = None, device: Device = None
) -> Noise:
    """Independent draws, one to a group.

    Example:
        >>> naive(3, P=5, K=2).diagonal.shape
        torch.Size([3, 5])
    """
    every = torch.randn(groups * (P + K), generator=generator, dtype=dtype, device=device)  # one call for both
    return Noise(every[: groups * P].view(groups, P), every[groups * P :].view(groups, K))


def paired(
    groups: int, P: int, K: int, generator: Generator | None = None, dtype: Dtype = None, device: Device = None
) -> Noise:
    """Antithetic pairs (ε, z), (−ε, −z): two draws to a group, mirror images of each other about the mean."""
    half = naive(groups, P, K, generator, dtype, device)
    return Noise(*(torch.stack([x, -x], dim=1).flatten(0, 1) for x in half))


@dataclass(frozen=True)
class Unscented:
    """Draws along jointly orthogonal random combinations of the low-rank directions.

    One group takes D ≤ K rows r_d·q_d, with q_d the rows of a uniform K×K rotation and r_d ~ χ_K, so that each row is
    exactly N(0, I_K) and different rows are orthogonal; each goes with diagonal noise ε_d. The rows of a group, block
    by block of D:

        (ε_d, z_d), [(−ε_d, z_d) if crossed], and the mirror images (−ε, −z) of all these.

    Crossing the signs makes the diagonal noise and the low-rank noise exactly uncorrelated within a group. A family
    without low-rank directions (K = 0) gets antithetic pairs.

    Args:
        directions: D; None for all K.
        crossed: pair every direction with ε and −ε: 4D draws to a group instead of 2D.
        shared_diagonal: one ε for the whole group, as in the original code, instead of one to a direction. It lowers
            the variance of the factor's gradient and raises the variance of the mean's and the scale's.

    Example:
        >>> unscented(directions=2)(1, P=5, K=3).low_rank.shape
        torch.Size([8, 3])
    """

    directions: int | None = None
    crossed: bool = True
    shared_diagonal: bool = False

    def __post_init__(self) -> None:
        check_integer("directions", self.directions, optional=True)

    def group_size(self, K: int) -> int:
        """Return the number of draws in one group at rank K."""
        if K == 0:
            return 2
        return (4 if self.crossed else 2) * (self.directions or K)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Return noise; called with settings instead, a coupling that has these."""
        if len(args) + len(keywords.keys() & {"groups", "P", "K"}) < 3:
            return Unscented(*args, **keywords)
        return self._noise(*args, **keywords)

    def _noise(
        self, groups: int, P: int, K: int, generator: Generator | None = None, dtype: Dtype = None, device: Any = None
    ) -> Noise:
        if K == 0:
            return paired(groups, P, K, generator, dtype, device)
        D = K if self.directions is None else self.directions
        if D > K:
            raise ValueError(
                f"unscented: directions={D} but the family has rank {K}; take at most {K}, or None for all"
            )
        options = {"generator": generator, "dtype": dtype, "device": device}
        z = _rotations(groups, K, options)[:, :D] * torch.randn(groups, D, K, **options).norm(dim=-1, keepdim=True)
        epsilon = torch.randn(groups, 1 if self.shared_diagonal else D, P, **options).expand(groups, D, P)
        if self.crossed:
            epsilon, z = torch.cat([epsilon, -epsilon], dim=1), torch.cat([z, z], dim=1)
        epsilon, z = torch.cat([epsilon, -epsilon], dim=1), torch.cat([z, -z], dim=1)
        return Noise(epsilon.reshape(-1, P), z.reshape(-1, K))


#: all directions, crossed; `unscented(crossed=False)` is another one
unscented = Unscented()


def _rotations(groups: int, K: int, options: dict) -> Tensor:
    """[G, K, K] uniform orthogonal matrices."""
    q, r = torch.linalg.qr(torch.randn(groups, K, K, **options))
    # without the sign of R's diagonal Q is not uniform: its rows have a mean
    return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
