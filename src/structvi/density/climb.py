"""Up the log density itself, from several starts at once: one gradient a step, where an ELBO takes many draws.

Where a climb ends is no fit, but near enough for one to begin: with the covariance that the steps have learned (the
inverse Hessian of BFGS), as in Pathfinder (Zhang, Carpenter, Gelman and Vehtari, JMLR 23:306, 2022).
"""

from contextlib import suppress
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from ..models.target import Target
from .coordinates import Limit
from .newton import triangular
from .rows import ascend

#: a climb ends where four steps gain less than this many nats
ROUGH = 0.2
#: nats that log p falls between two hills
VALLEY = 1.0
#: steps of a climb
STEPS = 60
#: and points after so many steps that come into question beside its end: a climb may go past the mass, as in a funnel
EARLIER = (0, 4, 8, 12, 16, 24, 32, 48)
#: last steps from which the covariance is learned
LEARNED = 40


class Climbed(NamedTuple):
    """A point of a climb: where, its log p, and a root of the inverse Hessian that the steps have met, a covariance."""

    theta: Tensor  # [P]
    value: float
    root: Tensor  # [P, P], lower triangular


def climb(target: Target, starts: Tensor) -> list[list[Climbed]]:
    """From the starts [n, P] up to where log p is no longer steep: of each hill the end and points before it.

    The highest hill comes first. There are none where log p has no value at any start.

    Example:
        >>> from structvi import LogDensity, Parameters
        >>> space = Parameters({"z": torch.zeros(2, dtype=torch.float64)})
        >>> target = LogDensity(lambda p: -0.5 * (p["z"] - 30).square().sum(), space)
        >>> ((end, *_),) = climb(target, space.initial.unsqueeze(0))
        >>> end.theta.round().tolist(), end.root.round(decimals=3).tolist()
        ([30.0, 30.0], [[1.0, 0.0], [0.0, 1.0]])
    """
    space = target.space
    origin, scale = space.initial.double(), space.scale.double()
    path: list[tuple[Tensor, Tensor, Tensor]] = []

    def function(z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.detach().requires_grad_()
        value = target.log_joint((origin + scale * z).to(space.initial))
        (gradient,) = torch.autograd.grad(value.sum(), z)
        return value.detach().double(), gradient

    z = (starts.double() - origin) / scale
    with suppress(Limit):
        ascend(function, z, torch.zeros_like(z), tolerance=ROUGH, iterations=STEPS, path=path)
    ends = []
    for row in range(len(z) if path else 0):
        points, values, gradients = (torch.stack([step[i][row] for step in path]) for i in range(3))
        if values[-1] > -inf:
            last = int((points.diff(dim=0) != 0).any(-1).sum())
            ends.append([])
            for at in (last, *(step for step in EARLIER if step < last)):
                root = inverse_hessian_root(points[: at + 1], -gradients[: at + 1])
                ends[-1].append(Climbed(origin + scale * points[at], values[at].item(), scale.unsqueeze(-1) * root))
    return _hills(target, sorted(ends, key=lambda end: -end[0].value))


def _hills(target: Target, ends: list[list[Climbed]]) -> list[list[Climbed]]:
    """One end for each hill: two are on the same where log p halfway is not below both."""
    kept: list[list[Climbed]] = []
    for end in ends:
        halfway = [(end[0].theta + other[0].theta) / 2 for other in kept]
        try:
            with torch.no_grad():
                values = target.log_joint(torch.stack(halfway).to(target.space.initial)) if halfway else ()
        except Limit:
            values = (inf,)
        if not any(value > end[0].value - VALLEY for value in values):
            kept.append(end)
    return kept


def inverse_hessian_root(points: Tensor, gradients: Tensor) -> Tensor:
    """Of a function to be minimised, by BFGS, from points along a way and the gradients there: [n, P] → [P, P].

    A lower triangular root of H; from H = I sᵀy/yᵀy, H ← (I − syᵀ/sᵀy) H (I − ysᵀ/sᵀy) + ssᵀ/sᵀy for each step s and
    the change y of the gradient.
    """
    P = points.shape[-1]
    inverse, begun = torch.eye(P, dtype=points.dtype, device=points.device), False
    pairs = [(s, y) for s, y in zip(points.diff(dim=0), gradients.diff(dim=0), strict=True) if s @ y > 0]
    for s, y in pairs[-LEARNED:]:
        product = s @ y
        if product <= 1e-10 * s.norm() * y.norm():
            continue
        if not begun:
            inverse, begun = inverse * product / (y @ y), True
        Hy = inverse @ y
        inverse = inverse + torch.outer(s, s) * (1 + y @ Hy / product) / product
        inverse = inverse - (torch.outer(s, Hy) + torch.outer(Hy, s)) / product
    if not begun:  # no step: a unit of the space, or less where it is steep
        inverse = inverse / max(1.0, float(gradients[-1].norm()))
    if not bool(inverse.isfinite().all()):
        inverse = 1e-6 * torch.eye(P, dtype=points.dtype, device=points.device)
    values, vectors = torch.linalg.eigh(inverse)  # rounding may have left it indefinite
    return triangular(vectors * values.clamp(min=max(1e-14 * float(values[-1]), 1e-100)).sqrt())
