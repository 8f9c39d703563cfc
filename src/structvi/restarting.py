"""Fits that learned nothing, recognised, and begun again elsewhere."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .families.low_rank import LowRankFamily
from .families.mean_field import MeanField
from .history import FitResult
from .optimizing import assign

if TYPE_CHECKING:
    from .variationalize import Posterior

#: A shorter fit is not called stuck: it may only not have begun to learn.
SHORTEST = 200


def state(posterior: "Posterior") -> dict[str, Tensor]:
    """All that a fit changes, copied: the parameters, and the family's buffers."""
    buffers = {f"family.{name}": buffer for name, buffer in posterior.family.named_buffers()}
    return {name: x.detach().clone() for name, x in {**dict(posterior.named_parameters()), **buffers}.items()}


def put(posterior: "Posterior", values: dict[str, Tensor]) -> None:
    buffers = {f"family.{name}": buffer for name, buffer in posterior.family.named_buffers()}
    assign({**dict(posterior.named_parameters()), **buffers}, values)


def elsewhere(posterior: "Posterior", begun: dict[str, Tensor], seed: int) -> None:
    """Likelihood and prior as when the fit began; the family at a fresh draw of the network's initialisation."""
    named = dict(posterior.named_parameters())
    assign({name: named[name] for name in begun}, begun)
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(posterior.family)
    for module in other.modules():
        if isinstance(module, MeanField | LowRankFamily) and module.space is not None:
            module.initial_mean = "fresh"
            module.initialise(module.space, generator)
    posterior.family.load_state_dict(other.state_dict())


def again_if_stuck(
    posterior: "Posterior",
    first: FitResult,
    begun: dict[str, Tensor],
    batches: Iterable[Any],
    restarts: int,
    seed: int,
    fit_again: Callable[[int, str], FitResult],
) -> FitResult:
    """The first fit, or, where it is stuck, the best by ELBO of it and up to `restarts` others.

    Args:
        posterior: as the first fit left it.
        first: what came of it.
        begun: the parameters of likelihood and prior before it.
        batches: of the data, to see what predictions explain.
        restarts: at most so many.
        seed: of the first fit.
        fit_again: (seed, name of a folder) → the result of another fit.
    """
    from .diagnostics.learned import learned  # it needs posteriors

    if first.steps < SHORTEST or (why := learned(posterior, batches).stuck) is None:
        return first
    best, kept = first, state(posterior)
    for number in range(1, restarts + 1):
        elsewhere(posterior, begun, seed + number)
        other = fit_again(seed + number, f"restart-{number}")
        if other.elbo.value > best.elbo.value:
            best, kept = other, state(posterior)
        if best is not first and learned(posterior, batches).stuck is None:
            break
    put(posterior, kept)
    came = "stayed the best" if best is first else "was left for a better one"
    best.notes.append(f"stuck, for {why}: begun again {number} times; the first fit, {first.elbo}, {came}")
    return best


def folder(directory: Any, name: str) -> Path | None:
    return None if directory is None else Path(directory) / name
