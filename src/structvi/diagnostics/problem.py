"""What is diagnosed: a posterior with its data or a family with its target, at independent draws of q."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..batches import Batches
from ..couplings import naive
from ..elbo import elbo_groups
from ..estimate import Estimate
from ..evaluation import training_key
from ..families.base import Density, Draws, Family
from ..parameters import Parameters
from ..predictive import Predictive
from ..targets import BayesianModel, Target, split_batch

if TYPE_CHECKING:
    from ..variationalize import Posterior

#: So many numbers of drawn weights are held at once.
DRAWN_NUMBERS = 2**26


class Unavailable(ValueError):
    """A diagnostic that does not exist for this posterior or these data; the message says why."""


@dataclass(frozen=True)
class Problem:
    """A family, what it approximates, and the data where there are any."""

    family: Family
    target: Target
    batches: Batches | None = None
    posterior: "Posterior | None" = None

    @classmethod
    def of(cls, q: "Posterior | Family", data: "Target | Iterable[Any]") -> "Problem":
        """From a posterior and a loader, or from a family and a log density."""
        from ..variationalize import Posterior

        if isinstance(q, Posterior):
            if isinstance(data, Target):
                raise TypeError("a posterior has its target with it: give the loader of its data")
            return cls(q.family, q.model, Batches(data, device=next(q.parameters()).device), q)
        if not isinstance(q, Family):
            raise TypeError(
                f"expected a posterior from variationalize with a loader, or a bound family with a LogDensity, "
                f"got {type(q).__name__}"
            )
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

    def mode(self) -> AbstractContextManager[None]:
        """The network's mode during a call."""
        return nullcontext() if self.posterior is None else self.posterior.network_mode()

    def elbo(self, groups: int, seed: int) -> Estimate:
        """Over all data, on draws that the seed alone decides."""
        if self.posterior is not None and self.batches is not None:
            return self.posterior.elbo(self.batches.loader, groups=groups, generator=self.generator(seed))
        density = self.family()
        estimator = "log_q" if density.offers("log_prob") else "entropy"
        with torch.no_grad():
            values = elbo_groups(
                self.family, self.target, groups=groups, estimator=estimator, generator=self.generator(seed)
            )
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


class IndependentDraws:
    """S independent draws of q with equal weights, made again from their seeds as often as asked, chunk by chunk.

    Of a density whose groups hold several draws (the parts of a mixture, masks) one of each group is taken, with the
    probability of its weight.

    Example:
        >>> from structvi import MeanField
        >>> q = MeanField().bind(Parameters({"z": torch.zeros(2)}))()
        >>> [draws.theta.shape for draws in IndependentDraws(q, 5, torch.Generator().manual_seed(0))]
        [torch.Size([5, 2])]
    """

    def __init__(
        self, density: Density, count: int, generator: torch.Generator | None = None, chunk: int | None = None
    ):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"draws must be an integer ≥ 1, got {count!r}")
        self.density, self.count = density, count
        size = max(1, DRAWN_NUMBERS // density.P) if chunk is None else chunk
        self.sizes = [min(size, count - start) for start in range(0, count, size)]
        device = None if generator is None else generator.device
        self.seeds: list[int] = torch.randint(2**62, (len(self.sizes),), generator=generator, device=device).tolist()

    def __iter__(self) -> Iterator[Draws]:
        for size, seed in zip(self.sizes, self.seeds, strict=True):
            yield _one_of_each(self.density, size, torch.Generator(self.density.mean.device).manual_seed(seed))


@torch.no_grad()
def _one_of_each(density: Density, count: int, generator: torch.Generator) -> Draws:
    draws = density.draw(1 if density.enumerates else count, naive, generator)
    S = draws.weight.shape[0]
    if density.enumerates:  # all states with their probabilities
        which = torch.multinomial(draws.weight, count, replacement=True, generator=generator)
    elif count == S:
        return draws
    else:
        within = torch.multinomial(draws.weight.reshape(count, -1), 1, generator=generator).squeeze(-1)
        which = torch.arange(count, device=within.device) * (S // count) + within
    latent = None if draws.latent is None else draws.latent[which]
    return Draws(draws.theta[which], draws.weight.new_full((count,), 1 / count), draws.fixed, latent)


def predictive(posterior: "Posterior", draws: Draws, batch: Any) -> tuple[Predictive, Any]:
    """p(t | y_s(x)) of a batch at given draws, and the batch's target."""
    model = posterior.model
    space = model.space.without(draws.fixed)

    def call(row: Tensor) -> tuple[Any, Any]:
        named = {**space.unravel(row), **draws.fixed}
        return model.call({name: x for name, x in named.items() if name not in model.likelihood_names}, batch)

    with torch.no_grad(), posterior.network_mode():
        key = ("diagnostics", frozenset(draws.fixed), training_key(model.net))
        outputs = model.evaluation(lambda row: call(row)[0], draws.theta, key)
        values = model.likelihood_values(draws.theta, draws.fixed)
        return Predictive(outputs, draws.weight, model.likelihood, values), target_of(posterior, batch)


def target_of(posterior: "Posterior", batch: Any) -> Any:
    """The target of a batch, which a user's `forward` takes a pass of the network to tell."""
    model = posterior.model
    if model.user_forward is None:
        return split_batch(batch)[1]
    with torch.no_grad(), posterior.network_mode():
        return model.call(model.net_space.unravel(posterior.family().mean[: model.net_space.size]), batch)[1]
