"""Any torch distribution as a prior."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributions import Distribution

from ...families.numerics import sum_weights
from ...parameters import Parameters
from ...util.patterns import assign, check_patterns
from .base import SeparablePrior


class DistributionPrior(SeparablePrior):
    """Any torch distribution, by patterns on tensor names.

    Args:
        distributions: glob pattern → distribution. A scalar distribution is that of every weight by itself; otherwise
            its batch and event shapes together must be the tensor's. Every tensor must match exactly one pattern, and
            "*" stands for what no other matches.

    Example:
        >>> from torch.distributions import Cauchy, Normal
        >>> prior = DistributionPrior({"w": Normal(0.0, 1.0), "*": Cauchy(0.0, 1.0)})
        >>> prior(Parameters({"w": torch.zeros(2, 2), "b": torch.zeros(1)}), torch.zeros(1, 5))
        tensor([-4.8205])
    """

    def __init__(self, distributions: Mapping[str, Distribution]):
        super().__init__()
        if not isinstance(distributions, Mapping):
            raise TypeError(
                "DistributionPrior expects a dict of patterns and torch distributions, "
                f'got {type(distributions).__name__}; for all tensors write {{"*": distribution}}'
            )
        check_patterns(distributions, "DistributionPrior")
        for pattern, distribution in distributions.items():
            if not isinstance(distribution, Distribution):
                raise TypeError(f"DistributionPrior: {pattern!r} needs a torch distribution, got {distribution!r}")
        self.distributions = dict(distributions)

    def check(self, parameters: Parameters) -> None:
        owners = assign(parameters.names, tuple(self.distributions), "DistributionPrior")
        every = list(self.distributions.values())
        for name, shape, owner in zip(parameters.names, parameters.shapes, owners, strict=True):
            own = every[owner].batch_shape + every[owner].event_shape
            if own not in ((), shape):
                raise ValueError(
                    f"DistributionPrior: {name} has shape {tuple(shape)}, its {type(every[owner]).__name__} "
                    f"{tuple(own)}; give a scalar distribution or one of the tensor's shape"
                )

    def terms(self, parameters: Parameters, theta: Tensor) -> Tensor:
        owners = assign(parameters.names, tuple(self.distributions), "DistributionPrior", partial=True)
        every = list(self.distributions.values())
        values = [
            sum_weights(every[owner].log_prob(x).reshape(theta.shape[0], -1))
            for owner, x in zip(owners, parameters.unravel(theta).values(), strict=True)
        ]
        return torch.stack(values).sum(0).to(theta.dtype)
