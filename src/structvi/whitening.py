"""A target that is counted, a target in other coordinates, θ = shift + root z, and Gaussian families in these."""

from typing import TypeVar

import torch
from torch import Tensor

from .families import Family, FullNormal, MeanField
from .families.low_rank import LowRankFamily
from .parameters import Parameters
from .targets import Target

#: the families whose members stay in the family when coordinates are scaled
Movable = MeanField | LowRankFamily | FullNormal
F = TypeVar("F", bound=Movable)

#: how large a random factor starts, relative to scales of one
FACTOR = 0.1


class Limit(Exception):
    """No evaluation is left."""


class Counted:
    """A target that counts the points at which its log density is asked for."""

    def __init__(self, target: Target, limit: float):
        self.target, self.space, self.limit = target, target.space, limit
        self.evaluations, self.exhausted = 0, False

    def log_joint(self, theta: Tensor, batch: object = None) -> Tensor:
        if self.evaluations + len(theta) > self.limit:
            raise Limit
        self.evaluations += len(theta)
        return self.target.log_joint(theta)


class Moved:
    """A target in other coordinates, θ = shift + root z: [P], and [P, P] lower triangular or [P] for a diagonal."""

    def __init__(self, target: Target, shift: Tensor, root: Tensor):
        self.target, self.shift, self.root = target, shift, root
        self.space = target.space.at(torch.zeros_like(shift))
        self.log_det = (root if root.ndim == 1 else root.diagonal()).log().sum()

    def theta(self, z: Tensor) -> Tensor:
        return self.shift + (z * self.root if self.root.ndim == 1 else z @ self.root.mT)

    def log_joint(self, theta: Tensor, batch: object = None) -> Tensor:
        """At z = `theta`."""
        return self.target.log_joint(self.theta(theta)) + self.log_det


class NormalTarget:
    """log N(θ; mean, (LLᵀ)⁻¹) but for a constant, with root L: a target that costs no evaluation."""

    def __init__(self, space: Parameters, mean: Tensor, root: Tensor):
        self.space, self.mean, self.root = space, mean, root

    def log_joint(self, theta: Tensor, batch: object = None) -> Tensor:
        return -0.5 * ((theta - self.mean) @ self.root).square().sum(-1)


def standardising(target: Target, mean_field: Family) -> Moved:
    """Coordinates in which the mean field is N(0, I)."""
    density = mean_field()
    return Moved(target, density.mean.detach(), density.variance.detach().sqrt())


def standard(recipe: F, space: Parameters, generator: torch.Generator | None) -> F:
    """The recipe bound, at N(0, I) or, where it has a factor, near it."""
    q = recipe.bind(space, generator)
    with torch.no_grad():
        q.mean.zero_()
        if not isinstance(q, FullNormal):
            q.log_scale.zero_()
        if not isinstance(q, MeanField):
            q.unit.fill_(1.0)
        if isinstance(q, LowRankFamily):
            q.start_factor(generator, FACTOR)
    return q


def principal(precision: Tensor, rank: int, of_precision: bool) -> Tensor:
    """The best factor beside scales of one: [P, P] → [P, K].

    With λ, v the eigenvalues and vectors of the target's precision, Σ = I + FFᵀ has the variance 1/λ along v for
    F = v√(1/λ − 1), worth most for the least λ; Λ = I + FFᵀ has λ for F = v√(λ − 1), for the greatest.
    """
    values, vectors = torch.linalg.eigh(precision)  # ascending
    if of_precision:
        values, vectors = values.flip(0), vectors.flip(1)
    values, vectors = values[:rank], vectors[:, :rank]
    return vectors * ((values if of_precision else 1 / values) - 1).clamp(min=FACTOR**2).sqrt()


def to_theta(q: Family, place: Moved) -> None:
    """Make q, in the place's coordinates, what it is in θ."""
    assert isinstance(q, Movable)
    q.space = place.target.space
    with torch.no_grad():
        q.mean.copy_(place.theta(q.mean))
        if isinstance(q, FullNormal):
            root = (torch.diag(place.root) if place.root.ndim == 1 else place.root) @ q.forward().cholesky
            q.unit.copy_(root.diagonal())
            rows, columns = torch.tril_indices(len(root), len(root), offset=-1)
            q.lower.copy_((root / q.unit.unsqueeze(-1))[rows, columns])
            q.log_diagonal.zero_()
            return
        q.log_scale.add_(place.root.log())
        if isinstance(q, LowRankFamily):
            q.unit.mul_(place.root)
