"""Modules of a network's own kind around the same tensors, and whether the network itself can be reached from them."""

import dis
import gc
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: What holds no module.
_LEAVES = (
    str, bytes, int, float, complex, type(None), type, ModuleType, CodeType, Tensor, torch.dtype, torch.device,
    torch.Size, torch.Generator, np.ndarray,
)  # fmt: skip
#: So many objects are looked at in search of the network's own modules; where there are more, it is taken as found.
MANY = 100_000


class ModuleCopy:
    """The modules of a network, copied one by one; tensors and all else are shared with it.

    Lists, tuples, dicts, bound methods and partial functions that hold a module of the network are made anew around
    its copy. Where another way leads from the copy to the network's own modules (a closure, a global variable, an
    object of the user's), a call with drawn weights would miss them: `complete` is then False.

    Args:
        net: the network.
        known: whether it is known that no other way leads there.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 1))
        >>> copied = ModuleCopy(net)
        >>> copied.net[0] is net[0], copied.net[0].weight is net[0].weight, copied.complete
        (False, True, True)
    """

    def __init__(self, net: nn.Module, known: bool = False):
        #: dicts and other containers that were made anew, with what was in them
        self.watched: list[tuple[Any, tuple[Any, ...]]] = []
        #: every module of the network, and its copy
        self.pairs: list[tuple[nn.Module, nn.Module]] = []
        self._made: dict[int, nn.Module] = {}
        self._shared: list[Any] = []
        self._open: set[int] = set()
        self.net: nn.Module = net
        try:
            self.net = self._module(net)
        except TypeError:  # a class that has other than a `__dict__`, or is not Python's alone
            self.complete = False
        else:
            self.complete = known or not self._leaks()

    def _leaks(self) -> bool:
        originals = [module for module, _ in self.pairs]
        classes = {kind for module in originals for kind in type(module).__mro__}
        functions = [value for kind in classes if not _foreign(kind) for value in vars(kind).values()]
        return _reaches([*self._shared, *functions], {id(module) for module in originals})

    def _module(self, module: nn.Module) -> nn.Module:
        if id(module) in self._made:
            return self._made[id(module)]
        slots = any(vars(kind).get("__slots__") for kind in type(module).__mro__)
        if slots or isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{type(module).__name__} is more than its attributes")
        twin = self._made[id(module)] = object.__new__(type(module))
        self.pairs.append((module, twin))
        own = vars(module)
        twin.__dict__.update(own)
        for name in ("_parameters", "_buffers"):
            twin.__dict__[name] = type(own[name])(own[name])
            self._watch(own[name])
        children = own["_modules"]
        twin.__dict__["_modules"] = type(children)(
            (name, child if child is None else self._module(child)) for name, child in children.items()
        )
        self._watch(children)
        for name, value in own.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                twin.__dict__[name] = self._value(value)
        self._watch(own)
        return twin

    def _watch(self, container: Any) -> None:
        self.watched.append((container, _elements(container)))

    def _value(self, value: Any) -> Any:
        """The value itself, or one around the copies of the modules that it holds."""
        if isinstance(value, _LEAVES):
            return value
        if isinstance(value, nn.Module):
            return self._module(value)
        if id(value) in self._open:  # it holds itself
            return value
        self._open.add(id(value))
        anew = self._anew(value)
        self._open.discard(id(value))
        return anew

    def _anew(self, value: Any) -> Any:
        kind = type(value)
        if kind in (list, tuple, set, frozenset, dict, OrderedDict):
            before = _elements(value)
            after = tuple(map(self._value, before))
            if all(map(_is, before, after)):
                return value
            self._watch(value)
            return kind(zip(value, after, strict=True)) if isinstance(value, dict) else kind(after)
        if kind is MethodType:
            owner = self._value(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if kind is partial:
            parts = (value.func, value.args, value.keywords)
            function, arguments, keywords = map(self._value, parts)
            if all(map(_is, parts, (function, arguments, keywords))):
                return value
            return partial(function, *arguments, **keywords)
        self._shared.append(value)
        return value


def _is(a: Any, b: Any) -> bool:
    return a is b


def _elements(container: Any) -> tuple[Any, ...]:
    return tuple(container.values()) if isinstance(container, Mapping) else tuple(container)


def _reaches(roots: Iterable[Any], goals: set[int]) -> bool:
    """Whether one of the goals, by id, can be reached from the roots."""
    seen: set[int] = set()
    ahead = list(roots)
    while ahead:
        value = ahead.pop()
        if id(value) in goals:
            return True
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if len(seen) > MANY:
            return True
        ahead.extend(_referents(value))
    return False


def _referents(value: Any) -> Iterator[Any]:
    if isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, FunctionType):
        yield from gc.get_referents(*(value.__closure__ or ()))
        yield from (value.__defaults__, value.__kwdefaults__, value.__dict__)
        if not _foreign(value):
            yield from (value.__globals__[name] for name in _loaded(value.__code__) if name in value.__globals__)
    else:
        yield from gc.get_referents(value)


def _foreign(value: Any) -> bool:
    """Whether a class or function is of torch or Python itself, whose global variables know no user's network."""
    return (value.__module__ or "").split(".")[0] in ("torch", "builtins", "abc", "collections", "typing", "functools")


@lru_cache(maxsize=4096)
def _loaded(code: CodeType) -> tuple[str, ...]:
    """The global variables that code reads: `co_names` has the names of attributes too."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _loaded(part)]
    return tuple(names.union(inner))
