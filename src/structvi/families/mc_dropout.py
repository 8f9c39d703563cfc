"""Monte Carlo dropout: θ̂∘z with Bernoulli masks z, and a network's own dropout layers as such masks."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from ..couplings import Coupling, naive
from ..parameters import Parameters, Select
from ..util.patterns import assign, check_patterns
from .family import Density, Draws, Family, check_draw, check_initial_mean, initial_mean
from .numerics import sum_weights

Per = Literal["weight", "input", "output"]

#: masks M up to which `support()` lists all 2^M states: a million rows
MAX_SUPPORT = 20

#: each kind of dropout, and the layer of whose inputs it drops whole units
LAYER_AFTER: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: nn.Linear,
    nn.Dropout1d: nn.Conv1d,
    nn.Dropout2d: nn.Conv2d,
    nn.Dropout3d: nn.Conv3d,
}


class Layout:
    """The weights that each of M masks multiplies; exempt tensors are multiplied by one.

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
        #: per tensor the shape of its masks, which broadcasts to the tensor's; None if it is exempt
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
        """Return the mask of every weight, [.., M] → [.., P], and `exempt` for weights without one."""
        lead = z.shape[:-1]
        parts = []
        for part, units, shape in zip(z.split(self.counts, dim=-1), self.units, self.shapes, strict=True):
            if units is None:
                parts.append(z.new_full((*lead, shape.numel()), exempt))
            else:
                parts.append(part.reshape(*lead, *units).expand(*lead, *shape).reshape(*lead, -1))
        return torch.cat(parts, dim=-1)

    def every(self, hit: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether all weights of a mask, and all exempt weights, are hit: [S, P] → [S, M], [S]."""
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


class DroppedPoint(Density):
    """Σ_z q(z) δ(θ − θ̂∘z) with independent masks z_m ~ B(keep_m): 2^M point masses.

    `log_prob` is the log probability of a point, −∞ off the support.

    Args:
        point: θ̂ [P].
        layout: the weights of each mask.
        keep: the probability that a mask is one, [M].
    """

    has_density = False
    centred = False

    def __init__(self, point: Tensor, layout: Layout, keep: Tensor):
        self.point, self.layout, self.keep = point, layout, keep
        self.log_keep, self.log_drop = keep.log(), torch.log1p(-keep)

    @property
    def mean(self) -> Tensor:
        return self.point * self.layout.spread(self.keep)

    @property
    def variance(self) -> Tensor:
        return self.layout.spread(self.keep * (1 - self.keep), 0) * self.point.square()

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        """Draw θ̂∘z, z = 1 where Φ(ε) < keep for a coupling's noise ε: masks of mirrored noise are antithetic."""
        check_draw(groups, coupling, generator, self.point.device)
        noise = coupling(groups, self.layout.M, 0, generator, self.point.dtype, self.point.device)[0]
        # on the scale of ε, where keep = 1 is +∞: Φ(ε) itself rounds to one
        z = (noise < torch.special.ndtri(self.keep.double()).to(noise.dtype)).to(noise.dtype)
        return Draws(self.point * self.layout.spread(z), z.new_full((len(z),), 1 / len(z)))

    def support(self) -> tuple[Tensor, Tensor]:
        """Return every state θ̂∘z and its probability, [2^M, P] and [2^M], for at most 20 masks.

        States that are the same point, because some θ̂_i = 0, are listed apart.
        """
        M = self.layout.M
        if M > MAX_SUPPORT:
            raise ValueError(f"support() has 2^{M} states; it lists them for at most {MAX_SUPPORT} masks: draw instead")
        bits, numbers = (torch.arange(n, device=self.point.device) for n in (M, 2**M))
        z = ((numbers.unsqueeze(-1) >> bits) & 1).to(self.point.dtype)
        log_q = sum_weights(torch.where(z > 0, self.log_keep, self.log_drop)).to(z.dtype)
        return self.point * self.layout.spread(z), log_q.exp()

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return log Σ over the masks that agree with θ, factor by factor: where θ̂ = 0 both values of a mask do."""
        kept, exempt = self.layout.every(self._check_theta(theta) == self.point)
        dropped, _ = self.layout.every(theta == 0)
        mass = torch.where(kept, self.log_keep, torch.where(dropped, self.log_drop, -torch.inf))
        mass = sum_weights(torch.where(kept & dropped, 0.0, mass))
        return torch.where(exempt, mass, -torch.inf).to(theta.dtype)

    def score(self, theta: Tensor) -> Tensor:
        raise NotImplementedError("masked point masses have no density and so no score")

    def entropy(self) -> Tensor:
        raise NotImplementedError(
            "masked point masses have no finite differential entropy (it is −∞): the objective is E[log joint] "
            "without it"
        )

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        """Return Cov(z)∘θ̂θ̂ᵀ: masks covary where they are the same."""
        variance = self.layout.spread(self.keep * (1 - self.keep), 0)
        number = self.layout.spread(torch.arange(self.layout.M, device=variance.device), -1)
        of_masks = torch.where(number[rows].unsqueeze(-1) == number[columns], variance[rows].unsqueeze(-1), 0.0)
        return of_masks * torch.outer(self.point[rows], self.point[columns])


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
        if per not in ("weight", "input", "output"):
            raise ValueError(f'per must be "weight", "input" or "output", got {per!r}')
        check_initial_mean("current" if initial_mean == "rescaled" else initial_mean)
        self.keep, self.per, self.exempt, self.initial_mean = keep, per, exempt, initial_mean
        self._keeps: list[float] = []  # of each tensor, once bound

    @classmethod
    def from_network(cls, net: nn.Module) -> "MCDropout":
        """Return the posterior that a network with `nn.Dropout` layers is, if dropout stays active to predict.

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
        rescaled = self.initial_mean == "rescaled"
        start = initial_mean(parameters, "current" if rescaled else self.initial_mean, generator)
        self.point = nn.Parameter(start / self.layout.spread(self._keep(start)) if rescaled else start)

    def _keep(self, like: Tensor) -> Tensor:
        """Return the probability of each mask, [M]."""
        pairs = zip(self.layout.counts, self._keeps, strict=True)
        return torch.cat([like.new_full((count,), keep) for count, keep in pairs])

    def forward(self) -> DroppedPoint:
        return DroppedPoint(self.point, self.layout, self._keep(self.point.detach()))


# ---------------------------------------------------------------------------------------- a network's dropout layers


def dropped_layers(net: nn.Module) -> dict[str, float]:
    """Return weight name → 1 − p for the layer after each dropout layer; refuse dropout that is no mask on weights.

    Example:
        >>> dropped_layers(nn.Sequential(nn.Dropout(0.2), nn.Linear(3, 2)))
        {'1.weight': 0.8}
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"expected the network, an nn.Module, got {type(net).__name__}")
    shared = Counter(id(tensor) for _, tensor in net.named_parameters(remove_duplicate=False))
    after = {name: following for chain in _chains(net, "") for (name, _), following in pairwise(chain)}
    keeps: dict[str, float] = {}
    refused: list[str] = []
    for name, module in net.named_modules(remove_duplicate=False):  # one dropout layer may serve several places
        p = _probability(module)
        if p == 0:
            continue
        following, layer = after.get(name, ("", None))
        reason = _refusal(module, p, layer)
        if reason is None and shared[id(layer.weight)] > 1:  # pyright: ignore[reportOptionalMemberAccess]
            reason = f"the weight of {following} is used elsewhere too, where nothing is dropped"
        if reason is None:
            keeps[f"{following}.weight"] = 1 - p
        else:
            refused.append(f"  {name or 'the network'} ({type(module).__name__}): {reason}")
    if refused:
        raise ValueError(
            "these dropout layers are no masks on the weights of a layer after them:\n"
            + "\n".join(refused)
            + '\nKeep them as they are with variationalize(.., dropout="on"), or change the network'
        )
    if not keeps:
        raise ValueError("the network has no nn.Dropout layer with p > 0; give keep= yourself: MCDropout(keep=0.9)")
    return keeps


def _probability(module: nn.Module) -> float:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    return module.dropout if isinstance(module, nn.RNNBase | nn.MultiheadAttention) else 0.0


def _refusal(module: nn.Module, p: float, layer: nn.Module | None) -> str | None:
    wanted = LAYER_AFTER.get(type(module))
    if wanted is None:
        return "it drops inside of the layer, or something else than units"
    if p == 1:
        return "p = 1 drops everything, and there is no weight divided by 1 − p"
    if layer is None:
        return "it is not in an nn.Sequential with a layer directly after it"
    if type(layer) is not wanted:
        return f"it is before {type(layer).__name__}, it must be before {wanted.__name__}"
    if getattr(layer, "groups", 1) > 1:
        return f"it is before a convolution with groups = {layer.groups}, whose weights have no axis of all inputs"
    return None


def _is_sequence(module: nn.Module) -> bool:
    return type(module).forward is nn.Sequential.forward


def _chains(module: nn.Module, name: str) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield the modules that are called one after the other in every `nn.Sequential`; nested ones are one chain."""
    if _is_sequence(module):
        chain = list(_links(module, name))
        yield chain
        inner = [(link, part) for link, part in chain if not _is_sequence(part)]
    else:
        inner = [(f"{name}.{child}" if name else child, part) for child, part in module.named_children()]
    for link, part in inner:
        if part is not module:
            yield from _chains(part, link)


def _links(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if not _is_sequence(module):
        yield name, module
        return
    for child, part in module._modules.items():  # not named_children: a module may come twice
        if part is not None:
            yield from _links(part, f"{name}.{child}" if name else child)
