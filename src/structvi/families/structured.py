"""Structured covariance: N(μ, diag(s)² + UUᵀ), low rank over all weights, within and across layers."""

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, LowRankMultivariateNormal, Normal

from .gaussian import LowRank
from .low_rank import LowRankDensity, LowRankFamily
from .numerics.algebra import half_log_det, project, solve, sum_weights


class LowRankNormalDensity(LowRankDensity):
    """N(mean, diag(scale)² + UUᵀ) with U = diag(unit) F; of mean [P], log scale [P], F [P, K] and unit [P].

    With r = unit / scale, M = I_K + Fᵀ diag(r²) F and x = (θ − mean)/scale, Woodbury's identity gives

        Λ(θ − mean) = (x − r∘F M⁻¹ Fᵀ(r∘x)) / scale,      det Σ = det M ∏ scale².

    U itself is never formed to draw or to measure.
    """

    @property
    def ratio(self) -> Tensor:
        return self.unit / self.scale

    def transform(self, diagonal: Tensor, low_rank: Tensor) -> Tensor:
        return torch.addcmul(self.scale * diagonal, low_rank @ self.factor.mT, self.unit)

    def precision_product(self, x: Tensor) -> Tensor:
        x = x / self.scale
        if self.rank:
            r = self.ratio
            inner = solve(self.cholesky(), project(x * r, self.factor)).to(x.dtype)  # [S, K]
            x = torch.addcmul(x, inner @ self.factor.mT, r, value=-1)
        return x / self.scale

    def quadratic(self, x: Tensor) -> Tensor:
        x = x / self.scale
        projected = project(x * self.ratio, self.factor)  # [S, K]
        reduced = torch.linalg.solve_triangular(self.cholesky(), projected.mT, upper=False)
        return sum_weights(x.square()) - reduced.square().sum(0)

    def half_log_det(self) -> Tensor:
        return sum_weights(self.log_scale) + half_log_det(self.cholesky())

    def low_rank(self) -> LowRank:
        identity = torch.eye(self.rank, dtype=self.scale.dtype, device=self.scale.device)
        return LowRank(self.scale.square(), self.factor * self.unit.unsqueeze(-1), identity)

    def precision_diagonal(self) -> Tensor:
        r = self.ratio
        inner = solve(self.cholesky(), self.factor.double()).to(r.dtype)  # [P, K]
        return (1 - r.square() * (inner * self.factor).sum(-1)) / self.scale.square()

    def to_distribution(self) -> Distribution:
        if self.rank == 0:
            return Independent(Normal(self.mean, self.scale), 1)
        return LowRankMultivariateNormal(self.mean, self.low_rank().V, self.scale.square())


class LowRankNormal(LowRankFamily):
    """Diagonal plus low rank over the whole weight vector: N(μ, diag(s)² + UUᵀ), U of rank K; P(K + 2) parameters.

    The factor learns relative to a fixed unit, U = s₀∘F, with s₀ the scale when the factor starts: with U free an
    adaptive optimizer's noise inflates it, and tied to the learned s it spoils optima on the boundary s_i → 0.

    Args:
        rank: K, from 0 (mean field) to P.
        initial_mean: means start at the network's "current" values, at a "fresh" draw of its initialisation or at
            "zero".
        initial_scale: scales start at this fraction of each tensor's initialisation scale.
        initial_factor: F starts as N(0, initial_factor²).

    Example:
        >>> from structvi import Parameters
        >>> q = LowRankNormal(rank=1).bind(Parameters({"a": torch.zeros(2), "b": torch.zeros(3)}))
        >>> q().covariance("a", "b").shape
        torch.Size([2, 3])
    """

    density = LowRankNormalDensity
