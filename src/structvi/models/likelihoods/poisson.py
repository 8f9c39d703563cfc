"""Counts."""

from collections.abc import Mapping
from math import log, nan
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions import Poisson as PoissonDistribution

from ...families.numerics import reads
from .base import NO_VALUES, Likelihood, check_same_shape


class Poisson(Likelihood):
    """t ~ Poisson(exp y), log p(t | y) = t·y − exp y − log t!: output of log rates, target of counts, equal shapes.

    Example:
        >>> Poisson()(torch.zeros(2, 1), torch.tensor([[0], [1]])).squeeze(-1)
        tensor([-1., -1.])
    """

    def log_prob(self, output: Any, target: Tensor) -> Tensor:
        check_same_shape("Poisson", output, target)
        count = target.to(output.dtype)
        wrong = (count < 0) | (count != count.floor())
        if not reads():
            count = count.masked_fill(wrong, nan)
        elif bool(wrong.any()):
            raise ValueError("Poisson: the target must hold counts 0, 1, 2, …, got negative numbers, fractions or NaN")
        return count * output - output.exp() - (count + 1).lgamma()

    def distribution(self, output: Tensor, values: Mapping[str, Tensor] = NO_VALUES) -> Distribution:
        return PoissonDistribution(output.exp(), validate_args=False)

    def sums(self, target: Tensor, mask: Tensor | None) -> Tensor:
        """Return the count of t and the sums of t and log t!, [3]."""
        t = target.detach().double()[... if mask is None else mask]
        return torch.stack([torch.ones_like(t).sum(), t.sum(), (t + 1).lgamma().sum()])

    def best_constant(self, sums: Tensor) -> float:
        count, total, factorials = sums.tolist()
        return (total * log(total / count) - total if total else 0.0) - factorials
