"""Diagonal plus low rank over all weights, of the covariance and of the precision."""

import torch
from torch import Tensor, nn

from ..parameters import Parameters
from ..util.checks import check_integer, check_positive, is_integer
from . import numerics
from .family import Family, standard_noise
from .gaussian import LowRankDensity
from .mean_field import ScaledFamily
from .normal import LowRank, NormalForm, Triangle

#: standard deviation, relative to the scales, of a factor that starts to learn after them
STAGE_FACTOR = 0.01
#: P up to which `precision_rank` says that a full normal holds every column
MOST_COLUMNS = 1024


class LowRankFamily(ScaledFamily):
    """Mean, log scale and a factor F of rank K that learns relative to a fixed unit; P(K + 2) parameters."""

    #: True if the precision has the low rank, False if the covariance has it
    of_precision: bool
    #: a number that makes the noise of a factor's start another one: ranks that hold rows of one factor differ in it
    stream: int = 0

    factor: Tensor
    unit: Tensor

    def __init__(
        self, rank: int, initial_mean: str = "current", initial_scale: float = 0.1, initial_factor: float = 0.1
    ):
        check_integer("rank", rank, least=0)
        if initial_factor != 0:
            check_positive(initial_factor, "initial_factor", "or 0")
        super().__init__(initial_mean, initial_scale)
        self.rank, self.initial_factor = rank, initial_factor

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        P = parameters.size
        if self.rank > P:
            raise ValueError(f"rank {self.rank} is larger than the number of weights P = {P}")
        super().initialise(parameters, generator)
        scale = self.initial_scale * parameters.scale
        factor = self.initial_factor * standard_noise((P, self.rank), scale, generator)
        self.factor = nn.Parameter(laid_out(factor))
        self.register_buffer("unit", scale)

    def forward(self) -> LowRankDensity:
        return LowRankDensity(self.mean, self.log_scale, self.factor, self.unit, self.of_precision)

    def _apply(self, fn, recurse=True):
        """Lay the factor out as is fast on the device that the family is moved to."""
        super()._apply(fn, recurse)
        if isinstance(getattr(self, "factor", None), nn.Parameter):
            self.factor.data = laid_out(self.factor.data)
        return self

    @torch.no_grad()
    def normal(self) -> NormalForm:
        scale = self.log_scale.exp()
        r = numerics.ratio(scale, self.unit, self.of_precision)
        return NormalForm(self.mean.detach().clone(), LowRank(scale, self.factor * r.unsqueeze(-1), self.of_precision))

    @torch.no_grad()
    def set_normal(self, form: NormalForm) -> None:
        root = form.low_rank(self.rank, self.of_precision)
        # the unit is the scale with the factor, of the margins or of the conditionals
        wider = (1 + root.factor.square().sum(-1)).sqrt()
        self.mean.copy_(form.mean)
        self.log_scale.copy_(root.scale.log())
        self.unit.copy_(root.scale / wider if root.of_precision else root.scale * wider)
        self.factor.copy_(root.factor / wider.unsqueeze(-1))


class LowRankNormal(LowRankFamily):
    """Diagonal plus low rank over the whole weight vector: N(μ, diag(s)² + UUᵀ), U of rank K; P(K + 2) parameters.

    The factor learns relative to a fixed unit, U = s₀∘F, with s₀ the scale when the factor starts. An adaptive
    optimizer's noise would inflate a free U. Tied to the learned s, U would spoil optima on the boundary s_i → 0.

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

    of_precision = False


class LowRankPrecision(LowRankFamily):
    """Diagonal plus low rank in the precision: Λ = diag(1/s²) + WWᵀ, W of rank K; P(K + 2) parameters.

    It pins down K directions that the data determine well and leaves the others as wide as the scales say. In
    over-parametrised networks few combinations of weights are well determined, and it is the right shape. The
    factor learns relative to a fixed unit, W = F/s₀, with s₀ the scale when the factor starts.

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

    of_precision = True


# ------------------------------------------------------------------------------- factors of a family and of its parts


def factors(family: Family) -> list[nn.Parameter]:
    """Return the low-rank factors [P, K] among the parameters, with the factors of all parts."""
    return [own.factor for own in _with_factors(family) if isinstance(own.factor, nn.Parameter)]


@torch.no_grad()
def hold_factors(family: Family) -> None:
    """Hold all low-rank factors at zero: mean and scales learn alone, N(μ, diag(s)²)."""
    for factor in factors(family):
        factor.zero_().requires_grad_(False)


@torch.no_grad()
def release_factors(family: Family, generator: torch.Generator | None = None, size: float = STAGE_FACTOR) -> None:
    """Let all low-rank factors learn, from N(0, size²) relative to the present scales."""
    for own in _with_factors(family):
        stream = generator
        if own.stream:
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device if generator else None))
            stream = torch.Generator(own.factor.device).manual_seed(seed + own.stream)
        own.unit.copy_(own.log_scale.exp())
        own.factor.copy_(size * standard_noise(tuple(own.factor.shape), own.factor, stream))
        own.factor.requires_grad_(True)


def precision_rank(family: Family) -> int:
    """Return how many columns of a precision diag + WWᵀ `set_normal` keeps; of blocks the most that one keeps."""
    columns = [0]
    for form in (own.normal() for own in family.modules() if isinstance(own, Family)):
        if form is not None and isinstance(form.root, Triangle):
            columns.append(len(form.mean) if len(form.mean) <= MOST_COLUMNS else 0)
        elif form is not None and isinstance(form.root, LowRank) and form.root.of_precision:
            columns.append(form.rank)
    return max(columns)


@torch.no_grad()
def with_rank(family: Family, rank: int, generator: torch.Generator) -> Family:
    """Return the same normal with small new columns; a normal without a factor becomes a `LowRankNormal`.

    Example:
        >>> from structvi import MeanField, Parameters
        >>> q = MeanField().bind(Parameters({"z": torch.zeros(3)}))
        >>> with_rank(q, 2, torch.Generator().manual_seed(0)).rank
        2
    """
    form = None if family.parts() else family.normal()
    if form is None or isinstance(form.root, Triangle) or not bool((form.variance > 0).all()):
        raise TypeError(f"grow(rank=) is for a `normal()` of a diagonal or low rank, not for {type(family).__name__}")
    present = form.rank
    if not is_integer(rank, present + 1):
        raise ValueError(f"the rank is {present} already: give an integer above that, got {rank!r}")
    recipe = (LowRankPrecision if isinstance(form.root, LowRank) and form.root.of_precision else LowRankNormal)(rank)
    grown = recipe.bind(family.bound_space(), generator).to(form.mean.device)
    grown.set_normal(form)
    columns = grown.factor[:, present:]
    columns.copy_(STAGE_FACTOR * standard_noise(tuple(columns.shape), columns, generator))
    return grown


def _with_factors(family: Family) -> list[LowRankFamily]:
    return [own for own in family.modules() if isinstance(own, LowRankFamily) and own.rank]


def laid_out(factor: Tensor) -> Tensor:
    """Return [P, K] as is fast in memory.

    On a CPU it lies column by column, where products run along the P weights; on a GPU row by row, where a kernel holds
    whole rows.
    """
    return factor.mT.contiguous().mT if factor.device.type == "cpu" else factor.contiguous()
