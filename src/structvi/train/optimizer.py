"""The optimizer that moves the parameters of a fit: fused Adam, or the user's."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..optim.adam import DEFAULT_LR, adam_groups
from ..util.checks import check_positive

if TYPE_CHECKING:
    from ..posterior import Posterior

OptimizerLike = Optimizer | Callable[[list[Tensor]], Optimizer]


def make_optimizer(posterior: "Posterior", optimizer: OptimizerLike | None, lr: float | None) -> Optimizer:
    """Return Adam, or the user's optimizer, which must hold the posterior's parameters and keep its optimum.

    Args:
        posterior: what is fitted.
        optimizer: the user's, or a function from parameters to it; None for Adam.
        lr: of Adam.
    """
    parameters: list[Tensor] = list(posterior.parameters())
    if lr is not None:
        check_positive(lr, "lr")
    if optimizer is None:
        lr, device = DEFAULT_LR if lr is None else lr, parameters[0].device.type
        fused, capturable = device in ("cpu", "cuda"), device == "cuda"
        return torch.optim.Adam(adam_groups(posterior, lr), lr=lr, fused=fused, capturable=capturable)
    if lr is not None:
        raise ValueError(f"lr={lr} belongs to the default optimizer; give it to the one you pass")
    made = optimizer(parameters) if callable(optimizer) and not isinstance(optimizer, Optimizer) else optimizer
    if not isinstance(made, Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer or a function of parameters to one, got {made!r}")
    if isinstance(made, torch.optim.LBFGS):
        raise TypeError("LBFGS searches along a line of a fixed function, and the ELBO is estimated anew at each call")
    for group in made.param_groups:
        if group.get("weight_decay", 0) != 0:
            raise ValueError(
                f"the optimizer has weight_decay={group['weight_decay']}: it would pull variational parameters (log "
                "scales too) to zero, and the result would no longer be the posterior; the prior holds weights back. "
                "Set weight_decay=0"
            )
    known = {id(parameter) for parameter in parameters}
    if any(id(parameter) not in known for group in made.param_groups for parameter in group["params"]):
        raise ValueError("the optimizer holds tensors that are not posterior.parameters(); make it from those alone")
    return made


def description(optimizer: Optimizer) -> str:
    """Return what a resumed fit must share, beside learning rates."""
    options = {name: value for name, value in optimizer.defaults.items() if name != "lr"}
    return f"{type(optimizer).__name__} with {options}"


def optimizer_state(optimizer: Optimizer, named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what the optimizer remembers of each parameter, flat: "name/key" → tensor or number, not copied."""
    return {
        f"{name}/{key}": value
        for name, parameter in named.items()
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
        if value is not None
    }


def set_optimizer_state(optimizer: Optimizer, named: Mapping[str, Tensor], flat: Mapping[str, Any]) -> None:
    """Invert `optimizer_state`; what `flat` does not name is forgotten."""
    optimizer.state.clear()
    for path, value in flat.items():
        name, key = path.rsplit("/", 1)
        parameter = named[name]
        if isinstance(value, Tensor):  # moments are laid out in memory as their parameter is
            like = value if value.shape != parameter.shape else parameter
            value = torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)
        optimizer.state[parameter][key] = value
