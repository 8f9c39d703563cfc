"""One call of a network with given tensors in place of its own. A network has one lock, and calls take turns."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from .mixed_precision import GradientScale, is_floating, times_gradient

Dropout = Literal["off", "on"]
BatchNorm = Literal["frozen", "deterministic", "reestimated"]
DROPOUT: tuple[Dropout, ...] = ("off", "on")
BATCH_NORM: tuple[BatchNorm, ...] = ("frozen", "deterministic", "reestimated")

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
#: layers that choose other kernels in eval mode: cuDNN's recurrence, which then has no backward pass, and fused
#: attention, which reads drawn weights at addresses that it does not check
FUSED_IN_EVAL = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)
#: those of `FUSED_IN_EVAL` have dropout of their own
DROPOUTS = (nn.modules.dropout._DropoutNd, *FUSED_IN_EVAL)


def is_in_training(module: nn.Module, dropout: Dropout, batch_norm: BatchNorm) -> bool:
    """Return whether a layer is called in training mode; every other layer is called in eval mode."""
    if dropout == "on" and isinstance(module, DROPOUTS):
        return True
    return batch_norm == "reestimated" and isinstance(module, BATCH_NORMS)


def draws(module: nn.Module) -> bool:
    """Return whether a layer draws random numbers when it is called in its present mode."""
    share = getattr(module, "p", getattr(module, "dropout", 0.0))
    return module.training and isinstance(module, DROPOUTS) and isinstance(share, float) and share > 0


class _Places:
    """Where a network has its tensors, found in one walk through its modules."""

    def __init__(self, net: nn.Module):
        #: every place of a tensor, by its first name
        self.of: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self.parameters: list[str] = []
        self.buffers: list[tuple[str, nn.Module]] = []
        self.fused = [module for module in net.modules() if isinstance(module, FUSED_IN_EVAL)]
        first: dict[int, str] = {}
        for prefix, module in net.named_modules(remove_duplicate=False):
            for holder in (module._parameters, module._buffers):
                for key, tensor in holder.items():
                    if tensor is None:
                        continue
                    name = first.setdefault(id(tensor), f"{prefix}.{key}".removeprefix("."))
                    if name not in self.of:
                        self.parameters += [name] if holder is module._parameters else []
                        self.buffers += [(name, module)] if holder is module._buffers else []
                    self.of.setdefault(name, []).append((holder, key))

    def tensor(self, name: str) -> Tensor:
        holder, key = self.of[name][0]
        return holder[key]

    def call(self, net: nn.Module, tensors: Mapping[str, Tensor], arguments: Any = (), keywords: Any = None) -> Any:
        """As `torch.func.functional_call`, which looks for every place again at every call."""
        had = [(holder, key, holder[key]) for name in tensors for holder, key in self.of[name]]
        try:
            for name, tensor in tensors.items():
                for holder, key in self.of[name]:
                    holder[key] = tensor
            return net(*arguments, **(keywords or {}))
        finally:
            for holder, key, tensor in had:
                holder[key] = tensor


class _Turn:
    """The lock of one network, the thread that holds it, and what that thread has found out."""

    def __init__(self) -> None:
        self.lock, self.owner, self.depth = threading.RLock(), 0, 0
        self.places: _Places | None = None


_TURNS: WeakKeyDictionary[nn.Module, _Turn] = WeakKeyDictionary()
_GUARD = threading.Lock()


@contextmanager
def alone_with(net: nn.Module, caller: int | None = None) -> Iterator[_Turn]:
    """Hold the lock of the network; a thread may enter again.

    Where a random stream is borrowed too, borrow it outside: two threads could otherwise wait for each other.

    Args:
        net: the network.
        caller: a thread that waits for this one; the lock may be in its hands.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> with alone_with(net), alone_with(net):
        ...     pass
    """
    with _GUARD:
        turn = _TURNS.setdefault(net, _Turn())
    if caller is not None and turn.owner == caller:  # autograd's thread on a GPU works for the thread with the lock
        yield turn
        return
    with turn.lock:
        turn.owner, turn.depth = threading.get_ident(), turn.depth + 1
        try:
            yield turn
        finally:
            turn.depth -= 1
            if not turn.depth:
                turn.owner, turn.places = 0, None


@contextmanager
def in_modes(
    net: nn.Module, modes: Callable[[nn.Module], bool] | Sequence[bool], caller: int | None = None
) -> Iterator[nn.Module]:
    """Hold the network with its modules in these modes, and restore theirs at the end.

    Args:
        net: the network.
        modes: whether a module is in training mode, by a function or in the order of `net.modules()`.
        caller: as in `alone_with`.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> with in_modes(net, lambda module: False):
        ...     net.training
        False
        >>> net.training
        True
    """
    with alone_with(net, caller):
        modules = list(net.modules())
        had = [module.training for module in modules]
        _set_modes(modules, map(modes, modules) if callable(modes) else modes)
        try:
            yield net
        finally:
            _set_modes(modules, had)


def _set_modes(modules: Sequence[nn.Module], modes: Any) -> None:
    for module, mode in zip(modules, modes, strict=True):
        module.__dict__["training"] = mode  # nn.Module.__setattr__ takes longer than a small network


def call_network(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    arguments: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
    *,
    precision: torch.dtype | None = None,
    scale: GradientScale | None = None,
    checkpointed: bool = False,
    functional: Callable[..., Any] | None = None,
) -> Any:
    """Return the network's output; afterwards its tensors, buffers and modes are what they were.

    Args:
        net: the network.
        tensors: by name, in place of its own parameters; the others are held.
        arguments, keywords: what it is called with.
        precision: run it under autocast to this type, and convert its outputs to that of `tensors`.
        scale: of gradients inside the network; None for one.
        checkpointed: keep no activations; the backward pass calls the network again, with the same random numbers.
        functional: a function of `torch.func.functional_call`'s signature that calls it in another way.

    Example:
        >>> tensors = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
        >>> call_network(nn.Linear(2, 1), tensors, (torch.ones(2, 2),))
        tensor([[3.],
                [3.]])
    """
    some = next(iter(tensors.values()))
    inputs: Any = (dict(tensors), tuple(arguments), dict(keywords or {}))
    up, down = (None, None) if scale is None else scale.factors(some.device)
    if down is not None:
        inputs = times_gradient(inputs, down)

    def call(turn: _Turn, tensors: Mapping[str, Tensor], arguments: Any, keywords: Any) -> Any:
        if turn.places is None:  # the walk is as long as the thread holds the network
            turn.places = _Places(net)
        places = turn.places
        held = {name: places.tensor(name).detach() for name in places.parameters if name not in tensors}
        autocast = nullcontext() if precision is None else torch.autocast(some.device.type, precision)
        with _unfused(places.fused), autocast:
            return (functional or places.call)(net, {**held, **_copied_buffers(places), **tensors}, arguments, keywords)

    with alone_with(net) as turn:
        try:
            run = partial(call, turn)
            if checkpointed:
                run = partial(checkpoint, _again(net, call), use_reentrant=False)
            output = run(*inputs)
        except Exception as error:  # whatever a network raises goes on its way, with what came to it
            error.add_note(_called_with((arguments, keywords), some.dtype))
            raise
    if precision is not None:
        output = tree_map(lambda x: x.to(some.dtype) if is_floating(x) else x, output)
    return output if up is None else times_gradient(output, up)


def _again(net: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call in the modes of now: the backward pass repeats it later, and on a GPU in a thread of its own."""
    modes, caller = [module.training for module in net.modules()], threading.get_ident()

    def repeated(*inputs: Any) -> Any:
        with alone_with(net, caller) as turn, in_modes(net, modes, caller):
            return call(turn, *inputs)

    return repeated


def _copied_buffers(places: _Places) -> dict[str, Tensor]:
    """Copies of the buffers that a call may change: of layers in training mode, and of modules that are not torch's."""
    return {
        name: places.tensor(name).clone() for name, module in places.buffers if module.training or not _of_torch(module)
    }


@contextmanager
def _unfused(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Put layers of `FUSED_IN_EVAL` into training mode without dropout: the same numbers, and derivatives.

    Recurrent layers keep a list of the weights of their last call: drawn ones would stay in memory with their graph.
    """
    own = ("training", "dropout", "_flat_weights", "_flat_weight_refs")
    had = [{name: vars(layer)[name] for name in own if name in vars(layer)} for layer in layers]
    try:
        for layer in layers:
            if not layer.training and _of_torch(layer):
                layer.__dict__["training"] = True
                if "dropout" in vars(layer):  # of an encoder layer it is a module, in a mode of its own
                    layer.__dict__["dropout"] = 0.0
        yield
    finally:
        for layer, before in zip(layers, had, strict=True):
            vars(layer).update(before)


def _of_torch(module: nn.Module) -> bool:
    """Whether its forward is torch's own: what another does in training mode is not known."""
    return module.forward.__module__.startswith("torch.nn.modules.")


def _called_with(inputs: Any, dtype: torch.dtype) -> str:
    """What came to a network that raised an error, and what to do where that is of another type than its weights."""
    given = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    came = ", ".join(f"{tuple(x.shape)} of {x.dtype}" for x in given) or "that are no tensors"
    note = f"the network, with weights of {dtype}, was called with inputs {came}"
    if any(is_floating(x) and x.dtype != dtype for x in given):
        note += f"; convert them: x.{'float()' if dtype == torch.float32 else f'to({dtype})'}"
    return note
