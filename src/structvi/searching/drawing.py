"""Draws of the parameters' values from a fit of a log density: of q, or corrected towards the posterior."""

import torch
from torch import Tensor

from ..basics.checks import check_integer
from ..correcting.pareto import K_LIMIT
from ..correcting.weighted_draws import Importance, Unavailable, weigh
from ..families.family import Family
from ..models.target import Target
from ..parameters import Parameters
from ..predicting.draws import IndependentDraws

#: of q, for a table; corrected draws are chosen from at least as many
DRAWS = 4000


def sample(
    family: Family, target: Target, n: int, corrected: bool, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """n draws of the values, of q or of the posterior: see `DensityFit.sample`."""
    check_integer("n", n)
    space = target.space
    if not corrected:
        return space.constrain(draws_of_q(family, space, n, generator))
    weighted = weighted_draws(family, target, max(DRAWS, 2 * n), generator)
    refuse(weighted, "draws")
    return space.constrain(weighted.theta[resampled(weighted.weights, n, generator)])


@torch.no_grad()
def draws_of_q(family: Family, space: Parameters, n: int, generator: torch.Generator | None) -> Tensor:
    """Independent draws of θ: [n, P]."""
    return torch.cat([space.join(draws.theta, draws.fixed) for draws in IndependentDraws(family(), n, generator)])


@torch.no_grad()
def weighted_draws(family: Family, target: Target, draws: int, generator: torch.Generator | None) -> Importance:
    """Draws of θ with importance weights towards the target; raises where there are none.

    Where k̂ is too large four times as many are tried: a round of tails takes its covariance from the draws before.
    """
    space, log_joint = target.space, target.log_joint
    weighted = weigh(family(), space, log_joint, draws, generator=generator)
    return weighted if weighted.trusted else weigh(family(), space, log_joint, 4 * draws, generator=generator)


def refuse(weighted: Importance, what: str) -> None:
    """Raise where k̂ says that the weights correct nothing."""
    if weighted.trusted:
        return
    raise Unavailable(
        f"no corrected {what}: k̂ of the importance weights is {weighted.k_weights:.2f}, and from {K_LIMIT} on they "
        "cannot be trusted, for q misses part of the posterior. Take a family nearer to it (FullNormal(), a Mixture), "
        "write the model in other parameters (theta = mu + tau * z of a hierarchy), or use MCMC; corrected=False gives "
        "q as it is"
    )


def resampled(weights: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """n indices, each as often as n times its weight says, by less than one more or less: [n], in random order.

    Example:
        >>> resampled(torch.tensor([0.5, 0.0, 0.5]), 6, None).sort().values
        tensor([0, 0, 0, 2, 2, 2])
    """
    device = weights.device
    points = (torch.arange(n, device=device) + torch.rand((), generator=generator, device=device)) / n
    index = torch.searchsorted(weights.cumsum(0), points.to(weights.dtype)).clamp_max(len(weights) - 1)
    return index[torch.randperm(n, generator=generator, device=device)]
