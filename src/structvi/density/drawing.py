"""Draws of the parameters' values from a fit of a log density: of q, or corrected towards the posterior."""

import warnings
from math import inf, isnan
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..density.annealing import Annealed, Annealing
from ..density.pareto import K_LIMIT, psislw_of_arviz
from ..density.weighted_draws import Importance, Unavailable, weigh
from ..families.family import Family
from ..models.target import Target
from ..parameters import Parameters
from ..predict.draws import IndependentDraws
from ..util.checks import check_integer
from .beside import beside

#: of q, in each of two runs
DRAWS = 4000

#: of q as it is, by importance weights, or led to the posterior step by step
Corrected = bool | Literal["annealed"]


class Weighted(NamedTuple):
    """Draws of θ with importance weights towards the posterior, of two independent runs."""

    theta: Tensor  # [S, P], with tails
    weights: Tensor  # [S], summing to one
    k: float  # k̂, the larger of the two
    of_q: Tensor  # [.., P], those that are q's own

    @property
    def trusted(self) -> bool:
        """Whether k̂ allows to correct by these weights."""
        return self.k < K_LIMIT

    @property
    def effective(self) -> float:
        return 1 / self.weights.square().sum().item()

    def refuse(self, what: str) -> None:
        """Raise where k̂ says that the weights correct nothing."""
        if self.trusted:
            return
        raise Unavailable(
            f"no corrected {what}: k̂ of the importance weights is {self.k:.2f}, and from {K_LIMIT} on they cannot be "
            "trusted, for q misses part of the posterior. Take a family nearer to it (FullNormal(), a Mixture), write "
            "the model in other parameters (theta = mu + tau * z of a hierarchy), use MCMC, or have q led to the "
            'posterior by some of it, corrected="annealed"; corrected=False gives q as it is'
        )


def sample(
    family: Family, target: Target, n: int, corrected: Corrected, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """n draws of the values, of q or of the posterior: see `DensityFit.sample`."""
    check_integer("n", n)
    space = target.space
    if corrected == "annealed":
        annealed = annealed_draws(family, target, n, generator)
        theta = annealed.theta
        return space.constrain(theta[resampled(theta.new_full((len(theta),), 1 / len(theta)), n, generator)])
    if not isinstance(corrected, bool):
        raise ValueError(f'corrected must be True, False or "annealed", got {corrected!r}')
    if not corrected:
        return space.constrain(draws_of_q(family, space, n, generator))
    weighted = weighted_draws(family, target, max(DRAWS, n), generator)
    weighted.refuse("draws")
    return space.constrain(weighted.theta[resampled(weighted.weights, n, generator)])


@torch.no_grad()
def draws_of_q(family: Family, space: Parameters, n: int, generator: torch.Generator | None) -> Tensor:
    """Independent draws of θ: [n, P]."""
    return torch.cat([space.join(draws.theta, draws.fixed) for draws in IndependentDraws(family(), n, generator)])


@torch.no_grad()
def weighted_draws(family: Family, target: Target, draws: int, generator: torch.Generator | None) -> Weighted:
    """Draws of θ with importance weights towards the target; raises where there are none.

    From two runs, for k̂ of a posterior with a neck that q misses is by chance below 0.7 now and then. Where rounds of
    tails were cut short four times as many draws are taken. Draws with tails are around modes beside q too.
    """
    psislw_of_arviz()  # before the searches, not after
    device = None if generator is None else generator.device
    around = beside(family(), target, int(torch.randint(2**31, (), generator=generator, device=device)))

    def run(count: int) -> Importance:
        return weigh(family(), target.space, target.log_joint, count, around=around, generator=generator)

    runs = [run(draws) for _ in range(2)]
    if any(one.cut_short for one in runs):
        runs = [run(4 * draws) for _ in range(2)]
    theta = [one.theta for one in runs]
    return Weighted(
        torch.cat(theta),
        torch.cat([one.weights for one in runs]) / 2,
        max((one.k_weights for one in runs), key=lambda k: inf if isnan(k) else k),
        torch.cat([x[: len(one.log_weights)] for x, one in zip(theta, runs, strict=True)]),
    )


def annealed_draws(family: Family, target: Target, n: int, generator: torch.Generator | None) -> Annealed:
    """At least n draws of θ that q was led to the posterior by; a warning says what speaks against them."""
    if generator is None:
        generator = torch.Generator(target.space.device).manual_seed(int(torch.randint(2**62, ())))
    annealed = Annealing(family(), target.log_joint, generator).run(n)
    if doubts := annealed.doubts(target.space):
        warnings.warn(f"annealed draws: {doubts}", stacklevel=4)
    return annealed


def resampled(weights: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """n indices, each as often as n times its weight says, by less than one more or less: [n], in random order.

    Example:
        >>> resampled(torch.tensor([0.5, 0.0, 0.5]), 6, None).sort().values
        tensor([0, 0, 0, 2, 2, 2])
    """
    device = weights.device
    drawn_on = device if generator is None else generator.device
    offset = torch.rand((), generator=generator, device=drawn_on).to(device)
    points = (torch.arange(n, device=device) + offset) / n
    index = torch.searchsorted(weights.cumsum(0), points.to(weights.dtype)).clamp_max(len(weights) - 1)
    return index[torch.randperm(n, generator=generator, device=drawn_on).to(device)]
