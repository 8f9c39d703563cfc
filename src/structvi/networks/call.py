"""One call of a network with given tensors in place of its own. A network has one lock, and calls take turns."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
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


@contextmanager
def _replaced(entries: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Put values under their keys into dicts, and restore the values of before at the end.

    Faster than `setattr` of a module, which takes longer than a small network.
    """
    had = []
    try:
        for holder, key, value in entries:
            had.append((holder, key, holder[key]))
            holder[key] = value
        yield
    finally:
        for holder, key, value in had:
            holder[key] = value


class Turn:
    """The lock of one network, the thread that holds it, and where the network's tensors are.

    Places are found again only if a module or tensor was added or replaced. Between calls the modules are known by
    weak references: else a hook that knows the network would keep it in memory.
    """

    def __init__(self) -> None:
        self.lock, self.owner = threading.Lock(), 0
        #: of the network, in the order of `net.modules()`, while a thread holds it
        self.modules: list[nn.Module] = []
        self._known: list[ref[nn.Module]] = []
        self._form: list[int] = []

    def look(self, net: nn.Module) -> None:
        """Find the modules, and the places of all tensors if those have changed."""
        self.modules = [module for one in self._known if (module := one()) is not None]
        if len(self.modules) == len(self._known) > 0 and _form(self.modules) == self._form:
            return
        named = dict(net.named_modules())
        self.modules = list(named.values())
        self._known, self._form = [ref(module) for module in self.modules], _form(self.modules)
        #: every place of a tensor, by its first name
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self._parameters: set[str] = set()
        #: the positions of the modules of buffers
        self._buffers: dict[str, int] = {}
        self._fused = [i for i, module in enumerate(self.modules) if isinstance(module, FUSED_IN_EVAL)]
        first: dict[int, str] = {}
        for i, (prefix, module) in enumerate(named.items()):
            for holder in (module._parameters, module._buffers):
                for key, tensor in holder.items():
                    if tensor is None:
                        continue
                    name = first.setdefault(id(tensor), f"{prefix}.{key}".removeprefix("."))
                    self._places.setdefault(name, []).append((holder, key))
                    if holder is module._parameters:
                        self._parameters.add(name)
                    else:
                        self._buffers.setdefault(name, i)

    def others(self, given: Collection[str]) -> dict[str, Tensor]:
        """Return the tensors that a call holds, without a gradient, or may change, as copies, beside those given."""
        others = {}
        for name in self._parameters.difference(given) if torch.is_grad_enabled() else ():
            holder, key = self._places[name][0]
            others[name] = holder[key].detach()
        for name, i in self._buffers.items():
            if self.modules[i].training or not _of_torch(self.modules[i]):
                holder, key = self._places[name][0]
                others[name] = holder[key].clone()
        return others

    def holding(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Put tensors into the network; `torch.func.functional_call` looks for every place again at every call."""
        entries = []
        for name, x in tensors.items():
            for holder, key in self._places[name]:
                entries.append((holder, key, x))
        return _replaced(entries)

    def unfused(self) -> AbstractContextManager[None]:
        """Put layers of `FUSED_IN_EVAL` into training mode without dropout: the same numbers, and derivatives.

        Recurrent layers keep a list of the weights of their last call: drawn ones would stay in memory with their
        graph.
        """
        entries = []
        for i in self._fused:
            layer = self.modules[i]
            own = vars(layer)
            new = {name: own[name] for name in ("_flat_weights", "_flat_weight_refs") if name in own}
            if not layer.training and _of_torch(layer):
                # of an encoder layer dropout is a module, in a mode of its own
                new |= {"training": True, "dropout": 0.0} if "dropout" in own else {"training": True}
            entries += [(own, name, value) for name, value in new.items()]
        return _replaced(entries) if entries else nullcontext()


def _form(modules: Sequence[nn.Module]) -> list[int]:
    """Return what is another list once a module or tensor has been added, removed or replaced."""
    held: list[Any] = []
    for module in modules:
        for holder in (module._modules, module._parameters, module._buffers):
            held += holder.values()
    return list(map(id, held))


def _of_torch(module: nn.Module) -> bool:
    """Return whether its forward is torch's own: another may do anything in training mode, and to its buffers."""
    return module.forward.__module__.startswith("torch.nn.modules.")


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
    here, before = threading.get_ident(), turn.owner
    if before in (here, caller):
        turn.owner = here
        try:
            yield turn
        finally:
            turn.owner = before
        return
    with turn.lock:
        turn.owner = here
        try:
            turn.look(net)
            yield turn
        finally:
            turn.owner, turn.modules = 0, []


@contextmanager
def in_modes(net: nn.Module, modes: Callable[[nn.Module], bool] | Sequence[bool]) -> Iterator[nn.Module]:
    """Hold the network with its modules in these modes, and restore theirs at the end.

    Args:
        net: the network.
        modes: whether a module is in training mode, by a function or in the order of `net.modules()`.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> with in_modes(net, lambda module: False):
        ...     net.training
        False
        >>> net.training
        True
    """
    with alone_with(net) as turn:
        modules = turn.modules
        new = [modes(module) for module in modules] if callable(modes) else modes
        with _replaced([(vars(module), "training", mode) for module, mode in zip(modules, new, strict=True)]):
            yield net


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
) -> Any:
    """Return the network's output, and restore its tensors, buffers and modes.

    Args:
        net: the network.
        tensors: by name, in place of its own parameters; the others are fixed.
        arguments, keywords: of the call.
        precision: run it under autocast to this type, and convert its outputs to that of `tensors`.
        checkpointed: keep no activations; the backward pass calls the network again, with the same random numbers.
        functional: a function of `torch.func.functional_call`'s signature that calls it in another way.

    Example:
        >>> tensors = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
        >>> call_network(nn.Linear(2, 1), tensors, (torch.ones(2, 2),))
        tensor([[3.],
                [3.]])
    """
    precision = None if _EXACT.get() else precision
    if checkpointed:
        call = _repeatable(net, partial(call_network, net, precision=precision, functional=functional))
        return checkpoint(call, tensors, arguments, keywords, use_reentrant=False)
    some = next(iter(tensors.values()))
    with alone_with(net) as turn:
        every = {**turn.others(tensors), **tensors}
        autocast = nullcontext() if precision is None else torch.autocast(some.device.type, precision)
        with turn.unfused(), autocast:
            if functional is not None:
                output = functional(net, every, arguments, keywords)
            else:
                with turn.holding(every):
                    output = net(*arguments, **(keywords or {}))
    if precision is not None:
        output = tree_map(lambda x: x.to(some.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, output)
    return output


def _repeatable(net: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call for the backward pass, which repeats it in other modes, and on a GPU in a thread of its own."""
    modes, caller = [module.training for module in net.modules()], threading.get_ident()

    def again(*inputs: Any) -> Any:
        with alone_with(net, caller), in_modes(net, modes):
            return call(*inputs)

    return again


def check_precision(precision: Any, dtype: torch.dtype) -> None:
    """Refuse a precision that would silently be full precision."""
    if precision not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"precision must be None, torch.bfloat16 or torch.float16, got {precision!r}")
    if precision is not None and dtype != torch.float32:
        raise ValueError(f"precision={precision} is mixed with float32, and the weights are {dtype}: use net.float()")


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
    for name in rows.keys() & tensors.keys():
        own = attrgetter(name)(net).detach()  # no parameter inside a functional_call
        is_padding = (torch.arange(len(own), device=own.device) == rows[name]).unsqueeze(1)
        changed[name] = torch.where(is_padding, own, tensors[name])
    return {**tensors, **changed} if changed else tensors
