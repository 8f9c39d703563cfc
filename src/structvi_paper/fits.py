"""Fit a family to a target stochastically. (Table 1 also fits on fixed draws: structvi.fit_density.)"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from structvi.couplings import unscented
from structvi.families import Density, Family
from structvi.models.target import Target
from structvi.models.tempered import annealed
from structvi.objective import Estimator, elbo
from structvi.parameters import Parameters

from .settings import Settings


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
    anneal: bool = False,
) -> Density:
    """Stochastic: Adam on fresh unscented draws, the rate decaying to zero along a half cosine.

    Args:
        recipe: unbound.
        target: what is to be fitted.
        settings: betas and the number of draws.
        generator: of start and draws.
        steps, rate: of Adam.
        anneal: begin with a flattened target, for mixtures.
    """
    family = recipe.bind(target.space, generator)
    groups = groups_for(family(), settings.evaluations)
    optimizer = torch.optim.Adam(family.parameters(), lr=rate, betas=settings.betas, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        optimizer.zero_grad()
        present = annealed(target, step / steps) if anneal else target
        (-elbo(family, present, estimator=Estimator(groups=groups, coupling=unscented), generator=generator)).backward()
        optimizer.step()
        schedule.step()
    return family.requires_grad_(False)()


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
