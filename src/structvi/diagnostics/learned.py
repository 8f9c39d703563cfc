"""The share of the targets that predictions explain."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Categorical

from ..models.likelihoods import Gaussian
from ..predict.predict import predictive_at
from ..predict.predictive import observed_target
from ..predict.sample import IndependentDraws
from ..train.data import Batches
from ..util.checks import check_seed

if TYPE_CHECKING:
    from ..posterior import Posterior

#: a fit is stuck if predictions explain a smaller share of the targets' variance, or noise is a larger one of their sd
NOTHING_EXPLAINED, ALL_NOISE = 0.01, 0.95
#: draws of the predictive mean
DRAWS = 16


@dataclass(frozen=True)
class Learned:
    """Shares of the targets' spread.

    Attributes:
        explained: variance of predictive means over the data, relative to the targets' variance; None if the likelihood
            is a plain function.
        noise: standard deviation of the noise over the targets'; None if the likelihood has no unknown noise.
    """

    explained: float | None
    noise: float | None

    @property
    def stuck(self) -> str | None:
        """The signs of a stuck fit, in words; None without any."""
        said = []
        if self.explained is not None and self.explained < NOTHING_EXPLAINED:
            said.append("predictions hardly depend on the input")
        if self.noise is not None and self.noise > ALL_NOISE:
            said.append(f"the noise is {self.noise:.2f} of the targets' standard deviation")
        return " and ".join(said) or None


@torch.no_grad()
def learned(posterior: "Posterior", loader: Iterable[Any], *, seed: int = 0) -> Learned:
    """Return what predictions explain of the targets, and how much is noise.

    For labels, means are probabilities, and the targets' variance is Σ p̄(1 − p̄), of the classes' indicators.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> bayes = variationalize(torch.nn.Linear(2, 1), likelihoods.Gaussian("point"), MeanField(), num_data=4)
        >>> learned(bayes, [(torch.zeros(4, 2), torch.arange(4.0).unsqueeze(-1))]).stuck
        'predictions hardly depend on the input'
    """
    check_seed(seed)
    generator = torch.Generator(posterior.device).manual_seed(seed)
    draws = next(iter(IndependentDraws(posterior.family(), DRAWS, generator)))
    means, targets, labels = [], [], False
    for batch in Batches(loader, device=posterior.device).everything():
        pred, target = predictive_at(posterior, draws, batch)
        if pred.is_function:
            return Learned(None, None)
        labels = pred.is_of_labels
        t, mask = observed_target(posterior.model.likelihood, target)
        mean = pred.mean.movedim(1, -1) if isinstance(pred.components, Categorical) else pred.mean.unsqueeze(-1)
        mask = torch.ones(mean.shape[:-1], dtype=torch.bool, device=mean.device) if mask is None else mask
        means.append(_sums(mean[mask]))
        targets += [] if labels else [_sums(t[mask].unsqueeze(-1))]
    p, variance = _moments(means)
    total = (p * (1 - p)).sum().item() if labels else _moments(targets)[1].item()
    noise = _noise(posterior)
    return Learned(variance.sum().item() / total if total else None, noise / sqrt(total) if noise and total else None)


def _noise(posterior: "Posterior") -> float | None:
    """Return the standard deviation of a noise that is fitted."""
    likelihood = posterior.model.likelihood
    if not isinstance(likelihood, Gaussian) or likelihood.noise not in ("point", "random"):
        return None
    if likelihood.noise == "point":
        return likelihood.log_noise.exp().item()
    return posterior.space.unravel(posterior.family().mean)["likelihood.log_noise"].exp().item()


def _sums(rows: Tensor) -> Tensor:
    """Return the number of rows [n, C], their sum, and the sum of their squares: [3, C], float64."""
    rows = rows.double().cpu()
    return torch.stack([torch.ones_like(rows).sum(0), rows.sum(0), rows.square().sum(0)])


def _moments(sums: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and variance [C] of rows that came in batches."""
    count, total, square = torch.stack(sums).sum(0)
    mean = total / count
    return mean, (square / count - mean.square()).clamp(min=0.0)
