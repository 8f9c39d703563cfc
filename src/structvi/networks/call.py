"""One call of a network with given tensors in place of its own: in mixed precision, or without keeping activations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from .mixed_precision import GradientScale, is_floating, times_gradient


def call_network(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    precision: torch.dtype | None = None,
    scale: GradientScale | None = None,
    checkpointed: bool = False,
    functional: Callable[..., Any] = functional_call,
    tied: bool = True,
) -> Any:
    """The network's output; neither its tensors nor its buffers change.

    Args:
        net: the network.
        tensors: by name, in place of its own parameters; the others are held.
        arguments, keywords: what it is called with.
        precision: run it under autocast to this type, and convert its outputs to that of `tensors`.
        scale: of gradients inside the network; None for one.
        tied: whether a tensor may have several names: where none has, a look at all of them is saved.
        functional: `torch.func.functional_call`, or that compiled.
        checkpointed: keep no activations; the backward pass calls the network again, with the same random numbers.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> call_network(net, {"weight": torch.ones(1, 2), "bias": torch.ones(1)}, (torch.ones(3, 2),), {})
        tensor([[3.],
                [3.],
                [3.]])
    """
    modes, some = [module.training for module in net.modules()], next(iter(tensors.values()))

    def call(tensors: Mapping[str, Tensor], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        held = {name: p.detach() for name, p in net.named_parameters() if name not in tensors}
        # a part may train inside a network in eval mode
        buffers = {name: b.clone() for name, b in net.named_buffers()} if any(modes) else {}
        every = {**held, **buffers, **tensors}
        if precision is None:
            return functional(net, every, tuple(arguments), dict(keywords), tie_weights=tied)
        with torch.autocast(some.device.type, precision):
            return functional(net, every, tuple(arguments), dict(keywords), tie_weights=tied)

    def call_in_modes(*inputs: Any) -> Any:  # by the time of the backward pass they may be others
        with _in_modes(net, modes):
            return call(*inputs)

    inputs: Any = (dict(tensors), tuple(arguments), dict(keywords))
    up, down = (None, None) if scale is None else scale.factors(some.device)
    if down is not None:
        inputs = times_gradient(inputs, down)
    try:
        output = checkpoint(call_in_modes, *inputs, use_reentrant=False) if checkpointed else call(*inputs)
    except Exception as error:  # whatever a network raises goes on its way, with what came to it
        error.add_note(_called_with((arguments, keywords), some.dtype))
        raise
    if precision is not None:
        output = tree_map(lambda x: x.to(some.dtype) if is_floating(x) else x, output)
    return output if up is None else times_gradient(output, up)


def _called_with(inputs: Any, dtype: torch.dtype) -> str:
    """What came to a network that raised an error, and what to do where that is of another type than its weights."""
    given = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    came = ", ".join(f"{tuple(x.shape)} of {x.dtype}" for x in given) or "that are no tensors"
    note = f"the network, with weights of {dtype}, was called with inputs {came}"
    if any(is_floating(x) and x.dtype != dtype for x in given):
        note += f"; convert them: x.{'float()' if dtype == torch.float32 else f'to({dtype})'}"
    return note


@contextmanager
def _in_modes(net: nn.Module, modes: Sequence[bool]) -> Iterator[None]:
    before = [(module, module.training) for module in net.modules()]
    try:
        for (module, _), mode in zip(before, modes, strict=True):
            module.training = mode
        yield
    finally:
        for module, mode in before:
            module.training = mode
