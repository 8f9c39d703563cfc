"""Fit a family to a target: stochastically, or deterministically on fixed draws."""

import copy
from collections.abc import Callable
from contextlib import suppress
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

from ..couplings import Noise, unscented
from ..elbo import NonFiniteError, elbo
from ..families import Density, Family
from ..parameters import Parameters
from ..targets import Target
from ..tempering import annealed
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
        (-elbo(family, present, groups=groups, coupling=unscented, generator=generator)).backward()
        optimizer.step()
        schedule.step()
    return family.requires_grad_(False)()


def fit_fixed(recipe: Family, target: Target, generator: torch.Generator, *, starts: int, iterations: int) -> Density:
    """Deterministic: L-BFGS on one fixed set of draws, `sigma_points`; the best of several starts by ELBO.

    On these draws the ELBO of a quadratic log density is exact, and what remains is the family's error. Nothing but
    the log density is used.
    """
    best: tuple[float, Density] | None = None
    for _ in range(starts):
        family = recipe.bind(target.space, generator)
        value = _maximise(family, target, generator, iterations)
        if best is None or value > best[0]:
            best = value, family.requires_grad_(False)()
    assert best is not None
    return best[1]


def _maximise(family: Family, target: Target, generator: torch.Generator, iterations: int) -> float:
    noise: list[Noise] = []

    def fixed(groups: int, P: int, K: int, *_: Any) -> Noise:
        if not noise:
            noise.append(sigma_points(P, K, generator))
        return noise[0]

    optimizer = torch.optim.LBFGS(
        family.parameters(),
        max_iter=iterations,
        history_size=30,
        tolerance_grad=1e-9,
        tolerance_change=1e-8,  # nats: further on lies only the boundary
        line_search_fn="strong_wolfe",
    )
    best, state = -inf, copy.deepcopy(family.state_dict())

    def loss() -> Tensor:
        nonlocal best, state
        optimizer.zero_grad()
        value = elbo(family, target, coupling=fixed, estimator="entropy")
        if value.item() > best:
            best, state = value.item(), copy.deepcopy(family.state_dict())
        (-value).backward()
        return -value

    # optima lie on the boundary, scale → 0: a search that steps over the edge of the floating numbers ends there
    with suppress(torch.linalg.LinAlgError, NonFiniteError):  # pyright: ignore[reportPrivateImportUsage]
        optimizer.step(loss)  # pyright: ignore[reportArgumentType]
    family.load_state_dict(state)
    # far out on the boundary rounding spoils log det Σ, and with it the entropy: log q at the draws disagrees
    with torch.no_grad():
        return min(best, elbo(family, target, coupling=fixed, estimator="log_q").item())


def sigma_points(P: int, K: int, generator: torch.Generator) -> Noise:
    """±√n times the rows of a random rotation in n = P + K dimensions: mean zero, covariance one, exactly: [2n, n]."""
    n = P + K
    options = {"generator": generator, "dtype": torch.float64}
    q, _ = torch.linalg.qr(torch.randn(n, n, **options))
    points = sqrt(n) * torch.cat([q, -q])
    return Noise(points[:, :P], points[:, P:])


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
