"""Gaussian densities: draws from coupled noise, log density, score, entropy, covariance, KL; diagonal plus low rank."""

from abc import abstractmethod
from functools import cached_property
from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from ..couplings import Coupling, Noise, naive
from ..util.checks import check_theta
from . import numerics
from .family import MAX_DENSE, Density, Draws, check_draw
from .numerics import capacitance, half_log_det, project, solve, sum_weights


class LowRankCovariance(NamedTuple):
    """A covariance as diag(d) + V C Vᵀ, with C symmetric and not necessarily positive."""

    d: Tensor  # [P]
    V: Tensor  # [P, K]
    C: Tensor  # [K, K]


class Gaussian(Density):
    """N(mean, Σ). A shape of covariance is a `location` and three methods: the rest follows.

    `transform` maps noise to deviations from the mean, `precision_product` is Λ x and `half_log_det` ½ log det Σ.
    All else follows from dense matrices [P, P]; a shape with a shorter way overrides it.
    """

    #: [P]
    location: Tensor
    #: K, how many low-rank directions the draws use
    rank: int = 0
    #: P of all ranks where each holds a slice
    P_whole: int | None = None

    @abstractmethod
    def transform(self, diagonal: Tensor, low_rank: Tensor) -> Tensor:
        """θ − mean from noise [S, P], [S, K]: [S, P]."""

    @abstractmethod
    def precision_product(self, x: Tensor) -> Tensor:
        """Λ x for the rows of x: [S, P] → [S, P]."""

    @abstractmethod
    def half_log_det(self) -> Tensor:
        """½ log det Σ, in float64."""

    def quadratic(self, x: Tensor) -> Tensor:
        """xᵀ Λ x for the rows of x, in float64: [S, P] → [S]."""
        return sum_weights(x * self.precision_product(x))

    def low_rank(self) -> LowRankCovariance:
        """Σ = diag(d) + V C Vᵀ: without a diagonal, and V [P, P + K] the image of the noise."""
        self._check_dense(f"the covariance of a {type(self).__name__} as diagonal plus low rank")
        identity = torch.eye(self.P + self.rank, dtype=self.mean.dtype, device=self.mean.device)
        V = self.transform(*identity.split([self.P, self.rank], dim=-1)).mT
        return LowRankCovariance(torch.zeros_like(self.mean), V, identity)

    def precision_diagonal(self) -> Tensor:
        """diag Λ: [P]."""
        self._check_dense("the precision")
        return self.precision_product(torch.eye(self.P, dtype=self.mean.dtype, device=self.mean.device)).diagonal()

    def covariance_product(self, x: Tensor) -> Tensor:
        """Σ x for the rows of x: [S, P] → [S, P]."""
        d, V, C = self.low_rank()
        return x * d + x @ V @ C @ V.mT

    @property
    def mean(self) -> Tensor:
        return self.location

    @property
    def noise_size(self) -> int:
        return self.P + self.rank

    @property
    def variance(self) -> Tensor:
        d, V, C = self.low_rank()
        return d + ((V @ C) * V).sum(-1)

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        theta = self.mean + self.transform(*self._noise(groups, coupling, generator))
        return Draws(theta, theta.new_full((len(theta),), 1 / len(theta)))

    def _noise(self, groups: int, coupling: Coupling, generator: torch.Generator | None) -> Noise:
        check_draw(groups, generator)
        P, K, like = self.P, self.rank, self.mean
        noise = coupling(groups, P, K, generator, like.dtype, like.device)
        came = [(tuple(x.shape), x.dtype, x.device) for x in noise]
        S = len(noise[0])
        if came != [((S, size), like.dtype, like.device) for size in (P, K)] or S == 0 or S % groups:
            raise ValueError(
                f"the coupling {coupling!r} gave noise of shapes, dtypes and devices {came}; expected [S, {P}] and "
                f"[S, {K}] with S a multiple of groups = {groups}, of `dtype` {like.dtype} on `device` {like.device}"
            )
        return noise

    def log_prob(self, theta: Tensor) -> Tensor:
        x = check_theta(theta, self.P) - self.mean
        return (-0.5 * self.quadratic(x) - self.half_log_det() - 0.5 * (self.P_whole or self.P) * log(2 * pi)).to(
            x.dtype
        )

    def score(self, theta: Tensor) -> Tensor:
        with torch.no_grad():
            return self.precision_product(self.mean - check_theta(theta, self.P))

    def entropy(self) -> Tensor:
        return (self.half_log_det() + 0.5 * (self.P_whole or self.P) * (1 + log(2 * pi))).to(self.mean.dtype)

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        return torch.cat([self.covariance_product(unit)[:, columns] for unit in self._unit_rows(rows)])

    def _unit_rows(self, part: slice) -> list[Tensor]:
        """Return rows of the identity, as many at a time as a dense matrix has room for: [n, P]."""
        numbers = torch.arange(part.start, part.stop, device=self.mean.device)
        positions = torch.arange(self.P, device=self.mean.device)
        some = numbers.split(max(1, MAX_DENSE**2 // self.P))
        return [(rows.unsqueeze(-1) == positions).to(self.mean.dtype) for rows in some]

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        """A Σ Bᵀ for rows A [.., n, P] and B [.., m, P]: [.., n, m]."""
        return self.covariance_product(left) @ right.mT

    def trace(self, p: "Gaussian") -> Tensor:
        """tr(Λ_p Σ), in float64."""
        d, V, C = self.low_rank()
        trace = sum_weights(d * p.precision_diagonal())
        if V.shape[-1]:
            columns = V.mT  # [K, P]
            trace = trace + sum_weights((C @ columns) * p.precision_product(columns)).sum()
        return trace


class LowRankDensity(Gaussian):
    """N(mean, S(I + GGᵀ)S) or, of the precision, N(mean, S(I + GGᵀ)⁻¹S), with S = diag(exp(log_scale)).

    G = diag(r) F, where r = unit/scale in the covariance and scale/unit in the precision: the columns of Σ or of Λ are
    F in a unit that is not learned. With M = I_K + GᵀG, Woodbury's identity (I + GGᵀ)⁻¹ = I − G M⁻¹ Gᵀ, and
    log det(I + GGᵀ) = log det M. For ε ~ N(0, I_P) and z ~ N(0, I_K), ε + Gz has covariance I + GGᵀ, and

        (I + GGᵀ)⁻¹(ε + Gz) = ε + G M⁻¹(z − Gᵀε)

    its inverse.

    Args:
        mean: [P].
        log_scale: [P].
        factor: F [P, K]; of no columns for a diagonal.
        unit: [P].
        of_precision: the form.
    """

    #: where ranks hold slices of the weights: the sum over ranks
    reduce: numerics.Reduce | None = None

    def __init__(self, mean: Tensor, log_scale: Tensor, factor: Tensor, unit: Tensor, of_precision: bool = False):
        self.location, self.log_scale, self.factor, self.unit = mean, log_scale, factor, unit
        self.rank, self.of_precision = factor.shape[-1], of_precision

    # values that are kept have a graph, whoever asks first

    @cached_property
    def scale(self) -> Tensor:
        with torch.enable_grad():
            return self.log_scale.exp()

    @cached_property
    def scaled_factor(self) -> Tensor:
        """G: [P, K]"""
        with torch.enable_grad():
            return self.factor * numerics.ratio(self.scale, self.unit, self.of_precision).unsqueeze(-1)

    @cached_property
    def cholesky(self) -> Tensor:
        """The lower Cholesky factor of M, in float64: [K, K]."""
        with torch.enable_grad():
            return capacitance(self.scaled_factor, self.reduce)

    @property
    def accurate(self) -> bool:
        """True if six of float64's digits are left: the K×K matrix M has a condition below 10¹⁰.

        A long step towards a scale of 0 or ∞ ends where rounding spoils log det Σ.
        """
        return not self.rank or self.cholesky.diagonal().max().item() < 1e5

    def draw_scored(
        self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None
    ) -> tuple[Draws, Tensor | None]:
        own = self.location, self.log_scale, self.factor, self.unit, self.of_precision, self.P_whole or self.P
        theta, log_q = numerics.draw(*own, self.reduce, *self._noise(groups, coupling, generator))
        return Draws(theta, theta.new_full((len(theta),), 1 / len(theta))), log_q

    def transform(self, diagonal: Tensor, low_rank: Tensor) -> Tensor:
        if self.rank:
            inner = solve(self.cholesky, low_rank - self._across(diagonal)) if self.of_precision else low_rank
            diagonal = self._plus(diagonal, inner)
        return self.scale * diagonal

    def precision_product(self, x: Tensor) -> Tensor:
        x = x / self.scale
        if self.rank:
            inner = self._across(x)
            x = self._plus(x, inner if self.of_precision else -solve(self.cholesky, inner))
        return x / self.scale

    def quadratic(self, x: Tensor) -> Tensor:
        x = x / self.scale
        quadratic = self._summed(x.square())
        if not self.rank:
            return quadratic
        inner = self._across(x)
        if self.of_precision:
            return quadratic + inner.square().sum(-1)
        return quadratic - torch.linalg.solve_triangular(self.cholesky, inner.mT, upper=False).square().sum(0)

    def half_log_det(self) -> Tensor:
        result = self._summed(self.log_scale)
        if not self.rank:
            return result
        of_inner = half_log_det(self.cholesky)
        return result - of_inner if self.of_precision else result + of_inner

    def low_rank(self) -> LowRankCovariance:
        V = self.scale.unsqueeze(-1) * self.scaled_factor
        C = torch.eye(self.rank, dtype=V.dtype, device=V.device)
        if self.of_precision and self.rank:
            C = -torch.cholesky_inverse(self.cholesky).to(V.dtype)
        return LowRankCovariance(self.scale.square(), V, C)

    def precision_diagonal(self) -> Tensor:
        G = self.scaled_factor
        inner = G if self.of_precision else -solve(self.cholesky, G.double()).to(G.dtype)  # [P, K]
        return (1 + (inner * G).sum(-1)) / self.scale.square()

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        d, V, C = self.low_rank()
        block = V[rows] @ C @ V[columns].mT
        return block + torch.diag(d[rows]) if rows == columns else block

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        d, V, C = self.low_rank()
        columns = left @ V  # nothing as large as `left` is made but once
        return (left * d) @ right.mT + columns @ C @ (columns if right is left else right @ V).mT

    def _across(self, x: Tensor) -> Tensor:
        """Return xG in float64: [S, P] → [S, K]."""
        inner = project(x, self.scaled_factor)
        return inner if self.reduce is None else self.reduce(inner)

    def _plus(self, x: Tensor, inner: Tensor) -> Tensor:
        """Return x + kGᵀ for k [S, K]: [S, P]."""
        return torch.addmm(x, inner.to(x.dtype), self.scaled_factor.mT)

    def _summed(self, x: Tensor) -> Tensor:
        total = sum_weights(x)
        return total if self.reduce is None else self.reduce(total)


def kl(q: Density, p: Density) -> Tensor:
    """KL[q‖p] = ½(tr(Λ_p Σ_q) + (μ_p − μ_q)ᵀΛ_p(μ_p − μ_q) − P) + ½ log det Σ_p − ½ log det Σ_q, in nats.

    Between Gaussians of any two shapes; the cost is linear in P, unless one of the two is a full normal.

    Example:
        >>> from structvi import MeanField, Parameters
        >>> space = Parameters({"z": torch.zeros(3)})
        >>> q, p = MeanField().bind(space)(), MeanField().bind(space)()
        >>> kl(q, p).item()
        0.0
    """
    if not isinstance(q, Gaussian) or not isinstance(p, Gaussian):
        came = f"{type(q).__name__} and {type(p).__name__}"
        raise TypeError(f"kl has a closed form between Gaussian densities, q = family(), got {came}")
    if q.P != p.P:
        raise ValueError(f"q is over {q.P} numbers and p over {p.P}")
    quadratic = p.quadratic((p.mean - q.mean).unsqueeze(0)).squeeze(0)
    result = 0.5 * (q.trace(p) + quadratic - q.P) + p.half_log_det() - q.half_log_det()
    return result.to(q.mean.dtype)
