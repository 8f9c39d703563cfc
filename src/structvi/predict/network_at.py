"""The network at one θ: a copy that shares its tensors, so that a small network is called at the price of its pass."""

import copy
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..models.bayesian_model import logits_of
from .linearised import network_inputs
from .predictive import on_device

if TYPE_CHECKING:
    from ..posterior import Posterior


class NetworkAt:
    """The network of a posterior with views of θ [P] in place of its random tensors, and all others shared."""

    def __init__(self, posterior: "Posterior", theta: Tensor):
        self.model, self.theta, self.lock = posterior.model, theta, threading.Lock()
        with torch.inference_mode(False), torch.no_grad(), posterior.network_mode() as net:
            self.modules = list(net.modules())
            holders = [holder for one in self.modules for holder in (one._parameters, one._buffers, one._modules)]
            self.places = [(holder, key, value) for holder in holders for key, value in holder.items()]
            named = self.model.with_padding(self.model.net_space.unravel(theta))
            shared: dict[int, Any] = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
            shared |= {id(p): nn.Parameter(named[name], False) for name, p in net.named_parameters() if name in named}
            self.net = copy.deepcopy(net, shared)

    def is_of(self, theta: Tensor) -> bool:
        """Return whether θ has its values, and the network the same modules and tensors as before, without hooks."""
        same = self.theta is theta or torch.equal(self.theta, theta)
        same = same and all(holder.get(key) is value for holder, key, value in self.places)
        return same and not any(one._forward_hooks or one._forward_pre_hooks for one in self.modules)

    def __call__(self, inputs: Any) -> Any:
        """Return the network's output [B, ..]; the caller holds the lock."""
        given = network_inputs(self.model, on_device(inputs, self.theta.device))
        with torch.no_grad():
            return logits_of(self.net(**given) if isinstance(given, dict) else self.net(*given))


_KEPT: "WeakKeyDictionary[Posterior, NetworkAt | None]" = WeakKeyDictionary()


def network_at(posterior: "Posterior", theta: Tensor, inputs: Any) -> NetworkAt | None:
    """Return the network at θ, kept from the last call; None if a copy is not the same network."""
    model, kept = posterior.model, _KEPT.get(posterior)
    if model.precision is not None or (posterior in _KEPT and kept is None):
        return None
    if kept is not None and kept.is_of(theta):
        return kept
    if any(one._forward_hooks or one._forward_pre_hooks for one in posterior.net.modules()):
        return None
    _KEPT[posterior] = made = NetworkAt(posterior, theta) if _is_copied_whole(posterior, theta, inputs) else None
    return made


def _is_copied_whole(posterior: "Posterior", theta: Tensor, inputs: Any) -> bool:
    """Return whether a copy gives at another θ what the network does: a function may know a layer by itself."""
    model = posterior.model
    of_torch = [
        one.forward.__module__.startswith("torch.nn.modules.") for one in posterior.net.modules() if one._buffers
    ]
    if model.user_forward is not None or posterior.dropout == "on" or posterior.mixes_rows or not all(of_torch):
        return False
    there = theta + 0.1 * theta.abs().mean()
    with torch.no_grad(), posterior.network_mode(), model.linearised_around(None):
        expected = model.outputs(there.unsqueeze(0), inputs)
    try:
        return torch.equal(NetworkAt(posterior, there)(inputs), expected[0])
    except Exception:  # whatever a network raises that cannot be copied
        return False
