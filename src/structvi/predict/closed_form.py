"""Outputs that are normal, with Gaussian noise that does not depend on them: p(t | x) in closed form."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

from ..models.likelihoods import Gaussian


@dataclass(frozen=True)
class NormalOutputs:
    """y ~ Σ_m w_m N(mean_m, variance_m) at every element, and t = y + noise.

    Example:
        >>> outputs = NormalOutputs(torch.ones(1), torch.zeros(1, 3), torch.full((1, 3), 9.0), torch.full((1, 3), 4.0))
        >>> outputs.observed().scale[0]
        tensor([5., 5., 5.])
    """

    weights: Tensor  # [M]
    mean: Tensor  # [M, B, ..]
    variance: Tensor  # [M, B, ..]
    noise: Tensor  # [M, B, ..], its standard deviation

    def observed(self) -> Normal:
        """p(t | m), whose mixture with the weights is p(t | x)."""
        return Normal(self.mean, self.variance.sqrt().hypot(self.noise), validate_args=False)

    @property
    def average(self) -> Tensor:
        """E y = E t: [B, ..]."""
        return torch.tensordot(self.weights, self.mean, dims=1)

    @property
    def spread(self) -> Tensor:
        """Var y: [B, ..]."""
        within = (self.mean - self.average).square() + self.variance
        return torch.tensordot(self.weights, within, dims=1)

    def stretched(self, scale: float) -> "NormalOutputs":
        """All deviations from the average `scale` times as large, of outputs and of noise."""
        average = self.average
        mean = average + scale * (self.mean - average)
        return replace(self, mean=mean, variance=scale**2 * self.variance, noise=scale * self.noise)

    def double(self) -> "NormalOutputs":
        return NormalOutputs(self.weights.double(), self.mean.double(), self.variance.double(), self.noise.double())

    @classmethod
    def joined(cls, parts: "Sequence[NormalOutputs | None]", shares: Sequence[float]) -> "NormalOutputs | None":
        """The mixture of several, each with its share, where all are known."""
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        weights = torch.cat([share * part.weights for share, part in zip(shares, known, strict=True)])
        rest = [[getattr(part, name) for part in known] for name in ("mean", "variance", "noise")]
        return cls(weights, *(torch.cat(own) for own in rest))


def with_noise(likelihood: Any, drawn: Any, weights: Tensor, mean: Tensor, variance: Tensor) -> NormalOutputs | None:
    """Of weights [M] and moments [M, B, ..] of y, and p(t | y) at draws of it; None where the noise is another, or
    depends on y.

    A variance that is not finite is NaN.
    """
    if type(likelihood) is not Gaussian or likelihood.noise in ("head", "random"):
        return None
    noise = drawn.scale[:1].expand(len(weights), *drawn.scale.shape[1:])
    variance = variance.clamp(min=0.0).masked_fill(~variance.isfinite(), torch.nan)
    return NormalOutputs(weights.to(noise), mean.to(noise), variance.to(noise), noise)
