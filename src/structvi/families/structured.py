"""Structured covariance: N(μ, diag(s)² + UUᵀ), low rank over all weights, within and across layers."""

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, LowRankMultivariateNormal, Normal

from .algebra import capacitance, half_log_det, project, solve, sum_weights
from .base import Family, check_factor, check_rank_fits, check_start, initial_mean
from .gaussian import Gaussian, LowRank


class StructuredNormalDensity(Gaussian):
    """N(mean, diag(scale)² + UUᵀ) with U = diag(unit) F: [P], [P], [P, K], [P].

    With r = unit / scale, M = I_K + Fᵀ diag(r²) F and x = (θ − mean)/scale, Woodbury's identity gives

        Λ(θ − mean) = (x − r∘F M⁻¹ Fᵀ(r∘x)) / scale,      det Σ = det M ∏ scale².

    U itself is never formed to draw or to measure.
    """

    def __init__(self, mean: Tensor, scale: Tensor, factor: Tensor, unit: Tensor):
        self.location, self.scale, self.factor, self.unit = mean, scale, factor, unit
        self.rank = factor.shape[-1]
        self._graphed: Tensor | None = None
        self._plain: Tensor | None = None

    def transform(self, diagonal: Tensor, low_rank: Tensor) -> Tensor:
        return torch.addcmul(self.scale * diagonal, low_rank @ self.factor.mT, self.unit)

    def _cholesky(self) -> Tensor:
        """Of M. Kept for the life of the density, with its graph where one is wanted: a value computed under no_grad
        is never used for gradients."""
        if torch.is_grad_enabled():
            if self._graphed is None:
                self._graphed = capacitance(self.factor, self.unit / self.scale)
            return self._graphed
        if self._plain is None:
            self._plain = (
                capacitance(self.factor, self.unit / self.scale) if self._graphed is None else self._graphed.detach()
            )
        return self._plain

    def precision_product(self, x: Tensor) -> Tensor:
        x = x / self.scale
        if self.rank:
            r = self.unit / self.scale
            inner = solve(self._cholesky(), project(x * r, self.factor)).to(x.dtype)  # [S, K]
            x = torch.addcmul(x, inner @ self.factor.mT, r, value=-1)
        return x / self.scale

    def quadratic(self, x: Tensor) -> Tensor:
        x = x / self.scale
        projected = project(x * (self.unit / self.scale), self.factor)  # [S, K]
        reduced = torch.linalg.solve_triangular(self._cholesky(), projected.mT, upper=False)
        return sum_weights(x.square()) - reduced.square().sum(0)

    def half_log_det(self) -> Tensor:
        return sum_weights(self.scale.log()) + half_log_det(self._cholesky())

    def low_rank(self) -> LowRank:
        identity = torch.eye(self.rank, dtype=self.scale.dtype, device=self.scale.device)
        return LowRank(self.scale.square(), self.factor * self.unit.unsqueeze(-1), identity)

    def precision_diagonal(self) -> Tensor:
        r = self.unit / self.scale
        inner = solve(self._cholesky(), self.factor.double()).to(r.dtype)  # [P, K]
        return (1 - r.square() * (inner * self.factor).sum(-1)) / self.scale.square()

    def to_distribution(self) -> Distribution:
        if self.rank == 0:
            return Independent(Normal(self.mean, self.scale), 1)
        return LowRankMultivariateNormal(self.mean, self.low_rank().V, self.scale.square())


class StructuredNormal(Family):
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
        >>> q = StructuredNormal(rank=1).bind(Parameters({"a": torch.zeros(2), "b": torch.zeros(3)}))
        >>> q().covariance("a", "b").shape
        torch.Size([2, 3])
    """

    mean: Tensor
    log_scale: Tensor
    factor: Tensor
    unit: Tensor

    def __init__(
        self,
        rank: int,
        initial_mean: str = "current",
        initial_scale: float = 0.1,
        initial_factor: float = 0.1,
    ):
        super().__init__()
        check_factor(rank, initial_factor)
        check_start(initial_mean, initial_scale)
        self.rank = rank
        self.initial_mean, self.initial_scale, self.initial_factor = initial_mean, initial_scale, initial_factor

    def initialise(self, parameters, generator):
        check_rank_fits(self.rank, parameters.size)
        self.mean = nn.Parameter(initial_mean(parameters, self.initial_mean, generator))
        scale = self.initial_scale * parameters.scale
        self.log_scale = nn.Parameter(scale.log())
        self.factor = nn.Parameter(self.initial_factor * normal((parameters.size, self.rank), scale, generator))
        self.register_buffer("unit", scale)

    def forward(self) -> StructuredNormalDensity:
        return StructuredNormalDensity(self.mean, self.log_scale.exp(), self.factor, self.unit)

    def factor_off(self) -> None:
        """Hold the factor at zero: mean and scales alone, N(μ, diag(s)²)."""
        with torch.no_grad():
            self.factor.zero_()
        self.factor.requires_grad_(False)

    def start_factor(self, generator: torch.Generator | None = None, size: float = 0.01) -> None:
        """Let the factor learn, from N(0, size²) relative to the present scales."""
        with torch.no_grad():
            self.unit.copy_(self.log_scale.exp())
            self.factor.copy_(size * normal(tuple(self.factor.shape), self.factor, generator))
        self.factor.requires_grad_(True)


def normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal noise for initial values: made where the generator is, moved to where it is used."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=device).to(like.device)
