"""A posterior with its data, or a family with its target, and its importance weights."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..density.correction import beside
from ..density.importance import Importance, Unavailable, weigh
from ..density.targets import Counted
from ..families.family import Family
from ..models.bayesian_model import BayesianModel
from ..models.target import Target
from ..objective import Estimate, Estimator, Kind, elbo_terms
from ..parameters import Parameters
from ..train.compare import elbo_over
from ..train.data import Batches
from ..util.checks import check_seed

if TYPE_CHECKING:
    from ..posterior import Posterior


#: evaluations that the search for mass beside q may spend
SEARCHED = 5000


@dataclass(frozen=True)
class Problem:
    """A family, its target, and the data of a posterior."""

    family: Family
    target: Target
    batches: Batches | None = None
    posterior: "Posterior | None" = None

    @classmethod
    def of(cls, q: "Posterior | Family", data: Target | Iterable[Any]) -> "Problem":
        """Return a posterior with a loader, or a family with a log density."""
        if not isinstance(q, Family):
            if not isinstance(getattr(q, "family", None), Family):
                raise TypeError(
                    f"expected a posterior from variationalize with a loader, or a bound family with a LogDensity, "
                    f"got {type(q).__name__}"
                )
            if isinstance(data, Target):
                raise TypeError("a posterior has its target with it: give the loader of its data")
            return cls(q.family, q.model, Batches(data, device=q.device), q)
        if isinstance(data, BayesianModel):
            raise TypeError("a BayesianModel needs its data: make a posterior with variationalize, and give the loader")
        if not isinstance(data, Target):
            raise TypeError(
                f"a family is diagnosed against a target with `space` and `log_joint`, such as LogDensity, "
                f"got {type(data).__name__}"
            )
        return cls(q, data)

    @property
    def space(self) -> Parameters:
        return self.target.space

    def generator(self, seed: int) -> torch.Generator:
        """Return a generator where the family is."""
        return torch.Generator(self.family().mean.device).manual_seed(seed)

    def mode(self) -> AbstractContextManager[object]:
        """Return the network's mode during a call."""
        return nullcontext() if self.posterior is None else self.posterior.network_mode()

    def elbo(self, groups: int, seed: int) -> Estimate:
        """Return the ELBO over all data, on draws that the seed alone decides."""
        if self.posterior is not None and self.batches is not None:
            every = self.batches.everything()
            return elbo_over(self.posterior, every, groups=groups, generator=self.generator(seed))
        density = self.family()
        kind: Kind = "log_q" if density.offers("log_prob") else "entropy"
        with torch.no_grad():
            terms = elbo_terms(self.family, self.target, None, Estimator(kind, groups), self.generator(seed))
        return Estimate.of(terms.objective(), density.bound)

    def log_joint(self, theta: Tensor) -> Tensor:
        """Return log p(data, θ) over all data, in float64: [S, P] → [S]; batches are summed, never scaled up."""
        if self.batches is None:
            return self.target.log_joint(theta).double()
        model = self.target
        assert isinstance(model, BayesianModel)
        total, seen = model.log_prior(theta).double(), 0
        for batch in self.batches.everything():
            values, B = model.batch_log_likelihood(theta, batch)
            total, seen = total + values, seen + B
        if seen != model.num_data:
            raise Unavailable(f"the loader gives {seen} of the N = {model.num_data} observations: not the full data")
        return total


def importance(
    q: "Posterior | Family",
    data: Target | Iterable[Any],
    draws: int = 1000,
    *,
    tails: bool | None = None,
    seed: int = 0,
) -> Importance:
    """Return importance weights of the joint over the full data, at independent draws of q.

    For a log density under a Gaussian, or a mixture of Gaussians, four times as many draws with longer tails are taken
    too, around what the weights so far tell, and around mass that a search finds beside q. `k` is for q's own
    draws. At most 5·draws + 5000 evaluations of the log density are spent.

    It raises `Unavailable`, with the reason, for point masses, families without `log_prob` or with masks, networks that
    are random themselves, and loaders that do not give all data.

    Args:
        q: a posterior, or a bound family.
        data: the posterior's loader, or the family's target, such as `LogDensity`.
        draws: S. For a network every draw is a pass over the data.
        tails: whether to take 4S more draws, with tails; by default for log densities, under Gaussians and mixtures of
            them, of at most 200 numbers.
        seed: of the draws.

    Example:
        >>> from structvi import LogDensity, MeanField
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
        >>> importance(MeanField(initial_scale=1 / 3).bind(space), target).k < 0.7  # scales of one: q is the target
        True
    """
    check_seed(seed)
    problem = Problem.of(q, data)
    if problem.posterior is not None and problem.batches is not None:
        if problem.posterior.dropout == "on":
            raise Unavailable("the network's dropout is on: the log likelihood at a draw is itself random")
        if problem.posterior.batch_norm == "reestimated":
            raise Unavailable('batch_norm="reestimated": the log likelihood depends on how the data are batched')
        if problem.batches.length is None:
            raise Unavailable("the loader does not know its length: whether it gives the full data is not known")
        tails = bool(tails)
    with problem.mode():
        density = problem.family()
        around = []
        if tails is not False and isinstance(data, Target):
            around = beside(density, Counted(data, SEARCHED, checked=True), seed)
        return weigh(
            density, problem.space, problem.log_joint, draws, tails=tails, around=around,
            generator=problem.generator(seed),
        )  # fmt: skip
