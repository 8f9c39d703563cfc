"""Monte Carlo dropout: θ̂∘z with Bernoulli masks z, and a network's own dropout layers as such masks."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..couplings import Coupling, naive
from ..parameters import Parameters
from ..util.checks import check_one_of
from ..util.patterns import assign
from .family import MAX_DENSE, STARTS, Density, Draws, Family, check_draw, initial_mean

Per = Literal["weight", "input", "output"]

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
        keeps: the probability that a mask is one, of each tensor that is masked.
    """

    def __init__(self, parameters: Parameters, per: Per, keeps: Mapping[str, float]):
        #: of each tensor its shape, that of its masks, which broadcasts to it (None: exempt), and their probability
        self.tensors = [
            (shape, _units(shape, per) if name in keeps else None, keeps.get(name, 1.0))
            for name, shape in zip(parameters.names, parameters.shapes, strict=True)
        ]
        self.counts = [0 if units is None else prod(units) for _, units, _ in self.tensors]
        self.M = sum(self.counts)
        if self.M == 0:
            raise ValueError('a network\'s tensors of fewer than two axes are dropped on request: keep={"*": 0.9}')

    def keep(self, like: Tensor) -> Tensor:
        """Return the probability of each mask, [M]."""
        own = zip(self.counts, self.tensors, strict=True)
        return torch.cat([like.new_full((count,), keep) for count, (_, _, keep) in own])

    def spread(self, z: Tensor, exempt: float = 1) -> Tensor:
        """Return the mask of every weight, [.., M] → [.., P], and `exempt` for weights without one."""
        lead, parts = z.shape[:-1], []
        for own, (shape, units, _) in zip(z.split(self.counts, dim=-1), self.tensors, strict=True):
            masks = z.new_full((), exempt) if units is None else own.reshape(*lead, *units)
            parts.append(masks.expand((*lead, *shape)).reshape(*lead, -1))
        return torch.cat(parts, dim=-1)


def _units(shape: torch.Size, per: Per) -> tuple[int, ...]:
    if per == "weight" or len(shape) < 2:
        return tuple(shape)
    axis = 1 if per == "input" else 0
    return tuple(size if i == axis else 1 for i, size in enumerate(shape))


class DroppedPoint(Density):
    """Σ_z q(z) δ(θ − θ̂∘z) with independent masks z_m ~ B(keep_m): 2^M point masses.

    Args:
        point: θ̂ [P].
        layout: the weights of each mask.
        keep: the probability that a mask is one, [M].
    """

    has_density = False
    centred = False

    def __init__(self, point: Tensor, layout: Layout, keep: Tensor):
        self.point, self.layout, self.keep = point, layout, keep

    @property
    def mean(self) -> Tensor:
        return self.point * self.layout.spread(self.keep)

    @property
    def variance(self) -> Tensor:
        return self.layout.spread(self.keep * (1 - self.keep), 0) * self.point.square()

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        """Draw θ̂∘z, z = 1 where Φ(ε) < keep for a coupling's noise ε: masks of mirrored noise are antithetic."""
        check_draw(groups, generator)
        noise = coupling(groups, self.layout.M, 0, generator, self.point.dtype, self.point.device)[0]
        # on the scale of ε, where keep = 1 is +∞: Φ(ε) itself rounds to one
        z = (noise < torch.special.ndtri(self.keep.double()).to(noise.dtype)).to(noise.dtype)
        return Draws(self.point * self.layout.spread(z), z.new_full((len(z),), 1 / len(z)))

    def support(self) -> tuple[Tensor, Tensor]:
        """Return every state θ̂∘z and its probability, [2^M, P] and [2^M], as far as a dense matrix has room.

        States that are the same point, because some θ̂_i = 0, are listed apart.
        """
        M = self.layout.M
        if 2**M * self.P > MAX_DENSE**2:
            raise ValueError(f"support() has 2^{M} states of {self.P} weights, too many to list: draw instead")
        bits, numbers = (torch.arange(n, device=self.point.device) for n in (M, 2**M))
        z = ((numbers.unsqueeze(-1) >> bits) & 1).to(self.point.dtype)
        return self.point * self.layout.spread(z), torch.where(z > 0, self.keep, 1 - self.keep).prod(-1)

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
        keep: the probability that a mask is one, in [0, 1]. In a network tensors of fewer than two axes (biases,
            norms) are never dropped. Or a dict of glob patterns on tensor names and such probabilities; tensors that
            no pattern matches are then never dropped.
        per: a mask to every "weight", or shared by the weights of an "input" unit (second axis of a tensor) or of
            an "output" unit (first axis).
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

    def __init__(self, keep: float | Mapping[str, float] = 0.9, per: Per = "weight", initial_mean: str = "current"):
        super().__init__()
        for value in keep.values() if isinstance(keep, Mapping) else [keep]:
            if not 0 <= value <= 1 or (value == 0 and initial_mean == "rescaled"):
                raise ValueError(f'keep must be a probability, in [0, 1] (above 0 if "rescaled"), got {value!r}')
        check_one_of("per", per, get_args(Per))
        check_one_of("initial_mean", initial_mean, (*STARTS, "rescaled"))
        self.keep, self.per, self.initial_mean = keep, per, initial_mean

    @classmethod
    def from_network(cls, net: nn.Module) -> "MCDropout":
        """Return the posterior that a network with `nn.Dropout` layers is, if dropout stays active to predict.

        Each dropout layer becomes masks on the inputs of the layer after it, with keep = 1 − p and θ̂ = W/(1 − p).
        Use it with `variationalize(net, .., dropout="off")`, the default: else weights and activations are dropped.

        The output for one input has the law it has in train mode. Masks belong to a draw of the weights:
        a draw is one function for all inputs of a batch. torch drops anew in every row.

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
            matched, values = parameters.matching(tuple(self.keep), "keep"), tuple(self.keep.values())
            owners = assign(matched, tuple(self.keep), "MCDropout")
            keeps = {name: values[owner] for name, owner in zip(matched, owners, strict=True)}
        else:
            shapes = zip(parameters.names, parameters.shapes, strict=True)
            least = 2 if parameters.from_network else 0
            keeps = {name: self.keep for name, shape in shapes if len(shape) >= least}
        self.layout = Layout(parameters, self.per, keeps)
        rescaled = self.initial_mean == "rescaled"
        start = initial_mean(parameters, "current" if rescaled else self.initial_mean, generator)
        self.point = nn.Parameter(start / self.layout.spread(self.layout.keep(start)) if rescaled else start)

    def forward(self) -> DroppedPoint:
        return DroppedPoint(self.point, self.layout, self.layout.keep(self.point.detach()))


# ---------------------------------------------------------------------------------------- a network's dropout layers


def dropped_layers(net: nn.Module) -> dict[str, float]:
    """Return weight name → 1 − p for the layer after each dropout layer; refuse dropout that is no mask on weights.

    Example:
        >>> dropped_layers(nn.Sequential(nn.Dropout(0.2), nn.Linear(3, 2)))
        {'1.weight': 0.8}
    """
    shared = Counter(id(tensor) for _, tensor in net.named_parameters(remove_duplicate=False))
    after = {}
    for name, module in net.named_modules(remove_duplicate=False):
        after |= {first: following for (first, _), following in pairwise(_in_sequence(module, name))}
    keeps: dict[str, float] = {}
    refused: list[str] = []
    for name, module in net.named_modules(remove_duplicate=False):  # one dropout layer may serve several places
        p = _probability(module)
        if p == 0:
            continue
        following, layer = after.get(name, ("", nn.Identity()))
        is_mask = type(layer) is LAYER_AFTER.get(type(module)) and getattr(layer, "groups", 1) == 1 and p < 1
        if is_mask and shared[id(layer.weight)] == 1:
            keeps[f"{following}.weight"] = 1 - p
        else:
            refused.append(f"{name or 'the network'} ({type(module).__name__})")
    if refused:
        raise ValueError(
            f"these dropout layers are no masks on weights: {', '.join(refused)}. In an nn.Sequential, directly before "
            "the layer whose inputs it drops, may be: Dropout before Linear; Dropout1d, 2d or 3d before a convolution "
            'of one group. Keep these layers as they are with variationalize(.., dropout="on"), or change the network'
        )
    if not keeps:
        raise ValueError("the network has no nn.Dropout layer with p > 0; give keep= yourself: MCDropout(keep=0.9)")
    return keeps


def _probability(module: nn.Module) -> float:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    return module.dropout if isinstance(module, nn.RNNBase | nn.MultiheadAttention) else 0.0


def _in_sequence(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that an `nn.Sequential` calls one after the other; those in it are taken apart."""
    if type(module).forward is not nn.Sequential.forward:
        yield name, module
        return
    for child, part in module._modules.items():  # not named_children: a module may come twice
        if part is not None:
            yield from _in_sequence(part, f"{name}.{child}" if name else child)
