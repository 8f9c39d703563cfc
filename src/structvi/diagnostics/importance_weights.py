"""Importance weights of a posterior over its data, or of a family towards its target."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..density.importance import Importance, Unavailable, correct, weigh
from ..families.family import Family
from ..models.bayesian_model import BayesianModel
from ..models.target import Target
from ..train.data import Batches
from ..util.checks import check_integer, check_seed

if TYPE_CHECKING:
    from ..posterior import Posterior

#: evaluations for each draw: of q itself, of four rounds with tails, and of the search for mass beside q
EACH = 7


def check_pair(q: "Posterior | Family", data: Target | Iterable[Any]) -> None:
    """Raise unless it is a posterior with a loader, or a family with a log density."""
    if not isinstance(getattr(q, "family", q), Family):
        raise TypeError(
            f"expected a posterior from variationalize with a loader, or a bound family with a LogDensity, got "
            f"{type(q).__name__}"
        )
    if isinstance(q, Family) and (isinstance(data, BayesianModel) or not isinstance(data, Target)):
        raise TypeError(
            f"a family is diagnosed against a target with `space` and `log_joint`, such as LogDensity, got "
            f"{type(data).__name__}"
        )
    if not isinstance(q, Family) and isinstance(data, Target):
        raise TypeError("a posterior has its target with it: give the loader of its data")


def importance(
    q: "Posterior | Family", data: Target | Iterable[Any], draws: int = 1000, *, tails: bool = True, seed: int = 0
) -> Importance:
    """Return importance weights of the joint over the full data, at independent draws of q.

    For a log density under a Gaussian, or a mixture of Gaussians, four times as many draws with longer tails are taken
    too, around what the weights so far tell, and around mass that a search finds beside q. `k` is for q's own
    draws. At most 7·draws evaluations of the log density are spent.

    It raises `Unavailable`, with the reason, for point masses, families without `log_prob` or with masks, networks that
    are random themselves, and loaders that do not give all data.

    Args:
        q: a posterior, or a bound family.
        data: the posterior's loader, or the family's target, such as `LogDensity`.
        draws: S. For a network every draw is a pass over the data.
        tails: whether to take 4S more draws, with tails, for log densities of at most 200 numbers.
        seed: of the draws.

    Example:
        >>> from structvi import LogDensity, MeanField, Parameters
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
        >>> importance(MeanField(initial_scale=1 / 3).bind(space), target).k < 0.7  # scales of one: q is the target
        True
    """
    check_seed(seed)
    check_integer("draws", draws)
    check_pair(q, data)
    if isinstance(q, Family):
        assert isinstance(data, Target)
        density = q()
        generator = torch.Generator(density.mean.device).manual_seed(seed)
        if tails:
            return correct(density, data, EACH * draws, generator, draws)
        return weigh(density, data.space, data.log_joint, draws, generator=generator)
    assert not isinstance(data, Target)
    batches, model = Batches(data, device=q.device), q.model
    if q.dropout == "on":
        raise Unavailable("the network's dropout is on: the log likelihood at a draw is itself random")
    if q.batch_norm == "reestimated":
        raise Unavailable('batch_norm="reestimated": the log likelihood depends on how the data are batched')
    if batches.length is None:
        raise Unavailable("the loader does not know its length: whether it gives the full data is not known")

    def log_joint(theta: Tensor) -> Tensor:
        """Return log p(data, θ) over all data, in float64: [S, P] → [S]; batches are summed, never scaled up."""
        total, seen = model.log_prior(theta).double(), 0
        for batch in batches.everything():
            values, B = model.batch_log_likelihood(theta, batch)
            total, seen = total + values, seen + B
        if seen != model.num_data:
            raise Unavailable(f"the loader gives {seen} of the N = {model.num_data} observations: not the full data")
        return total

    with q.network_mode():
        density = q.family()
        generator = torch.Generator(density.mean.device).manual_seed(seed)
        return weigh(density, model.space, log_joint, draws, generator=generator)
