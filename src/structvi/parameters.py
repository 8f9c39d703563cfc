"""Which tensors are random, and how they lie in one flat vector θ of P numbers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import ceil
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .constraints import Constrained, Constraint, free_tensors
from .util.initialisers import Initialisers
from .util.patterns import few
from .util.random_streams import borrowed_stream

Select = str | Sequence[str] | Callable[[str, Tensor], bool]

#: Smallest initialisation scale of a tensor that starts constant in a network, such as a bias that starts at zero.
SCALE_FLOOR = 0.05
#: Smallest initialisation scale of a log density's tensors, which belong to no layer. With the families' default
#: fraction of a tenth, scales start at 0.3: of 0.1, 0.3 and 1 the best on random Gaussians.
FREE_SCALE_FLOOR = 3.0


class Parameters:
    """Named random tensors and the flat vector θ ∈ ℝ^P that holds them side by side.

    θ is the concatenation of the raveled tensors in the order of their names; `unravel` cuts [.., P] into named views
    [.., *shape] without copying, and `ravel` is its inverse.

    A log density's may be constrained: `positive`, `interval`, `simplex`, `ordered`, `cholesky_correlation`. Then θ,
    `shapes` and `unravel` are of free numbers, which families see; `constrain` gives the values themselves.

    Args:
        tensors: name → floating tensor, number, or `positive(1.0)` and its like; their values are the initial values.
        dtype: of all of them; by default float64 where one is constrained, and else that of the tensors.

    Example:
        >>> space = Parameters({"w": torch.zeros(2, 3), "b": torch.ones(3)})
        >>> space.size, space.names
        (9, ('w', 'b'))
        >>> space.unravel(torch.arange(9.0))["b"]
        tensor([6., 7., 8.])
        >>> from structvi.constraints import positive, simplex
        >>> Parameters({"mu": torch.zeros(()), "sigma": positive(2.0), "p": simplex(3)})
        Parameters(P=4, torch.float64, cpu,
          mu: ()
          sigma: () positive
          p: (3,) simplex
        )
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor | Constrained | float],
        *,
        dtype: torch.dtype | None = None,
        net: nn.Module | None = None,
        known_scales: Mapping[str, float] = MappingProxyType({}),
        constraints: Mapping[str, Constraint] = MappingProxyType({}),
    ):
        if not isinstance(tensors, Mapping):
            raise TypeError(f"Parameters expects a mapping of names to tensors, got {type(tensors).__name__}")
        if not tensors:
            raise ValueError("Parameters needs at least one tensor, got an empty mapping")
        #: of those that have one, by name
        self.constraints = {name: c for name, c in constraints.items() if name in tensors}
        self.constraints |= {name: t.constraint for name, t in tensors.items() if isinstance(t, Constrained)}
        tensors = free_tensors(tensors, dtype)
        _check_tensors(tensors)
        first = next(iter(tensors.values()))
        self.names: tuple[str, ...] = tuple(tensors)
        self.shapes: tuple[torch.Size, ...] = tuple(t.shape for t in tensors.values())
        self.numels: tuple[int, ...] = tuple(t.numel() for t in tensors.values())
        self.size: int = sum(self.numels)
        self.dtype: torch.dtype = first.dtype
        self.device: torch.device = first.device
        self.initial: Tensor = torch.cat([t.detach().reshape(-1) for t in tensors.values()])  # [P]
        self._net = net
        relative = [name for name, constraint in self.constraints.items() if constraint.relative]
        known_scales = {**dict.fromkeys(relative, FREE_SCALE_FLOOR), **known_scales}
        self._known_scales = {name: scale for name, scale in known_scales.items() if name in tensors}
        self._scales: Tensor | None = None
        self._subsets: dict[frozenset[str], Parameters] = {}

    @classmethod
    def of(cls, net: nn.Module, select: Select = "*", exclude: Select = ()) -> "Parameters":
        """The random tensors of a module: its trainable parameters whose name matches `select` and not `exclude`.

        Tied tensors are taken once, under their first name, and match by any of their names. Frozen tensors
        (`requires_grad=False`) and buffers are left out; trainable tensors that are not selected are held at the
        values the module has.

        Args:
            net: the module.
            select: a glob pattern ("head.*"), several, or a predicate (name, tensor) → bool.
            exclude: likewise, what to leave out of the selection.

        Example:
            >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
            >>> Parameters.of(net, "2.*").names
            ('2.weight', '2.bias')
        """
        if not isinstance(net, nn.Module):
            raise TypeError(f"Parameters.of expects an nn.Module, got {type(net).__name__}")
        names: dict[Tensor, list[str]] = {}
        for name, tensor in net.named_parameters(remove_duplicate=False):
            if tensor.requires_grad:
                names.setdefault(tensor, []).append(name)
        if not names:
            raise ValueError(f"{type(net).__name__} has no trainable parameter: nothing can be random")
        all_names = [name for own in names.values() for name in own]
        chosen, dropped = _matcher(select, "select", all_names), _matcher(exclude, "exclude", all_names)
        picked = {
            own[0]: tensor
            for tensor, own in names.items()
            if any(chosen(name, tensor) for name in own) and not any(dropped(name, tensor) for name in own)
        }
        if not picked:
            raise ValueError(
                f"select={select!r} with exclude={exclude!r} leaves no tensor; the trainable ones are {few(all_names)}"
            )
        return cls(picked, net=net)

    def append(self, tensors: Mapping[str, Tensor | Constrained | float], scale: float | None = None) -> "Parameters":
        """A larger space: these tensors, then `tensors` at the end of θ (a likelihood's random noise, say).

        `scale` is the initialisation scale of the new ones, which no layer knows.
        """
        known = self._known_scales if scale is None else {**self._known_scales, **dict.fromkeys(tensors, scale)}
        return self._like({**self.unravel(self.initial), **tensors}, known)

    def at(self, theta: Tensor) -> "Parameters":
        """The same space, with the same scales, whose current values are θ [P]."""
        known = dict(zip(self.names, self.scales.tolist(), strict=True))
        return self._like(self.unravel(theta), known)

    def subset(self, names: Iterable[str]) -> "Parameters":
        """The space of some of these tensors, in this space's order, with their scales and fresh draws."""
        key = frozenset(names)
        if key not in self._subsets:
            self._indices(*key)
            chosen = {name: tensor for name, tensor in self.unravel(self.initial).items() if name in key}
            self._subsets[key] = self._like(chosen, self._known_scales)
        return self._subsets[key]

    def _like(self, tensors: Mapping[str, Any], known_scales: Mapping[str, float]) -> "Parameters":
        return Parameters(tensors, net=self._net, known_scales=known_scales, constraints=self.constraints)

    def without(self, names: Iterable[str]) -> "Parameters":
        """The space of all tensors but these."""
        names = set(names)
        return self.subset(n for n in self.names if n not in names) if names else self

    def join(self, theta: Tensor, fixed: Mapping[str, Tensor]) -> Tensor:
        """θ [S, P] of the whole space from the draws of `without(fixed)` and the tensors that all draws share."""
        if not fixed:
            return theta
        shared = {name: tensor.expand(theta.shape[0], *tensor.shape) for name, tensor in fixed.items()}
        return self.ravel({**self.without(fixed).unravel(theta), **shared})

    @property
    def from_network(self) -> bool:
        """True for tensors of a network, False for those of a log density."""
        return self._net is not None

    def matching(self, select: Select, what: str = "select") -> tuple[str, ...]:
        """The names that a pattern, several, or a predicate choose; a pattern that matches none is an error."""
        chosen = _matcher(select, what, self.names)
        return tuple(name for name, tensor in self.constrain(self.initial).items() if chosen(name, tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Parameters":
        return self  # a value that is never changed; the network it knows is not to be copied

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __repr__(self) -> str:
        kinds = {name: f" {constraint.name}" for name, constraint in self.constraints.items()}
        values = self.constrain(self.initial) if kinds else self.unravel(self.initial)
        lines = [f"  {name}: {tuple(value.shape)}{kinds.get(name, '')}" for name, value in values.items()]
        if len(lines) > 12:
            lines = [*lines[:6], f"  … {len(lines) - 11} more", *lines[-5:]]
        return f"Parameters(P={self.size}, {self.dtype}, {self.device},\n" + "\n".join(lines) + "\n)"

    def slice(self, name: str) -> slice:
        """Return the slice of the tensor `name` in θ."""
        (index,) = self._indices(name)
        start = sum(self.numels[:index])
        return slice(start, start + self.numels[index])

    def unravel(self, theta: Tensor) -> dict[str, Tensor]:
        """Named views [.., *shape] of θ [.., P]; no copy."""
        if theta.ndim == 0 or theta.shape[-1] != self.size:
            raise ValueError(f"expected theta of shape [.., P] with P = {self.size}, got {tuple(theta.shape)}")
        # split, not slicing: the backward of a slice allocates a full-size gradient for each
        parts = torch.split(theta, list(self.numels), dim=-1)
        return {
            name: part.view((*theta.shape[:-1], *shape))
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def constrain(self, theta: Tensor) -> dict[str, Tensor]:
        """The values by name, [.., *shape] each, of θ [.., P]: where there are no constraints, `unravel`."""
        named = self.unravel(theta)
        return {**named, **{name: c.natural(named[name]) for name, c in self.constraints.items()}}

    def log_jacobian(self, theta: Tensor) -> Tensor:
        """log |det ∂ values/∂θ|, [..], of θ [.., P]: what turns a log density of the values into one of θ."""
        named, lead = self.unravel(theta), theta.shape[:-1]
        terms = [c.log_jacobian(named[name]).reshape(*lead, -1).sum(-1) for name, c in self.constraints.items()]
        return torch.stack(terms).sum(0) if terms else theta.new_zeros(lead)

    def label(self, index: int) -> str:
        """The name of θ_index: "w[2, 0]", "b" of a single number, "log sigma" of a positive one."""
        for name, shape, numel in zip(self.names, self.shapes, self.numels, strict=True):
            if index < numel:
                symbol = f"{self.constraints[name].symbol} " if name in self.constraints else ""
                where = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(index), shape)) if shape else ""
                return f"{symbol}{name}[{where}]" if numel > 1 else f"{symbol}{name}"
            index -= numel
        raise IndexError(index)

    def ravel(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """θ [.., P] from named tensors [.., *shape]: the inverse of `unravel`."""
        if set(tensors) != set(self.names):
            raise ValueError(f"expected the tensors {few(self.names)}, got {few(tensors)}")
        parts = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            tensor = tensors[name]
            lead = tensor.shape[: tensor.ndim - len(shape)]
            if tensor.shape[len(lead) :] != shape:
                raise ValueError(f"{name}: expected shape (.., {str(tuple(shape))[1:]}, got {tuple(tensor.shape)}")
            parts.append(tensor.reshape(*lead, -1))
        return torch.cat(parts, dim=-1)

    @property
    def scales(self) -> Tensor:
        """[len(names)]: each tensor's initialisation scale.

        The root mean square of its layer's own initialisation (`reset_parameters`, `_reset_parameters`,
        `_init_weights`). If the layer has none, that of the current values. It is at least `SCALE_FLOOR` for tensors of
        a network that start constant (biases, the shifts of normalisation layers: a constant says nothing of its
        scale), and at least `FREE_SCALE_FLOOR` without a network.
        Tensors that were appended with a scale have that one.
        """
        if self._scales is None:
            # small tensors need several draws for a root mean square that means something
            draws = min(32, ceil(1024 / min(self.numels)), max(1, 10_000_000 // self.size)) if self._net else 1
            initialise = Initialisers(self._net) if self._net is not None else dict
            generator = torch.Generator().manual_seed(0)
            made = torch.stack([self._fresh(initialise, generator).cpu().double() for _ in range(draws)])
            found = []
            for part in made.split(self.numels, dim=-1):
                floor = SCALE_FLOOR * bool(part.min() == part.max()) if self._net is not None else FREE_SCALE_FLOOR
                found.append(part.square().mean().sqrt().clamp(min=floor))
            scales = torch.stack(found)
            for name, scale in self._known_scales.items():
                scales[self.names.index(name)] = scale
            self._scales = scales.to(self.initial)
        return self._scales

    @property
    def scale(self) -> Tensor:
        """[P]: the initialisation scale of each number's tensor."""
        return self.scales.repeat_interleave(torch.tensor(self.numels, device=self.device))

    def fresh(self, generator: torch.Generator | None = None) -> Tensor:
        """[P]: a fresh draw of the layers' own initialisation, the current value where a tensor's layer has none.

        With a generator the global random stream is left as it was; without one it gives the seed.
        """
        if self._net is None:
            return self.initial.clone()
        return self._fresh(Initialisers(self._net), generator)

    def _fresh(self, initialise: Callable[[], dict[str, Tensor]], generator: torch.Generator | None) -> Tensor:
        with borrowed_stream(generator):
            tensors = initialise()
        current = self.unravel(self.initial)
        return self.ravel({name: tensors.get(name, current[name]).detach() for name in self.names})

    def _indices(self, *names: str) -> list[int]:
        for name in names:
            if name not in self.names:
                raise ValueError(f"no tensor named {name!r}; the random ones are {few(self.names)}")
        return [self.names.index(name) for name in names]


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            came = type(tensor).__name__
            raise TypeError(f"{name}: expected a tensor, a number, or positive(..) and its like, got {came}")
    wrong = {name: tensor.dtype for name, tensor in tensors.items() if not tensor.dtype.is_floating_point}
    if wrong:
        raise TypeError(f"random tensors must be floating, but {wrong}; convert them or exclude them")
    kinds = {f"{tensor.dtype} on {tensor.device}": name for name, tensor in tensors.items()}
    if len(kinds) > 1:
        raise ValueError(f"random tensors must share one dtype and device, got {kinds}")
    empty = [name for name, tensor in tensors.items() if tensor.numel() == 0]
    if empty:
        raise ValueError(f"the tensors {empty} have no elements; exclude them")
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise ValueError(f"the tensors {few(bad)} hold non-finite values; repair or re-initialise the network first")


def _matcher(select: Select, what: str, names: Sequence[str]) -> Callable[[str, Tensor], bool]:
    if callable(select):
        return select
    patterns = (select,) if isinstance(select, str) else select
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{what} takes glob patterns or a predicate (name, tensor) → bool, got {select!r}")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{what}: the pattern {pattern!r} matches none of the trainable tensors {few(names)}")
    return lambda name, tensor: any(fnmatchcase(name, pattern) for pattern in patterns)
