"""A target that is counted, a target in other coordinates, θ = shift + root z, and families in these."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from ..families.family import Family
from ..models.target import Target
from ..parameters import Parameters
from .gradient import checked_log_joint

F = TypeVar("F", bound=Family)

#: relative difference that rounding may make between two values of a log density at one point
SAME = 1e-4
#: scales of the space beyond which a distribution's refusal of a value is taken for zero density
NEAR = 100.0
RANDOM = (
    "the log density is random, {:.6g} and {:.6g} at the same point: make its random numbers once, before the fit, or "
    "give the data in batches, by a loader"
)


class Limit(Exception):
    """No evaluation is left."""


class Counted:
    """A target that counts the points at which its log density is asked for; the first answer is looked at.

    So many of the first points are asked for `twice`, and another where there was only one: a log density that is
    another each time has no maximum. (At zeros what multiplies them may be random and not be seen.)
    """

    def __init__(self, target: Target, limit: float, twice: int = 0):
        self.target, self.space, self.limit = target, target.space, limit
        self.evaluations, self.exhausted, self.known = 0, False, False
        #: whether a search ended at a part of the limit
        self.shortened = False
        self.twice = twice
        self._asked = 2 if twice else 0  # times that points may still be asked for once more
        #: two values at one point, where they are not the same
        self.differ: tuple[float, float] | None = None

    def log_joint(self, theta: Tensor, batch: object = None) -> Tensor:
        if self.evaluations + len(theta) > self.limit:
            self.exhausted = True
            raise Limit
        self.evaluations += len(theta)
        value = self._value(theta) if self.known else checked_log_joint(self.target, theta)
        self.known = True
        if self._asked and self.evaluations < self.limit:
            self._ask_again(theta.detach()[-self.twice :], value.detach()[-self.twice :], last=len(theta) > 1)
        return value

    def _value(self, theta: Tensor) -> Tensor:
        """[S]. Far away exp may be 0 or ∞, which distributions refuse: there is no density there, −∞."""
        try:
            return self.target.log_joint(theta)
        except ValueError:
            away = (theta.detach() - self.space.initial).abs() / self.space.scale
            near = (away < NEAR).all(-1).nonzero().squeeze(-1)
            if len(near) == len(theta):
                raise
            none = theta.sum(-1) * 0 - torch.inf
            return none.index_copy(0, near, self.target.log_joint(theta[near])) if len(near) else none

    @torch.no_grad()
    def _ask_again(self, theta: Tensor, value: Tensor, last: bool) -> None:
        self.evaluations += len(theta)
        again = self.target.log_joint(theta)
        for one, other in zip(value.tolist(), again.tolist(), strict=True):
            if abs(one - other) > SAME * (1 + abs(one)):
                self.differ = (one, other)
        self._asked = 0 if last or self.differ else self._asked - 1

    @contextmanager
    def half(self) -> Iterator[None]:
        """Within it, half of the evaluations that are left. After it there are others: it is not `exhausted`."""
        with self.part(0.5):
            yield

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """Within it, this share of the evaluations that are left."""
        limit = self.limit
        self.limit = self.evaluations + share * (limit - self.evaluations)
        try:
            yield
        finally:
            self.limit = limit
            self.shortened, self.exhausted = self.shortened or self.exhausted, False


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


def standard(recipe: F, space: Parameters, generator: torch.Generator | None) -> F:
    """The recipe bound, at N(0, I) or, where it has a factor, near it."""
    q = recipe.bind(space, generator)
    q.standardise(generator)
    return q


def to_theta(q: Family, place: Moved) -> None:
    """Make q, in the place's coordinates, what it is in θ."""
    q.space = place.target.space
    q.change_coordinates(place.shift, place.root)
