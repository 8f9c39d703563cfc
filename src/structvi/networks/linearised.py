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

Network = Callable[[Mapping[str, Tensor]], Any]
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
        failed: list[str] = []
        for name, product in WAYS:
            try:
                with _FORWARD_MODE, PlainKernels():
                    output, change = product(network, at, tangent)
            except (RuntimeError, NotImplementedError) as error:
                if not failed:
                    network(at)  # what is wrong with the network or its inputs is told as it is
                failed.append(f"{name}: {str(error).strip().splitlines()[0][:300]}")
                continue
            return tree_map(lambda y, dy: y + dy if isinstance(y, Tensor) and _real(y) else y, output, change)
        raise NotImplementedError(
            f"{type(net).__name__} cannot be linearised: an operation in it has no derivative of the kind that is "
            f"needed. {'; '.join(failed)}. Replace that operation, leave its tensors out (variationalize(exclude=)), "
            "or use linearise=False"
        )


@cache
def _load_rules() -> None:
    """Compile torch's rules of forward mode, which warns at their first use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.")  # of newer torch, a FutureWarning
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def _forward(network: Network, at: Mapping[str, Tensor], tangent: Mapping[str, Tensor]) -> tuple[Any, Any]:
    output, change = jvp(network, (dict(at),), (dict(tangent),))  # pyright: ignore[reportAssignmentType]
    return output, change


def _two_vjps(network: Network, at: Mapping[str, Tensor], tangent: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Jv by autograd, which also takes custom functions that functorch does not: Jᵀu is linear in u."""
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


#: name and product (network, θ₀, v) → (f(θ₀), Jv), in the order in which they are tried
WAYS: tuple[tuple[str, Callable[..., tuple[Any, Any]]], ...] = (
    ("forward mode", _forward),
    ("two vector–Jacobian products", _two_vjps),
)


def _real(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
