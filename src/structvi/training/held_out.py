"""The log density of data that take no part in a fit, of the average over draws, on draws that a seed alone decides."""

from collections.abc import Callable, Iterable, Sequence
from math import inf, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical
from torch.quasirandom import SobolEngine
from torch.utils._pytree import tree_leaves

from ..couplings import naive
from ..families.gaussian import Gaussian
from ..families.point import MAP
from ..models.batch import split_batch
from ..posterior import PosteriorBase
from ..predicting.draws import DrawChunks
from ..predicting.function_space import outputs_of_normals
from ..predicting.predictive import Predictive, observed_target

#: draws over which a prediction is averaged
DRAWS = 32
#: draws of outputs, where they are known to be normal: they cost no pass of the network
OUTPUT_DRAWS = 512
#: a network with at most so many outputs is looked at in function space
FEW_OUTPUTS = 48


class HeldOut(NamedTuple):
    """log p(t | x) of every row, summed over its elements (pixels), and how many were observed: [rows] each."""

    total: Tensor
    count: Tensor

    @property
    def mean(self) -> float:
        """In nats for each element; −∞ where some row has none that is a number."""
        mean = float(self.total.sum() / self.count.sum())
        return mean if mean == mean else -inf

    def gain_over(self, other: "HeldOut") -> tuple[float, float]:
        """How much higher the mean is, and the standard error of that, over the rows that both have seen.

        Where one has seen fewer, those are the first of the other's.

        Example:
            >>> count = torch.ones(4, dtype=torch.float64)
            >>> HeldOut(-count, count).gain_over(HeldOut(-2 * count, count))
            (1.0, 0.0)
        """
        rows = min(len(self.total), len(other.total))
        one, two = (HeldOut(x.total[:rows], x.count[:rows]) for x in (self, other))
        gain = one.mean - two.mean
        residual = (one.total - two.total) - gain * one.count
        error = sqrt(float(residual.square().sum()) * rows / (rows - 1)) / float(one.count.sum()) if rows > 1 else 0.0
        return gain, error


def of_posterior(posterior: PosteriorBase, batches: Iterable[Any], seed: int, draws: int = DRAWS) -> HeldOut:
    """Of the average over draws of the weights, with the network as the model calls it."""
    generator = torch.Generator().manual_seed(seed + 3)
    chunks = DrawChunks(posterior, draws, naive, 16, None, generator)
    rows = []
    for batch in batches:
        inputs, target = chunks.split(batch)
        rows.append(_rows(chunks.whole(inputs), target))
    return _joined(rows)


def member_log_probs(
    posteriors: Sequence[PosteriorBase], batches: Sequence[Any], seed: int, draws: int = DRAWS
) -> tuple[Tensor, float]:
    """log p_c(t) of every observed number under each posterior, [C, n], and n."""
    found: list[list[Tensor]] = [[] for _ in posteriors]
    for rows, posterior in zip(found, posteriors, strict=True):
        chunks = DrawChunks(posterior, draws, naive, 16, None, torch.Generator().manual_seed(seed + 3))
        for batch in batches:
            inputs, target = chunks.split(batch)
            predictive = chunks.whole(inputs)
            log_prob = predictive.log_prob(target).double()
            observed = None if predictive.is_function else observed_target(predictive.likelihood, target)[1]
            rows.append((log_prob if observed is None else log_prob[observed]).flatten().cpu())
    log_probs = torch.stack([torch.cat(rows) for rows in found])
    return log_probs, float(log_probs.shape[1])


def of_network(posterior: PosteriorBase, theta: Tensor, batches: Iterable[Any]) -> HeldOut:
    """Of the network at one θ [P]."""
    with posterior.model.linearised_around(None):
        return of_posterior(_at(posterior, theta), batches, 0, 1)


def _at(posterior: PosteriorBase, theta: Tensor) -> PosteriorBase:
    family = MAP().bind(posterior.space)
    with torch.no_grad():
        family.point.copy_(theta)
    return posterior.with_family(family.to(posterior.device))


def is_too_sure(posterior: PosteriorBase, theta: Tensor, batches: Iterable[Any]) -> bool:
    """Whether the labels are less likely under the network at one θ [P] than it expects: −log p(t) above its entropy.

    The derivative of the held-out log-likelihood by a temperature, at one, is the mean of −log p(t) less that of the
    entropy. Where it is negative every spread of the predictions costs, to first order. Of likelihoods that are not of
    labels nothing is said: True.
    """
    excess = 0.0
    with posterior.model.linearised_around(None):
        chunks = DrawChunks(_at(posterior, theta), 1, naive, 16, None, torch.Generator())
        for batch in batches:
            inputs, target = chunks.split(batch)
            predictive = chunks.whole(inputs)
            if predictive.is_function or not isinstance(predictive.components, Categorical | Bernoulli):
                return True
            rows = _rows(predictive, target)
            observed = observed_target(predictive.likelihood, target)[1]
            entropy = predictive.entropy.double()
            excess -= float((entropy if observed is None else entropy[observed]).sum()) + float(rows.total.sum())
    return excess > 0


def of_normals(
    posterior: PosteriorBase,
    theta: Tensor,
    normals: Sequence[Callable[[], Gaussian]],
    batches: Iterable[Any],
    seed: int,
) -> list[HeldOut]:
    """Of normals over the weights of the network linearised at θ [P], without a draw of weights."""
    noise: Tensor | None = None
    likelihood, found = posterior.model.likelihood, [[] for _ in normals]
    values = posterior.model.likelihood_values(theta.unsqueeze(0).expand(OUTPUT_DRAWS, -1))
    weights = theta.new_full((OUTPUT_DRAWS,), 1 / OUTPUT_DRAWS)
    with torch.no_grad():
        for batch in batches:
            inputs, target = split_batch(batch)
            if noise is None:
                size = outputs_of(posterior, theta, inputs)
                # evenly spread: of as many independent draws the error is about five times as large
                uniform = SobolEngine(size, scramble=True, seed=seed).draw(OUTPUT_DRAWS, dtype=torch.float64)
                noise = torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9)).to(theta.device)
            assert noise is not None
            outputs = outputs_of_normals(posterior, theta, normals, inputs, noise)
            for rows, make, output in zip(found, normals, outputs, strict=True):
                make()  # with the noise that goes with it
                rows.append(_rows(Predictive(output, weights, likelihood, values), target))
    return [_joined(rows) for rows in found]


def outputs_of(posterior: PosteriorBase, theta: Tensor, inputs: Any) -> int:
    """How many numbers the network's output has for one input."""
    with torch.no_grad(), posterior.network_mode(), posterior.model.linearised_around(None):
        output = posterior.model.outputs(theta.unsqueeze(0), inputs)
    return sum(leaf[0, 0].numel() for leaf in tree_leaves(output))


def _rows(predictive: Predictive, target: Any) -> HeldOut:
    log_prob = predictive.log_prob(target).double()
    observed = None if predictive.is_function else observed_target(predictive.likelihood, target)[1]
    observed = torch.ones_like(log_prob) if observed is None else observed.to(log_prob)
    flat = [x.reshape(len(log_prob), -1).sum(1).cpu() for x in (log_prob, observed)]
    return HeldOut(*flat)


def _joined(rows: list[HeldOut]) -> HeldOut:
    return HeldOut(torch.cat([one.total for one in rows]), torch.cat([one.count for one in rows]))
