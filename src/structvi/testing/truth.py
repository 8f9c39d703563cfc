"""The truth that families are held to, never taken from the formulas under test; and small comparisons with it.

The covariance of a Gaussian family, for one, is read off its draws: fed with unit noise vectors they are the columns of
a matrix J, and Σ = JJᵀ.
"""

from collections.abc import Callable
from math import pi
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..couplings import Noise
from ..families.family import Density, Family
from ..families.full import FullNormalDensity
from ..families.gaussian import Gaussian, kl
from ..objective import Kind
from ..parameters import Parameters

Make = Callable[[Parameters], Family]

#: Statistical laws compare with this many standard errors: over the few hundred comparisons of one check a correct
#: family fails with probability below 1e-4, and the seed is fixed.
STANDARD_ERRORS = 5.5
#: Tolerance of float32: its rounding through a few hundred operations.
SINGLE = 1e-4


class NotApplicable(Exception):
    """The law says nothing about this family, with the reason."""


class Case(NamedTuple):
    """Device and precision of the families that are held to the laws."""

    make: Make
    seed: int
    device: torch.device
    dtype: torch.dtype

    def family(self, P: int, dtype: torch.dtype | None = None) -> Family:
        """Return the family over P weights: of two tensors if they are more than three."""
        zeros = torch.zeros(P, dtype=dtype or self.dtype, device=self.device)
        if P < 4:
            return self.make(Parameters({"z": zeros}))
        first = zeros[:4].view(2, 2) if P > 4 else zeros[:3]
        return self.make(Parameters({"a.weight": first.clone(), "b.bias": zeros[first.numel() :].clone()}))

    def generator(self, more: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed + more)

    def normals(self, *shape: int, generator: torch.Generator) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=self.dtype, device=self.device)

    def tolerance(self, wanted: float) -> float:
        """Return the tolerance wanted in float64, or the one that the precision allows."""
        return wanted if self.dtype == torch.float64 else max(wanted, SINGLE)

    def check_close(self, actual: Tensor, expected: Tensor, relative: float, what: str) -> None:
        """Equal, relative to the largest element of the truth (and absolutely below one)."""
        check(actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
        error = (actual.detach().double() - expected.detach().to(actual.device).double()).abs().max().item()
        allowed = self.tolerance(relative) * max(1.0, expected.detach().abs().max().item())
        check(error <= allowed, f"{what}: off by {error:.2e}, allowed {allowed:.2e}")

    def check_within(self, samples: Tensor, expected: Tensor, what: str) -> None:
        """The mean of independent rows [G, ..] is the truth, to STANDARD_ERRORS of them."""
        mean, error = samples.mean(0), samples.std(0) / samples.shape[0] ** 0.5
        # rounding alone is left where every group is exact
        rounding = 1e-10 if self.dtype == torch.float64 else 1e-6
        worst = ((mean - expected).abs() / (error + rounding * (1 + expected.abs()))).max().item()
        check(worst < STANDARD_ERRORS, f"{what}: {worst:.1f} standard errors from the truth")


def check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def dense_moments(density: Gaussian) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a Gaussian read off its draws at zero and at unit noise vectors: [P], [P, P]."""

    def unit_noise(groups, P, K, generator, dtype, device):
        unit = torch.eye(P + K, dtype=dtype, device=device)
        return Noise(*torch.cat([torch.zeros_like(unit[:1]), unit]).split([P, K], dim=-1))

    theta = density.draw(1, unit_noise).theta.detach()
    J = theta[1:] - theta[0]  # [P + K, P]
    return theta[0], J.mT @ J


class FunctionTarget:
    """A log density over the tensors that a family draws."""

    def __init__(self, family: Family, fn: Callable[[Tensor], Tensor]):
        self.space, self.fn = family.bound_space(), fn

    def log_joint(self, theta: Tensor, batch: Any = None, fixed: Any = None) -> Tensor:
        return self.fn(self.space.join(theta, fixed or {}))


class GaussianTarget(FunctionTarget):
    """A normalised Gaussian with a dense covariance."""

    def __init__(self, family: Family, case: Case):
        P, generator = family.bound_space().size, case.generator(17)
        A = case.normals(P, P, generator=generator)
        eye = torch.eye(P, dtype=A.dtype, device=A.device)
        root = torch.linalg.cholesky(A @ A.mT / P + 0.5 * eye)
        self.density = FullNormalDensity(0.5 * case.normals(P, generator=generator), root)
        super().__init__(family, self.density.log_prob)


def true_kl(q: Density, target: GaussianTarget) -> Tensor:
    """KL[q‖target]: closed, or by quadrature over θ ∈ ℝ, or over the noise where there is only an entropy."""
    if isinstance(q, Gaussian):
        return kl(q, target.density)
    if q.offers("log_prob"):
        theta, volume = quadrature(q)
        log_q = q.log_prob(theta)
        integrand = torch.where(log_q > -700, log_q.exp() * (log_q - target.fn(theta)), 0.0)
        return (integrand * volume).sum()
    epsilon = torch.linspace(-9, 9, 2001).to(q.mean)
    weight = (-0.5 * epsilon.square()).exp() / (2 * pi) ** 0.5 * (epsilon[1] - epsilon[0])
    grid = Noise(epsilon.unsqueeze(-1), epsilon.new_zeros(len(epsilon), 0))
    return -q.entropy() - (weight * target.fn(q.draw(1, lambda *_: grid).theta)).sum()


def quadrature(density: Density) -> tuple[Tensor, Tensor]:
    """Double exponential nodes over ℝ^P around the density, exact for heavy tails too: [M, P] and volumes [M]."""
    mean = density.mean.detach().double().nan_to_num(0.0)
    spread = density.variance.detach().double().sqrt().nan_to_num(1.0, 1.0).clamp(min=1e-3)
    t = torch.linspace(-3.6, 3.6, {1: 4001, 2: 501}[len(mean)], dtype=torch.float64, device=mean.device)
    x = torch.sinh(pi / 2 * torch.sinh(t))
    slope = pi / 2 * torch.cosh(t) * torch.cosh(pi / 2 * torch.sinh(t)) * (t[1] - t[0])
    theta = torch.cartesian_prod(*(mean.unsqueeze(-1) + spread.unsqueeze(-1) * x)).view(-1, len(mean))
    volume = torch.cartesian_prod(*(spread.unsqueeze(-1) * slope)).view(-1, len(mean)).prod(-1)
    return theta.to(density.mean), volume.to(density.mean)


def as_gaussian(density: Density) -> Gaussian:
    if not isinstance(density, Gaussian):
        raise NotApplicable(f"{type(density).__name__} is no Gaussian")
    return density


def with_log_prob(density: Density, everywhere: bool = False) -> Density:
    """The density, where it has one to evaluate: over all weights, or over those that are not point masses."""
    if not (density.bound if everywhere else density.has_density) or not density.offers("log_prob"):
        raise NotApplicable(f"{type(density).__name__} has no density to evaluate{' for all weights' * everywhere}")
    return density


def offers_entropy(density: Density) -> bool:
    """Some of torch's distributions have no entropy."""
    try:
        density.entropy()
    except NotImplementedError:
        return False
    return True


def estimators_of(density: Density) -> list[Kind]:
    if not density.has_density:
        return ["path"]
    estimators: list[Kind] = ["path", "log_q"] if density.offers("log_prob") else []
    return [*estimators, "entropy"] if offers_entropy(density) else estimators
