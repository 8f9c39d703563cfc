"""Importance weights of a posterior or of a family: `weigh` with the log joint that they have."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..density.correction import beside
from ..density.importance import K_LIMIT, Importance, Moments, Unavailable, psis, weigh
from ..families.family import Family
from ..models.target import Target
from ..util.checks import check_seed
from .problem import Problem

if TYPE_CHECKING:
    from ..posterior import Posterior

__all__ = ["K_LIMIT", "Importance", "Moments", "importance", "psis"]


def importance(
    q: "Posterior | Family",
    data: Target | Iterable[Any],
    draws: int = 1000,
    *,
    tails: bool | None = None,
    seed: int = 0,
) -> Importance:
    """Importance weights of the joint over the full data, at independent draws of q.

    For the corrected moments of a log density under a Gaussian, or a mixture of Gaussians, as many draws again are
    taken with longer tails than q's, and three times more around the means and with the covariances that the weights so
    far tell; all are weighted by p over the mixture of the five. Of at most 100 numbers a round of searches looks for
    modes beside q, and draws with tails are around these too. `k` is that of q's own draws.

    Where they do not exist this raises `Unavailable` with the reason: point masses, families without `log_prob` or
    with masks, a network that is itself random, data that the loader does not give in full.

    Args:
        q: a posterior, or a bound family.
        data: the posterior's loader, or the family's target, such as `LogDensity`.
        draws: S. For a network every draw is a pass over the data.
        tails: whether to take 4S more draws, with tails; by default for log densities, under Gaussians and mixtures of
            them, of at most 200 numbers.
        seed: of the draws.

    Example:
        >>> import torch
        >>> from structvi import LogDensity, MeanField, Parameters
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
        >>> importance(MeanField(initial_scale=1 / 3).bind(space), target).k < 0.7  # scales of one: q is the target
        True
    """
    check_seed(seed)
    problem = Problem.of(q, data)
    _check_available(problem)
    if tails is None and problem.posterior is not None:
        tails = False
    with problem.mode():
        density = problem.family()
        around = beside(density, data, seed, draws) if tails is not False and isinstance(data, Target) else []
        return weigh(
            density, problem.space, problem.log_joint, draws, tails=tails, around=around,
            generator=problem.generator(seed),
        )  # fmt: skip


def _check_available(problem: Problem) -> None:
    posterior, batches = problem.posterior, problem.batches
    if posterior is None or batches is None:
        return
    if posterior.dropout == "on":
        raise Unavailable("the network's dropout is on: the log likelihood at a draw is itself random")
    if posterior.batch_norm == "reestimated":
        raise Unavailable('batch_norm="reestimated": the log likelihood depends on how the data are batched')
    if batches.length is None:
        raise Unavailable("the loader does not know its length: whether it gives the full data is not known")
