"""Posteriors compared: their ELBO over all data, on draws that a seed alone decides."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch

from ..basics.random_streams import borrowed_stream
from ..couplings import Coupling, paired
from ..objective import Estimate, full_elbo
from ..posterior import PosteriorBase

#: names of candidates
LAST_STEP, WITHOUT_FACTOR = "last step", "rank 0 (mean field)"


def average_of(count: int) -> str:
    """The name of the average over so many iterates."""
    return f"average of the last {count}"


def elbo_over(
    posterior: PosteriorBase,
    batches: Iterable[Any],
    *,
    groups: int = 64,
    coupling: Coupling = paired,
    generator: torch.Generator | None = None,
    stream: torch.Generator | None = None,
) -> Estimate:
    """The ELBO over batches that all see the same draws, in nats, with its standard error.

    Args:
        posterior: N must be known.
        batches: on the posterior's device.
        groups, coupling, generator: as in `elbo`.
        stream: of whatever else is random, in the network and in the data; None for the global stream.
    """
    with posterior.network_mode(), nullcontext() if stream is None else borrowed_stream(stream):
        return full_elbo(
            posterior.family, posterior.model, batches, groups=groups, coupling=coupling, generator=generator
        )


def elbo_on_seed(posterior: PosteriorBase, batches: Iterable[Any], groups: int, seed: int) -> Estimate:
    """`elbo_over` with all randomness from a seed: posteriors over the same tensors see the same draws."""
    generator = torch.Generator(posterior.device).manual_seed(seed + 1)
    stream = torch.Generator().manual_seed(seed + 2)
    return elbo_over(posterior, batches, groups=groups, generator=generator, stream=stream)
