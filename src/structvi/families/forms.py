"""What a family says of itself to those who fit, grow or search it."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor

Coordinates = Literal["diagonal", "full"]


class LowRankForm(NamedTuple):
    """A normal as a low-rank family has it: what `grow(rank=)` adds columns to."""

    mean: Tensor  # [P]
    log_scale: Tensor  # [P]
    unit: Tensor  # [P], the scale that the factor is relative to
    factor: Tensor  # [P, K]
    #: from a rank to a recipe of that form; None for the covariance form
    recipe: Callable[[int], Any] | None


class RelativeForm(NamedTuple):
    """N(mean, S(I + GGᵀ)S) with S = diag(scale), or with the precision S⁻¹(I + GGᵀ)S⁻¹."""

    mean: Tensor  # [P]
    scale: Tensor  # [P]
    factor: Tensor  # G [P, K]
    of_precision: bool


class Factor(NamedTuple):
    """A parameter [P, K] that is a low-rank factor."""

    parameter: Tensor
    #: the parameters [P] that are moved beside it
    beside: tuple[Tensor, ...]
    #: the number of weights, over all ranks
    P: int


class MeanAndScale(NamedTuple):
    """The parameters of a normal that has no others."""

    mean: Tensor  # [P]
    log_scale: Tensor  # [P]


class PartsSought(NamedTuple):
    """What a recipe of a mixture has to say to a search for modes."""

    #: of its parts; the last is that of all further ones
    recipes: list[Any]
    #: how many parts it has; None: as many as the search finds worth having
    number: int | None


class Profile(NamedTuple):
    """The best approximation of a normal that has given scales."""

    kl: float  # from it to the normal, in nats
    gradient: Tensor  # of the KL by the log scales, [P]
    factor: Tensor  # relative to the scales, [P, K]
