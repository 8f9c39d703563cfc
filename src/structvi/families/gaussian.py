"""What every Gaussian density shares: draws from coupled noise, log density, score, entropy, covariance, KL."""

from abc import abstractmethod
from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from ..couplings import Coupling, Noise, naive
from . import numerics
from .family import Density, Draws, check_draw
from .numerics import sum_weights


class LowRankCovariance(NamedTuple):
    """A covariance as diag(d) + V C Vᵀ, with C symmetric and not necessarily positive."""

    d: Tensor  # [P]
    V: Tensor  # [P, K]
    C: Tensor  # [K, K]


class Gaussian(Density):
    """N(mean, Σ). A shape of covariance is a `location` and six methods: the rest follows.

    `transform` maps noise to deviations from the mean; `precision_product` is Λ x, `quadratic` xᵀΛx, `half_log_det`
    ½ log det Σ, and `low_rank` and `precision_diagonal` give Σ and diag Λ in the form in which traces are cheap.
    """

    #: [P]
    location: Tensor
    #: K, how many low-rank directions the draws use
    rank: int = 0
    #: the sum over ranks, where each holds a slice of the weights
    reduce: numerics.Reduce | None = None

    @abstractmethod
    def transform(self, diagonal: Tensor, low_rank: Tensor) -> Tensor:
        """θ − mean from noise [S, P], [S, K]: [S, P]."""

    @abstractmethod
    def precision_product(self, x: Tensor) -> Tensor:
        """Λ x for the rows of x: [S, P] → [S, P]."""

    @abstractmethod
    def quadratic(self, x: Tensor) -> Tensor:
        """xᵀ Λ x for the rows of x, in float64: [S, P] → [S]."""

    @abstractmethod
    def half_log_det(self) -> Tensor:
        """½ log det Σ, in float64."""

    @abstractmethod
    def low_rank(self) -> LowRankCovariance:
        """Σ = diag(d) + V C Vᵀ."""

    @abstractmethod
    def precision_diagonal(self) -> Tensor:
        """diag Λ: [P]."""

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

    def state(self) -> numerics.State | None:
        """What the fused passes need; None for shapes of covariance that have none."""
        return None

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        theta = self.mean + self.transform(*self._noise(groups, coupling, generator))
        return Draws(theta, theta.new_full((len(theta),), 1 / len(theta)))

    def draw_scored(
        self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None
    ) -> tuple[Draws, Tensor | None]:
        if (state := self.state()) is None:
            return super().draw_scored(groups, coupling, generator)
        theta, log_q = numerics.draw(state, *self._noise(groups, coupling, generator))
        return Draws(theta, theta.new_full((len(theta),), 1 / len(theta))), log_q

    def _noise(self, groups: int, coupling: Coupling, generator: torch.Generator | None) -> Noise:
        check_draw(groups, coupling, generator, self.mean.device)
        P, K = self.P, self.rank
        noise = coupling(groups, P, K, generator, self.mean.dtype, self.mean.device)
        if not isinstance(noise, tuple) or len(noise) != 2 or not all(isinstance(x, Tensor) for x in noise):
            raise TypeError(
                f"the coupling {coupling!r} must return Noise(diagonal [S, P], low_rank [S, K]), "
                f"got {type(noise).__name__}"
            )
        shapes = tuple(tuple(x.shape) for x in noise)
        S = shapes[0][0] if shapes[0] else 0
        if shapes != ((S, P), (S, K)) or S == 0 or S % groups:
            raise ValueError(
                f"the coupling {coupling!r} gave noise of shapes {shapes}; expected [S, {P}] and [S, {K}] with S a "
                f"multiple of groups = {groups}"
            )
        if any(x.dtype != self.mean.dtype or x.device != self.mean.device for x in noise):
            raise ValueError(
                f"the coupling {coupling!r} gave noise of {noise[0].dtype} on {noise[0].device} and {noise[1].dtype} "
                f"on {noise[1].device}; the weights are {self.mean.dtype} on {self.mean.device}: pass on `dtype` and "
                "`device`"
            )
        return noise

    def log_prob(self, theta: Tensor) -> Tensor:
        x = self._check_theta(theta) - self.mean
        return (-0.5 * self.quadratic(x) - self.half_log_det() - 0.5 * self.P * log(2 * pi)).to(x.dtype)

    def score(self, theta: Tensor) -> Tensor:
        with torch.no_grad():
            return self.precision_product(self.mean - self._check_theta(theta))

    def entropy(self) -> Tensor:
        return (self.half_log_det() + 0.5 * self.P * (1 + log(2 * pi))).to(self.mean.dtype)

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        d, V, C = self.low_rank()
        block = V[rows] @ C @ V[columns].mT
        return block + torch.diag(d[rows]) if rows == columns else block

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        """A Σ Bᵀ for rows A [.., n, P] and B [.., m, P]: [.., n, m]."""
        d, V, C = self.low_rank()
        columns = left @ V
        return (left * d) @ right.mT + columns @ C @ (columns if right is left else right @ V).mT

    def trace(self, p: "Gaussian") -> Tensor:
        """tr(Λ_p Σ), in float64."""
        d, V, C = self.low_rank()
        trace = sum_weights(d * p.precision_diagonal())
        if V.shape[-1]:
            columns = V.mT  # [K, P]
            trace = trace + sum_weights((C @ columns) * p.precision_product(columns)).sum()
        return trace


def kl(q: Density, p: Density) -> Tensor:
    """KL[q‖p] = ½(tr(Λ_p Σ_q) + (μ_p − μ_q)ᵀΛ_p(μ_p − μ_q) − P) + ½ log det Σ_p − ½ log det Σ_q, in nats.

    Between Gaussians of any two shapes; the cost is that of their low-rank algebra, never P² unless one of the two is
    a full normal.

    Example:
        >>> from structvi import MeanField, Parameters
        >>> space = Parameters({"z": torch.zeros(3)})
        >>> q, p = MeanField().bind(space)(), MeanField().bind(space)()
        >>> kl(q, p).item()
        0.0
    """
    for name, density in (("q", q), ("p", p)):
        if not isinstance(density, Gaussian):
            raise TypeError(
                f"kl has a closed form between Gaussians; {name} is {type(density).__name__}. "
                "Call the families (q = family()) and estimate other divergences from draws"
            )
    assert isinstance(q, Gaussian)
    assert isinstance(p, Gaussian)
    if q.P != p.P:
        raise ValueError(f"q is over {q.P} numbers and p over {p.P}")
    quadratic = p.quadratic((p.mean - q.mean).unsqueeze(0)).squeeze(0)
    result = 0.5 * (q.trace(p) + quadratic - q.P) + p.half_log_det() - q.half_log_det()
    return result.to(q.mean.dtype)
