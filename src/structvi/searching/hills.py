"""How many hills did the starts of a fit end on? One normal has one of them."""

import torch

from .newton import Normal

#: nats below the best at which a hill still counts, and standard deviations that make two
COUNTS, APART = 3.0, 3.0

NOTE = (
    "the starts ended on {hills} hills of nearly the same mass, and this family is on one of them: "
    'Mixture(.., components="auto") looks for all'
)


def hills(fits: list[tuple[float, Normal]]) -> int:
    """Of ELBOs and normals those that count, each far from the others in standard deviations of both.

    Example:
        >>> one = Normal(torch.zeros(2), torch.eye(2))
        >>> hills([(-1.0, one), (-1.2, one._replace(mean=torch.full((2,), 9.0))), (-1.0, one)])
        2
    """
    kept: list[Normal] = []
    best = max((elbo for elbo, _ in fits), default=0.0)
    for elbo, normal in sorted(fits, key=lambda fit: -fit[0]):
        if elbo > best - COUNTS and all(min(_apart(one, normal), _apart(normal, one)) > APART for one in kept):
            kept.append(normal)
    return len(kept)


def _apart(one: Normal, other: Normal) -> float:
    return torch.linalg.solve(one.root, other.mean - one.mean).norm().item()
