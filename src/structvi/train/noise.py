"""The noise of a regression whose network is trained: its residuals on its own data are too small, and held-out data
say by how much.

A factor of these residuals is searched for the network first: its outputs do not depend on the noise, so one pass over
the held-out data is enough for any number of factors. A posterior around the network adds spread of its own, and its
noise is that factor or less.

Few held-out rows may have small residuals by chance, and too little noise costs far more than too much. Residuals on
other data are hardly ever smaller than those on the training data: noise below these is weighed against `PULL` more
rows whose residuals are as on the training data (`pull`). Above them held-out rows alone decide.
"""

from collections.abc import Callable, Sequence
from math import exp, log, sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..models.likelihoods import Gaussian, StudentT
from .batches import Reread
from .held_out import density_at, joined, network_predictives

if TYPE_CHECKING:
    from ..posterior import Posterior

#: factors of a posterior's noise, relative to that of the network alone
SHARES = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.87, 0.93, 1.0)
#: factors that are tried between the neighbours of the one that is kept
BETWEEN = 6
#: of the network's search: the first factors, the largest, and by how much a factor may be off at its end
FIRST, LARGEST, EXACT = (0.5, 0.7, 1.0, 1.4, 2.0), 1e9, 1e-3
#: rows against which noise below the residuals on the training data is weighed
PULL = 10.0
#: so many numbers of outputs are kept
KEPT_NUMBERS = 2**24


class Noise:
    """The noise of a likelihood that learns one, in units of the network's residuals on the training data."""

    def __init__(self, parameter: Tensor | None, expected: float = 1.0):
        self.parameter = parameter
        self.start = 0.0 if parameter is None else float(parameter.detach())
        #: the factor at which errors have the variance of the residuals; 0 where they have none
        self.expected = expected

    @classmethod
    def of(cls, posterior: "Posterior") -> "Noise":
        likelihood = posterior.model.likelihood
        if not isinstance(likelihood, Gaussian | StudentT) or likelihood.noise != "point":
            return cls(None)
        if isinstance(likelihood, Gaussian):
            return cls(likelihood.log_noise)
        df = float(likelihood.df_value().detach())
        return cls(likelihood.log_noise, sqrt(max(0.0, 1 - 2 / df)))  # σ²ν/(ν − 2) = 1

    def set(self, factor: float) -> None:
        if self.parameter is not None:
            with torch.no_grad():
                self.parameter.fill_(self.start + log(factor))


def pull(factor: float, rows: int, expected: float = 1.0) -> float:
    """What noise below the expected loses, in nats for each of so many held-out rows.

    That of `PULL` normal errors with the residuals of the training data: with c the factor in units of the expected
    one, PULL (½ − log c − 1/(2c²)) where c < 1. The best c² for n residuals of mean square r² < 1 is then
    (PULL + n r²)/(PULL + n).

    Example:
        >>> pull(1.3, rows=5), round(pull(0.7, rows=5), 4), round(pull(0.7, rows=500), 4)
        (0.0, -0.3275, -0.0033)
    """
    c = factor / expected if expected > 0 else 1.0
    return 0.0 if c >= 1 else PULL / rows * (0.5 - log(c) - 0.5 / c**2)


def factors_around(network: float) -> tuple[float, ...]:
    """Those of posteriors, where the network's own is given: up to it, and not below the residuals themselves.

    Example:
        >>> [round(factor, 2) for factor in factors_around(1.3)]
        [1.0, 1.04, 1.13, 1.21, 1.3]
    """
    least = min(1.0, network)
    found = {network * share for share in SHARES if network * share > least} | {least, network}
    return tuple(sorted(found))


def between(factor: float, tried: Sequence[float]) -> list[float]:
    """Factors in equal ratios between the neighbours of one, without those that were tried.

    Example:
        >>> [round(one, 3) for one in between(2.0, [1.0, 2.0, 4.0])]
        [1.219, 1.486, 1.811, 2.208, 2.692, 3.281]
    """
    ordered = sorted(set(tried))
    place = ordered.index(factor)
    low = ordered[place - 1] if place else factor / 1.1
    high = ordered[place + 1] if place + 1 < len(ordered) else factor * 1.1
    step = log(high / low) / (BETWEEN + 1)
    return [low * exp(step * (index + 1)) for index in range(BETWEEN)]


def network_factor(networks: "Sequence[tuple[Posterior, Tensor]]", noises: Sequence[Noise], held_out: Reread) -> float:
    """The factor with the highest held-out density of the network, or of the average over several, and `pull`: one for
    all."""
    kept, numbers = [], 0
    for predictives, target in network_predictives(networks, held_out):
        kept.append((predictives, target))
        numbers += sum(leaf.numel() for one in predictives for leaf in tree_leaves(one.outputs))
        if numbers > KEPT_NUMBERS:
            break

    def density(factor: float) -> float:
        for one in noises:
            one.set(factor)
        found = joined([density_at(*one) for one in kept])
        return found.mean + pull(factor, len(found.total), noises[0].expected)

    found = highest(density)
    for one in noises:
        one.set(1.0)
    return found


def highest(density: Callable[[float], float]) -> float:
    """The factor with the highest density: on beyond the first ones while the last is best, then by golden sections.

    Example:
        >>> round(highest(lambda factor: -log(factor / 37.0) ** 2), 2)
        37.0
    """
    tried = {factor: density(factor) for factor in FIRST}
    while (last := max(tried)) < LARGEST and max(tried, key=lambda one: tried[one]) == last:
        tried[2 * last] = density(2 * last)
    ordered = sorted(tried)
    place = ordered.index(max(ordered, key=lambda one: tried[one]))
    low, high = log(ordered[max(0, place - 1)]), log(ordered[min(len(ordered) - 1, place + 1)])
    ratio = (sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = density(exp(a)), density(exp(b))
    while high - low > EXACT:
        if at_a >= at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = density(exp(a))
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = density(exp(b))
    return exp((low + high) / 2)
