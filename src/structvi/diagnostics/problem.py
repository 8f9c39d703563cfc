"""What is diagnosed: a posterior with its data or a family with its target, at independent draws of q."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..density.importance import Unavailable
from ..families.family import Family
from ..models.bayesian_model import BayesianModel
from ..models.target import Target
from ..objective import Estimate, Estimator, Kind, elbo_terms
from ..parameters import Parameters
from ..train.compare import elbo_over
from ..train.data import Batches

if TYPE_CHECKING:
    from ..posterior import Posterior


@dataclass(frozen=True)
class Problem:
    """A family, what it approximates, and the data where there are any."""

    family: Family
    target: Target
    batches: Batches | None = None
    posterior: "Posterior | None" = None

    @classmethod
    def of(cls, q: "Posterior | Family", data: Target | Iterable[Any]) -> "Problem":
        """From a posterior and a loader, or from a family and a log density."""
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

    @property
    def device(self) -> torch.device:
        return self.family().mean.device

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def mode(self) -> AbstractContextManager[object]:
        """The network's mode during a call."""
        return nullcontext() if self.posterior is None else self.posterior.network_mode()

    def elbo(self, groups: int, seed: int, most: int | None = None) -> Estimate:
        """Over all data, or at most so many batches, on draws that the seed alone decides."""
        if self.posterior is not None and self.batches is not None:
            read = self.batches.everything(most)
            return elbo_over(self.posterior, read, groups=groups, generator=self.generator(seed))
        density = self.family()
        kind: Kind = "log_q" if density.offers("log_prob") else "entropy"
        with torch.no_grad():
            values = elbo_terms(
                self.family, self.target, None, Estimator(kind, groups), self.generator(seed)
            ).objective()
        return Estimate.of(values, density.bound)

    def log_joint(self, theta: Tensor) -> Tensor:
        """log p(data, θ) over all data, in float64: [S, P] → [S]. A batch's part is summed, never scaled up."""
        if self.batches is None:
            return self.target.log_joint(theta).double()
        model = self.target
        assert isinstance(model, BayesianModel)
        total = model.log_prior(theta).double()
        seen = 0
        for batch in self.batches.everything():
            values, B = model.batch_log_likelihood(theta, batch)
            total, seen = total + values, seen + B
        if seen != model.num_data:
            raise Unavailable(f"the loader gives {seen} of the N = {model.num_data} observations: not the full data")
        return total
