"""A method under examination: `name`, `fit` and `draw`; and the families of structvi in that form."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.density.fixed_draws import FixedDraws
from structvi_paper.methods import KEEP

from .problems import Data, Problem

#: rank of the structured families
RANK = 4
#: searches for the best mixture: 12 found both modes of "bimodal" from 8 seeds of 8, and 4 from 6
MIXTURE_STARTS = 12
#: steps of Adam for a network, all data at once
STEPS = 2000
#: fixed masks over which the objective of MC dropout is averaged
MASKS = 512


class NotApplicable(ValueError):
    """Raised by `fit` where a method cannot be put to a problem; the message says why."""


@runtime_checkable
class Adapter(Protocol):
    """The two functions and the name of a method. It may also have a normalised `log_prob(theta [S, P]) -> [S]`.

    Example:
        >>> class Prior:
        ...     name = "the prior"
        ...     def fit(self, problem, seed):
        ...         self.P = problem.P
        ...     def draw(self, n, generator):
        ...         return torch.randn(n, self.P, generator=generator, dtype=torch.float64)
        >>> isinstance(Prior(), Adapter)
        True
    """

    name: str

    def fit(self, problem: Problem, seed: int) -> object:
        """Approximate the posterior of `problem`, a target with `space`, `log_joint` and, for networks, `data`.

        The answer is not in it: see `Problem.question`.
        """

    def draw(self, n: int, generator: torch.Generator) -> Tensor:  # pyright: ignore[reportReturnType] a protocol
        """Return independent draws of the approximation: [n, P]."""


def log_prob_of(method: Adapter) -> Callable[[Tensor], Tensor] | None:
    """Return the method's `log_prob`, or None."""
    return getattr(method, "log_prob", None)


class Ours:
    """A family of structvi, fitted as its user would: `fit_density`, for the network `variationalize(..).fit(..)`.

    Point masses have no ELBO: of log densities their objective is maximised on fixed draws.

    Args:
        family: a recipe, or a function from the problem to one.
        name: the family's class and its rank by default.
    """

    density: vi.Density

    def __init__(self, family: vi.Family | Callable[[Problem], vi.Family], name: str | None = None):
        rank = getattr(family, "rank", None)
        self.family = family
        self.name = name or type(family).__name__ + ("" if rank is None else f" {rank}")

    def fit(self, problem: Problem, seed: int) -> None:
        recipe = self.family if isinstance(self.family, vi.Family) else self.family(problem)
        if not problem.identified:
            assert problem.data is not None
            family = fit_network(recipe, problem.data, seed)
        elif not recipe.bind(problem.space, torch.Generator())().bound:
            family = _fit_points(recipe, problem, seed)
        else:
            starts = MIXTURE_STARTS if isinstance(recipe, vi.Mixture) else None
            family = vi.fit_density(problem, recipe, starts=starts, seed=seed, progress=False).family
        self.space, self.density = problem.space, family.requires_grad_(False)()

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        draws = self.density.draw(n, generator=generator)
        theta = self.space.join(draws.theta, draws.fixed)
        weight = draws.weight.reshape(n, -1)  # of a mixture's parts, one of which is taken for each draw
        chosen = torch.multinomial(weight, 1, generator=generator).squeeze(-1)
        return theta.reshape(n, -1, self.space.size)[torch.arange(n), chosen]

    def log_prob(self, theta: Tensor) -> Tensor:
        if not self.density.bound:  # in some weights a point mass: no density
            return theta.new_full((len(theta),), -torch.inf)
        return self.density.log_prob(theta)


def fit_network(recipe: vi.Family, data: Data, seed: int) -> vi.Family:
    """Fit a family to the network by Adam, on all data at once."""
    generator = torch.Generator().manual_seed(seed)
    prior = vi.priors.NormalPrior(data.scale)
    bayes = vi.variationalize(data.build(), data.likelihood, recipe, prior, generator=generator)
    loader = DataLoader(TensorDataset(data.x, data.t), batch_size=len(data.x))
    bayes.fit(loader, steps=STEPS, estimator=vi.Estimator(groups=4), seed=seed, progress=False)
    return bayes.family


def _fit_points(recipe: vi.Family, problem: Problem, seed: int) -> vi.Family:
    """Maximise E log p(data, θ) over fixed draws, by L-BFGS."""
    family = recipe.bind(problem.space, torch.Generator().manual_seed(seed))
    estimator = vi.Estimator(coupling=FixedDraws(MASKS, seed))
    optimizer = torch.optim.LBFGS(family.parameters(), max_iter=500, history_size=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -vi.elbo(family, problem, estimator=estimator)
        value.backward()
        return value

    optimizer.step(loss)  # pyright: ignore[reportArgumentType]
    return family


def ours() -> dict[str, Adapter]:
    """Return the families, by the names of the command line."""
    return {
        "map": Ours(vi.MAP(), "MAP"),
        "mc-dropout": Ours(vi.MCDropout(keep=KEEP), "MC dropout"),
        "mean-field": Ours(vi.MeanField(), "mean field"),
        "structured": Ours(lambda problem: vi.LowRankNormal(min(RANK, problem.P)), f"structured normal {RANK}"),
        "precision": Ours(lambda problem: vi.LowRankPrecision(min(RANK, problem.P)), f"structured precision {RANK}"),
        "full": Ours(vi.FullNormal(), "full normal"),
        "mixture": Ours(vi.Mixture(vi.FullNormal(), components=2), "mixture of 2 normals"),
    }
