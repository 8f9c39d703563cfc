"""Twins of a network: modules of their own around its tensors. Every call has one to itself, in modes of its own."""

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..util.patterns import few
from ..util.random_streams import alone
from .module_copy import ModuleCopy

#: of the modules of a network: which are in training mode, by a function of each or in their order
Modes = Callable[[nn.Module], bool] | Sequence[bool]


class _Buffer(NamedTuple):
    name: str
    tensor: Tensor
    holder: dict[str, Tensor | None]  # `_buffers` of the twin's module
    key: str
    own: bool  # of a module that is not torch's


class Twin:
    """A network's twin, or the network itself where it has none: `private` says which.

    Args:
        twins: those that it is one of.
        known: whether the network is known to have twins, and no search is needed.
    """

    def __init__(self, twins: "Twins", known: bool = False):
        self.twins = twins
        copied = ModuleCopy(twins.original, known)
        self.private = copied.complete
        self.net = copied.net if self.private else twins.original
        self._watch(copied.watched)
        self._pairs = copied.pairs
        self.look()

    def _watch(self, watched: Sequence[tuple[Any, tuple[Any, ...]]]) -> None:
        """From now on look at these containers, which have had this in them."""
        self._watched = list(watched)
        self._views = [_view(box) for box, _ in watched]
        self._sizes = [len(had) for _, had in watched]
        self._had = [one for _, had in watched for one in had]

    def look(self) -> None:
        """What is in the tree."""
        self.originals = list(self.twins.original.modules())
        self.modules = list(self.net.modules())
        self.recurrent = [module for module in self.modules if is_recurrent(module)]
        #: those that keep a list of the weights of their last call
        self.flattened = [module for module in self.modules if isinstance(module, nn.RNNBase)]
        self.attends = any(isinstance(module, nn.MultiheadAttention) for module in self.modules)
        self.parameters = list(self.net.named_parameters())
        first: dict[int, _Buffer] = {}  # a buffer with several names is tied by `functional_call`
        for prefix, module in self.net.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is not None:
                    name = f"{prefix}.{key}".removeprefix(".")
                    first.setdefault(
                        id(tensor), _Buffer(name, tensor, module._buffers, key, not _of_torch(type(module)))
                    )
        self.buffers = list(first.values())
        #: where the tensor of a name is: the dictionary of its module, and the key in it
        self.places: dict[str, tuple[dict[str, Any], str]] = {
            f"{prefix}.{key}".removeprefix("."): (holder, key)
            for prefix, module in self.net.named_modules()
            for holder in (module._parameters, module._buffers)
            for key in (holder if type(holder) is dict else ())
        }

    def called(self, tensors: dict[str, Tensor], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """The output with these tensors in place of its own; what stands there at the end is put into `tensors`.

        As `torch.func.functional_call` without ties, which looks for every place again at every call.

        Example:
            >>> with Twins(nn.Linear(1, 1)).borrowed() as twin:
            ...     twin.called({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, (torch.ones(1, 1),), {})
            tensor([[2.]])
        """
        places: list[tuple[Any, str]] = [self.places[name] for name in tensors]
        own = [holder[key] for holder, key in places]
        try:
            for (holder, key), tensor in zip(places, tensors.values(), strict=True):
                holder[key] = tensor
            return self.net(*arguments, **keywords)
        finally:
            for name, (holder, key), tensor in zip(list(tensors), places, own, strict=True):
                tensors[name], holder[key] = holder[key], tensor

    def follows(self) -> bool:
        """Whether the network is as it was when this twin was made, but for its values and its mode."""
        if not self.private:
            return True
        # of hundreds of containers, at every step: no loop in Python
        if list(map(len, self._views)) == self._sizes and all(map(is_, chain.from_iterable(self._views), self._had)):
            return True
        if not all(_same_but_mode(box, had) for box, had in self._watched):
            return False
        self._watch([(box, tuple(view)) for (box, _), view in zip(self._watched, self._views, strict=True)])
        for own, twin in self._pairs:  # the registered ones get theirs at every call
            twin.__dict__["training"] = own.training
        return True

    def is_intact(self) -> bool:
        """Whether it has the network's own tensors, and nothing that was drawn."""
        return not self.private or all(
            all(map(is_, vars(own)[kind].values(), vars(twin)[kind].values()))
            for own, twin in self._pairs
            for kind in ("_parameters", "_buffers")
        )

    @property
    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training mode, in the order of `net.modules()`."""
        return tuple([module.training for module in self.modules])

    def set_modes(self, modes: Modes) -> None:
        each = map(modes, self.modules) if callable(modes) else modes
        for module, mode in zip(self.modules, each, strict=True):
            module.__dict__["training"] = mode  # past nn.Module's own, which takes longer than small networks

    @contextmanager
    def in_modes(self, modes: Modes) -> Iterator["Twin"]:
        """Inside, its modules are in these modes; afterwards in those of before."""
        before = self.modes
        self.set_modes(modes)
        try:
            yield self
        finally:
            self.set_modes(before)

    def copied_buffers(self) -> dict[str, Tensor]:
        """Copies of those buffers that a call may change: the network's own stay as they are."""
        known = self.twins.changing
        if not self.buffers:
            return {}
        if known is None or any(self.modes):
            return {buffer.name: buffer.tensor.clone() for buffer in self.buffers}
        return {buffer.name: buffer.tensor.clone() for buffer in self.buffers if buffer.name in known} if known else {}

    def note_changes(self, copies: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Which buffers a call in eval mode changed: it had `copies`, and left `after`. The next ones copy only those.

        Args:
            copies: of all buffers; of some there is nothing new to learn.
            after: what stood in their place when the call ended.
        """
        whole = len(copies) == len(self.buffers)
        if not whole or self.twins.changing is not None or any(self.modes) or _is_captured(copies):
            return
        try:
            self.twins.changing = frozenset(
                buffer.name
                for buffer in self.buffers
                if after[buffer.name] is not copies[buffer.name] or _is_changed(copies[buffer.name], buffer.tensor)
            )
        except RuntimeError:  # inside a transformation that lets no value be read: known after another call
            return

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside, a change of a buffer that no call has changed before is seen, and copied from then on."""
        own = [(buffer, _version(buffer.tensor)) for buffer in self.buffers if buffer.own]
        yield
        late = [buffer for buffer, _ in own if buffer.holder[buffer.key] is not buffer.tensor]
        for buffer in late:
            buffer.holder[buffer.key] = buffer.tensor
        changed = [buffer.name for buffer, version in own if _version(buffer.tensor) != version]
        if changed or late:
            self.twins.changing = (self.twins.changing or frozenset()) | {*changed, *(buffer.name for buffer in late)}
        if changed:
            warnings.warn(
                f"the network changed its buffers {few(changed)} in a call, which its first call did not: they are "
                "changed now. From the next call on they are copied",
                stacklevel=5,
            )


class _Own(threading.local):
    twin: Twin | None = None


class Twins:
    """All twins of a network: so many as there are calls at the same time.

    A twin is used again as long as the network has the same modules, tensors and attributes; values are the network's
    own. A network that can be reached from its twin (`ModuleCopy.complete`) has none: it is called itself, by one
    thread at a time.

    Args:
        original: the network.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> twins = Twins(net)
        >>> with twins.borrowed(lambda module: False) as twin:
        ...     twin.net is net, twin.net.weight is net.weight, twin.net.training, net.training
        (False, True, False, True)
    """

    def __init__(self, original: nn.Module):
        self.original = original
        #: whether it has any; None where that is not known yet
        self.private: bool | None = None
        #: buffers that a call in eval mode changes; None where that is not known yet
        self.changing: frozenset[str] | None = None
        #: what has been seen to draw no random numbers, by the caller's keys
        self.quiet: set[Hashable] = set()
        self._known = False  # that it has twins, since its last change
        self._free: list[Twin] = []
        self._own = _Own()

    def __reduce__(self) -> tuple[Any, ...]:  # copies and other processes make their own
        return Twins, (self.original,)

    def borrowed(self, modes: Modes | None = None, caller: int | None = None) -> AbstractContextManager[Twin]:
        """A twin for this thread, the same one inside.

        Args:
            modes: of the modules, one by one; by default those of the network, inside those that are set already.
            caller: the thread that waits for this one, where it is another: what is its own may be used.
        """
        twin = self._own.twin
        if twin is None:
            return self._taken(modes, caller)
        return nullcontext(twin) if modes is None else twin.in_modes(modes)

    @contextmanager
    def _taken(self, modes: Modes | None, caller: int | None) -> Iterator[Twin]:
        waited_for = caller not in (None, threading.get_ident())
        twin = self._take(waited_for)
        with nullcontext() if twin.private or waited_for else alone():
            if twin.private:
                twin.set_modes([module.training for module in twin.originals] if modes is None else modes)
            else:
                twin.look()  # nobody else is inside now
            self._own.twin, whole = twin, False
            own = any(buffer.own for buffer in twin.buffers)
            try:
                with (
                    nullcontext() if twin.private or modes is None else twin.in_modes(modes),
                    twin.guarded() if own else nullcontext(),
                ):
                    yield twin
                whole = True
            finally:
                self._own.twin = None
                if whole or twin.is_intact():  # an interrupt may have come while weights were put in or taken out
                    self._free.append(twin)

    def _take(self, waited_for: bool) -> Twin:
        while self._free:
            try:
                twin = self._free.pop()
            except IndexError:  # another thread was faster
                break
            if twin.follows():
                return twin
            self.changing, self._known = None, False
            self.quiet.clear()
        # drawn weights may be in the network itself
        with nullcontext() if self.private or waited_for else alone():
            twin = Twin(self, self._known)
        self.private = self._known = twin.private
        return twin


def is_recurrent(module: nn.Module) -> bool:
    """Whether it is torch's LSTM, GRU or RNN: what a `forward` of another class does in training mode is not known."""
    return isinstance(module, nn.RNNBase) and _of_torch(type(module).forward)


def _view(box: Any) -> Any:
    """What is in a container now, whenever it is looked at."""
    return box.values() if isinstance(box, dict) else box


def _same_but_mode(box: Any, had: tuple[Any, ...]) -> bool:
    if len(box) != len(had):
        return False
    if isinstance(box, dict) and "training" in box:
        return all(name == "training" or now is before for (name, now), before in zip(box.items(), had, strict=True))
    return all(map(is_, _view(box), had))


def _of_torch(made: Any) -> bool:
    """Whether this class or function is torch's own."""
    return made.__module__.startswith("torch.nn.modules.")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_changed(copy: Tensor, original: Tensor) -> bool:
    return _version(copy) > 0 or not torch.equal(copy, original)


def _is_captured(tensors: Mapping[str, Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors.values()) and torch.cuda.is_current_stream_capturing()
