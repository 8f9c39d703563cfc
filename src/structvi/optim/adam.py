"""Adam's parameter groups for a variational posterior: low-rank factors learn at a lower rate."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..distributed.sharding import Sharded
from ..families.low_rank import factors

if TYPE_CHECKING:
    from ..posterior import Posterior

#: learning rate of Adam: log scales start about five below where many end, and move by at most this much a step
DEFAULT_LR = 0.02
#: factors [P, K] learn at most at this rate over √P, relative to the rest: Adam moves every entry at every step,
#: signal or not, and at the full rate the noise of twenty columns costs more than they bring (docs/optimisation.md)
FACTOR_RATE = 2.5


def adam_groups(posterior: "Posterior", lr: float, without: Collection[Tensor] = ()) -> list[dict[str, Any]]:
    """Return the parameter groups of a posterior for Adam: one for each low-rank factor, and one for the rest.

    Args:
        posterior: what is fitted.
        lr: the learning rate; that of a factor [P, K] is min(1, `FACTOR_RATE`/√P) times it.
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
