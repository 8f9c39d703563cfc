"""Newton's method for the ELBO of a normal, in the space of normals.

At draws of q = N(m, LLᵀ), θ = m + Lz with z of exact second moments, gradients g of log p(θ) by z give the quadratic
that log p is on average under q: its gradient b = E g and, by Stein's identity, its Hessian −A, A = −E g zᵀ. The normal
that is best for the quadratic, N(m + L A⁻¹b, L A⁻¹ Lᵀ), is the natural gradient's full step; a smaller family takes its
best approximation of that normal. If b = 0 and q is its own best approximation, then q is an optimum of the ELBO. On a
quadratic log density one step is enough.
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from ..models.target import Target
from .gaussian import SINGULAR, Normal, half_log_det, is_far, is_singular
from .targets import Limit

#: steps that are tried one after the other: least curvature that is believed, relative to q's (its inverse the
#: greatest), and the share of the way that is gone
TRIES = ((1e-8, 1.0), (1e-2, 1.0), (1e-1, 0.5), (0.5, 0.25), (0.5, 0.1), (0.5, 0.03))
#: least and greatest precision, relative to q's, where the average curvature is negative: q is made wider
WIDER = (1e-2, 0.25)
#: share of the gain promised that a step must bring
ENOUGH_GAIN = 1e-2
#: share above which the quadratic was right and the next step may be longer
GOOD = 0.75
#: steps over which the promise must halve
SLOW = 4
#: steps on one set of draws
STEPS = 100

#: the family's best approximation of a normal
Project = Callable[[Normal], Normal]


class Local(NamedTuple):
    """The ELBO at draws of q, and the quadratic that log p is on average, in coordinates z of q."""

    normal: Normal
    elbo: float
    value: float  # E log p
    slope: Tensor  # b [P]
    curvature: Tensor  # A [P, P], symmetric

    def promise(self, new: Normal) -> float:
        """Return the nats that the quadratic gains from here to another normal."""
        step = torch.linalg.solve(self.normal.root, new.mean - self.normal.mean)
        root = torch.linalg.solve(self.normal.root, new.root)
        quadratic = self.slope @ step - 0.5 * step @ self.curvature @ step
        spread = (self.curvature @ root * root).sum() - self.curvature.diagonal().sum()
        return (quadratic - 0.5 * spread).item() + half_log_det(root)


def local(target: Target, normal: Normal, noise: Tensor) -> Local | None:
    """Return what draws m + Lz tell, for the rows z of noise [S, P].

    None where log p or its gradient is not finite at one of them, and of a normal that rounding leaves no digits of.
    """
    if is_singular(normal.root):
        return None
    z = noise.clone().requires_grad_()
    theta = normal.mean + z @ normal.root.mT
    value = target.log_joint(theta.to(target.space.initial))
    (gradient,) = torch.autograd.grad(value.sum(), z)
    if not bool(value.isfinite().all() and gradient.isfinite().all()):
        return None
    product = gradient.mT @ noise / len(noise)
    mean = value.detach().double().mean().item()
    return Local(normal, mean + normal.entropy(), mean, gradient.mean(0), -(product + product.mT) / 2)


def stepped(at: Local, project: Project, floor: float = TRIES[0][0], share: float = 1.0) -> Normal:
    """Return the family's best for the quadratic, or this share of the way: precision λ^share along each direction."""
    values, vectors = torch.linalg.eigh(at.curvature)
    values = torch.where(values > 0, values.clamp(floor, 1 / floor), values.abs().clamp(*WIDER).clamp(min=floor))
    step = vectors @ ((vectors.mT @ at.slope) / values)
    mean, root = at.normal.mean, at.normal.root
    new = Normal(mean + share * (root @ step), root @ (vectors * values ** (-share / 2)) @ vectors.mT)
    return aligned(project(new), root)


def part_of_the_way(at: Local, project: Project, floor: float, share: float) -> Normal:
    """Return this share of the way to the family's best for the quadratic: an optimum stays where it is."""
    if share == 1 or at.normal.form is None:
        return stepped(at, project, floor, share)
    whole, mean, root = stepped(at, project, floor), at.normal.mean, at.normal.root
    ratio = torch.linalg.solve(root, whole.root)  # symmetric and positive
    values, vectors = torch.linalg.eigh((ratio + ratio.mT) / 2)
    new = root @ (vectors * values.clamp(min=SINGULAR) ** share) @ vectors.mT
    return aligned(project(Normal(mean + share * (whole.mean - mean), new)), root)


def aligned(normal: Normal, root: Tensor) -> Normal:
    """Return the same normal with the root L S, S symmetric and positive, for a root L.

    Then draws move as little as they can. To first order the ELBO on fixed draws gains the quadratic's promise, for
    noise in the antisymmetric part of E g zᵀ does not count.
    """
    u, s, _ = torch.linalg.svd(torch.linalg.solve(root, normal.root))
    return normal._replace(root=root @ (u * s) @ u.mT)


class Ended(NamedTuple):
    """The end of the steps on one set of draws, and the promise of one more; settled if that is next to nothing.

    `normal` is after that step, if it is settled; `first` is the step of `TRIES` that was right at last.
    """

    at: Local
    normal: Normal
    promise: float
    settled: bool
    first: int


def ascend_normals(
    target: Target,
    start: Local,
    noise: Tensor,
    project: Project,
    tolerance: float,
    each: Callable[[Local], None],
    first: int = 0,
    steps: int = STEPS,
) -> Ended:
    """Return the end of steps on fixed draws, each with a higher ELBO; `first` of `TRIES` to begin with."""
    at, promises = start, []
    for _ in range(steps):
        new = stepped(at, project)
        promises.append(at.promise(new))
        if abs(promises[-1]) < tolerance:
            return Ended(at, part_of_the_way(at, project, *TRIES[first]), promises[-1], True, first)
        if len(promises) > SLOW and promises[-1] < 1 and promises[-1] > 0.5 * promises[-1 - SLOW]:
            break
        try:
            found, first = _higher(target, at, noise, project, first)
        except Limit:
            break
        if found is None:
            break
        at = found
        each(at)
        if is_far(at.normal, target.space):
            break
    return Ended(at, at.normal, promises[-1], False, first)


def _higher(target: Target, at: Local, noise: Tensor, project: Project, first: int) -> tuple[Local | None, int]:
    """Return the first step that gains some of what it promises, and which to try first next time."""
    before = inf
    for index in range(first, len(TRIES)):
        new = stepped(at, project, *TRIES[index])
        promise = at.promise(new)
        if promise == before:  # the same step
            continue
        before, found = promise, local(target, new, noise)
        if found is not None and found.elbo > at.elbo + ENOUGH_GAIN * min(promise, 1.0):
            return found, max(0, index - 1) if found.elbo - at.elbo > GOOD * promise else index
    return None, 0


def full(normal: Normal) -> Normal:
    """Return the normal itself: `Project` of the full normal."""
    return Normal(normal.mean, normal.root)
