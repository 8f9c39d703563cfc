"""Fit a family to a target: plain Adam over `elbo`, from several starts."""

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..couplings import unscented
from ..elbo import elbo
from ..families import Density, Family
from ..parameters import Parameters
from ..targets import Target
from ..tempering import annealed
from .settings import Settings


class Fit(NamedTuple):
    density: Density
    seconds: float


def groups_for(density: Density, evaluations: int) -> int:
    """How many groups of unscented draws come nearest to this many evaluations of the log density."""
    size = density.draw(1, unscented, torch.Generator()).theta.shape[0]
    return max(1, round(evaluations / size))


def fit(
    recipe: Family,
    target: Target,
    settings: Settings,
    generator: torch.Generator,
    *,
    steps: int,
    rate: float,
    starts: int = 1,
    anneal: bool = False,
) -> Fit:
    """The best of `starts` fits by estimated ELBO; nothing but the log density is used.

    Args:
        recipe: unbound.
        target: what is to be fitted.
        settings: betas and numbers of draws.
        generator: of starts and draws.
        steps, rate: of Adam; the rate decays to zero along a half cosine.
        starts: how many fits.
        anneal: begin with a flattened target, for mixtures.
    """
    began = perf_counter()
    fitted = [_fit_once(recipe, target, settings, generator, steps, rate, anneal) for _ in range(starts)]
    best = fitted[0]
    if starts > 1:
        values = [_value(family, target, settings, generator) for family in fitted]
        best = fitted[values.index(max(values))]
    return Fit(best.requires_grad_(False)(), perf_counter() - began)


def _fit_once(
    recipe: Family,
    target: Target,
    settings: Settings,
    generator: torch.Generator,
    steps: int,
    rate: float,
    anneal: bool,
) -> Family:
    family = recipe.bind(target.space, generator)
    groups = groups_for(family(), settings.evaluations)
    optimizer = torch.optim.Adam(family.parameters(), lr=rate, betas=settings.betas, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        optimizer.zero_grad()
        present = annealed(target, step / steps) if anneal else target
        (-elbo(family, present, groups=groups, coupling=unscented, generator=generator)).backward()
        optimizer.step()
        schedule.step()
    return family


def _value(family: Family, target: Target, settings: Settings, generator: torch.Generator) -> float:
    with torch.no_grad():
        groups = groups_for(family(), settings.selection_draws)
        return elbo(family, target, groups=groups, coupling=unscented, generator=generator).item()


def median(values: list[float]) -> float:
    """The mean of the middle two for even numbers."""
    ordered = sorted(values)
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


class Batched:
    """A target given as one function of all draws, [S, P] → [S]."""

    def __init__(self, space: Parameters, function: Callable[[Tensor], Tensor]):
        self.space, self.function = space, function

    def log_joint(self, theta: Tensor, batch: Any = None) -> Tensor:
        return self.function(theta)


def space(**sizes: int) -> Parameters:
    """Vectors of these sizes, all zero, in float64."""
    return Parameters({name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()})
