"""One call of a network with given tensors in place of its own: in mixed precision, or without keeping activations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from .fast_paths import forgotten, kernels_that_serve
from .mixed_precision import GradientScale, is_floating, times_gradient
from .twins import Twin


def call_network(
    twin: Twin,
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
    """The network's output; neither its tensors nor its buffers change, and every call sees the buffers as they are.

    Args:
        twin: the network, in modes of its own, as `Twins.borrowed` gives it.
        tensors: by name, in place of its own parameters; the others are held.
        arguments, keywords: what it is called with.
        precision: run it under autocast to this type, and convert its outputs to that of `tensors`.
        scale: of gradients inside the network; None for one.
        tied: whether a tensor may have several names: where none has, a look at all of them is saved.
        functional: `torch.func.functional_call`, or that compiled.
        checkpointed: keep no activations; the backward pass calls the network again, with the same random numbers.

    Example:
        >>> from structvi.networks.twins import Twins
        >>> tensors = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
        >>> with Twins(torch.nn.Linear(2, 1)).borrowed() as twin:
        ...     call_network(twin, tensors, (torch.ones(3, 2),), {})
        tensor([[3.],
                [3.],
                [3.]])
    """
    some = next(iter(tensors.values()))

    def call(twin: Twin, tensors: Mapping[str, Tensor], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        held = {name: p.detach() for name, p in twin.parameters if name not in tensors}
        buffers = twin.copied_buffers()
        every = {**held, **buffers, **tensors}
        direct = functional is functional_call and twin.private and not tied and every.keys() <= twin.places.keys()
        with _around(twin, some, precision):
            if direct:
                output = twin.called(every, arguments, keywords)
            else:
                output = functional(twin.net, every, tuple(arguments), dict(keywords), tie_weights=tied)
        if buffers:
            twin.note_changes(buffers, every)
        return output

    inputs: Any = (dict(tensors), tuple(arguments), dict(keywords))
    up, down = (None, None) if scale is None else scale.factors(some.device)
    if down is not None:
        inputs = times_gradient(inputs, down)
    try:
        output = checkpoint(_again(twin, call), *inputs, use_reentrant=False) if checkpointed else call(twin, *inputs)
    except Exception as error:  # whatever a network raises goes on its way, with what came to it
        error.add_note(_called_with((arguments, keywords), some.dtype))
        raise
    if precision is not None:
        output = tree_map(lambda x: x.to(some.dtype) if is_floating(x) else x, output)
    return output if up is None else times_gradient(output, up)


def _around(twin: Twin, some: Tensor, precision: torch.dtype | None) -> AbstractContextManager[Any]:
    """What some networks need around a call; most need nothing."""
    recurs = twin.flattened or twin.recurrent or twin.attends
    return _served(twin, some, precision) if recurs or precision is not None else nullcontext()


@contextmanager
def _served(twin: Twin, some: Tensor, precision: torch.dtype | None) -> Iterator[None]:
    autocast = nullcontext() if precision is None else torch.autocast(some.device.type, precision)
    with forgotten(twin.flattened), kernels_that_serve(twin, some), autocast:
        yield


def _again(twin: Twin, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, in the modes of now: in the backward pass with another twin, and maybe in a thread of autograd's."""
    twins, modes, caller = twin.twins, twin.modes, get_ident()

    def repeated(*inputs: Any) -> Any:
        with twins.borrowed(modes, caller) as now:
            return call(now, *inputs)

    return repeated


def _called_with(inputs: Any, dtype: torch.dtype) -> str:
    """What came to a network that raised an error, and what to do where that is of another type than its weights."""
    given = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    came = ", ".join(f"{tuple(x.shape)} of {x.dtype}" for x in given) or "that are no tensors"
    note = f"the network, with weights of {dtype}, was called with inputs {came}"
    if any(is_floating(x) and x.dtype != dtype for x in given):
        note += f"; convert them: x.{'float()' if dtype == torch.float32 else f'to({dtype})'}"
    return note
