"""Where the parameters of a family start, and the constructor arguments that say so."""

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from ..parameters import Parameters
from ..util.checks import check_integer, is_positive

STARTS = ("current", "fresh", "zero")


def initial_mean(parameters: Parameters, at: str, generator: torch.Generator | None) -> Tensor:
    """[P]: where a mean starts: "current" values of the network, a "fresh" draw of its initialisation, or "zero"."""
    starts: dict[str, Callable[[], Tensor]] = {
        "current": lambda: parameters.initial.clone(),
        "fresh": lambda: parameters.fresh(generator),
        "zero": lambda: torch.zeros_like(parameters.initial),
    }
    return starts[at]()


def check_initial_mean(initial_mean: str) -> None:
    if initial_mean not in STARTS:
        raise ValueError(f'initial_mean must be "current", "fresh" or "zero", got {initial_mean!r}')


def check_start(initial_mean: str, initial_scale: float) -> None:
    """The constructor arguments that the families share."""
    check_initial_mean(initial_mean)
    if not is_positive(initial_scale):
        raise ValueError(
            f"initial_scale must be a positive number, a fraction of each tensor's scale, got {initial_scale!r}"
        )


def check_factor(rank: int, initial_factor: float) -> None:
    """The constructor arguments of a low-rank factor."""
    check_integer("rank", rank, least=0)
    if not isinstance(initial_factor, int | float) or isinstance(initial_factor, bool) or not 0 <= initial_factor < inf:
        raise ValueError(f"initial_factor must be a number ≥ 0, got {initial_factor!r}")


def check_rank_fits(rank: int, P: int) -> None:
    if rank > P:
        raise ValueError(f"rank {rank} is larger than the number of weights P = {P}; take at most {P}")


def normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal noise for initial values: made where the generator is, moved to where it is used."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=device).to(like.device)
