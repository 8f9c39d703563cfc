"""What the two low-rank forms share: a diagonal, a factor relative to a unit, and Woodbury's K×K matrix."""

from abc import abstractmethod
from functools import cached_property

import torch
from torch import Tensor, nn

from . import fused
from .algebra import capacitance
from .base import Family, check_factor, check_rank_fits, check_start, initial_mean
from .gaussian import Gaussian


class LowRankDensity(Gaussian):
    """A Gaussian of mean [P], log scale [P], factor F [P, K] and unit [P]; a subclass says how they make Σ."""

    #: whether M is the precision's, not the covariance's
    of_precision: bool = False
    #: see `fused.State`
    pending: list[fused.LowRankGradient] | None = None
    reduce: fused.Reduce | None = None

    def __init__(self, mean: Tensor, log_scale: Tensor, factor: Tensor, unit: Tensor):
        self.location, self.log_scale, self.factor, self.unit = mean, log_scale, factor, unit
        self.rank = factor.shape[-1]
        self._graphed: Tensor | None = None
        self._plain: Tensor | None = None

    @cached_property
    def scale(self) -> Tensor:
        with torch.enable_grad():  # a value without a graph must not be found by who wants one
            return self.log_scale.exp()

    def state(self) -> fused.State:
        parts = self.location, self.log_scale, self.factor, self.unit
        return fused.State(*parts, self.of_precision, self.pending, self.reduce)

    @property
    @abstractmethod
    def ratio(self) -> Tensor:
        """r in M = I_K + Fᵀ diag(r²) F: [P]"""

    def _cholesky(self) -> Tensor:
        """Of M. Kept for the life of the density, with its graph where one is wanted: a value computed under no_grad
        is never used for gradients."""
        if torch.is_grad_enabled():
            if self._graphed is None:
                self._graphed = capacitance(self.factor, self.ratio)
            return self._graphed
        if self._plain is None:
            known = self._graphed
            self._plain = capacitance(self.factor, self.ratio) if known is None else known.detach()
        return self._plain


class LowRankFamily(Family):
    """Mean, log scale and a factor F of rank K that learns relative to a fixed unit; P(K + 2) parameters."""

    #: the density of this shape
    density: type[LowRankDensity]
    #: where a step that does without the factor's `.grad` finds its gradient
    pending: list[fused.LowRankGradient] | None = None
    #: the sum over ranks, where each holds a slice of the weights
    reduce: fused.Reduce | None = None

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
        factor = self.initial_factor * normal((parameters.size, self.rank), scale, generator)
        self.factor = nn.Parameter(laid_out(factor))
        self.register_buffer("unit", scale)

    def forward(self) -> LowRankDensity:
        density = self.density(self.mean, self.log_scale, self.factor, self.unit)
        density.pending, density.reduce = self.pending, self.reduce
        return density

    def _apply(self, fn, recurse=True):
        """Where the family is moved to, the factor is laid out as is fast there."""
        super()._apply(fn, recurse)
        if isinstance(getattr(self, "factor", None), nn.Parameter):
            self.factor.data = laid_out(self.factor.data)
        return self

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


def laid_out(factor: Tensor) -> Tensor:
    """[P, K] as is fast in memory: on a CPU column by column, where products run along the P weights; on a GPU row by
    row, where a kernel holds whole rows."""
    return factor.mT.contiguous().mT if factor.device.type == "cpu" else factor.contiguous()


def normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal noise for initial values: made where the generator is, moved to where it is used."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=device).to(like.device)
