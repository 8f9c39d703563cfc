"""Structured precision: N(μ, Λ⁻¹) with Λ = diag(1/s²) + WWᵀ."""

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal

from .gaussian import LowRank
from .low_rank import LowRankDensity, LowRankFamily
from .numerics.algebra import half_log_det, project, solve, sum_weights


class LowRankPrecisionDensity(LowRankDensity):
    """N(mean, Λ⁻¹), Λ = diag(1/scale²) + WWᵀ, W = diag(1/unit) F; of mean [P], log scale [P], F [P, K] and unit [P].

    With r = scale / unit, G = r∘F and M = I_K + GᵀG, for ε ~ N(0, I_P) and z ~ N(0, I_K) the deviation

        (I + GGᵀ)⁻¹(ε + Gz) = ε + G M⁻¹(z − Gᵀε)

    has covariance (I + GGᵀ)⁻¹, and times scale it has Λ⁻¹. W and G are never formed to draw or to measure.
    """

    of_precision = True

    @property
    def ratio(self) -> Tensor:
        return self.scale / self.unit

    def transform(self, diagonal: Tensor, low_rank: Tensor) -> Tensor:
        deviation = self.scale * diagonal
        if self.rank:
            r = self.ratio
            inner = solve(self.cholesky(), low_rank - project(diagonal * r, self.factor)).to(diagonal.dtype)  # [S, K]
            deviation = torch.addcmul(deviation, inner @ self.factor.mT, self.scale * r)
        return deviation

    def precision_product(self, x: Tensor) -> Tensor:
        product = x / self.scale.square()
        if self.rank:
            inner = project(x / self.unit, self.factor).to(x.dtype)  # [S, K]
            product = torch.addcdiv(product, inner @ self.factor.mT, self.unit)
        return product

    def quadratic(self, x: Tensor) -> Tensor:
        return sum_weights((x / self.scale).square()) + project(x / self.unit, self.factor).square().sum(-1)

    def half_log_det(self) -> Tensor:
        return sum_weights(self.log_scale) - half_log_det(self.cholesky())

    def low_rank(self) -> LowRank:
        inverse = -torch.cholesky_inverse(self.cholesky()).to(self.scale.dtype)
        return LowRank(self.scale.square(), self.factor * (self.scale.square() / self.unit).unsqueeze(-1), inverse)

    def precision_diagonal(self) -> Tensor:
        return self.scale.square().reciprocal() + self.factor.square().sum(-1) / self.unit.square()

    def to_distribution(self) -> Distribution:
        self._check_dense("to_distribution()")
        W = self.factor / self.unit.unsqueeze(-1)
        return MultivariateNormal(self.mean, precision_matrix=torch.diag(self.scale.square().reciprocal()) + W @ W.mT)


class LowRankPrecision(LowRankFamily):
    """Diagonal plus low rank in the precision: Λ = diag(1/s²) + WWᵀ, W of rank K; P(K + 2) parameters.

    It pins down K directions that the data determine well and leaves the others as wide as the scales say: the right
    shape where few combinations of weights are well determined, as in over-parametrised networks. The factor learns
    relative to a fixed unit, W = F/s₀, with s₀ the scale when the factor starts.

    Args:
        rank: K, from 0 (mean field) to P.
        initial_mean: means start at the network's "current" values, at a "fresh" draw of its initialisation or at
            "zero".
        initial_scale: scales start at this fraction of each tensor's initialisation scale.
        initial_factor: F starts as N(0, initial_factor²).

    Example:
        >>> from structvi import Parameters
        >>> q = LowRankPrecision(rank=1).bind(Parameters({"z": torch.zeros(4)}))
        >>> q().log_prob(torch.zeros(2, 4)).shape
        torch.Size([2])
    """

    density = LowRankPrecisionDensity

    @property
    def precision_columns(self) -> int:
        return self.rank

    def place_columns(self, columns: Tensor) -> None:
        # the unit is the scale with the columns: other than the scale, which says that the factor has begun
        self.unit.copy_((self.log_scale.exp() ** -2 + columns.square().sum(1)).rsqrt())
        self.factor.zero_()
        self.factor[:, : columns.shape[1]] = columns * self.unit.unsqueeze(-1)
