"""Fresh values of a network's parameters, by its layers' own initialisation."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from inspect import signature

import torch
from torch import Tensor, nn

METHODS = ("reset_parameters", "_reset_parameters", "_init_weights")


class Initialisers:
    """The layers' own initialisation (`reset_parameters` and its like), called in one copy of a network.

    Each call gives the parameters by name after all of them, innermost modules first; a parameter whose layer has no
    initialiser keeps the value it has in the network. The tensors are the copy's: the next call writes over them.
    A network that cannot be copied gives none, with a warning.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> fresh = Initialisers(net)
        >>> bool((fresh()["weight"] != net.weight).all())
        True
    """

    def __init__(self, net: nn.Module):
        self._current = {name: tensor.detach() for name, tensor in net.named_parameters()}
        self._twin: nn.Module | None = None
        self._calls: list[Callable[[], object]] = []
        try:
            self._twin = copy.deepcopy(net)
        except (RuntimeError, TypeError) as error:  # a tensor with a graph; a lock, a file or a generator
            message = f"the network cannot be copied ({error}): its current values stand in for fresh ones"
            warnings.warn(message, stacklevel=3)
            return
        for module in reversed(list(self._twin.modules())):
            for method in METHODS:
                if callable(initialise := getattr(module, method, None)):
                    self._calls += _calls(initialise, module)

    def __call__(self) -> dict[str, Tensor]:
        if self._twin is None:
            return {}
        with torch.no_grad():
            for name, tensor in self._twin.named_parameters():
                tensor.copy_(self._current[name])
            for call in self._calls:
                call()
        return dict(self._twin.named_parameters())  # asked again: a layer may have put another in the place of one


def _calls(initialise: Callable[..., object], module: nn.Module) -> list[Callable[[], object]]:
    """`reset()` of a layer, or `initialise(part)` that a model applies to each of its parts."""
    required = [
        p for p in signature(initialise).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    if not required:
        return [initialise]
    if len(required) == 1:
        return [partial(initialise, part) for part in reversed(list(module.modules()))]
    return []
