"""What predictions explain of the targets."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical

from ..models.likelihoods import Gaussian
from ..predict.draws import IndependentDraws, predictive_at
from ..predict.predictive import Predictive, observed_target
from ..train.data import Batches

if TYPE_CHECKING:
    from ..posterior import Posterior

#: A fit is stuck where predictions explain less of the targets' variance, or noise is more of their standard deviation.
NOTHING_EXPLAINED = 0.01
ALL_NOISE = 0.95
#: Draws from which the predictive mean is taken.
DRAWS = 16


@dataclass(frozen=True)
class Explained:
    """What predictions explain of the targets.

    Attributes:
        explained: the variance of predictive means over the data, relative to that of the targets; None where the
            likelihood is a plain function.
        noise: standard deviation of the noise over that of the targets; None where the likelihood has no unknown one.
    """

    explained: float | None
    noise: float | None

    @property
    def stuck(self) -> str | None:
        """What shows that the fit is stuck, in words; None where nothing does."""
        said = []
        if self.explained is not None and self.explained < NOTHING_EXPLAINED:
            said.append("predictions hardly depend on the input")
        if self.noise is not None and self.noise > ALL_NOISE:
            said.append(f"the noise is {self.noise:.2f} of the targets' standard deviation")
        return " and ".join(said) or None


def explained(posterior: "Posterior", loader: Iterable[Any], seed: int = 0) -> Explained:
    """What is explained, at a few draws and over the loader's batches."""
    part, spread = explained_variance(posterior, loader, seed)
    noise = noise_of(posterior)
    return Explained(part, noise / spread if noise is not None and spread else None)


@torch.no_grad()
def noise_of(posterior: "Posterior") -> float | None:
    """The standard deviation of a noise that is fitted."""
    likelihood = posterior.model.likelihood
    if not isinstance(likelihood, Gaussian) or likelihood.noise not in ("point", "random"):
        return None
    if likelihood.noise == "point":
        return likelihood.log_noise.exp().item()
    return posterior.space.unravel(posterior.family().mean)["likelihood.log_noise"].exp().item()


def explained_variance(posterior: "Posterior", loader: Iterable[Any], seed: int) -> tuple[float | None, float | None]:
    """Variance of predictive means over that of the targets, and the standard deviation of the targets; None for none.

    Of labels the means are probabilities and the variance is that of the indicators of the classes, Σ p̄(1 − p̄).
    """
    device = posterior.device
    sample = IndependentDraws(posterior.family(), DRAWS, torch.Generator(device).manual_seed(seed))
    draws = next(iter(sample))
    predicted, observed = _Variance(), _Variance()
    labels = False
    for batch in Batches(loader, device=device).everything():
        pred, target = predictive_at(posterior, draws, batch)
        if pred.is_function:
            return None, None
        labels = isinstance(pred.components, Categorical | Bernoulli)
        t, mask = observed_target(posterior.model.likelihood, target)
        predicted.add(_rows(pred, mask))
        if not labels:
            observed.add(t.reshape(-1, 1) if mask is None else t[mask].unsqueeze(-1))
    if labels:
        total = (predicted.mean * (1 - predicted.mean)).sum().item()
        return (predicted.variance.sum().item() / total if total else None), None
    total = observed.variance.item()
    return (predicted.variance.item() / total, sqrt(total)) if total else (None, None)


def _rows(pred: Predictive, mask: Tensor | None) -> Tensor:
    """Predictive means of the observed elements: [n, 1], and class probabilities [n, C]."""
    mean = pred.mean.movedim(1, -1) if isinstance(pred.components, Categorical) else pred.mean.unsqueeze(-1)
    return mean.reshape(-1, mean.shape[-1]) if mask is None else mean[mask]


class _Variance:
    """Mean and variance of rows that come in batches, in float64."""

    def __init__(self) -> None:
        self.count, self.total, self.square = 0, torch.zeros(1), torch.zeros(1)

    def add(self, rows: Tensor) -> None:
        rows = rows.double().cpu()
        self.count += len(rows)
        self.total = self.total + rows.sum(0)
        self.square = self.square + rows.square().sum(0)

    @property
    def mean(self) -> Tensor:
        return self.total / self.count

    @property
    def variance(self) -> Tensor:
        return (self.square / self.count - self.mean.square()).clamp(min=0.0)
