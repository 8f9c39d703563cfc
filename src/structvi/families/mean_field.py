"""Mean field: independent normals, N(μ, diag(s)²)."""

from functools import cached_property

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from .gaussian import Gaussian, LowRank
from .numerics import fused
from .numerics.algebra import sum_weights
from .scaled import Scaled


class DiagonalNormal(Gaussian):
    """N(mean, diag(scale)²) with scale = exp(log_scale): [P], [P]."""

    def __init__(self, mean: Tensor, log_scale: Tensor):
        self.location, self.log_scale = mean, log_scale

    @cached_property
    def scale(self) -> Tensor:
        with torch.enable_grad():  # a value without a graph must not be found by who wants one
            return self.log_scale.exp()

    def state(self) -> fused.State:
        empty = self.location.new_empty(self.P, 0)
        return fused.State(self.location, self.log_scale, empty, self.location.detach(), False, self.reduce)

    def transform(self, diagonal: Tensor, low_rank: Tensor) -> Tensor:
        return self.scale * diagonal

    def precision_product(self, x: Tensor) -> Tensor:
        return x / self.scale.square()

    def quadratic(self, x: Tensor) -> Tensor:
        return sum_weights((x / self.scale).square())

    def half_log_det(self) -> Tensor:
        return sum_weights(self.log_scale)

    def low_rank(self) -> LowRank:
        empty = self.scale.new_zeros(self.P, 0)
        return LowRank(self.scale.square(), empty, self.scale.new_zeros(0, 0))

    def precision_diagonal(self) -> Tensor:
        return self.scale.square().reciprocal()

    @property
    def variance(self) -> Tensor:
        return self.scale.square()

    def to_distribution(self) -> Distribution:
        return Independent(Normal(self.mean, self.scale), 1)


class MeanField(Scaled):
    """Independent normals over all weights, θ_i ~ N(μ_i, s_i²): 2P variational parameters.

    Args:
        initial_mean: means start at the network's "current" values, at a "fresh" draw of its initialisation or at
            "zero".
        initial_scale: scales start at this fraction of each tensor's initialisation scale.

    Example:
        >>> import torch
        >>> from structvi import Parameters
        >>> q = MeanField().bind(Parameters({"z": torch.zeros(3)}))
        >>> q().variance.shape
        torch.Size([3])
    """

    def forward(self) -> DiagonalNormal:
        return DiagonalNormal(self.mean, self.log_scale)
