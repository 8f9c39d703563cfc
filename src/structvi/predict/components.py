"""The distributions p(t | y_s) that a predictive is made of: their parameters, in range, mapped and put together."""

import copy
from collections.abc import Callable, Sequence
from math import sqrt

import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    Laplace,
    Normal,
    Poisson,
    StudentT,
)

from ..models.likelihoods.student_t import StudentTNoise

#: What each distribution is made of: to index it, to move its axes, to change its dtype.
_PARAMETERS: dict[type, tuple[str, ...]] = {
    Normal: ("loc", "scale"),
    Laplace: ("loc", "scale"),
    StudentT: ("df", "loc", "scale"),
    StudentTNoise: ("df", "loc", "scale"),
    Bernoulli: ("logits",),
    Poisson: ("rate",),
    Categorical: ("logits",),
}
HALF = (torch.float16, torch.bfloat16)


def at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def in_range(d: Normal) -> Normal:
    """A normal whose standard deviations are kept where their squares neither vanish nor overflow.

    In float32 a head that gives log σ = ±200 has no other.
    """
    number = torch.finfo(d.scale.dtype)
    # what all elements share is looked at once, and stays shared
    once = d.scale[tuple(slice(0, 1) if step == 0 else slice(None) for step in d.scale.stride())]
    changed = copy.copy(d)
    changed.scale = once.clamp(sqrt(number.tiny), sqrt(number.max) / 4).expand_as(d.scale)
    return changed


def concatenated(parts: Sequence[Distribution]) -> Distribution:
    """Distributions of one type along their first axis, the draws."""
    first = parts[0]
    if isinstance(first, Independent):
        inner = concatenated([part.base_dist for part in parts])  # pyright: ignore
        return Independent(inner, first.reinterpreted_batch_ndims, validate_args=False)
    names = iter(_PARAMETERS.get(type(first), ()))
    return mapped(first, lambda x: torch.cat([getattr(part, name) for part in parts]) if (name := next(names)) else x)


def mapped(d: Distribution, function: Callable[[Tensor], Tensor]) -> Distribution:
    """The distribution with a function applied to its parameters."""
    if isinstance(d, Independent):
        return Independent(mapped(d.base_dist, function), d.reinterpreted_batch_ndims, validate_args=False)
    if type(d) not in _PARAMETERS:
        known = ", ".join(kind.__name__ for kind in _PARAMETERS)
        raise TypeError(f"p(t | y) is {type(d).__name__}; this is known for {known}, and Independent of those")
    return type(d)(**{name: function(getattr(d, name)) for name in _PARAMETERS[type(d)]}, validate_args=False)  # pyright: ignore
