"""Fresh values of a network's parameters, by its layers' own initialisation."""

import copy
import warnings
from collections.abc import Callable
from inspect import signature

import torch
from torch import Tensor, nn


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
        try:
            self._twin = copy.deepcopy(net)
        except (RuntimeError, TypeError) as error:  # a tensor with a graph; a lock, a file or a generator
            message = f"the network cannot be copied ({error}): its current values stand in for fresh ones"
            warnings.warn(message, stacklevel=3)

    def __call__(self) -> dict[str, Tensor]:
        if self._twin is None:
            return {}
        with torch.no_grad():
            for name, tensor in self._twin.named_parameters():
                tensor.copy_(self._current[name])
            for module in reversed(list(self._twin.modules())):
                _initialise(module)
        return dict(self._twin.named_parameters())  # asked again: a layer may have put another in the place of one


def _initialise(module: nn.Module) -> None:
    for method in ("reset_parameters", "_reset_parameters", "_init_weights"):
        initialise = getattr(module, method, None)
        if not callable(initialise):
            continue
        required = _required(initialise)
        if required == 0:
            initialise()
        elif required == 1 and method == "_init_weights":  # what a model applies to each of its parts
            for part in reversed(list(module.modules())):
                initialise(part)  # with other arguments only the layer knows how


def _required(function: Callable[..., object]) -> int:
    """Return the number of arguments without a default."""
    kinds = signature(function).parameters.values()
    return sum(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in kinds)
