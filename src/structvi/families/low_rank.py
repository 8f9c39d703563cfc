"""What the two low-rank forms share: a diagonal, a factor relative to a unit, and Woodbury's K×K matrix."""

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from math import inf

import torch
from torch import Tensor, nn

from ..parameters import Parameters
from .density import LowRankPart
from .family import Coordinates, Family
from .forms import Factor, LowRankForm, Profile, RelativeForm
from .gaussian import Gaussian
from .normal import LowRank as LowRankRoot
from .normal import NormalForm
from .numerics import fused
from .numerics.algebra import capacitance
from .scaled import Scaled
from .starts import check_factor, check_rank_fits, normal

#: the factor of a second stage starts at this size, relative to the scales
STAGE_FACTOR = 0.01
#: that of a search in coordinates in which scales are one
SEARCH_FACTOR = 0.1
#: scales from which the best approximation of a normal is sought, which costs no evaluation
STARTS = 8
#: least eigenvalue of a normal, relative to the greatest, that rounding leaves some digits of
LEAST = 1e-13
#: least eigenvalue that a factor is made for, its inverse the greatest: then the family is `accurate`
LEAST_HELD = 1e-9


class LowRankDensity(Gaussian):
    """A Gaussian of mean [P], log scale [P], factor F [P, K] and unit [P]; a subclass says how they make Σ."""

    #: whether M is the precision's, not the covariance's
    of_precision: bool = False

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
        return fused.State(*parts, self.of_precision, self.reduce)

    @property
    @abstractmethod
    def ratio(self) -> Tensor:
        """r in M = I_K + Fᵀ diag(r²) F: [P]"""

    @property
    def accurate(self) -> bool:
        """Whether six of float64's digits are left: the K×K matrix M has a condition below 10¹⁰.

        A long step towards a scale of 0 or ∞ ends where rounding spoils log det Σ.
        """
        with torch.no_grad():
            return not self.rank or self.cholesky().diagonal().max().item() < 1e5

    def low_rank_part(self) -> LowRankPart:
        return LowRankPart(self.factor * self.ratio.unsqueeze(-1), self.cholesky(), self.of_precision)

    def cholesky(self) -> Tensor:
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


class LowRankFamily(Scaled):
    """Mean, log scale and a factor F of rank K that learns relative to a fixed unit; P(K + 2) parameters."""

    #: the density of this shape
    density: type[LowRankDensity]
    row_tensors = ("mean", "log_scale", "factor", "unit")

    factor: Tensor
    unit: Tensor

    def __init__(
        self,
        rank: int,
        initial_mean: str = "current",
        initial_scale: float = 0.1,
        initial_factor: float = 0.1,
    ):
        check_factor(rank, initial_factor)
        super().__init__(initial_mean, initial_scale)
        self.rank, self.initial_factor = rank, initial_factor

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        check_rank_fits(self.rank, parameters.size)
        super().initialise(parameters, generator)
        scale = self.initial_scale * parameters.scale
        factor = self.initial_factor * normal((parameters.size, self.rank), scale, generator)
        self.factor = nn.Parameter(laid_out(factor))
        self.register_buffer("unit", scale)

    def forward(self) -> LowRankDensity:
        return self.density(self.mean, self.log_scale, self.factor, self.unit)

    def _apply(self, fn, recurse=True):
        """Where the family is moved to, the factor is laid out as is fast there."""
        super()._apply(fn, recurse)
        if isinstance(getattr(self, "factor", None), nn.Parameter):
            self.factor.data = laid_out(self.factor.data)
        return self

    @torch.no_grad()
    def normal(self) -> NormalForm:
        scale = self.log_scale.exp()
        ratio = scale / self.unit if self.density.of_precision else self.unit / scale
        root = LowRankRoot(scale, self.factor * ratio.unsqueeze(-1), self.density.of_precision)
        return NormalForm(self.mean.detach().clone(), root)

    @torch.no_grad()
    def set_normal(self, form: NormalForm) -> None:
        root = form.low_rank(self.rank, self.density.of_precision)
        scale, factor = self.own_rows(root.scale), self.own_rows(root.factor)
        self.mean.copy_(self.own_rows(form.mean))
        self.log_scale.copy_(scale.log())
        # the unit is the scale with the factor, of the margins or of the conditionals
        wider = (1 + factor.square().sum(-1)).sqrt()
        self.unit.copy_(scale / wider if root.of_precision else scale * wider)
        self.factor.copy_(factor / wider.unsqueeze(-1))

    def place_at(self, mean: Tensor, scale: Tensor) -> None:
        self.mean.copy_(mean)
        self.log_scale.copy_(scale.log())
        self.unit.copy_(scale)

    @torch.no_grad()
    def move_to(self, theta: Tensor) -> None:
        self.mean.copy_(theta)

    def hold_mean(self) -> None:
        self.mean.requires_grad_(False)

    @torch.no_grad()
    def change_basis(self, turn: Callable[[Tensor], Tensor], squares: Callable[[Tensor], Tensor]) -> None:
        size = -1 if self.density.of_precision else 1  # the factor's columns are unit∘F, or F/unit
        columns = turn((self.factor * self.unit.unsqueeze(-1) ** size).mT).mT
        self.mean.copy_(turn(self.mean))
        self.log_scale.copy_(-0.5 * squares((-2 * self.log_scale).exp()).log())
        self.unit.copy_(squares(self.unit**-2).rsqrt())
        self.factor.copy_(columns / self.unit.unsqueeze(-1) ** size)

    # ---- stages

    @property
    def has_stages(self) -> bool:
        return self.rank > 0

    def is_untouched(self) -> bool:
        """Whether the scales are still those that the factor's unit was set to."""
        return bool(torch.isclose(self.log_scale, self.unit.log(), rtol=0, atol=1e-6).all())

    @torch.no_grad()
    def first_stage(self) -> None:
        """Hold the factor at zero: mean and scales alone, N(μ, diag(s)²)."""
        self.factor.zero_()
        self.factor.requires_grad_(False)

    def second_stage(self, generator: torch.Generator | None = None) -> None:
        """Let the factor learn, from small numbers relative to the present scales."""
        self.start_factor(generator, STAGE_FACTOR)

    def start_factor(self, generator: torch.Generator | None, size: float) -> None:
        """Let the factor learn, from N(0, size²) relative to the present scales."""
        if self.shard is not None:  # noise for this rank's rows: a factor made whole might not fit
            generator = self.shard.generator(generator, self.factor.device)
        with torch.no_grad():
            self.unit.copy_(self.log_scale.exp())
            self.factor.copy_(size * normal(tuple(self.factor.shape), self.factor, generator))
        self.factor.requires_grad_(True)

    def learn_all(self) -> None:
        self.factor.requires_grad_(True)

    def factors(self) -> list[Factor]:
        P = len(self.factor) if self.space is None else self.space.size
        return [Factor(self.factor, (self.mean, self.log_scale), P)] if self.rank else []

    # ---- growth and search

    def low_rank_form(self) -> LowRankForm:
        unit = self.unit if self.rank else self.log_scale.exp()  # no column yet, no unit yet: the present scales
        return LowRankForm(self.mean, self.log_scale, unit, self.factor, type(self))

    @property
    def coordinates(self) -> Coordinates:
        return "diagonal"

    @torch.no_grad()
    def standardise(self, generator: torch.Generator | None) -> None:
        self.mean.zero_()
        self.log_scale.zero_()
        self.start_factor(generator, SEARCH_FACTOR)

    @torch.no_grad()
    def change_coordinates(self, shift: Tensor, root: Tensor) -> None:
        self.mean.copy_(shift + self.mean * root)
        self.log_scale.add_(root.log())
        self.unit.mul_(root)

    @property
    def starts(self) -> int:
        return STARTS if self.rank else 1

    @torch.no_grad()
    def start_at(self, index: int, mean: Tensor, precision: Tensor, noise: Callable[[], Tensor]) -> None:
        """Scales of the conditionals, of the margins and between; then others around these, for other optima."""
        conditional = -0.5 * precision.diagonal().log()
        marginal = 0.5 * torch.cholesky_inverse(torch.linalg.cholesky(precision)).diagonal().log()
        log_scale = torch.lerp(conditional, marginal, (index % 3) / 2)
        if index > 2:
            log_scale = log_scale + 0.25 * (1 + index % 4) * noise()
        self.mean.copy_(mean)
        self.take_scales(log_scale, precision)

    def profile(self, log_scale: Tensor, precision: Tensor) -> Profile:
        return profile(log_scale, precision, self.rank, self.density.of_precision)

    @torch.no_grad()
    def take_scales(self, log_scale: Tensor, precision: Tensor) -> None:
        factor = self.profile(log_scale, precision).factor
        ratio = log_scale.exp() / self.unit
        self.log_scale.copy_(log_scale)
        self.factor.copy_(factor * (1 / ratio if self.density.of_precision else ratio).unsqueeze(-1))

    @torch.no_grad()
    def relative_form(self) -> RelativeForm:
        density = self()
        assert isinstance(density, LowRankDensity)
        part = density.low_rank_part()
        return RelativeForm(self.mean.clone(), self.log_scale.exp(), part.factor, part.of_precision)

    @torch.no_grad()
    def take_relative_form(self, form: RelativeForm) -> None:
        """The unit becomes the scale with the factor, of the margins or of the conditionals."""
        self.mean.copy_(form.mean)
        self.log_scale.copy_(form.scale.log())
        wider = (1 + form.factor.square().sum(-1)).sqrt()  # of the diagonal, relative to the scale alone
        self.unit.copy_(form.scale / wider if form.of_precision else form.scale * wider)
        self.factor.copy_(form.factor / wider.unsqueeze(-1))

    def ridge(self) -> Tensor:
        return (self.log_scale - self.unit.log()).square().sum()


def profile(log_scale: Tensor, precision: Tensor, rank: int, of_precision: bool) -> Profile:
    """KL to N(·, Λ⁻¹) at these scales s and the best factor beside them: [P], [P, P].

    With λ, v the eigenvalues and vectors of SΛS, Σ = S(I + GGᵀ)S has the variance 1/λ along v for G = v√(1/λ − 1),
    worth most for the least λ; Λ = S⁻¹(I + GGᵀ)S⁻¹ has λ for G = v√(λ − 1), for the greatest. The others cost
    ½(λ − 1 − log λ) each, whose gradient by log s_i is (λ − 1)v_i². Where rounding spoils the least λ the KL is ∞.

    Example:
        >>> found = profile(torch.zeros(3), torch.diag(torch.tensor([4.0, 1.0, 1.0])), rank=1, of_precision=True)
        >>> round(found.kl, 3), round(found.factor.norm().item() ** 2, 3)
        (0.0, 3.0)
    """
    scale = log_scale.exp()
    nothing = Profile(inf, torch.zeros_like(scale), torch.zeros_like(precision[:, :rank]))
    try:
        values, vectors = torch.linalg.eigh(scale.unsqueeze(-1) * precision * scale)  # ascending
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        return nothing  # the scales overflow
    if of_precision:
        values, vectors = values.flip(0), vectors.flip(1)
    if not values.min() > LEAST * values.max():
        return nothing
    first = values[:rank]
    held = first.clamp(1.0, 1 / LEAST_HELD) if of_precision else first.clamp(LEAST_HELD, 1.0)
    left = torch.cat([first / held, values[rank:]])  # eigenvalues in units of the approximation
    size = ((held if of_precision else 1 / held) - 1).clamp(min=SEARCH_FACTOR**4).sqrt()
    kl = 0.5 * (left - 1 - left.log()).sum().item()
    return Profile(kl, vectors.square() @ (left - 1), vectors[:, :rank] * size)


def factors(family: Family) -> list[nn.Parameter]:
    """Return the low-rank factors [P, K] among the parameters, those of all parts too."""
    own = (m.factor for m in family.modules() if isinstance(m, LowRankFamily) and m.rank)
    return [factor for factor in own if isinstance(factor, nn.Parameter)]


def is_untouched(family: Family) -> bool:
    """Return whether every scale still has the value that its factor is relative to: no fit has moved it."""
    return all(own.is_untouched() for own in _with_factors(family))


@torch.no_grad()
def hold_factors(family: Family) -> None:
    """Hold all low-rank factors at zero: mean and scales learn alone, N(μ, diag(s)²)."""
    for factor in factors(family):
        factor.zero_().requires_grad_(False)


def release_factors(family: Family, generator: torch.Generator | None = None, size: float = STAGE_FACTOR) -> None:
    """Let all low-rank factors learn, from N(0, size²) relative to the present scales."""
    for own in _with_factors(family):
        own.start_factor(generator, size)


def precision_rank(family: Family) -> int:
    """Return how many columns of a precision diag + WWᵀ `set_normal` keeps; of blocks the most that one keeps."""
    return max(part.precision_columns for part in family.families())


def _with_factors(family: Family) -> list[LowRankFamily]:
    return [own for own in family.modules() if isinstance(own, LowRankFamily) and own.rank]


def laid_out(factor: Tensor) -> Tensor:
    """[P, K] as is fast in memory: on a CPU column by column, where products run along the P weights; on a GPU row by
    row, where a kernel holds whole rows."""
    return factor.mT.contiguous().mT if factor.device.type == "cpu" else factor.contiguous()
