"""Newton's method for the ELBO of a normal, in the space of normals.

At draws of q = N(m, LLᵀ), θ = m + Lz with z of exact second moments, gradients g of log p(θ) by z give the quadratic
that log p is on average under q: its gradient b = E g and, by Stein's identity, its Hessian −A, A = −E g zᵀ. The normal
that is best for the quadratic, N(m + L A⁻¹b, L A⁻¹ Lᵀ), is the natural gradient's full step; a smaller family takes its
best approximation of that normal. Where b = 0 and q is its own best approximation, q is an optimum of the ELBO. On a
quadratic log density one step is enough.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..models.target import Target
from .gaussian import SINGULAR, Normal, half_log_det, is_far, is_singular
from .lowrank import WIDER
from .targets import Limit

#: steps that are tried one after the other, each half as long as the one before
TRIES = 6
#: least curvature that is believed, relative to q's (its inverse the greatest), in a whole step and in a shorter one
LEAST, CAUTIOUS = 1e-8, 0.1
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


def stepped(at: Local, project: Project, share: float = 1.0, floor: float = LEAST) -> Normal:
    """Return the family's best for the quadratic, or this share of the way: precision λ^share along each direction."""
    values, vectors = torch.linalg.eigh(at.curvature)
    values = torch.where(values > 0, values.clamp(floor, 1 / floor), WIDER)
    step = vectors @ ((vectors.mT @ at.slope) / values)
    mean, root = at.normal.mean, at.normal.root
    new = Normal(mean + share * (root @ step), root @ (vectors * values ** (-share / 2)) @ vectors.mT)
    return aligned(project(new), root)


def part_of_the_way(at: Local, project: Project, share: float) -> Normal:
    """Return this share of the way to the family's best for the quadratic: an optimum stays where it is."""
    if share == 1 or at.normal.form is None:
        return stepped(at, project, share)
    whole, mean, root = stepped(at, project), at.normal.mean, at.normal.root
    ratio = torch.linalg.solve(root, whole.root)  # symmetric and positive
    values, vectors = torch.linalg.eigh((ratio + ratio.mT) / 2)
    new = root @ (vectors * values.clamp(min=SINGULAR) ** share) @ vectors.mT
    return aligned(project(Normal(mean + share * (whole.mean - mean), new)), root)


def aligned(normal: Normal, root: Tensor) -> Normal:
    """Return the same normal with the root L S, S symmetric and positive, for a root L.

    Then draws move as little as they can, and to first order the ELBO on fixed draws gains what the quadratic promises:
    noise in what is not symmetric of E g zᵀ does not count.
    """
    u, s, _ = torch.linalg.svd(torch.linalg.solve(root, normal.root))
    return normal._replace(root=root @ (u * s) @ u.mT)


class Ended(NamedTuple):
    """Where the steps on one set of draws ended, and what one more would promise; settled if that is next to nothing.

    `normal` is after that step, if it is settled; `share` is the length of the step that was right at last.
    """

    at: Local
    normal: Normal
    promise: float
    settled: bool
    share: float


def ascend_normals(
    target: Target,
    start: Local,
    noise: Tensor,
    project: Project,
    tolerance: float,
    each: Callable[[Local], None],
    share: float = 1.0,
    steps: int = STEPS,
) -> Ended:
    """Return the end of steps on fixed draws, each with a higher ELBO; `share` is the length of the first one."""
    at, promises = start, []
    for _ in range(steps):
        new = stepped(at, project)
        promises.append(at.promise(new))
        if abs(promises[-1]) < tolerance:
            return Ended(at, part_of_the_way(at, project, share), promises[-1], True, share)
        if len(promises) > SLOW and promises[-1] < 1 and promises[-1] > 0.5 * promises[-1 - SLOW]:
            break
        try:
            found, share = _higher(target, at, noise, project, share)
        except Limit:
            break
        if found is None:
            break
        at = found
        each(at)
        if is_far(at.normal, target.space):
            break
    return Ended(at, at.normal, promises[-1], False, share)


def _higher(target: Target, at: Local, noise: Tensor, project: Project, share: float) -> tuple[Local | None, float]:
    """Return the first step that gains some of what it promises, and the length to try first next time."""
    while share > 0.5**TRIES:
        new = stepped(at, project, share, LEAST if share == 1 else CAUTIOUS)
        promise, found = at.promise(new), local(target, new, noise)
        if found is not None and found.elbo > at.elbo + ENOUGH_GAIN * min(promise, 1.0):
            return found, min(1.0, 2 * share) if found.elbo - at.elbo > GOOD * promise else share
        share /= 2
    return None, 1.0


def full(normal: Normal) -> Normal:
    """Return the normal itself: `Project` of the full normal."""
    return Normal(normal.mean, normal.root)
