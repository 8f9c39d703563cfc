"""The methods that the paper compares, by the names of its tables, and their stochastic fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from structvi.couplings import unscented
from structvi.families import (
    MAP,
    Density,
    Family,
    FullNormal,
    LowRankNormal,
    LowRankPrecision,
    MCDropout,
    MeanField,
    Mixture,
)
from structvi.objective import Estimator, elbo
from structvi.parameters import FREE_SCALE_FLOOR, Parameters

from .settings import TABLE, Settings

KEEP, HOTTEST = (float(TABLE["methods"][name]) for name in ("keep", "hottest"))
COMPONENTS, MIXTURE_RANK = (int(TABLE["methods"][name]) for name in ("components", "mixture_rank"))


@dataclass(frozen=True)
class Method:
    """A row of a table: the paper's name and the rank, where it has one."""

    name: str
    rank: int | None = None

    @property
    def label(self) -> str:
        return self.name if self.rank is None or self.name == "MF-VI" else f"{self.name} {self.rank}"

    @property
    def form(self) -> str:
        """The matrix that a normal's rank belongs to; empty for point masses and mixtures."""
        forms = {"MF-VI": "covariance", "sN-VI": "covariance", "full": "covariance", "sP-VI": "precision"}
        return forms.get(self.name, "")

    def recipe(self, scale: float, dropped: str = "*") -> Family:
        """Return the family, unbound.

        Args:
            scale: where standard deviations start; factors start as wide.
            dropped: the tensors that dropout drops, a pattern.
        """
        start = scale / FREE_SCALE_FLOOR
        if self.name in ("sN-VI", "sP-VI", "sGMM-VI"):
            kind = LowRankPrecision if self.name == "sP-VI" else LowRankNormal
            normal = kind(self.rank or 0, initial_scale=start, initial_factor=1.0)
            return Mixture(normal, components=COMPONENTS) if self.name == "sGMM-VI" else normal
        if self.name in ("MF-VI", "full"):
            return (MeanField if self.name == "MF-VI" else FullNormal)(initial_scale=start)
        return MAP() if self.name == "MAP" else MCDropout({dropped: KEEP})


def methods(P: int, dropouts: tuple[str, ...], mixture: bool = False) -> list[Method]:
    """Return the rows of a table over P weights, in the paper's order."""
    ranks = (1, 2, 4, P)
    rows = [Method("MAP"), *(Method(name) for name in dropouts), Method("MF-VI", 0)]
    rows += [Method("sN-VI", rank) for rank in ranks] + [Method("sP-VI", rank) for rank in ranks]
    rows.append(Method("full"))
    return [*rows, Method("sGMM-VI", MIXTURE_RANK)] if mixture else rows


class Batched:
    """A target given as one function of all draws, [S, P] → [S], of named vectors in float64."""

    def __init__(self, function: Callable[[Tensor], Tensor], **sizes: int):
        self.function = function
        self.space = Parameters({name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()})

    def log_joint(self, theta: Tensor, batch: Any = None) -> Tensor:
        return self.function(theta)


def groups_for(density: Density, evaluations: int) -> int:
    """Return how many groups of unscented draws come nearest to this many evaluations of the log density."""
    size = density.draw(1, unscented, torch.Generator()).theta.shape[0]
    return max(1, round(evaluations / size))


def adam(
    family: Family, target: Batched, estimator: Estimator, settings: Settings, generator: torch.Generator, steps: int,
    rate: float,
) -> Iterator[int]:  # fmt: skip
    """Maximise the ELBO; the rate falls to zero along a half cosine. Yield the number of steps so far."""
    optimizer = torch.optim.Adam(family.parameters(), lr=rate, betas=settings.betas, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        yield step
        optimizer.zero_grad()
        (-elbo(family, target, estimator=estimator, generator=generator)).backward()
        optimizer.step()
        schedule.step()
    yield steps


def fit(
    method: Method,
    scale: float,
    target: Batched,
    settings: Settings,
    generator: torch.Generator,
    steps: int,
    rate: float,
) -> Density:
    """Fit by Adam on fresh unscented draws.

    A mixture is first fitted to a flattened target, log p / T. Its parts then find all modes and divide them.
    """
    family = method.recipe(scale, "theta" if "log_noise" in target.space else "*").bind(target.space, generator)
    estimator = Estimator(groups=groups_for(family(), settings.evaluations), coupling=unscented)
    log_p = target.function
    for step in adam(family, target, estimator, settings, generator, steps, rate):
        if method.name == "sGMM-VI":
            heat = 1 + (HOTTEST - 1) * max(0.0, 1 - 2 * step / steps)
            target.function = lambda theta, heat=heat: log_p(theta) / heat
    target.function = log_p
    return family.requires_grad_(False)()
