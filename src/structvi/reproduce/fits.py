"""Fit a family to a target: stochastically, or deterministically on fixed draws."""

import copy
from collections.abc import Callable
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

from ..couplings import Noise, unscented
from ..elbo import NonFiniteError, elbo
from ..families import Density, Family
from ..families.gaussian import Gaussian
from ..parameters import Parameters
from ..targets import Target
from ..tempering import annealed
from .settings import Settings

#: searches of one start, the first and those begun again
SEARCHES = 4


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
    the log density is used. For Gaussian families.
    """
    best, density = -inf, None
    for _ in range(starts):
        family = recipe.bind(target.space, generator)
        value = _maximise(family, target, generator, iterations)
        if value > best:
            best, density = value, family.requires_grad_(False)()
    assert density is not None
    return density


class _Edge(Exception):
    """The search has left the numbers for which the family's algebra is exact."""


def _maximise(family: Family, target: Target, generator: torch.Generator, iterations: int) -> float:
    """The greatest ELBO found; the family is left there.

    Optima often lie on the boundary, a scale going to 0 or ∞, where the ELBO is flat and a long step ends where
    rounding spoils log det Σ. Such a step is not taken: the search begins again from the best point, without memory.
    """
    density = family()
    assert isinstance(density, Gaussian)
    noise = sigma_points(density.P, density.rank, generator)
    best, state = -inf, copy.deepcopy(family.state_dict())

    def loss() -> Tensor:
        nonlocal best, state
        optimizer.zero_grad()
        value = elbo(family, target, coupling=lambda *_: noise, estimator="entropy")
        if not _accurate(family(), noise):
            raise _Edge
        if value.item() > best:
            best, state = value.item(), copy.deepcopy(family.state_dict())
        (-value).backward()
        return -value

    for _ in range(SEARCHES):
        optimizer = torch.optim.LBFGS(
            family.parameters(),
            max_iter=iterations,
            history_size=30,
            tolerance_grad=1e-9,
            tolerance_change=1e-8,  # nats
            line_search_fn="strong_wolfe",
        )
        try:
            optimizer.step(loss)  # pyright: ignore[reportArgumentType]
            break
        except (_Edge, NonFiniteError, torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
            family.load_state_dict(state)
    family.load_state_dict(state)
    return best


@torch.no_grad()
def _accurate(density: Density, noise: Noise) -> bool:
    """Whether E_q (θ − μ)ᵀΛ(θ − μ) = P, which draws and precision together must give, to six digits."""
    assert isinstance(density, Gaussian)
    spread = density.quadratic(density.transform(*noise)).mean().item()
    return abs(spread / density.P - 1) < 1e-6


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
