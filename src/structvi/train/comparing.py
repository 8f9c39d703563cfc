"""Posteriors compared: what they are worth over all data, on draws that a seed alone decides."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..couplings import Coupling, paired
from ..objective import Estimate, Estimator, full_terms
from ..util.random_streams import borrowed_stream

if TYPE_CHECKING:
    from ..posterior import Posterior

#: names of candidates
LAST_STEP, WITHOUT_FACTOR = "last step", "rank 0 (mean field)"


class Worth(NamedTuple):
    """Of a posterior: the ELBO, at λ = 1, and the objective E log lik − λ KL that was maximised, which decides."""

    elbo: Estimate
    objective: Estimate


def average_of(count: int) -> str:
    """The name of the average over so many iterates."""
    return f"average of the last {count}"


def elbo_over(
    posterior: "Posterior",
    batches: Iterable[Any],
    *,
    groups: int = 64,
    coupling: Coupling = paired,
    generator: torch.Generator | None = None,
) -> Estimate:
    """The ELBO over batches that all see the same draws, in nats, with its standard error.

    Args:
        posterior: N must be known.
        batches: on the posterior's device.
        groups, coupling, generator: as in `elbo`.
    """
    with posterior.network_mode():
        estimator = Estimator(groups=groups, coupling=coupling)
        return full_terms(posterior.family, posterior.model, batches, estimator, generator).estimate()


def worth_on_seed(
    posterior: "Posterior",
    batches: Iterable[Any],
    groups: int,
    seed: int,
    temperature: float,
    coupling: Coupling = paired,
) -> Worth:
    """ELBO and objective of one reading of the batches, with all randomness from a seed.

    Args:
        posterior: N must be known.
        batches: on the posterior's device.
        groups: of draws.
        seed: posteriors over the same tensors see the same draws.
        temperature: λ of the objective.
        coupling: of the draws of a group.
    """
    generator = torch.Generator(posterior.device).manual_seed(seed + 1)
    stream = torch.Generator().manual_seed(seed + 2)
    with borrowed_stream(stream), posterior.network_mode():
        estimator = Estimator(groups=groups, coupling=coupling)
        terms = full_terms(posterior.family, posterior.model, batches, estimator, generator)
    return Worth(terms.estimate(), terms.estimate(temperature))
