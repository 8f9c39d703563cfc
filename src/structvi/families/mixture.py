"""Mixtures: Σ_c π_c q_c(θ) of parts of any family, with learned proportions."""

import copy
from collections.abc import Sequence
from itertools import count
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..couplings import Coupling, Noise, naive
from ..parameters import Parameters
from ..util.checks import check_theta, is_integer
from .family import Density, Draws, Family, check_draw, standard_noise
from .gaussian import Gaussian
from .rotated import rotation

#: Logits learn relative to this unit: a step of an optimizer moves them a fifth as far as means and log scales. With
#: unit 1 a part far from its mode loses its proportion, and with it its gradient, before it arrives: two modes at ±5,
#: parts on opposite sides, plain Adam: both found in 82 of 100 fits with unit 1, in 57 of 60 with unit 0.2.
LOGIT_UNIT = 0.2
#: share of all new parts together when a mixture grows
NEW_WEIGHT = 0.1
#: `components` of a mixture that has as many parts as a search finds
AUTO = "auto"


class MixtureDensity(Density):
    """Σ_c π_c q_c(θ); everything through the parts' own algebra.

    Draws are stratified: every group has the draws of every part, and a draw of part c weighs π_c over their number.
    The weights carry the gradient of the proportions. Parts of one shape have one noise.

    Args:
        parts: the densities q_c, over the same P weights; all have a density, or none (point masses).
        log_proportions: log π_c, [C].
    """

    centred = False

    def __init__(self, parts: Sequence[Density], log_proportions: Tensor):
        if len({part.has_density for part in parts}) > 1 or any(part.bound != part.has_density for part in parts):
            raise ValueError(
                "all parts of a mixture must have a density over all weights, or none (point masses), got "
                + ", ".join(f"{type(part).__name__}: {part.bound}" for part in parts)
            )
        self.parts, self.log_proportions = parts, log_proportions
        self.proportions = log_proportions.exp()  # π [C]
        self.has_density, self.finite = parts[0].has_density, all(part.finite for part in parts)
        self.coupled = all(part.coupled for part in parts)

    @property
    def P(self) -> int:
        return self.parts[0].P

    @property
    def noise_size(self) -> int:
        return max(part.noise_size for part in self.parts)

    @property
    def mean(self) -> Tensor:
        return self.proportions @ self._means()

    @property
    def variance(self) -> Tensor:
        within = torch.stack([part.variance for part in self.parts])
        return self.proportions @ (within + (self._means() - self.mean).square())

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        """Return `groups` groups of the draws of all parts, part after part within a group."""
        check_draw(groups, generator)
        tape: dict[tuple[int, int, int], Noise] = {}
        thetas, weights = [], []
        for part, proportion in zip(self.parts, self.proportions, strict=True):
            draws = part.draw(groups, _recorded(coupling, tape), generator)
            thetas.append(draws.theta.unflatten(0, (groups, -1)))  # [G, size, P]
            weights.append(proportion * draws.weight.unflatten(0, (groups, -1)))
        return Draws(torch.cat(thetas, dim=1).flatten(0, 1), torch.cat(weights, dim=1).flatten())

    def offers(self, method: str) -> bool:
        return super().offers(method) and all(part.offers(method) for part in self.parts)

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return log Σ_c π_c q_c(θ)."""
        return self._log_joint(theta).logsumexp(0)

    def score(self, theta: Tensor) -> Tensor:
        """Return Σ_c r_c(θ) ∇ log q_c(θ), with responsibilities r_c = π_c q_c / Σ π q."""
        with torch.no_grad():
            responsibilities = self._log_joint(theta).softmax(0)  # [C, S]
            scored = zip(responsibilities, self.parts, strict=True)
            return sum((r.unsqueeze(-1) * part.score(theta) for r, part in scored), torch.zeros_like(theta))

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        deviations = self._means() - self.mean
        covariance = deviations[:, rows].mT @ (self.proportions.unsqueeze(-1) * deviations[:, columns])
        for proportion, part in zip(self.proportions, self.parts, strict=True):
            covariance = covariance + proportion * part.covariance_block(rows, columns)
        return covariance

    def _means(self) -> Tensor:
        return torch.stack([part.mean for part in self.parts])  # [C, P]

    def _log_joint(self, theta: Tensor) -> Tensor:
        """Return log π_c + log q_c(θ): [S, P] → [C, S]."""
        check_theta(theta, self.P)
        return torch.stack([part.log_prob(theta) for part in self.parts]) + self.log_proportions.unsqueeze(-1)


class Mixture(Family):
    """Σ_c π_c q_c(θ): parts of any family with learned proportions; with `LowRankNormal` parts, sGMM-VI.

    A mixture of `MAP` is a deep ensemble with weights. The parts of a recipe start apart: at fresh draws of the
    network's initialisation; without a network (a log density) at draws of N(current values, scale²), every second
    one the mirror image of the one before. To start elsewhere, bind parts at points of your own and pass the list.

    A part does not see a mode that its draws never reach. If two parts start on the same side of a target with two
    modes, then both end on one mode. `fit_density` looks for the modes first and places a part at each.

    Args:
        part: a recipe, or a list of recipes, or a list of bound families over the same tensors: the mixture of
            those is bound, and holds them, not copies.
        components: how many parts are made of a recipe; 2 if not given. "auto": as many as `fit(target, family)` of a
            log density finds worth having; nothing else takes such a recipe.

    Example:
        >>> from structvi import MeanField, LowRankNormal
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> q = Mixture(LowRankNormal(rank=1), components=3).bind(space)
        >>> q().draw(groups=4).theta.shape, q().proportions.shape
        (torch.Size([12, 2]), torch.Size([3]))
        >>> points = [Parameters({"z": torch.full((2,), start)}) for start in (-3.0, 3.0)]
        >>> Mixture([MeanField().bind(point) for point in points]).is_bound
        True
    """

    raw_logits: Tensor

    def __init__(self, part: Family | Sequence[Family], components: int | Literal["auto"] | None = None):
        super().__init__()
        parts = _as_parts(part, components)
        self.components: int | str = AUTO if components == AUTO else len(parts)
        self.inner = nn.ModuleList(parts)
        if self.is_bound:
            self.space = parts[0].space
            self.raw_logits = nn.Parameter(next(self.inner.parameters()).new_zeros(len(parts)))

    @classmethod
    def weighted(cls, parts: Sequence[Family], log_weights: Tensor) -> "Mixture":
        """Return the mixture of bound families with these weights [C], logarithms but for a constant."""
        made = cls(list(parts))
        with torch.no_grad():
            made.raw_logits.copy_((log_weights - log_weights.mean()) / LOGIT_UNIT)
        return made

    @property
    def part(self) -> list[Family]:
        return list(self.inner)  # pyright: ignore[reportReturnType]

    def parts(self) -> list[Family]:
        return self.part

    @property
    def is_bound(self) -> bool:
        return all(part.is_bound for part in self.part)

    @property
    def log_proportions(self) -> Tensor:
        """log π: [C]"""
        return (LOGIT_UNIT * self.raw_logits).log_softmax(-1)

    @property
    def proportions(self) -> Tensor:
        """π: [C]"""
        return self.log_proportions.exp()

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        if self.components == AUTO:
            raise ValueError('components="auto" takes as many parts as there are modes, in fit_density alone')
        C = len(self.part)
        spaces = _starts(parameters, C, generator)
        self.inner = nn.ModuleList(part.bind(space, generator) for part, space in zip(self.part, spaces, strict=True))
        self.raw_logits = nn.Parameter(parameters.initial.new_zeros(C))

    def forward(self) -> MixtureDensity:
        return MixtureDensity([part() for part in self.part], self.log_proportions)


def _as_parts(part: Family | Sequence[Family], components: int | str | None) -> list[Family]:
    """Return the constructor's arguments as a list of recipes, or of bound families."""
    if isinstance(part, Family):
        if part.is_bound:
            raise ValueError(f"this {type(part).__name__} is bound already, and copies would coincide: give a recipe")
        components = 1 if components == AUTO else 2 if components is None else components
        if not is_integer(components):
            raise ValueError(f"components must be an integer ≥ 1, got {components!r}")
        return [copy.deepcopy(part) for _ in range(components)]
    if not isinstance(part, Sequence) or not part or not all(isinstance(one, Family) for one in part):
        raise TypeError(f"Mixture expects a family or a list of families, got {part!r}")
    if components not in (None, len(part)):
        raise ValueError(f"components={components!r} but the list has {len(part)} parts; leave components out")
    if len({one.is_bound for one in part}) > 1:
        raise ValueError("the parts of a mixture must be all recipes or all bound")
    return list(part)


def _starts(parameters: Parameters, components: int, generator: torch.Generator | None) -> list[Parameters]:
    """Return the space with current values of its own for each part, so that the parts of one recipe differ."""
    if components == 1:
        return [parameters]
    starts = [parameters.fresh(generator) for _ in range(components)]
    if starts[0] is parameters.initial or torch.equal(starts[0], parameters.initial):  # no layer to ask
        shape = (components + 1) // 2, parameters.size
        half = parameters.scale * standard_noise(shape, parameters.initial, generator)
        starts = list(parameters.initial + torch.stack([half, -half], dim=1).flatten(0, 1))[:components]
    return [parameters.at(start) for start in starts]


def _recorded(coupling: Coupling, tape: dict[tuple[int, int, int], Noise]) -> Coupling:
    """Return the coupling as one part sees it: its n-th call gives the noise of every other part's n-th call.

    Noise of other sizes (parts of another rank) is made for itself.
    """
    calls = count()

    def common(groups: int, P: int, K: int, generator=None, dtype=None, device=None) -> Noise:
        key = (next(calls), P, K)
        if key not in tape:
            tape[key] = coupling(groups, P, K, generator, dtype, device)
        return tape[key]

    return common


# -------------------------------------------------------------------------------------------------- mixtures as values


def mixture_of(family: Family) -> Mixture | None:
    """Return the mixture that a family is, bound or not, or None.

    Example:
        >>> from structvi import MeanField
        >>> mixture_of(MeanField()) is None, mixture_of(Mixture(MeanField())).components
        (True, 2)
    """
    return family if isinstance(family, Mixture) else None


class Weighted(NamedTuple):
    """A normal and its weight in a mixture."""

    weight: float
    normal: Gaussian


def weighted_normals(density: Density) -> list[Weighted]:
    """Return the normals of a mixture of normals, or the normal itself; an empty list for other densities.

    Example:
        >>> from structvi import MeanField
        >>> q = Mixture(MeanField(), components=2).bind(Parameters({"z": torch.zeros(3)}))
        >>> [one.weight for one in weighted_normals(q())]
        [0.5, 0.5]
    """
    if isinstance(density, Gaussian):
        return [Weighted(1.0, density)]
    if not isinstance(density, MixtureDensity):
        return []
    parts = [weighted_normals(part) for part in density.parts]
    own = zip(density.proportions.tolist(), parts, strict=True)
    return [Weighted(share * one.weight, one.normal) for share, part in own for one in part] if all(parts) else []


@torch.no_grad()
def with_components(family: Family, components: int, generator: torch.Generator) -> Mixture:
    """Return a mixture whose first part it is; new parts start as copies of old ones, each at a draw from it."""
    own = mixture_of(family)
    parts, weights = ([family], family().mean.new_ones(1)) if own is None else (own.parts(), own.proportions)
    if not is_integer(components, len(parts) + 1):
        raise ValueError(f"there are {len(parts)} parts already: give an integer above that, got {components!r}")
    new = components - len(parts)
    if not family().bound:
        raise ValueError("grow(components=) compares ELBOs, and with point masses there is no bound to compare")
    stream = torch.Generator(weights.device).manual_seed(generator.initial_seed())
    # the part that each new one copies its shape from
    origins = torch.multinomial(weights.double().cpu(), new, replacement=True, generator=generator).tolist()
    added = [copy.deepcopy(parts[origin]) for origin in origins]
    for part in added:
        _move(part, part().draw(1, generator=stream).theta[0])
    share = torch.cat([(1 - NEW_WEIGHT) * weights, weights.new_full((new,), NEW_WEIGHT / new)])
    return Mixture.weighted([*copy.deepcopy(parts), *added], share.log())


def _move(family: Family, theta: Tensor) -> None:
    """Set the mean to θ [P]; the shape does not change."""
    turned, form = rotation(family), family.normal()
    if turned is not None:
        _move(turned.part, turned.basis(theta, back=True))
    elif form is None:
        raise TypeError(f"grow(components=) is for families with `set_normal(form)`, not for {type(family).__name__}")
    else:
        family.set_normal(form._replace(mean=theta))
