"""The features that come to a network's last layer, and the targets beside them, row by row, from one pass."""

from collections.abc import Iterable, Iterator
from math import log
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..laplace.place import trained_values
from ..models.bayesian_model import batch_size
from ..models.likelihoods import Bernoulli, Categorical, Gaussian, split_mask
from ..networks.last_layer import LastLayer, Pass

if TYPE_CHECKING:
    from ..posterior import Posterior


class Rows(NamedTuple):
    """The n rows of one batch, with C outputs."""

    features: Tensor  # [n, D], the last column ones if the bias is random
    target: Tensor  # [n, C]; labels of classes as one-hot
    weight: Tensor  # [n, C], or [n, 1] of classes: zero if nothing was observed


def check_head(posterior: "Posterior", who: str) -> None:
    """Raise if the likelihood or the modes of a posterior are not those of a head."""
    likelihood = posterior.model.likelihood
    is_gaussian = isinstance(likelihood, Gaussian) and likelihood.noise not in ("random", "head")
    if not is_gaussian and not (isinstance(likelihood, Bernoulli | Categorical) and likelihood.exact):
        raise ValueError(
            f'{who} is for likelihoods.Gaussian with a known noise or noise="point", and for Bernoulli and '
            f"Categorical without class weights, got {likelihood!r}: use fit"
        )
    if posterior.dropout == "on" or posterior.batch_norm == "reestimated":
        raise ValueError(
            f'{who} uses the features of one pass: with dropout="on" or batch_norm="reestimated" they are others in '
            "every pass. Leave these out, or use fit"
        )


@torch.no_grad()
def passes(
    posterior: "Posterior", layer: LastLayer, batches: Iterable[Any], theta: Tensor | None = None
) -> Iterator[Pass]:
    """Yield one pass of the network over each batch, at θ [P] or the trained values."""
    model, theta = posterior.model, trained_values(posterior) if theta is None else theta
    with posterior.network_mode(), model.linearised_around(None):
        for batch in batches:

            def call(own: Tensor, batch: Any = batch) -> tuple[Any, Any]:
                return model.call(model.net_space.unravel(own), batch)

            here = layer.run(lambda call=call: call(theta))
            model.likelihood(here.output, here.target)  # its checks of shapes, types and labels
            layer.checked(here, call, theta)
            yield here


def rows_of(
    posterior: "Posterior", layer: LastLayer, batches: Iterable[Any], theta: Tensor | None = None
) -> Iterator[tuple[Rows, int]]:
    """Yield the rows of each batch, and its number of observations: one pass of the network."""
    for here in passes(posterior, layer, batches, theta):
        features = here.features.to(torch.float64 if here.features.dtype == torch.float64 else torch.float32)
        target = _targets(posterior.model.likelihood, layer, here.target, features.dtype)
        yield Rows(features, *target), batch_size(here.target)


def _targets(likelihood: Any, layer: LastLayer, target: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    t, mask = split_mask(target)
    is_known = torch.ones_like(t, dtype=torch.bool) if mask is None else mask
    if not isinstance(likelihood, Gaussian) and likelihood.ignore_index is not None:
        is_known = is_known & (t != likelihood.ignore_index)
    t, weight = t.masked_fill(~is_known, 0), is_known.to(dtype)
    if isinstance(likelihood, Categorical):
        one_hot = nn.functional.one_hot(t.reshape(-1).long(), layer.outputs)
        return one_hot.to(dtype), weight.reshape(-1, 1)
    return layer.as_rows(t).to(dtype), layer.as_rows(weight)


def log_noise_of(likelihood: Gaussian) -> float:
    """Return log σ of a noise that is known or learned as a point."""
    return log(likelihood.noise) if isinstance(likelihood.noise, float) else float(likelihood.log_noise.detach())
