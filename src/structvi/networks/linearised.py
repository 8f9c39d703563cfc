"""A network that is linear in its weights: f(x; θ₀) + J(x)(θ − θ₀), by forward-mode differentiation.

`Linearised` has the signature of `torch.func.functional_call`, and stands in its place. The product J(x)v takes one
pass with dual numbers, and its backward pass is a plain vector–Jacobian product at θ₀. Under vmap the pass at θ₀ itself
is made once for all draws. Threads take turns: torch's forward mode has one state for the whole process.

Not every operation has a rule for forward mode. The ways, in order, and the first that the network can go is kept:

1. forward mode;
2. forward mode with fused kernels off: attention from its parts, LSTM cells from theirs;
3. two vector–Jacobian products: Jᵀu is linear in u, and the transpose of that is Jv.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..util.random_streams import alone
from .fast_paths import plain_attention


class Ways:
    """What has been found out about one network."""

    def __init__(self) -> None:
        #: the first of `WAYS` that it can go
        self.first = 0

    def __str__(self) -> str:
        return WAYS[self.first][0]


class Linearised:
    """`functional_call` of a network linearised at `at`, in the tensors of these names; in all others it is as it is.

    Args:
        at: θ₀ by name.
        ways: which ways the network can go, as far as that is known; the same for all calls of one network.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh())
        >>> call = Linearised({"0.weight": torch.zeros(1, 1)})
        >>> call(net, {"0.weight": torch.full((1, 1), 2.0)}, (torch.ones(1, 1),))  # tanh(wx) is wx near w = 0
        tensor([[2.]])
    """

    def __init__(self, at: Mapping[str, Tensor], ways: "Ways | None" = None):
        self.at, self.ways = at, Ways() if ways is None else ways

    def __call__(
        self,
        net: nn.Module,
        tensors: Mapping[str, Tensor],
        arguments: Any = (),
        keywords: dict[str, Any] | None = None,
        *,
        tie_weights: bool = True,
    ) -> Any:
        held = {name: tensor for name, tensor in tensors.items() if name not in self.at}
        at = {name: tensor for name, tensor in self.at.items() if name in tensors}
        tangent = {name: tensors[name] - tensor for name, tensor in at.items()}

        changed = _changed_by_a_call(net) & held.keys()

        def network(at: Mapping[str, Tensor]) -> Any:
            own = {name: held[name].clone() for name in changed}  # a transform refuses to change what it did not make
            return functional_call(net, {**held, **own, **at}, arguments, keywords, tie_weights=tie_weights)

        _load_rules()
        failed: list[str] = []
        for index in range(self.ways.first, len(WAYS)):
            name, context, product = WAYS[index]
            try:
                with alone(), context():  # torch counts the levels of forward mode for the whole process
                    output, change = product(network, at, tangent)
            except (RuntimeError, NotImplementedError) as error:
                if not failed:
                    network(at)  # what is wrong with the network or its inputs is told as it is
                failed.append(f"{name}: {str(error).strip().splitlines()[0][:300]}")
                continue
            self.ways.first = index
            return tree_map(lambda y, dy: y + dy if isinstance(y, Tensor) and _real(y) else y, output, change)
        raise NotImplementedError(
            f"{type(net).__name__} cannot be linearised: an operation in it has no derivative of the kind that is "
            f"needed. {'; '.join(failed)}. Replace that operation, leave its tensors out (variationalize(exclude=)), "
            "or use linearise=False"
        )


@cache
def _load_rules() -> None:
    """At its first use torch compiles rules of forward mode, by a means of its own that it warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.")  # of newer torch, a FutureWarning
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


Network = Callable[[Mapping[str, Tensor]], Any]


def _forward(network: Network, at: Mapping[str, Tensor], tangent: Mapping[str, Tensor]) -> tuple[Any, Any]:
    output, change = jvp(network, (dict(at),), (dict(tangent),))  # pyright: ignore[reportAssignmentType]
    return output, change


def _two_vjps(network: Network, at: Mapping[str, Tensor], tangent: Mapping[str, Tensor]) -> tuple[Any, Any]:
    # by autograd itself, which also takes custom functions that functorch does not
    graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tangent.values())
    with torch.enable_grad():
        leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in at.items()}
        output = network(leaves)
        flat, layout = tree_flatten(output)
        changing = [i for i, y in enumerate(flat) if isinstance(y, Tensor) and y.requires_grad]
        outputs = [flat[i] for i in changing]
        u = [torch.zeros_like(y, requires_grad=True) for y in outputs]
        pulled = torch.autograd.grad(outputs, list(leaves.values()), u, create_graph=True, materialize_grads=True)
        used = [(one, tangent[name]) for one, name in zip(pulled, leaves, strict=True) if one.requires_grad]
        sides = [one for one, _ in used], u, [v for _, v in used]
        changes = torch.autograd.grad(*sides, create_graph=graph, materialize_grads=True)
    change: list[Any] = [torch.zeros_like(y) if isinstance(y, Tensor) else y for y in flat]
    for i, dy in zip(changing, changes, strict=True):
        change[i] = dy
    detached = [y.detach() if isinstance(y, Tensor) else y for y in flat]
    return tree_unflatten(detached, layout), tree_unflatten(change, layout)


@contextmanager
def _fused_off() -> Iterator[None]:
    """Fused kernels off, in the whole process: one thread at a time is inside."""
    with ExitStack() as stack:
        stack.enter_context(plain_attention())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for backend in (torch.backends.mkldnn, torch.backends.cudnn):
            before, *_ = backend.set_flags(False)  # `flags` also sets, and warns of, what it was not asked for
            stack.callback(backend.set_flags, before)
        yield


#: name, context and product (network, θ₀, v) → (f(θ₀), Jv), in the order in which they are tried
WAYS: tuple[tuple[str, Callable[[], Any], Callable[..., tuple[Any, Any]]], ...] = (
    ("forward mode", nullcontext, _forward),
    ("forward mode without fused kernels", _fused_off, _forward),
    ("two vector–Jacobian products", _fused_off, _two_vjps),
)


def _changed_by_a_call(net: nn.Module) -> set[str]:
    """Buffers of modules in training mode: running statistics."""
    return {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in net.named_modules()
        if module.training
        for name, _ in module.named_buffers(recurse=False)
    }


def _real(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
