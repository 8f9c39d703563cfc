"""Fits that learned nothing, begun again elsewhere."""

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .averaging import assign, copied
from .result import FitResult
from .stuck import explained

if TYPE_CHECKING:
    from ..posterior import Posterior

#: A shorter fit is not called stuck: it may only not have begun to learn.
SHORTEST = 200


def elsewhere(posterior: "Posterior", begun: Mapping[str, Tensor], seed: int) -> None:
    """Likelihood and prior as when the fit began; the family at a fresh draw of the network's initialisation."""
    assign({name: x for name, x in posterior.outside_family().items() if name in begun}, begun)
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(posterior.family)
    for family in list(other.families()):
        family.begin_again(generator)
    posterior.family.load_state_dict(other.state_dict())


def again_if_stuck(
    posterior: "Posterior",
    first: FitResult,
    begun: dict[str, Tensor],
    batches: Iterable[Any],
    restarts: int,
    seed: int,
    fit_again: Callable[[int, str, str], FitResult],
) -> FitResult:
    """The first fit, or, where it is stuck, the best by its objective of it and up to `restarts` others.

    Args:
        posterior: as the first fit left it.
        first: what came of it.
        begun: the parameters of likelihood and prior before it.
        batches: of the data, read once for each look at what predictions explain.
        restarts: at most so many.
        seed: of the first fit.
        fit_again: (seed, name of a folder, label for the progress bar) → the result of another fit.
    """
    if first.steps < SHORTEST or (why := explained(posterior, batches).stuck) is None:
        return first
    best, kept = first, copied(posterior.learned())
    for number in range(1, restarts + 1):
        elsewhere(posterior, begun, seed + number)
        other = fit_again(seed + number, f"restart-{number}", f"stuck: begun again, {number} of at most {restarts}")
        if is_better(other, best):
            best, kept = other, copied(posterior.learned())
        if best is not first and explained(posterior, batches).stuck is None:
            break
    assign(posterior.learned(), kept)
    came = "stayed the best" if best is first else "was left for a better one"
    best.notes.append(f"stuck, for {why}: begun again {number} times; the first fit, {first.elbo}, {came}")
    return best


def is_better(other: FitResult, best: FitResult) -> bool:
    """By the objective that both maximised; where one was stopped before it was measured, by the ELBO."""
    if other.kept in other.objectives and best.kept in best.objectives:
        return other.objectives[other.kept].value > best.objectives[best.kept].value
    return other.elbo.value > best.elbo.value


def folder(directory: Any, name: str) -> Path | None:
    return None if directory is None else Path(directory) / name
