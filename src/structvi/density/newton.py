"""Newton's method for the ELBO of a normal, in the space of normals.

At draws of q = N(m, LLᵀ), θ = m + Lz with z of exact second moments, gradients g of log p(θ) by z give the quadratic
that log p is on average under q: its gradient b = E g and, by Stein's identity, its Hessian −A, A = −E g zᵀ. The normal
that is best for the quadratic, N(m + L A⁻¹b, L A⁻¹ Lᵀ), is the natural gradient's full step; a smaller family takes its
best approximation of that normal. Where b = 0 and q is its own best approximation, q is an optimum of the ELBO. On a
quadratic log density one step is enough.
"""

from collections.abc import Callable
from math import inf, log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from ..models.target import Target
from ..parameters import Parameters
from .coordinates import Limit
from .units import NARROW

#: steps that are tried one after the other: least curvature that is believed, relative to q's (its inverse the
#: greatest), and the share of the way that is gone
TRIES = ((1e-8, 1.0), (1e-2, 1.0), (1e-1, 0.5), (0.5, 0.25), (0.5, 0.1), (0.5, 0.03))
#: where the average curvature is negative q is made wider: its precision by so much, at most and at least
WIDER = (1e-2, 0.25)
#: a normal this many scales of its space wide or away is followed no further
FAR = 1e8
#: a direction narrower than this, beside the others, is lost in rounding
SMALLEST = 1e-14
#: share of the gain promised that a step must bring
ENOUGH_GAIN = 1e-2
#: share above which the quadratic was right and the next step may be longer
GOOD = 0.75
#: steps on one set of draws; they are given up as slow where the promise has not halved over the last of them
SLOW = 4
STEPS = 100


class Normal(NamedTuple):
    """N(mean, root rootᵀ), in float64; `state` is what a family has to be to be that normal."""

    mean: Tensor  # [P]
    root: Tensor  # [P, P]
    state: tuple[Tensor, ...] = ()

    def entropy(self) -> float:
        return half_log_det(self.root) + 0.5 * len(self.mean) * (1 + log(2 * pi))

    def precision(self) -> Tensor:
        half = torch.linalg.inv(self.root)
        return half.mT @ half


#: the family's best approximation of a normal
Project = Callable[[Normal], Normal]


class Local(NamedTuple):
    """What draws of q tell: ELBO, E log p, and the quadratic that log p is on average, in coordinates z of q."""

    normal: Normal
    elbo: float
    value: float
    slope: Tensor  # b [P]
    curvature: Tensor  # A [P, P], symmetric
    #: nats that noise of the draws alone would promise: what is not symmetric in E g zᵀ has no other source
    noise: float

    def promise(self, new: Normal) -> float:
        """Nats that the quadratic gains from here to another normal."""
        step = torch.linalg.solve(self.normal.root, new.mean - self.normal.mean)
        root = torch.linalg.solve(self.normal.root, new.root)
        quadratic = self.slope @ step - 0.5 * step @ self.curvature @ step
        spread = (self.curvature @ root * root).sum() - self.curvature.diagonal().sum()
        return (quadratic - 0.5 * spread).item() + half_log_det(root)


def half_log_det(root: Tensor) -> float:
    """½ log det of root rootᵀ."""
    return torch.linalg.slogdet(root).logabsdet.item()


def triangular(root: Tensor) -> Tensor:
    """The lower triangular L with LLᵀ = root rootᵀ and a positive diagonal: [P, n] → [P, P]."""
    R = torch.linalg.qr(root.mT).R
    return (R * torch.where(R.diagonal() < 0, -1.0, 1.0).unsqueeze(-1)).mT


def is_singular(root: Tensor) -> bool:
    """Whether a direction is narrower than rounding beside the others, in units of each number's own spread."""
    rows = root.norm(dim=-1, keepdim=True)
    if not bool((rows > 0).all() and rows.isfinite().all()):
        return True
    factors, _, failed = torch.linalg.lu_factor_ex(root / rows)
    pivots = factors.diagonal().abs()
    return bool(failed) or float(pivots.min()) < SMALLEST * float(pivots.max())


def is_far(normal: Normal, space: Parameters) -> bool:
    """Whether it has left or outgrown the space by more than a posterior does, or shrunk, or is no normal at all."""
    scale, wide = space.scale.double(), normal.root.norm(dim=-1)
    reach = torch.maximum((normal.mean - space.initial.double()).abs(), wide) / scale
    return not bool((reach < FAR).all()) or bool((wide < NARROW * scale).any())


def local(target: Target, normal: Normal, noise: Tensor) -> Local | None:
    """At draws m + Lz for the rows z of noise [S, P].

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
    skew = 0.25 * (product - product.mT).square().sum().item()
    curvature = -(product + product.mT) / 2
    return Local(normal, mean + normal.entropy(), mean, gradient.mean(0), curvature, 0.25 * skew)


def stepped(at: Local, project: Project, floor: float = TRIES[0][0], share: float = 1.0) -> Normal:
    """The family's best for the quadratic, or this share of the way there: precision λ^share along each direction."""
    values, vectors = torch.linalg.eigh(at.curvature)
    values = torch.where(values > 0, values.clamp(floor, 1 / floor), values.abs().clamp(*WIDER).clamp(min=floor))
    step = vectors @ ((vectors.mT @ at.slope) / values)
    mean, root = at.normal.mean, at.normal.root
    new = Normal(mean + share * (root @ step), root @ (vectors * values ** (-share / 2)) @ vectors.mT)
    return aligned(project(new), root)


def averaged(at: Local, project: Project, share: float) -> Normal:
    """The family's best for precision (1 − ρ)I + ρA, and ρ of the way of the mean.

    An optimum of any family stays where it is, for its condition is linear in A, and so do noisy ones on average.
    Negative eigenvalues down to −1 are believed, those of noise.
    """
    values, vectors = torch.linalg.eigh(at.curvature)
    values = (1 + share * (values - 1)).clamp(min=max(1 - 2 * share, (1 - share) / 2, 1e-8))
    step = vectors @ ((vectors.mT @ at.slope) * share / values)
    mean, root = at.normal.mean, at.normal.root
    return aligned(project(Normal(mean + root @ step, root @ (vectors * values.rsqrt()) @ vectors.mT)), root)


def part_of_the_way(at: Local, project: Project, floor: float, share: float) -> Normal:
    """This share of the way to the family's best for the quadratic: of a smaller family its optimum stays where it is.

    (Its best for this share of the way to the normal that is best for the quadratic would not: powers of A move it.)
    """
    if share == 1 or not at.normal.state:
        return stepped(at, project, floor, share)
    whole, (mean, root) = stepped(at, project, floor), at.normal[:2]
    ratio = torch.linalg.solve(root, whole.root)  # symmetric and positive
    values, vectors = torch.linalg.eigh((ratio + ratio.mT) / 2)
    root = root @ (vectors * values.clamp(min=SMALLEST) ** share) @ vectors.mT
    return aligned(project(Normal(mean + share * (whole.mean - mean), root)), at.normal.root)


def aligned(normal: Normal, root: Tensor) -> Normal:
    """The same normal with the root L S, S symmetric and positive, for a root L.

    Then draws move as little as they can, and to first order the ELBO on fixed draws gains what the quadratic promises:
    noise in what is not symmetric of E g zᵀ does not count.
    """
    u, s, _ = torch.linalg.svd(torch.linalg.solve(root, normal.root))
    return normal._replace(root=root @ (u * s) @ u.mT)


class Ended(NamedTuple):
    """Where the steps on one set of draws ended, and what one more would promise; settled if that is next to nothing.

    `normal` is after that step, where it is settled; `first` is the step of `TRIES` that was right at last.
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
    """Steps on draws that stay the same, each with a higher ELBO than the one before; `first` of `TRIES` to begin."""
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
    """The first step from here that gains some of what it promises, and which to try first next time."""
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
    """`Project` of the full normal."""
    return normal
