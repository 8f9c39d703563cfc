"""Single maxima of a function of rows: Newton's method to the top, and the normal that has its curvature."""

from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from .rows import RowFunction

#: iterations of Newton's method, and the nats that a step must promise for another
ITERATIONS, PROMISE = 30, 1e-9
#: a step is shortened so many times to a third
SHORTER = 12
#: parabolas agree within so many standard deviations and nats; a value so many nats off is none of theirs
AGREE, HOLE = 0.02, 1.0
#: least curvature of a maximum, relative to the greatest; what is flatter has no normal
FLAT = 1e-12
#: a normal is a mode's within so many standard deviations of its curvature, times √P, and so many times as wide at most
AT, WIDER = 0.5, 3.0


class Peak(NamedTuple):
    """A maximum, and N(at, root rootᵀ) with its curvature."""

    at: Tensor  # [P]
    value: float
    root: Tensor  # [P, P], lower triangular

    @property
    def log_mass(self) -> float:
        """log ∫ exp of the parabola through the maximum."""
        return self.value + len(self.at) / 2 * log(2 * pi) + self.root.diagonal().log().sum().item()

    def distance(self, z: Tensor) -> Tensor:
        """In standard deviations: [n, P] → [n]."""
        return torch.linalg.solve_triangular(self.root, (z - self.at).mT, upper=False).norm(dim=0)


def with_mass(peak: Peak, log_mass: float) -> Peak:
    """The peak as high as makes its mass this one."""
    return peak._replace(value=peak.value + log_mass - peak.log_mass)


def is_at(mode: Peak, mean: Tensor, covariance: Tensor) -> bool:
    """Whether a normal is at the mode and about as wide: of a mode with heavy tails it is wider than the curvature, of
    a skewed one of many numbers its mean is aside."""
    if float(mode.distance(mean.unsqueeze(0))) > max(1.0, AT * len(mode.at) ** 0.5):
        return False
    wider = (covariance.logdet() / 2 - mode.root.diagonal().log().sum()).item()
    return wider < len(mode.at) * log(WIDER)


def settle(function: RowFunction, z: Tensor, unit: Tensor) -> Peak | None:
    """The maximum above z [P], by Newton's method; None where there is none, or none with a curvature.

    Hessians are differences of gradients, ± a small part of `unit` [P, P] (columns), then of the normal of the step
    before: 2P + 1 points each. Eigenvalues of the wrong sign are turned, so that saddles are left. Where the function
    has no value at the top itself, the maximum is that of the parabola that two points around agree on.

    Example:
        >>> bowl = lambda z: (-0.5 * (z - 3).square().sum(-1) / 4, -(z - 3) / 4)
        >>> peak = settle(bowl, torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
        >>> peak.at.round(decimals=3).tolist(), peak.root.diagonal().round(decimals=3).tolist()
        ([3.0, 3.0], [2.0, 2.0])
    """
    value, before = function(z.unsqueeze(0))[0].item(), None
    for _ in range(ITERATIONS):
        if not -torch.inf < value < torch.inf:
            return None
        gradient, hessian = _derivatives(function, z, unit)
        if not bool(hessian.isfinite().all() and gradient.isfinite().all()):
            return None
        values, vectors = torch.linalg.eigh(-hessian)  # in units of `unit`
        size = values.abs().max()
        if size == 0:
            return None
        curvature = values.abs().clamp(min=FLAT * size)
        along = vectors.mT @ gradient
        step = unit @ (vectors @ (along / curvature))
        promise = (along.square() / curvature).sum().item() / 2
        if promise < PROMISE * (1 + abs(value) * 1e-3) and values[0] > FLAT * size:
            return _peak(z, value, unit @ (vectors * values.rsqrt()))
        if values[0] < -1e-6 * size and promise < 1e-3:  # a saddle, or a minimum: leave it
            step = unit @ vectors[:, 0] * curvature[0].rsqrt()
        top = _peak(z + step, value + promise, unit @ (vectors * curvature.rsqrt())) if values[0] > 0 else None
        if top is not None and before is not None and _agree(top, before) and _hole(function, top):
            return top
        before = top
        moved = _shortened(function, z, value, step)
        if moved is None:
            if values[0] > FLAT * size and promise < 1e-3:  # rounding hides the rest
                return _peak(z, value, unit @ (vectors * values.rsqrt()))
            return None
        z, value = moved
        unit = unit @ (vectors * curvature.rsqrt()) @ vectors.mT
    return None


def _agree(one: Peak, other: Peak) -> bool:
    """Whether two points see the same parabola."""
    if abs(one.log_mass - other.log_mass) > AGREE or float(one.distance(other.at.unsqueeze(0))) > AGREE:
        return False
    ratio = torch.linalg.solve_triangular(one.root, other.root, upper=False)
    return bool((torch.linalg.svdvals(ratio).log().abs() < AGREE).all())


def _hole(function: RowFunction, top: Peak) -> bool:
    """Whether there is no value at the top, or one far from the parabola's."""
    value = function(top.at.unsqueeze(0))[0].item()
    return not abs(value - top.value) < HOLE


def _derivatives(function: RowFunction, z: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient [P] and Hessian [P, P] by the coordinates z + unit u."""
    small = torch.finfo(z.dtype).eps ** (1 / 6)  # exact for parabolas: the longer, the less they are rounded
    P = len(z)
    rows = torch.cat([z + small * unit.mT, z - small * unit.mT, z.unsqueeze(0)])
    gradients = function(rows)[1] @ unit  # [2P + 1, P]
    hessian = (gradients[:P] - gradients[P : 2 * P]) / (2 * small)
    return gradients[-1], (hessian + hessian.mT) / 2


def _shortened(function: RowFunction, z: Tensor, value: float, step: Tensor) -> tuple[Tensor, float] | None:
    """The best of the step and shorter ones, all at once; None where none gains."""
    lengths = (1 / 3) ** torch.arange(SHORTER, dtype=z.dtype, device=z.device)
    for some in (lengths[:2], lengths[2:]):
        trial = z + some.unsqueeze(-1) * step
        values = function(trial)[0]
        values = torch.where(values.isfinite(), values, -torch.inf)
        best = int(values.argmax())
        if values[best].item() > value:
            return trial[best], values[best].item()
    return None


def _peak(z: Tensor, value: float, root: Tensor) -> Peak | None:
    triangle, failed = torch.linalg.cholesky_ex(root @ root.mT)
    return None if failed.item() else Peak(z, value, triangle)
