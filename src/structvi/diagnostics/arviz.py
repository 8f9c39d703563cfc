"""A posterior for arviz: its summaries and leave-one-out, at independent draws."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..families.family import Draws, Family
from ..predict.predict import predictive_at
from ..predict.predictive import observed_target
from ..predict.sample import IndependentDraws, data_tree
from ..train.data import Batches
from ..util.checks import check_seed
from ..util.random_streams import borrowed_stream

if TYPE_CHECKING:
    from xarray import DataTree

    from ..posterior import Posterior


def to_arviz(
    q: "Posterior | Family",
    loader: Iterable[Any] | None = None,
    draws: int = 1000,
    *,
    select: Any = "*",
    seed: int = 0,
) -> "DataTree":
    """Return independent draws of the posterior by tensor name, as one chain; with a loader what the data say at each.

    Constrained parameters of a log density are their values.

    Args:
        q: a posterior, or a bound family.
        loader: of a posterior: adds the groups log_likelihood (of every element of the target), posterior_predictive
            and observed_data, each with the name "t". They take S × N numbers.
        draws: S.
        select: which tensors, by glob pattern, several, or a predicate.
        seed: of draws and replicated data.

    Example:
        >>> from structvi import MeanField, Parameters
        >>> data = to_arviz(MeanField().bind(Parameters({"z": torch.zeros(3)})), draws=50)
        >>> data.posterior["z"].dims, data.posterior["z"].shape
        (('chain', 'draw', 'z_dim_0'), (1, 50, 3))
    """
    check_seed(seed)
    family = q if isinstance(q, Family) else getattr(q, "family", None)
    if not isinstance(family, Family):
        raise TypeError(f"to_arviz expects a posterior from variationalize or a bound family, got {type(q).__name__}")
    if loader is not None and isinstance(q, Family):
        raise TypeError("a loader goes with a posterior, whose model says what the data are at a draw")
    density = family()
    space = density.named_space()
    names = space.matching(select)
    generator = torch.Generator(density.mean.device).manual_seed(seed)
    sample = list(IndependentDraws(density, draws, generator, 16 if loader is not None else None))
    theta = torch.cat([space.join(one.theta, one.fixed) for one in sample])
    posterior = {name: tensor for name, tensor in space.constrain(theta).items() if name in names}
    if loader is None:
        return data_tree(posterior)
    assert not isinstance(q, Family)
    log_likelihood, replicated, observed = _at_data(q, loader, sample, generator)
    groups = {"log_likelihood": {"t": log_likelihood}}
    if replicated is not None:
        groups["posterior_predictive"] = {"t": replicated}
    return data_tree(posterior, observed={"t": observed}, **groups)


def _at_data(
    posterior: "Posterior", loader: Iterable[Any], sample: list[Draws], generator: torch.Generator
) -> tuple[Tensor, Tensor | None, Tensor]:
    """log p(t | y_s) [S, N, ..], replicated t [S, N, ..] where p(t | y) can be drawn from, and t [N, ..]."""
    log_likelihood, replicated, observed = [], [], []
    with borrowed_stream(generator):  # torch's distributions draw from the global stream
        for batch in Batches(loader, device=posterior.device).everything():
            pairs = [predictive_at(posterior, draws, batch) for draws in sample]
            target = pairs[0][1]
            log_likelihood.append(torch.cat([pred.log_prob_draws(target) for pred, _ in pairs]))
            if not pairs[0][0].is_function:
                replicated.append(torch.cat([pred.components.sample() for pred, _ in pairs]))
            observed.append(observed_target(posterior.model.likelihood, target)[0])
    return torch.cat(log_likelihood, 1), torch.cat(replicated, 1) if replicated else None, torch.cat(observed)
