"""The log density of held-out data while a fit runs: the average over draws that a seed alone decides."""

from collections.abc import Iterable, Sequence
from math import inf, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..families.point import MAP
from ..predict.draws import PredictiveDraws, WeightDraws
from ..predict.predictive import Predictive, observed_target

if TYPE_CHECKING:
    from ..posterior import Posterior

#: draws over which a prediction is averaged
DRAWS = 32


class HeldOut(NamedTuple):
    """log p(t | x) of every row, summed over its elements (pixels), and how many were observed: [rows] each."""

    total: Tensor
    count: Tensor

    @property
    def mean(self) -> float:
        """Return nats for each element; −∞ if some row has none that is a number."""
        mean = float(self.total.sum() / self.count.sum())
        return mean if mean == mean else -inf

    def gain_over(self, other: "HeldOut") -> tuple[float, float]:
        """Return how much higher the mean is, and the paired standard error of that over rows.

        Example:
            >>> count = torch.ones(4, dtype=torch.float64)
            >>> HeldOut(-count, count).gain_over(HeldOut(-2 * count, count))
            (1.0, 0.0)
        """
        gain, rows = self.mean - other.mean, len(self.total)
        residual = ((self.total - other.total) - gain * self.count) / self.count.mean()
        return gain, sqrt(float(residual.square().sum()) / (rows * (rows - 1))) if rows > 1 else 0.0


def of_posterior(posterior: "Posterior", batches: Iterable[Any], seed: int, draws: int = DRAWS) -> HeldOut:
    """Return the log density of the average over draws of the weights."""
    chunks, rows = _draws(posterior, draws, seed + 3), []
    for batch in batches:
        predictive, target = _predicted(chunks, batch)
        log_prob, observed = predictive.log_prob(target).double(), _observed(predictive, target)
        observed = torch.ones_like(log_prob) if observed is None else observed.to(log_prob)
        rows.append([x.reshape(len(log_prob), -1).sum(1).cpu() for x in (log_prob, observed)])
    if not rows:
        raise ValueError("validation= gives no batch: is its data set empty, or was it read to its end before?")
    return HeldOut(*(torch.cat(part) for part in zip(*rows, strict=True)))


def of_network(posterior: "Posterior", theta: Tensor, batches: Iterable[Any]) -> HeldOut:
    """Return the log density of the network at one θ [P]."""
    family = MAP().bind(posterior.space)
    with torch.no_grad():
        family.point.copy_(theta)
    with posterior.model.linearised_around(None):
        return of_posterior(posterior.with_family(family.to(posterior.device)), batches, 0, 1)


def member_log_probs(
    posteriors: "Sequence[Posterior]", batches: Sequence[Any], seed: int, draws: int = DRAWS
) -> tuple[Tensor, float]:
    """Return log p_c(t) of every observed number under each posterior, [C, n], and n."""
    found: list[list[Tensor]] = [[] for _ in posteriors]
    for rows, posterior in zip(found, posteriors, strict=True):
        chunks = _draws(posterior, draws, seed + 3)
        for batch in batches:
            predictive, target = _predicted(chunks, batch)
            log_prob, observed = predictive.log_prob(target).double(), _observed(predictive, target)
            rows.append((log_prob if observed is None else log_prob[observed]).flatten().cpu())
    log_probs = torch.stack([torch.cat(rows) for rows in found])
    return log_probs, float(log_probs.shape[1])


def _draws(posterior: "Posterior", draws: int, seed: int) -> WeightDraws:
    return WeightDraws(posterior, draws, generator=torch.Generator().manual_seed(seed))


def _predicted(chunks: PredictiveDraws, batch: Any) -> tuple[Predictive, Any]:
    inputs, target = chunks.split(batch)
    return chunks(inputs), target


def _observed(predictive: Predictive, target: Any) -> Tensor | None:
    return None if predictive.is_function else observed_target(predictive.likelihood, target)[1]
