"""The optimizer that moves the parameters of a fit: the default one, or the user's."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..families.family import Family
from ..optim.adam import DEFAULT_LR
from .adam import Adam

OptimizerLike = Optimizer | Callable[[list[Tensor]], Optimizer]


def make_optimizer(
    parameters: list[Tensor],
    optimizer: OptimizerLike | None,
    lr: float | None,
    family: Family,
) -> Optimizer:
    """Adam, or the user's own, which must hold these parameters and keep the optimum.

    Args:
        parameters: all that is learned.
        optimizer: what was asked for; None for Adam.
        lr: of Adam.
        family: which of the parameters are its factors.
    """
    if optimizer is None:
        return Adam(parameters, lr=DEFAULT_LR if lr is None else lr, factors=family.factors())
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
                "scales too) to zero, and what is found would no longer be the posterior; the prior is what holds "
                "weights back. Set weight_decay=0"
            )
    known = {id(parameter) for parameter in parameters}
    if any(id(parameter) not in known for group in made.param_groups for parameter in group["params"]):
        raise ValueError("the optimizer holds tensors that are not posterior.parameters(); make it from those alone")
    return made


def described(optimizer: Optimizer) -> str:
    """What a resumed fit must share, beside learning rates."""
    options = {name: value for name, value in optimizer.defaults.items() if name != "lr"}
    return f"{type(optimizer).__name__} with {options}"
