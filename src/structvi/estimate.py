"""The ELBO over all data at one set of draws: what is reported, and what posteriors are compared by."""

from collections.abc import Iterable
from math import inf, isnan, nan, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .couplings import Coupling, paired
from .elbo import NonFiniteError, log_q, per_group
from .families.base import Family
from .targets import BayesianModel


class Estimate(NamedTuple):
    """An estimate with its standard error over groups of draws; nan for a single group."""

    value: float
    standard_error: float
    per_group: Tensor  # [groups], float64
    #: False where part of q is a point mass: the value is then E log p(data, θ) without that part's entropy
    bound: bool = True

    def __str__(self) -> str:
        error = "" if isnan(self.standard_error) else f" ± {self.standard_error:.2f}"
        return f"{self.value:.2f}{error} nats"

    @classmethod
    def of(cls, per_group: Tensor, bound: bool = True) -> "Estimate":
        per_group = per_group.detach().double().cpu()
        groups = per_group.shape[0]
        error = float(per_group.std()) / sqrt(groups) if groups > 1 else nan
        return cls(float(per_group.mean()), error, per_group, bound)


@torch.no_grad()
def full_elbo(
    family: Family,
    model: BayesianModel,
    loader: Iterable[Any],
    *,
    groups: int = 64,
    coupling: Coupling = paired,
    generator: torch.Generator | None = None,
) -> Estimate:
    """ELBO = Σ_n E_q log p(t_n | y_θ(x_n)) − KL[q‖prior], streamed over batches that all see the same draws.

    Two posteriors over the same tensors, each with a generator of the same seed, are compared on common draws: their
    noise is shared, and what differs is the posteriors.

    Args:
        family: bound, over the model's space.
        model: the network with likelihood and prior.
        loader: batches; where they hold fewer than N observations in all, their log likelihood is scaled up to N.
        groups: how many independent groups of coupled draws.
        coupling: `naive`, `paired`, `unscented`, or a callable of your own.
        generator: the source of all randomness; the global stream if None.

    Example:
        >>> from structvi import MeanField, NormalPrior, likelihoods
        >>> model = BayesianModel(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=0.1), NormalPrior(1.0), 20)
        >>> batches = [(torch.zeros(10, 3), torch.zeros(10, 1)), (torch.zeros(10, 3), torch.zeros(10, 1))]
        >>> full_elbo(MeanField().bind(model.space), model, batches, groups=8).per_group.shape
        torch.Size([8])
    """
    density = family()
    draws = density.draw(groups, coupling, generator)
    point = draws.theta if draws.latent is None else draws.latent
    # log q at the draws rather than the entropy: where q is the posterior, every draw gives the same value. Before the
    # data, which may end this on one rank of several: those of a sharded posterior need each other for it
    at_draws = log_q(density, point, path=False) if density.has_density and density.offers("log_prob") else None
    log_likelihood = torch.zeros_like(draws.weight, dtype=torch.float64)
    seen = 0
    for batch in loader:
        values, B = model.batch_log_likelihood(draws.theta, batch, draws.fixed)
        log_likelihood += values
        seen += B
    if not seen:
        raise ValueError("the loader gave no batch: there is no ELBO without data")
    log_likelihood *= model.num_data / seen
    log_prior = model.log_prior(point, draws.fixed)
    for values, what in ((log_likelihood, "log likelihood"), (log_prior, "log prior")):
        if not bool(torch.isfinite(values).all()):
            raise NonFiniteError(f"the {what} of the full data is not finite at some of {len(values)} draws")
    cost = -log_prior.double()
    if at_draws is not None:
        cost = cost + at_draws
    values = per_group(log_likelihood - cost, density, draws, groups) - density.latent_kl()
    if density.has_density and not density.offers("log_prob"):
        values = values + density.entropy()
    return Estimate.of(values, density.bound)


def not_finite(groups: int) -> Estimate:
    """What stands for the ELBO of a posterior some of whose draws have none."""
    return Estimate(-inf, nan, torch.full((groups,), -inf, dtype=torch.float64))
