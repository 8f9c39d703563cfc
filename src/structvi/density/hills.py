"""How many hills did the starts of a fit end on? One normal has one of them."""

from collections.abc import Callable

import torch
from torch import Tensor

from .newton import Normal

#: nats below the best at which a hill still counts, standard deviations that make two, and nats that log p must fall
#: between them
COUNTS, APART, VALLEY = 3.0, 3.0, 1.0

NOTE = (
    "the starts ended on {hills} hills of nearly the same mass, and this family is on one of them: "
    'Mixture(.., components="auto") looks for all'
)


def hills(fits: list[tuple[float, Normal]], log_p: Callable[[Tensor], Tensor]) -> int:
    """Of ELBOs and normals those that count: far from each other in standard deviations of both, a valley between.

    Example:
        >>> one = Normal(torch.zeros(2), torch.eye(2))
        >>> two = one._replace(mean=torch.full((2,), 9.0))
        >>> hills([(-1.0, one), (-1.2, two), (-1.0, one)], lambda theta: (theta - 4.5).square().sum(-1))
        2
    """
    kept: list[Normal] = []
    best = max((elbo for elbo, _ in fits), default=0.0)
    for elbo, normal in sorted(fits, key=lambda fit: -fit[0]):
        if elbo > best - COUNTS and all(_are_two(one, normal, log_p) for one in kept):
            kept.append(normal)
    return len(kept)


def _are_two(one: Normal, other: Normal, log_p: Callable[[Tensor], Tensor]) -> bool:
    way = other.mean - one.mean
    if min(torch.linalg.solve(normal.root, way).norm().item() for normal in (one, other)) < APART:
        return False
    first, halfway, last = log_p(torch.stack([one.mean, one.mean + way / 2, other.mean])).tolist()
    return halfway < min(first, last) - VALLEY
