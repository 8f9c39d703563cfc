"""The truth that families are held to, never taken from the formulas under test; and small comparisons with it.

The covariance of a Gaussian family, for one, is read off its draws: fed with unit noise vectors they are the columns of
a matrix J, and Σ = JJᵀ.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import pi
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..couplings import Noise, naive
from ..families.family import Density, Family
from ..families.full import FullNormalDensity
from ..families.gaussian import Gaussian, kl
from ..objective import Kind
from ..parameters import Parameters

#: Statistical laws compare with this many standard errors: over the few hundred comparisons of one check a correct
#: family fails with probability below 1e-4, and the seed is fixed.
STANDARD_ERRORS = 5.5


#: Tolerance of float32: its rounding through a few hundred operations.
SINGLE = 1e-4


class NotApplicable(Exception):
    """The law says nothing about this family, with the reason."""


class Place(NamedTuple):
    """The device and the precision of the laws."""

    device: torch.device
    dtype: torch.dtype

    def tolerance(self, wanted: float) -> float:
        """Return the tolerance wanted in float64, or the one that the precision allows."""
        return wanted if self.dtype == torch.float64 else max(wanted, SINGLE)


_place: ContextVar[Place | None] = ContextVar("place", default=None)


def place() -> Place:
    return _place.get() or Place(torch.device("cpu"), torch.float64)


def global_streams() -> list[Tensor]:
    """The states of torch's own random streams, of the CPU and of the device."""
    states = [torch.get_rng_state()]
    return states + ([torch.cuda.get_rng_state(place().device)] if place().device.type == "cuda" else [])


@contextmanager
def placed_on(device: torch.device | str, dtype: torch.dtype) -> Iterator[None]:
    """Inside, laws are held there."""
    token = _place.set(Place(torch.device(device), dtype))
    try:
        yield
    finally:
        _place.reset(token)


def dense_moments(density: Gaussian) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a Gaussian read off its draws at zero and at unit noise vectors: [P], [P, P]."""

    def unit_noise(groups, P, K, generator, dtype, device):
        unit = torch.eye(P + K, dtype=dtype, device=device)
        noise = torch.cat([torch.zeros_like(unit[:1]), unit])
        return Noise(noise[:, :P], noise[:, P:])

    theta = density.draw(1, unit_noise).theta.detach()
    J = theta[1:] - theta[0]  # [P + K, P]
    return theta[0], J.mT @ J


class FunctionTarget:
    """A log density over the tensors that a family draws."""

    def __init__(self, family: Family, fn: Callable[[Tensor], Tensor]):
        assert family.space is not None
        self.space, self.fn = family.space, fn

    def log_joint(self, theta: Tensor, batch: Any = None, fixed: Any = None) -> Tensor:
        return self.fn(self.space.join(theta, fixed or {}))


class GaussianTarget(FunctionTarget):
    """A normalised Gaussian with a dense covariance."""

    def __init__(self, family: Family, seed: int):
        assert family.space is not None
        P, dtype, generator = family.space.size, family.space.dtype, seeded(seed + 17)
        A = torch.randn(P, P, generator=generator, dtype=dtype, device=generator.device)
        mean = 0.5 * torch.randn(P, generator=generator, dtype=dtype, device=generator.device)
        eye = torch.eye(P, dtype=dtype, device=generator.device)
        self.density = FullNormalDensity(mean, torch.linalg.cholesky(A @ A.mT / P + 0.5 * eye))
        super().__init__(family, self.density.log_prob)


def true_kl(q: Density, target: GaussianTarget) -> Tensor:
    if isinstance(q, Gaussian):
        return kl(q, target.density)
    if q.offers("log_prob"):
        theta, volume = quadrature(q)
        log_q = q.log_prob(theta)
        integrand = torch.where(log_q > -700, log_q.exp() * (log_q - target.fn(theta)), 0.0)
        return (integrand * volume).sum()
    epsilon = torch.linspace(-9, 9, 2001, dtype=place().dtype, device=place().device)
    weight = (-0.5 * epsilon.square()).exp() / (2 * pi) ** 0.5 * (epsilon[1] - epsilon[0])

    def grid(groups, P, K, generator, dtype, device):
        return Noise(epsilon.unsqueeze(-1), epsilon.new_zeros(len(epsilon), K))

    return -q.entropy() - (weight * target.fn(q.draw(1, grid).theta)).sum()


def quadrature(density: Density) -> tuple[Tensor, Tensor]:
    """Double exponential nodes over ℝ^P around the density, exact for heavy tails too: [M, P] and volumes [M]."""
    P = density.P
    t = torch.linspace(-3.6, 3.6, {1: 4001, 2: 501}[P], dtype=torch.float64, device=place().device)
    x = torch.sinh(pi / 2 * torch.sinh(t))
    slope = pi / 2 * torch.cosh(t) * torch.cosh(pi / 2 * torch.sinh(t)) * (t[1] - t[0])
    mean = density.mean.detach().double().nan_to_num(0.0)
    spread = density.variance.detach().double().sqrt().nan_to_num(1.0, 1.0).clamp(min=1e-3)
    axes = [mean[i] + spread[i] * x for i in range(P)]
    weights = [spread[i] * slope for i in range(P)]
    theta = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, P)
    volume = torch.stack(torch.meshgrid(*weights, indexing="ij"), dim=-1).prod(-1).reshape(-1)
    return theta.to(place().dtype), volume.to(place().dtype)


def small_space(P: int, dtype: torch.dtype | None = None) -> Parameters:
    zeros = torch.zeros(P, dtype=place().dtype if dtype is None else dtype, device=place().device)
    if P < 4:
        return Parameters({"z": zeros})
    if P == 4:
        return Parameters({"a.weight": zeros[:3].clone(), "b.bias": zeros[3:].clone()})
    return Parameters({"a.weight": zeros[:4].reshape(2, 2).clone(), "b.bias": zeros[4:].clone()})


def learned_by(family: Family) -> dict[str, Tensor]:
    """The variational parameters by name, without the empty ones of rank 0."""
    return {name: parameter for name, parameter in family.named_parameters() if parameter.numel()}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(place().device).manual_seed(seed)


def normals(*shape: int, generator: torch.Generator) -> Tensor:
    """Standard normal numbers in the precision of the laws."""
    return torch.randn(*shape, generator=generator, dtype=place().dtype, device=place().device)


def as_gaussian(density: Density) -> Gaussian:
    if not isinstance(density, Gaussian):
        raise NotApplicable(f"{type(density).__name__} is no Gaussian")
    return density


def with_log_prob(density: Density, everywhere: bool = False) -> Density:
    """The density, where it has one to evaluate: over all weights, or over those that are not point masses."""
    if not (density.bound if everywhere else density.has_density) or not density.offers("log_prob"):
        over = "over all weights " if everywhere else ""
        raise NotApplicable(f"{type(density).__name__} has no density {over}to evaluate")
    return density


def points_of(density: Density, seed: int) -> Tensor:
    return density.draw(8, naive, seeded(seed)).theta.detach()


def estimators_of(density: Density) -> list[Kind]:
    if not density.has_density:
        return ["path"]
    estimators: list[Kind] = ["path", "log_q"] if density.offers("log_prob") else []
    if density.offers("entropy"):
        try:
            density.entropy()
            estimators.append("entropy")
        except NotImplementedError:
            pass
    return estimators


def check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def check_close(actual: Tensor, expected: Tensor, relative: float, what: str) -> None:
    """Equal, relative to the largest element of the truth (and absolutely below one)."""
    check(actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    error = (actual.detach().double() - expected.detach().to(actual.device).double()).abs().max().item()
    allowed = place().tolerance(relative) * max(1.0, expected.detach().abs().max().item())
    check(error <= allowed, f"{what}: off by {error:.2e}, allowed {allowed:.2e}")


def check_within(samples: Tensor, expected: Tensor, what: str) -> None:
    """The mean of independent rows [G, ..] is the truth, to STANDARD_ERRORS of them."""
    mean, error = samples.mean(0), samples.std(0) / samples.shape[0] ** 0.5
    # rounding alone is left where every group is exact
    rounding = 1e-10 if place().dtype == torch.float64 else 1e-6
    excess = (mean - expected).abs() / (error + rounding * (1 + expected.abs()))
    worst = excess.max().item()
    check(worst < STANDARD_ERRORS, f"{what}: {worst:.1f} standard errors from the truth")
