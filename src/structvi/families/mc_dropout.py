"""Monte Carlo dropout: θ̂∘z with Bernoulli masks z, and what every family of masked weights shares."""

from abc import abstractmethod
from collections.abc import Mapping
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from ..couplings import Coupling, naive
from ..parameters import Parameters, Select
from ..util.patterns import assign, check_patterns
from .density import Density, Draws
from .dropout_layers import dropped_layers
from .family import Family
from .mean_field import DiagonalNormal
from .numerics.algebra import sum_weights
from .point import PointMass
from .starts import check_start, initial_mean

Per = Literal["weight", "input", "output"]

#: `support()` lists all 2^M states up to this M.
MAX_SUPPORT = 20


class Layout:
    """Which of M masks multiplies which of P weights; exempt tensors are multiplied by one.

    Args:
        parameters: the P weights.
        per: "weight" for a mask of its own to every weight, "input" for one to an input unit of a tensor (its second
            axis: a column of a Linear's weight, a channel of a convolution's), "output" for one to an output unit (its
            first axis). Tensors of fewer than two axes have one mask per element.
        exempt: the tensors that are never masked: patterns or a predicate. None for those of fewer than two axes in
            a network (biases, norms), and for none of a log density's.
    """

    def __init__(self, parameters: Parameters, per: Per, exempt: Select | None):
        if exempt is None:
            exempt = (lambda name, tensor: tensor.ndim < 2) if parameters.from_network else ()
        names = parameters.matching(exempt, "exempt")
        self.shapes, self.numels = parameters.shapes, parameters.numels
        #: per tensor the shape of its masks, which broadcasts to the tensor's; None where it is exempt
        self.units: list[tuple[int, ...] | None] = [
            None if name in names else _units(shape, per)
            for name, shape in zip(parameters.names, parameters.shapes, strict=True)
        ]
        self.counts = [0 if units is None else prod(units) for units in self.units]
        self.M = sum(self.counts)
        if self.M == 0:
            raise ValueError(
                f"every one of the {len(parameters)} tensors is exempt from dropout: nothing can be dropped. "
                "In a network those of fewer than two axes are, by default: say otherwise with exempt="
            )

    def spread(self, z: Tensor, exempt: float = 1) -> Tensor:
        """The mask of every weight: [.., M] → [.., P], with `exempt` where there is none."""
        lead = z.shape[:-1]
        parts = []
        for part, units, shape in zip(z.split(self.counts, dim=-1), self.units, self.shapes, strict=True):
            if units is None:
                parts.append(z.new_full((*lead, shape.numel()), exempt))
            else:
                parts.append(part.reshape(*lead, *units).expand(*lead, *shape).reshape(*lead, -1))
        return torch.cat(parts, dim=-1)

    def every(self, hit: Tensor) -> tuple[Tensor, Tensor]:
        """Whether all weights of a mask, and all exempt weights, are hit: [S, P] → [S, M], [S]."""
        S = hit.shape[0]
        masks, exempt = [], [hit.new_ones(S)]
        for part, units, shape in zip(hit.split(self.numels, dim=-1), self.units, self.shapes, strict=True):
            if units is None:
                exempt.append(part.all(-1))
            else:
                misses = (~part).reshape(S, *shape).int().sum_to_size(S, *units)
                masks.append((misses == 0).reshape(S, -1))
        return torch.cat(masks, dim=-1), torch.stack(exempt).all(0)


def _units(shape: torch.Size, per: Per) -> tuple[int, ...]:
    if per == "weight" or len(shape) < 2:
        return tuple(shape)
    axis = 1 if per == "input" else 0
    return tuple(size if i == axis else 1 for i, size in enumerate(shape))


class Masked(Density):
    """The law of θ∘z for weights θ under some density and M masks z, independent of θ.

    `mean`, `variance` and `covariance` are those of the weights θ∘z that the network sees. Where θ has a density,
    `log_prob`, `score` and `entropy` are those of θ, before the mask.
    """

    centred = False

    def __init__(self, weights: Density, layout: Layout):
        self.weights, self.layout = weights, layout
        self.has_density = weights.has_density

    @property
    @abstractmethod
    def keep(self) -> Tensor:
        """E z: [M]"""

    @property
    @abstractmethod
    def mask_variance(self) -> Tensor:
        """Var z: [M]"""

    @abstractmethod
    def log_mass(self, theta: Tensor) -> Tensor:
        """The log probability of points θ∘z, where θ is a point estimate: [S, P] → [S]."""

    @property
    def P(self) -> int:
        return self.weights.P

    @property
    def mean(self) -> Tensor:
        return self.weights.mean * self.layout.spread(self.keep)

    @property
    def variance(self) -> Tensor:
        keep, spread = self.layout.spread(self.keep), self.layout.spread(self.mask_variance, 0)
        return (spread + keep.square()) * self.weights.variance + spread * self.weights.mean.square()

    def offers(self, method: str) -> bool:
        return self.weights.offers(method)

    def log_prob(self, theta: Tensor) -> Tensor:
        return self.weights.log_prob(theta) if self.has_density else self.log_mass(self._check_theta(theta))

    def score(self, theta: Tensor) -> Tensor:
        if not self.has_density:
            raise NotImplementedError("masked point masses have no density and so no score")
        return self.weights.score(theta)

    def entropy(self) -> Tensor:
        if not self.has_density:
            raise NotImplementedError(
                "masked point masses have no finite differential entropy (it is −∞): the objective is E[log joint] "
                "without it"
            )
        return self.weights.entropy()


class BernoulliMasked(Masked):
    """θ∘z with independent masks z_m ~ B(exp log_keep_m): [M], [M]."""

    def __init__(self, weights: Density, layout: Layout, log_keep: Tensor, log_drop: Tensor):
        super().__init__(weights, layout)
        self.log_keep, self.log_drop = log_keep, log_drop

    @property
    def keep(self) -> Tensor:
        return self.log_keep.exp()

    @property
    def mask_variance(self) -> Tensor:
        return self.log_keep.exp() * self.log_drop.exp()

    def masks(self, groups: int, coupling: Coupling, generator: torch.Generator | None) -> Tensor:
        """Masks [S, M] from a coupling's noise ε [S, M]: z = 1 where Φ(ε) < keep."""
        keep = self.keep.detach()
        noise = DiagonalNormal(torch.zeros_like(keep), torch.zeros_like(keep)).draw(groups, coupling, generator).theta
        # on the scale of ε, where keep = 1 is +∞: Φ(ε) itself rounds to one
        return (noise < torch.special.ndtri(keep.double()).to(noise.dtype)).to(noise.dtype)

    def log_mask(self, z: Tensor) -> Tensor:
        """log q(z) = Σ_m z_m log keep_m + (1 − z_m) log drop_m: [S, M] → [S]."""
        return sum_weights(torch.where(z > 0, self.log_keep, self.log_drop)).to(self.log_keep.dtype)

    def states(self) -> Tensor:
        """All masks, in binary order: [2^M, M]."""
        M = self.layout.M
        bits = torch.arange(M, device=self.log_keep.device)
        numbers = torch.arange(2**M, device=self.log_keep.device)
        return ((numbers.unsqueeze(-1) >> bits) & 1).to(self.log_keep.dtype)

    def support(self) -> tuple[Tensor, Tensor]:
        """Every state θ̂∘z and its probability: [2^M, P] and [2^M], for at most 20 masks over a point estimate.

        States that are the same point, because some θ̂_i = 0, are listed apart.
        """
        point, M = self._point("support()"), self.layout.M
        if M > MAX_SUPPORT:
            raise ValueError(f"support() has 2^{M} states; it lists them for at most {MAX_SUPPORT} masks: draw instead")
        z = self.states()
        return point * self.layout.spread(z), self.log_mask(z).exp()

    def log_mass(self, theta: Tensor) -> Tensor:
        """Σ over the masks that agree with θ, factor by factor: where θ̂ = 0 both values of a mask do."""
        kept, exempt = self.layout.every(theta == self._point("log_prob"))
        dropped, _ = self.layout.every(theta == 0)
        mass = torch.where(kept, self.log_keep, torch.where(dropped, self.log_drop, -torch.inf))
        mass = sum_weights(torch.where(kept & dropped, 0.0, mass))
        return torch.where(exempt, mass, -torch.inf).to(theta.dtype)

    def _point(self, what: str) -> Tensor:
        if not isinstance(self.weights, PointMass):
            raise NotImplementedError(f"{what} needs weights under MAP, these are {type(self.weights).__name__}")
        return self.weights.point

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        """Cov(θ∘z) = E[zzᵀ]∘Cov(θ) + Cov(z)∘E[θ]E[θ]ᵀ; masks covary where they are the same."""
        keep, variance = self.layout.spread(self.keep), self.layout.spread(self.mask_variance, 0)
        mean = self.weights.mean
        number = self.layout.spread(torch.arange(self.layout.M, device=keep.device), -1)
        same = number[rows].unsqueeze(-1) == number[columns]
        of_masks = torch.where(same, variance[rows].unsqueeze(-1), 0.0)
        products = of_masks + torch.outer(keep[rows], keep[columns])
        of_weights = self.weights.covariance_block(rows, columns)
        return products * of_weights + of_masks * torch.outer(mean[rows], mean[columns])


class DroppedPoint(BernoulliMasked):
    """Σ_z q(z) δ(θ − θ̂∘z): 2^M point masses. `log_prob` is the log probability of a point, −∞ off the support."""

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        """θ̂∘z; the masks of a coupling's mirrored noise are antithetic."""
        z = self.masks(groups, coupling, generator)
        S = z.shape[0]
        return Draws(self._point("draw") * self.layout.spread(z), z.new_full((S,), 1 / S))


class MCDropout(Family):
    """Monte Carlo dropout: θ = θ̂∘z, z ~ B(keep), P parameters θ̂. Point masses: no density, no lower bound.

    The objective is E_z[log lik(θ̂∘z) + log prior(θ̂∘z)]. `keep` is the probability to keep, and kept weights are not
    rescaled. keep = 1 is MAP, keep = 0 puts all mass at the origin. `torch.nn.Dropout(p)` drops with probability p and
    multiplies by 1/(1 − p): as masks on the inputs of the layer after it, it is keep = 1 − p with θ̂ = W/(1 − p), see
    `from_network`.

    Args:
        keep: the probability that a mask is one, in [0, 1]; or a dict of glob patterns on tensor names and such
            probabilities: tensors that no pattern matches are then never dropped.
        per: a mask to every "weight", or shared by the weights of an "input" unit (second axis of a tensor) or of
            an "output" unit (first axis).
        exempt: tensors that are never dropped, by glob pattern or predicate; None for those of fewer than two axes in
            a network (biases, norms), and for none of a log density's. Not with a dict for `keep`.
        initial_mean: θ̂ starts at the network's "current" values, at these divided by keep ("rescaled": then E θ is
            what the network has), at a "fresh" draw of its initialisation or at "zero".

    Example:
        >>> from structvi import Parameters
        >>> q = MCDropout(keep=0.9).bind(Parameters({"z": torch.ones(2)}))
        >>> theta, probability = q().support()
        >>> probability
        tensor([0.0100, 0.0900, 0.0900, 0.8100])
    """

    point: Tensor
    layout: Layout
    per: Per

    def __init__(
        self,
        keep: float | Mapping[str, float] = 0.9,
        per: Per = "weight",
        exempt: Select | None = None,
        initial_mean: str = "current",
    ):
        super().__init__()
        by_name = isinstance(keep, Mapping)
        if by_name:
            check_patterns(keep, "MCDropout")
            if exempt is not None:
                raise ValueError("with a dict for keep the tensors that no pattern matches are exempt: drop exempt=")
        for value in keep.values() if by_name else [keep]:
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
                raise ValueError(f"keep must be a probability to keep, in [0, 1], got {value!r}")
            if value == 0 and initial_mean == "rescaled":
                raise ValueError('initial_mean="rescaled" divides by keep, which must not be 0')
        check_per(per)
        check_start("current" if initial_mean == "rescaled" else initial_mean, 1.0)
        self.keep, self.per, self.exempt, self.initial_mean = keep, per, exempt, initial_mean
        self._keeps: list[float] = []  # of each tensor, once bound

    @classmethod
    def from_network(cls, net: nn.Module) -> "MCDropout":
        """The posterior that a network with `nn.Dropout` layers is, where dropout stays active to predict.

        Each dropout layer becomes masks on the inputs of the layer after it, with keep = 1 − p and θ̂ = W/(1 − p).
        Use it with `variationalize(net, .., dropout="off")`, the default: else weights and activations are dropped.

        The output for one input has the law it has in train mode. Masks belong to a draw of the weights, so that a
        draw is one function for all inputs of a batch, where torch drops anew in every row.

        Args:
            net: its dropout layers must be in `nn.Sequential`, directly before the layer whose inputs they drop:
                `Dropout` before `Linear`, `Dropout1d`, `2d`, `3d` (whole channels) before a convolution.

        Example:
            >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
            >>> MCDropout.from_network(net).keep
            {'3.weight': 0.8}
        """
        return cls(dropped_layers(net), per="input", initial_mean="rescaled")

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        if isinstance(self.keep, Mapping):
            matched = parameters.matching(tuple(self.keep), "keep")
            owners = assign(matched, tuple(self.keep), "MCDropout")
            keeps = {name: tuple(self.keep.values())[owner] for name, owner in zip(matched, owners, strict=True)}
            self.layout = Layout(parameters, self.per, lambda name, tensor: name not in keeps)
            self._keeps = [keeps.get(name, 1.0) for name in parameters.names]
        else:
            self.layout = Layout(parameters, self.per, self.exempt)
            self._keeps = [self.keep] * len(parameters)
        if self.initial_mean == "rescaled":
            current = initial_mean(parameters, "current", generator)
            self.point = nn.Parameter(current / self.layout.spread(self._keep(current)))
        else:
            self.point = nn.Parameter(initial_mean(parameters, self.initial_mean, generator))

    def _keep(self, like: Tensor) -> Tensor:
        """The probability of each mask: [M]"""
        pairs = zip(self.layout.counts, self._keeps, strict=True)
        return torch.cat([like.new_full((count,), keep) for count, keep in pairs])

    def forward(self) -> DroppedPoint:
        keep = self._keep(self.point.detach())
        return DroppedPoint(PointMass(self.point), self.layout, keep.log(), torch.log1p(-keep))

    def normal(self) -> None:
        """None: point masses of many states."""

    def begin_again(self, generator: torch.Generator) -> None:
        if self.space is not None:
            self.initial_mean = "fresh"
            self.initialise(self.space, generator)


def check_per(per: str) -> None:
    if per not in ("weight", "input", "output"):
        raise ValueError(f'per must be "weight", "input" or "output", got {per!r}')
