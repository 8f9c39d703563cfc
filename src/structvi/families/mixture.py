"""Mixtures: Σ_c π_c q_c(θ) of parts of any family, with learned proportions."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    Distribution,
    Independent,
    LowRankMultivariateNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
)

from ..couplings import Coupling, Noise, naive
from ..parameters import Parameters, Select
from .density import Density, Draws, NormalPart, check_draw
from .family import Family
from .forms import PartsSought
from .full import FullNormalDensity
from .gaussian import Gaussian, kl
from .held import check_held
from .mixture_parts import AUTO, apart, check_shared, parts_of
from .numerics.algebra import project, sum_weights

#: Logits learn relative to this unit: a step of an optimizer moves them a fifth as far as means and log scales. With
#: unit 1 a part far from its mode loses its proportion, and with it its gradient, before it arrives: two modes at ±5,
#: parts on opposite sides, plain Adam: both found in 82 of 100 fits with unit 1, in 57 of 60 with unit 0.2.
LOGIT_UNIT = 0.2


class MixtureDensity(Density):
    """Σ_c π_c q_c(θ); everything through the parts' own algebra.

    Draws are stratified: every group has the draws of every part, and a draw of part c weighs π_c over their number.
    The weights carry the gradient of the proportions.

    Args:
        parts: the densities q_c, over the same P weights; all have a density, or none (point masses).
        log_proportions: log π_c, [C].
        common_noise: one noise for all parts of the same shape, or noise of its own for each.
    """

    centred = False

    def __init__(self, parts: Sequence[Density], log_proportions: Tensor, common_noise: bool = True):
        _check_densities(parts)
        self.parts, self.log_proportions, self.common_noise = parts, log_proportions, common_noise
        self.has_density, self.coupled = parts[0].has_density, all(part.coupled for part in parts)

    @property
    def proportions(self) -> Tensor:
        """π: [C]"""
        return self.log_proportions.exp()

    @property
    def P(self) -> int:
        return self.parts[0].P

    @property
    def noise_size(self) -> int:
        return max(part.noise_size for part in self.parts)

    @property
    def finite(self) -> bool:
        return all(part.finite for part in self.parts)

    @property
    def mean(self) -> Tensor:
        return self.proportions @ self._means()

    @property
    def variance(self) -> Tensor:
        within = torch.stack([part.variance for part in self.parts])
        return self.proportions @ (within + (self._means() - self.mean).square())

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        """`groups` groups of the draws of all parts, part after part within a group."""
        check_draw(groups, coupling, generator, self.log_proportions.device)
        tape: dict[tuple[int, int, int], Noise] = {}
        thetas, weights = [], []
        for part, proportion in zip(self.parts, self.proportions, strict=True):
            own = _recorded(coupling, tape) if self.common_noise else coupling
            draws = part.draw(groups, own, generator)
            thetas.append(draws.theta.unflatten(0, (groups, -1)))  # [G, size, P]
            weights.append(proportion * draws.weight.unflatten(0, (groups, -1)))
        return Draws(torch.cat(thetas, dim=1).flatten(0, 1), torch.cat(weights, dim=1).flatten())

    def normals(self) -> list[NormalPart]:
        parts = [part.normals() for part in self.parts]
        if not all(parts):
            return []
        own = zip(self.log_proportions.tolist(), parts, strict=True)
        return [one._replace(log_weight=log_weight + one.log_weight) for log_weight, part in own for one in part]

    def offers(self, method: str) -> bool:
        return method != "entropy" and all(part.offers(method) for part in self.parts)

    def log_prob(self, theta: Tensor) -> Tensor:
        """log Σ_c π_c q_c(θ); of point masses the log probability of the point."""
        return self._log_joint(theta).logsumexp(0)

    def score(self, theta: Tensor) -> Tensor:
        """Σ_c r_c(θ) ∇ log q_c(θ), with responsibilities r_c = π_c q_c / Σ π q."""
        if not self.has_density:
            raise NotImplementedError("a mixture of point masses has no density and so no score")
        with torch.no_grad():
            responsibilities = self._log_joint(theta).softmax(0)  # [C, S]
            score = torch.zeros_like(theta)
            for r, part in zip(responsibilities, self.parts, strict=True):
                score = torch.addcmul(score, r.unsqueeze(-1), part.score(theta))
        return score

    def entropy(self) -> Tensor:
        raise NotImplementedError(
            "the entropy of a mixture has no closed form: use estimator='path' or 'log_q', which need only log_prob; "
            "entropy_bounds() gives a lower and an upper bound"
        )

    def entropy_bounds(self) -> tuple[Tensor, Tensor]:
        """Lower and upper bound of the entropy in nats, Σ_c π_c (H(q_c) − log Σ_k π_k exp(−D_ck)).

        Between Gaussians D is the Bhattacharyya distance for the lower and KL[q_c‖q_k] for the upper bound (Kolchinsky
        and Tracey, Entropy 19:361, 2017): both are exact where parts coincide or do not overlap. For other parts
        0 ≤ D ≤ ∞: Σ π_c H(q_c), and that plus the entropy of π.
        """
        C = len(self.parts)
        H = torch.stack([part.entropy() for part in self.parts])
        gaussians = [part for part in self.parts if isinstance(part, Gaussian)]
        if len(gaussians) == C:
            least = torch.stack([_bhattacharyya(q, p) for q in gaussians for p in gaussians]).reshape(C, C)
            most = torch.stack([kl(q, p) for q in gaussians for p in gaussians]).reshape(C, C)
        else:
            least = H.new_zeros(C, C)
            most = torch.full_like(least, torch.inf).fill_diagonal_(0.0)
        lower, upper = (
            self.proportions @ (H - (self.log_proportions - distance).logsumexp(-1)) for distance in (least, most)
        )
        return lower, upper

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        deviations = self._means() - self.mean
        between = deviations[:, rows].mT @ (self.proportions.unsqueeze(-1) * deviations[:, columns])
        for proportion, part in zip(self.proportions, self.parts, strict=True):
            between = between + proportion * part.covariance_block(rows, columns)
        return between

    def to_distribution(self) -> Distribution:
        return MixtureSameFamily(
            Categorical(logits=self.log_proportions), _batched([part.to_distribution() for part in self.parts])
        )

    def _means(self) -> Tensor:
        return torch.stack([part.mean for part in self.parts])  # [C, P]

    def _log_joint(self, theta: Tensor) -> Tensor:
        """log π_c + log q_c(θ): [S, P] → [C, S]."""
        self._check_theta(theta)
        return torch.stack([part.log_prob(theta) for part in self.parts]) + self.log_proportions.unsqueeze(-1)


class Mixture(Family):
    """Σ_c π_c q_c(θ): parts of any family with learned proportions; with `LowRankNormal` parts, sGMM-VI.

    A mixture of `MAP` is a deep ensemble with weights. The parts of a recipe start apart: at fresh draws of the
    network's initialisation; without a network (a log density) at draws of N(current values, scale²), every second
    one the mirror image of the one before. To start elsewhere, bind parts at points of your own and pass the list.

    A part does not see a mode that its draws never reach: two parts that start on the same side of a target with two
    modes end on the same one. `fit_density` looks for the modes first and places a part at each.

    Args:
        part: a recipe, or a list of recipes, or a list of bound families over the same tensors: the mixture of
            those is bound, and holds them, not copies.
        components: how many parts are made of a recipe; 2 if not given. "auto": as many as `fit(target, family)` of a
            log density finds worth having; nothing else takes such a recipe.
        common_noise: give all parts of one rank the same noise, as the original code does, or False for noise of
            their own. The law of one part's draws and gradients is the same either way; what changes is the difference
            between parts. Two parts, four states of a fit, `paired` and `unscented` draws: the variance of the
            proportions' gradient is 0.005 to 0.66 of that with independent noise (with `naive` 0.17 to 1.4), that of
            the ELBO's value 1.3 to 2.1 times; both modes are found as often. (`benchmarks/mixture_noise.py`)

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

    def __init__(
        self,
        part: Family | Sequence[Family],
        components: int | Literal["auto"] | None = None,
        common_noise: bool = True,
    ):
        super().__init__()
        parts = parts_of(part, components)
        self.components: int | str = AUTO if components == AUTO else len(parts)
        self.common_noise = bool(common_noise)
        self.inner = nn.ModuleList(parts)
        if self.is_bound:
            spaces = [own.space for own in parts if own.space is not None]
            check_shared(spaces)
            self.space = spaces[0] if spaces else None
            self.raw_logits = nn.Parameter(next(self.inner.parameters()).new_zeros(len(parts)))

    @property
    def part(self) -> list[Family]:
        return list(self.inner)  # pyright: ignore[reportReturnType]

    @property
    def is_bound(self) -> bool:
        return all(part.is_bound for part in self.part)

    @property
    def logits(self) -> Tensor:
        """[C]: the proportions are their softmax."""
        return LOGIT_UNIT * self.raw_logits

    @property
    def proportions(self) -> Tensor:
        """π: [C]"""
        return self.logits.softmax(-1)

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        if self.components == AUTO:
            raise ValueError(
                'components="auto" takes as many parts as there are modes, and only fit(target, family) of a log '
                "density looks for these; give the number of parts: components=2"
            )
        C = len(self.part)
        spaces = apart(parameters, C, generator)
        bound = [part.bind(space, generator) for part, space in zip(self.part, spaces, strict=True)]
        self.inner = nn.ModuleList(bound)
        self.raw_logits = nn.Parameter(parameters.initial.new_zeros(C))

    @classmethod
    def weighted(cls, parts: Sequence[Family], log_weights: Tensor, common_noise: bool = True) -> "Mixture":
        """Return the mixture of bound families with these weights [C], logarithms but for a constant."""
        made = cls(list(parts), common_noise=common_noise)
        with torch.no_grad():
            made.raw_logits.copy_((log_weights - log_weights.mean()) / LOGIT_UNIT)
        return made

    @classmethod
    def from_networks(
        cls, networks: Sequence[nn.Module], part: Family, select: Select = "*", exclude: Select = ()
    ) -> "Mixture":
        """A bound mixture that starts at a trained ensemble: one part at the present values of each network.

        Args:
            networks: of one architecture; variationalize one of them. What is not random, buffers and tensors that
                are not selected, must be the same in all: every part is called with those of that one.
            part: a recipe whose means start at the current values.
            select, exclude: which tensors are random, as in `Parameters.of`.

        Example:
            >>> from structvi import MeanField
            >>> q = Mixture.from_networks([nn.Linear(3, 1), nn.Linear(3, 1)], part=MeanField())
            >>> q().proportions.tolist()
            [0.5, 0.5]
        """
        if isinstance(networks, nn.Module) or not networks:
            raise ValueError("from_networks expects a list of at least one network")
        spaces = [Parameters.of(net, select, exclude) for net in networks]
        check_shared(spaces)
        check_held(networks, spaces)
        parts = [part.bind(space) for space in spaces]
        for bound in parts:
            assert bound.space is not None
            if not torch.equal(bound().mean.detach(), bound.space.initial):
                raise ValueError(
                    f"{type(part).__name__} does not start at the networks' values; "
                    'give a recipe with initial_mean="current"'
                )
        return cls(parts)

    def parts(self) -> list[Family]:
        return self.part

    def normal(self) -> None:
        """None: a mixture is no single normal."""

    def mixture_parts(self) -> tuple[list[Family], Tensor]:
        return self.part, self.proportions

    def parts_sought(self) -> PartsSought:
        return PartsSought(self.part, None if self.components == AUTO else len(self.part))

    def of_parts(self, parts: Sequence[Family], log_weights: Tensor) -> "Mixture":
        return Mixture.weighted(parts, log_weights, self.common_noise)

    @torch.no_grad()
    def change_coordinates(self, shift: Tensor, root: Tensor) -> None:
        """Of every part."""
        for part in self.part:
            part.space = self.space
            part.change_coordinates(shift, root)

    def forward(self) -> MixtureDensity:
        return MixtureDensity([part() for part in self.part], self.logits.log_softmax(-1), self.common_noise)


def mixture_of(family: Family) -> Mixture | None:
    """Return the mixture that a family is, bound or not, or None.

    Example:
        >>> from structvi import MeanField
        >>> mixture_of(MeanField()) is None, mixture_of(Mixture(MeanField())).components
        (True, 2)
    """
    return family if isinstance(family, Mixture) else None


def widths(family: Family) -> int:
    """Return how many normals `set_normals` of a `ScaleMixture` takes; 1 for all other families."""
    return family.scale_count


class Weighted(NamedTuple):
    """A normal and its weight in a mixture."""

    weight: float
    normal: Gaussian


def weighted_normals(density: Density) -> list[Weighted]:
    """The normals that a density is a mixture of, itself where it is one; none where it is no such mixture.

    Example:
        >>> import torch
        >>> from structvi import Mixture, MeanField, Parameters
        >>> q = Mixture(MeanField(), components=2).bind(Parameters({"z": torch.zeros(3)}))
        >>> [one.weight for one in weighted_normals(q())]
        [0.5, 0.5]
    """
    if isinstance(density, Gaussian):
        return [Weighted(1.0, density)]
    if not isinstance(density, MixtureDensity):
        return []
    parts = [weighted_normals(part) for part in density.parts]
    if not all(parts):
        return []
    own = zip(density.proportions.tolist(), parts, strict=True)
    return [Weighted(share * one.weight, one.normal) for share, part in own for one in part]


def _check_densities(parts: Sequence[Density]) -> None:
    sizes = {part.P for part in parts}
    if len(sizes) > 1:
        raise ValueError(f"the parts of a mixture must be over the same weights, got P = {sorted(sizes)}")
    kinds = {part.has_density for part in parts}
    if len(kinds) > 1:
        raise ValueError(
            "all parts of a mixture must have a density, or none (point masses), got "
            + ", ".join(f"{type(part).__name__}: {part.has_density}" for part in parts)
        )
    for part in parts:
        if part.bound != part.has_density:
            raise ValueError(
                f"{type(part).__name__} cannot be part of a mixture: some of its tensors are point masses, "
                "and the parts' densities cannot be compared; use families that have a density for all tensors"
            )


def _recorded(coupling: Coupling, tape: dict[tuple[int, int, int], Noise]) -> Coupling:
    """The coupling as one part sees it: its first call gives the noise of every other part's first call, and so on.

    Noise of other sizes (parts of another rank) is made for itself.
    """
    calls = count()

    def common(groups: int, P: int, K: int, generator=None, dtype=None, device=None) -> Noise:
        key = (next(calls), P, K)
        if key not in tape:
            tape[key] = coupling(groups, P, K, generator, dtype, device)
        return tape[key]

    return common


def _bhattacharyya(q: Gaussian, p: Gaussian) -> Tensor:
    """−log ∫ √(q p) = ⅛ xᵀΣ̄⁻¹x + ½ log det Σ̄ − ¼ log det Σ_q Σ_p for x = μ_q − μ_p and Σ̄ = (Σ_q + Σ_p)/2."""
    x = q.mean - p.mean
    of_q, of_p = q.low_rank(), p.low_rank()
    d = (of_q.d + of_p.d) / 2
    V = torch.cat([of_q.V, of_p.V], dim=-1)  # [P, K]
    if V.shape[-1] >= q.P or bool((d == 0).any()):  # not low rank, or no diagonal to build on
        middle = FullNormalDensity(x, torch.linalg.cholesky((q.covariance() + p.covariance()) / 2))
        quadratic, half_log_det = middle.quadratic(x.unsqueeze(0)).squeeze(0), middle.half_log_det()
    else:
        C = torch.block_diag(of_q.C, of_p.C).double() / 2
        W, y = V / d.sqrt().unsqueeze(-1), (x / d.sqrt()).unsqueeze(0)
        inner = torch.eye(len(C), dtype=C.dtype, device=C.device) + C @ project(W.mT, W)  # [K, K]
        projected = project(y, W)  # [1, K]
        quadratic = sum_weights(y.square()).squeeze(0) - (projected @ torch.linalg.solve(inner, C @ projected.mT)).sum()
        half_log_det = sum_weights(d.log()) / 2 + torch.linalg.slogdet(inner).logabsdet / 2
    return (quadratic / 8 + half_log_det - (q.half_log_det() + p.half_log_det()) / 2).to(x.dtype)


def _batched(parts: Sequence[Distribution]) -> Distribution:
    """Distributions of one type as one with a batch axis."""

    def stack(of: Callable[[Distribution], Tensor]) -> Tensor:
        return torch.stack([of(part) for part in parts])

    kinds = {type(part) for part in parts}
    if kinds == {MultivariateNormal}:
        return MultivariateNormal(stack(lambda d: d.mean), scale_tril=stack(lambda d: d.scale_tril))  # pyright: ignore
    if kinds == {Independent} and all(type(part.base_dist) is Normal for part in parts):  # pyright: ignore
        return Independent(Normal(stack(lambda d: d.mean), stack(lambda d: d.stddev)), 1)
    if kinds == {LowRankMultivariateNormal} and len({part.cov_factor.shape for part in parts}) == 1:  # pyright: ignore
        return LowRankMultivariateNormal(
            stack(lambda d: d.mean),
            stack(lambda d: d.cov_factor),  # pyright: ignore
            stack(lambda d: d.cov_diag),  # pyright: ignore
        )
    raise NotImplementedError(
        "torch's MixtureSameFamily needs parts of one type and rank, got "
        + ", ".join(sorted(kind.__name__ for kind in kinds))
    )
