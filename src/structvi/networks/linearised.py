"""A network that is linear in its weights: f(x; θ₀) + J(x)(θ − θ₀), by forward-mode differentiation.

`Linearised` has the signature of `torch.func.functional_call`, and stands in its place. The product J(x)v takes one
pass with dual numbers, and its backward pass is a plain vector–Jacobian product at θ₀. Under vmap the pass at θ₀ itself
is made once for all draws.
"""

import threading
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .plain_kernels import PlainKernels

#: torch's forward mode has one state for the whole process
_FORWARD_MODE = threading.RLock()


class Linearised:
    """`functional_call` of a network linearised at `at`, in the tensors of these names alone.

    Args:
        at: θ₀ by name.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh())
        >>> call = Linearised({"0.weight": torch.zeros(1, 1)})
        >>> call(net, {"0.weight": torch.full((1, 1), 2.0)}, (torch.ones(1, 1),))  # tanh(wx) is wx near w = 0
        tensor([[2.]])
    """

    def __init__(self, at: Mapping[str, Tensor]):
        self.at = at

    def __call__(
        self,
        net: nn.Module,
        tensors: Mapping[str, Tensor],
        arguments: Any = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        held = {name: tensor for name, tensor in tensors.items() if name not in self.at}
        buffers = {name for name, _ in net.named_buffers()} & held.keys()
        at = {name: tensor for name, tensor in self.at.items() if name in tensors}
        tangent = {name: tensors[name] - tensor for name, tensor in at.items()}

        def network(at: Mapping[str, Tensor]) -> Any:
            own = {name: held[name].clone() for name in buffers}  # a transform refuses to change what it did not make
            return functional_call(net, {**held, **own, **at}, arguments, dict(keywords or {}))

        _load_rules()
        try:
            with _FORWARD_MODE, PlainKernels():
                output, change = jvp(network, (at,), (tangent,))  # pyright: ignore[reportAssignmentType]
        except (RuntimeError, NotImplementedError) as error:
            network(at)  # what is wrong with the network or its inputs is told as it is
            try:
                output, change = _two_vjps(network, at, tangent)
            except (RuntimeError, NotImplementedError):
                raise NotImplementedError(
                    f"{type(net).__name__} cannot be linearised, for an operation in it has no derivative of forward "
                    f"mode: {str(error).strip().splitlines()[0][:300]}. Replace that operation, leave its tensors out "
                    "(variationalize(exclude=)), or use linearise=False"
                ) from error
        return tree_map(lambda y, dy: y + dy if _is_real(y) else y, output, change)


@cache
def _load_rules() -> None:
    """Compile torch's rules of forward mode, which warns at their first use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.")  # of newer torch, a FutureWarning
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def _two_vjps(
    network: Callable[[Mapping[str, Tensor]], Any], at: Mapping[str, Tensor], tangent: Mapping[str, Tensor]
) -> tuple[Any, Any]:
    """Return f(θ₀) and Jv by autograd, which takes custom functions that functorch does not: Jᵀu is linear in u."""
    leaves: list[Any] = []
    layout: Any = None

    def real_outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal leaves, layout
        leaves, layout = tree_flatten(network(dict(zip(at, tensors, strict=True))))
        return tuple(y for y in leaves if _is_real(y))

    graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tangent.values())
    vectors = tuple(tangent[name] for name in at)
    with PlainKernels():
        found = torch.autograd.functional.jvp(real_outputs, tuple(at.values()), vectors, create_graph=graph)
    output, change = ([next(parts) if _is_real(y) else y for y in leaves] for parts in map(iter, found))
    return tree_unflatten(output, layout), tree_unflatten(change, layout)


def _is_real(y: Any) -> bool:
    return isinstance(y, Tensor) and (y.dtype.is_floating_point or y.dtype.is_complex)
