"""The optimizer of a fit: Adam, whose rate is lower for low-rank factors, or the user's."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed.sharding import Sharded
from ..families.low_rank import factors
from ..util.checks import check_positive

if TYPE_CHECKING:
    from ..posterior import Posterior

OptimizerLike = Optimizer | Callable[[list[Tensor]], Optimizer]

#: learning rate of Adam: log scales start about five below where many end, and move by at most this much a step
DEFAULT_LR = 0.02
#: factors [P, K] learn at most at this rate over √P, relative to the rest: Adam moves every entry at every step,
#: signal or not, and at the full rate the noise of twenty columns costs more than they bring (lab/scratch.md)
FACTOR_RATE = 2.5


def adam_groups(posterior: "Posterior", lr: float, without: Collection[Tensor] = ()) -> list[dict[str, Any]]:
    """Return the parameter groups of a posterior for Adam: one for each low-rank factor, and one for the rest.

    Args:
        posterior: to fit.
        lr: the learning rate; a factor [P, K] learns at min(1, `FACTOR_RATE`/√P) times this rate.
        without: parameters that another rule moves.

    Example:
        >>> import torch
        >>> from structvi import LowRankNormal, likelihoods, variationalize
        >>> net = torch.nn.Linear(25, 1, bias=False)
        >>> bayes = variationalize(net, likelihoods.Gaussian(noise=1.0), LowRankNormal(rank=2))
        >>> [(len(group["params"]), group["lr"]) for group in adam_groups(bayes, lr=0.02)]
        [(2, 0.02), (1, 0.01)]
    """
    left_out = {id(parameter) for parameter in without}
    learned = [p for p in posterior.parameters() if id(p) not in left_out]
    own = {id(factor) for factor in factors(posterior.family)}
    whole = posterior.space.size if isinstance(posterior.family, Sharded) else None  # this rank has some rows of it
    groups = [{"params": [p for p in learned if id(p) not in own], "lr": lr}]
    groups += [
        {"params": [p], "lr": lr * min(1.0, FACTOR_RATE / (whole or len(p)) ** 0.5)} for p in learned if id(p) in own
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(posterior: "Posterior", optimizer: OptimizerLike | None, lr: float | None) -> Optimizer:
    """Return Adam, or the user's optimizer, which must hold the posterior's parameters and keep its optimum.

    Args:
        posterior: to fit.
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
