"""A lower bound of the mass of a log density on a plane: the ELBO of a normal there, found by gradients alone."""

from collections.abc import Callable
from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor

from .fixed_draws import FixedDraws, least_draws

#: rounds of the search, and nats that a round must gain
ROUNDS, GAIN = 40, 0.05
#: a round changes a precision by at most this factor, and its inverse
TRUST = 1e4
#: fresh draws of the bound, at least
FRESH = 64
#: at the start it is made narrower by this factor as long as that is better, to that
SHORTER, LEAST = 1e-2, 1e-25
#: the normal is also tried so many times as narrow: few draws fit one that is too wide
SHRINK = (1.0, 0.3, 0.1, 0.03)


class Normal(NamedTuple):
    """N(mean, root rootᵀ): on fixed draws its ELBO, but for a constant, and the log density's gradient and Hessian."""

    mean: Tensor  # [P]
    root: Tensor  # [P, P]
    log_det: float
    elbo: float = -inf
    gradient: Tensor | None = None  # [P], of E log p in units of root
    values: Tensor | None = None  # [P], of −E ∇² log p in these units, and its eigenvectors [P, P]
    vectors: Tensor | None = None

    def step(self, length: float) -> "Normal":
        """Towards the normal with the curvature that was met, kept to what can be believed of it."""
        assert self.gradient is not None
        assert self.values is not None
        assert self.vectors is not None
        precision = self.values.clamp(1 / TRUST, TRUST)
        limit = 3 * precision.rsqrt()  # new standard deviations
        newton = torch.clamp((self.vectors.mT @ self.gradient) / self.values.clamp(min=1 / TRUST), -limit, limit)
        mean = self.mean + length * self.root @ (self.vectors @ newton)
        root = self.root @ (self.vectors * precision.pow(-length / 2))
        return Normal(mean, root, self.log_det - length / 2 * precision.log().sum().item())


def mass_bound(log_joint: Callable[[Tensor], Tensor], mean: Tensor) -> float:
    """log ∫ exp log_joint ≥ this: the ELBO of a normal that is looked for from N(mean, I) on, mean [P].

    Example:
        >>> bound = mass_bound(lambda v: -0.5 * v.square().sum(-1), torch.ones(2, dtype=torch.float64))
        >>> 1.7 < bound < 1.9  # log 2π is 1.838; draws differ
        True
    """
    P = len(mean)
    noise = FixedDraws(least_draws(P), seed=0)(1, P, 0, dtype=mean.dtype, device=mean.device).diagonal
    normal = _fitted(log_joint, mean, noise)
    # exact on a quadratic: masses that differ by a thousandth of a nat are told apart
    fresh = FixedDraws(max(FRESH, least_draws(P)), seed=1)(1, P, 0, dtype=mean.dtype, device=mean.device).diagonal
    best, entropy = -inf, P * (1 + log(2 * torch.pi)) / 2
    for shrink in SHRINK:
        with torch.no_grad():
            value = log_joint(normal.mean + shrink * fresh @ normal.root.mT).mean().item()
        if value == value:
            best = max(best, value + normal.log_det + P * log(shrink) + entropy)
    return best


def _fitted(log_joint: Callable[[Tensor], Tensor], mean: Tensor, noise: Tensor) -> Normal:
    root = torch.diag(torch.ones_like(mean))
    scale, normal = 1.0, Normal(mean, root, 0.0)
    while scale > LEAST:  # narrower as long as that is better
        new = _met(log_joint, Normal(mean, scale * root, len(mean) * log(scale)), noise)
        if normal.elbo >= new.elbo > -inf:
            break
        normal, scale = new, SHORTER * scale
    if normal.elbo == -inf:
        return normal
    length = 1.0
    for _ in range(ROUNDS):
        new = _met(log_joint, normal.step(length), noise)
        if new.elbo > normal.elbo:
            settled = new.elbo - normal.elbo < GAIN and length == 1
            normal, length = new, min(1.0, 2 * length)
            if settled:
                break
        else:
            length /= 4
            if length < 1e-2:
                break
    return normal


def _met(log_joint: Callable[[Tensor], Tensor], normal: Normal, noise: Tensor) -> Normal:
    """The normal with what its draws meet; by Stein's identity E ∇² log p = E ∇log p(ε) εᵀ, exact for a quadratic."""
    z = noise.clone().requires_grad_()
    value = log_joint(normal.mean + z @ normal.root.mT)
    if not value.requires_grad:  # an error at every row
        return normal._replace(elbo=-inf)
    (gradient,) = torch.autograd.grad(value.sum(), z)
    hessian = gradient.mT @ noise / len(noise)
    if not bool(value.isfinite().all() and hessian.isfinite().all()):
        return normal._replace(elbo=-inf)
    values, vectors = torch.linalg.eigh(-(hessian + hessian.mT) / 2)
    elbo = value.mean().item() + normal.log_det
    return Normal(normal.mean, normal.root, normal.log_det, elbo, gradient.mean(0), values, vectors)
