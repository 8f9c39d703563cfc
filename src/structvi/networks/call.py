"""One call of a network with given tensors in place of its own. A network has one lock, and calls take turns."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

Dropout = Literal["off", "on"]
BatchNorm = Literal["frozen", "deterministic", "reestimated"]
DROPOUT: tuple[Dropout, ...] = ("off", "on")
BATCH_NORM: tuple[BatchNorm, ...] = ("frozen", "deterministic", "reestimated")

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
#: layers that choose other kernels in eval mode: cuDNN's recurrence, which then has no backward pass, and fused
#: attention, which reads drawn weights at addresses that it does not check
FUSED_IN_EVAL = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)
#: the layers of `FUSED_IN_EVAL` have dropout of their own
DROPOUTS = (nn.modules.dropout._DropoutNd, *FUSED_IN_EVAL)
#: whether this thread's networks run in full precision, whatever is asked for
_EXACT: ContextVar[bool] = ContextVar("exact", default=False)


def is_in_training(module: nn.Module, dropout: Dropout, batch_norm: BatchNorm) -> bool:
    """Return whether a layer is called in training mode; every other layer is called in eval mode."""
    if dropout == "on" and isinstance(module, DROPOUTS):
        return True
    return batch_norm == "reestimated" and isinstance(module, BATCH_NORMS)


def draws(module: nn.Module) -> bool:
    """Return whether a layer draws random numbers when it is called in its present mode."""
    share = getattr(module, "p", getattr(module, "dropout", 0.0))
    return module.training and isinstance(module, DROPOUTS) and isinstance(share, float) and share > 0


class Found:
    """The modules and the places of all tensors of a network, found in one walk."""

    def __init__(self, net: nn.Module):
        self.modules = list(net.modules())
        self.fused: list[nn.Module] = []
        for module in self.modules:
            if isinstance(module, FUSED_IN_EVAL):
                self.fused.append(module)
        #: every place of a tensor, by its first name
        self.places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self.parameters: dict[str, tuple[dict[str, Any], str]] = {}
        #: those that a call may change in eval mode too: of modules that are not torch's
        self.buffers: dict[str, tuple[nn.Module, bool]] = {}
        first: dict[int, str] = {}
        for prefix, module in net.named_modules(remove_duplicate=False):
            for holder in (module._parameters, module._buffers):
                for key, tensor in holder.items():
                    if tensor is None:
                        continue
                    name = first.setdefault(id(tensor), f"{prefix}.{key}".removeprefix("."))
                    if name not in self.places and holder is module._parameters:
                        self.parameters[name] = holder, key
                    elif name not in self.places:
                        self.buffers[name] = module, not _of_torch(module)
                    self.places.setdefault(name, []).append((holder, key))

    def call(self, net: nn.Module, tensors: Mapping[str, Tensor], arguments: Any = (), keywords: Any = None) -> Any:
        """As `torch.func.functional_call`, which looks for every place again at every call."""
        had = []
        try:
            for name, tensor in tensors.items():
                for holder, key in self.places[name]:
                    had.append((holder, key, holder[key]))
                    holder[key] = tensor
            return net(*arguments, **(keywords or {}))
        finally:
            for holder, key, tensor in reversed(had):
                holder[key] = tensor


class Turn:
    """The lock of one network, the thread that holds it, and what that thread has found in the network."""

    found: Found

    def __init__(self) -> None:
        self.lock, self.owner, self.depth = threading.RLock(), 0, 0


_TURNS: WeakKeyDictionary[nn.Module, Turn] = WeakKeyDictionary()
_GUARD = threading.Lock()


@contextmanager
def alone_with(net: nn.Module, caller: int | None = None) -> Iterator[Turn]:
    """Hold the lock of the network; a thread may enter again.

    Borrow a random stream outside of this block: two threads could otherwise wait for each other.

    Args:
        net: the network.
        caller: a thread that waits for this one; the lock may be in its hands.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> with alone_with(net), alone_with(net):
        ...     pass
    """
    with _GUARD:
        turn = _TURNS.get(net) or _TURNS.setdefault(net, Turn())
    if caller is not None and turn.owner == caller:  # autograd's thread on a GPU works for the thread with the lock
        yield turn
        return
    with turn.lock:
        if not turn.depth:  # the walk holds as long as the thread holds the network
            turn.owner, turn.found = threading.get_ident(), Found(net)
        turn.depth += 1
        try:
            yield turn
        finally:
            turn.depth -= 1
            if not turn.depth:
                turn.owner = 0
                del turn.found


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
    with alone_with(net, caller) as turn:
        modules = turn.found.modules
        had = [module.training for module in modules]
        _set_modes(modules, map(modes, modules) if callable(modes) else modes)
        try:
            yield net
        finally:
            _set_modes(modules, had)


def _set_modes(modules: Sequence[nn.Module], modes: Any) -> None:
    for module, mode in zip(modules, modes, strict=True):
        module.__dict__["training"] = mode  # nn.Module.__setattr__ takes longer than a small network


@contextmanager
def full_precision() -> Iterator[None]:
    """Run this thread's networks in full precision inside the block."""
    token = _EXACT.set(True)
    try:
        yield
    finally:
        _EXACT.reset(token)


def call_network(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    arguments: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
    *,
    precision: torch.dtype | None = None,
    checkpointed: bool = False,
    functional: Callable[..., Any] | None = None,
    caller: int | None = None,
) -> Any:
    """Return the network's output, and restore its tensors, buffers and modes.

    Args:
        net: the network.
        tensors: by name, in place of its own parameters; the others are fixed.
        arguments, keywords: of the call.
        precision: run it under autocast to this type, and convert its outputs to that of `tensors`.
        checkpointed: keep no activations; the backward pass calls the network again, with the same random numbers.
        functional: a function of `torch.func.functional_call`'s signature that calls it in another way.
        caller: as in `alone_with`.

    Example:
        >>> tensors = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
        >>> call_network(nn.Linear(2, 1), tensors, (torch.ones(2, 2),))
        tensor([[3.],
                [3.]])
    """
    precision = None if _EXACT.get() else precision
    if checkpointed:
        caller = threading.get_ident()
        call = partial(call_network, net, precision=precision, functional=functional, caller=caller)
        return checkpoint(_in_modes_of_now(net, call, caller), tensors, arguments, keywords, use_reentrant=False)
    some = next(iter(tensors.values()))
    with alone_with(net, caller) as turn:
        found = turn.found
        every = {name: holder[key].detach() for name, (holder, key) in found.parameters.items() if name not in tensors}
        for name, (module, always) in found.buffers.items():
            if always or module.training:
                (holder, key), *_ = found.places[name]
                every[name] = holder[key].clone()
        autocast = nullcontext() if precision is None else torch.autocast(some.device.type, precision)
        try:
            with _unfused(found.fused) if found.fused else nullcontext(), autocast:
                output = (functional or found.call)(net, {**every, **tensors}, arguments, keywords)
        except Exception as error:  # whatever a network raises goes on its way, with what came to it
            error.add_note(_called_with((arguments, keywords), some.dtype))
            raise
    if precision is not None:
        output = tree_map(lambda x: x.to(some.dtype) if _is_floating(x) else x, output)
    return output


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def check_precision(precision: Any, net: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a precision that would not run, or would silently be full precision."""
    if precision not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"precision must be None, torch.bfloat16 or torch.float16, got {precision!r}")
    if precision is None:
        return
    if dtype != torch.float32:
        raise ValueError(f"precision={precision} is mixed with float32, and the weights are {dtype}: use net.float()")
    if not torch.amp.is_autocast_available(device.type):
        raise ValueError(f"torch has no mixed precision on {device.type!r}: fit with precision=None")
    if device.type == "cpu" and any(isinstance(module, nn.LSTM) for module in net.modules()):
        raise ValueError("torch runs LSTMs in half precision on few CPUs only: use precision=None")


def _in_modes_of_now(net: nn.Module, call: Callable[..., Any], caller: int) -> Callable[..., Any]:
    """Return the call for the backward pass, which repeats it later, and on a GPU in a thread of its own."""
    modes = [module.training for module in net.modules()]

    def again(*inputs: Any) -> Any:
        with in_modes(net, modes, caller):
            return call(*inputs)

    return again


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
    """Return whether its forward is torch's own: another may do anything in training mode."""
    return module.forward.__module__.startswith("torch.nn.modules.")


def _called_with(inputs: Any, dtype: torch.dtype) -> str:
    """Return a note on the inputs of a network that raised an error, and on a dtype unlike its weights'."""
    given = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    came = ", ".join(f"{tuple(x.shape)} of {x.dtype}" for x in given) or "that are no tensors"
    note = f"the network, with weights of {dtype}, was called with inputs {came}"
    if any(_is_floating(x) and x.dtype != dtype for x in given):
        note += f"; convert them: x.{'float()' if dtype == torch.float32 else f'to({dtype})'}"
    return note


def padding_rows(net: nn.Module, names: Collection[str]) -> dict[str, int]:
    """Return the padding row of each of these tensors that is an embedding with one.

    A tensor with a second name, an output layer's, is left out: there the row is a weight.

    Example:
        >>> padding_rows(nn.Sequential(nn.Embedding(5, 2, padding_idx=1), nn.Linear(2, 1)), ["0.weight", "1.weight"])
        {'0.weight': 1}
    """
    every = [id(tensor) for _, tensor in net.named_parameters(remove_duplicate=False)]
    found = {}
    for prefix, module in net.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.padding_idx is not None:
            name = f"{prefix}.weight".removeprefix(".")
            if name in names and every.count(id(module.weight)) == 1:
                found[name] = module.padding_idx
    return found


def with_padding(tensors: Mapping[str, Tensor], rows: Mapping[str, int], net: nn.Module) -> Mapping[str, Tensor]:
    """Return the tensors [.., n, d] by name, with the network's own padding rows.

    Example:
        >>> net = nn.Embedding(3, 2, padding_idx=0)
        >>> with_padding({"weight": torch.ones(3, 2)}, {"weight": 0}, net)["weight"].sum(1)
        tensor([0., 2., 2.])
    """
    changed = {}
    for name, row in rows.items():
        if name in tensors:
            own = attrgetter(name)(net).detach()  # no parameter inside a functional_call
            is_padding = (torch.arange(len(own), device=own.device) == row).unsqueeze(1)
            changed[name] = torch.where(is_padding, own, tensors[name])
    return {**tensors, **changed} if changed else tensors
