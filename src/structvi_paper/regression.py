"""The paper's RBF regression: data sets, and the exact posteriors with the noise known and unknown."""

from math import lgamma, log, pi
from typing import Any

import torch
from torch import Tensor

from structvi.families.full import FullNormalDensity

from .settings import TABLE, Settings

_OWN: dict[str, Any] = TABLE["regression"]
CENTRES, OBSERVATIONS = int(_OWN["centres"]), int(_OWN["observations"])
WIDTH, NOISE, SHAPE = (float(_OWN[name]) for name in ("width", "noise", "shape"))
RANGE: tuple[float, float] = tuple(_OWN["range"])
#: of the variant with unknown noise: σ² ~ InverseGamma(shape, rate), θ | σ² ~ N(0, ratio·σ² I)
RATE, RATIO = SHAPE * NOISE**2, NOISE**-2


def features(x: Tensor) -> Tensor:
    """Return Π_c(x), of regularly spaced centres: [N] → [N, 10]."""
    centres = torch.linspace(*RANGE, CENTRES, dtype=x.dtype)
    return torch.exp(-0.5 * ((x.unsqueeze(-1) - centres) / (WIDTH * (centres[1] - centres[0]))).square())


class Data:
    """One data set and the weights it comes from: θ* [10], x [N], t [N]."""

    def __init__(self, theta: Tensor, x: Tensor, t: Tensor):
        self.theta, self.x, self.t = theta, x, t
        self.design = features(x)  # [N, 10]
        #: all that the likelihood needs: G = ΠᵀΠ/σ², b = Πᵀt/σ²
        self.G, self.b = self.design.mT @ self.design / NOISE**2, self.design.mT @ t / NOISE**2

    def posterior(self) -> FullNormalDensity:
        """Return N(μ, Σ), Σ⁻¹ = ΠᵀΠ/σ² + I and μ = ΣΠᵀt/σ², for known noise and θ ~ N(0, I)."""
        covariance = torch.linalg.inv(self.G + torch.eye(CENTRES, dtype=torch.float64))
        return FullNormalDensity(covariance @ self.b, torch.linalg.cholesky((covariance + covariance.mT) / 2))

    def log_joint(self, theta: Tensor) -> Tensor:
        """Return log p(t, θ) with known noise: [S, 10] → [S]."""
        squares = ((theta @ self.G) * theta).sum(-1) - 2 * theta @ self.b + self.t @ self.t / NOISE**2
        constant = len(self.t) * log(2 * pi * NOISE**2) + CENTRES * log(2 * pi)
        return -0.5 * (squares + theta.square().sum(-1) + constant)

    def dropout_optimum(self, keep: float) -> Tensor:
        """Return MC dropout's θ̂ in closed form, (pG + (1 − p) diag G + I)⁻¹ b."""
        dropped = (1 - keep) * torch.diag(self.G.diagonal())
        return torch.linalg.solve(keep * self.G + dropped + torch.eye(CENTRES, dtype=torch.float64), self.b)


class NormalInverseGamma:
    """The exact posterior of (θ, log σ): σ² | t ~ InverseGamma(a, b), θ | σ², t ~ N(m, σ²Λ⁻¹)."""

    def __init__(self, data: Data):
        design, t = data.design, data.t
        self.precision = design.mT @ design + torch.eye(CENTRES, dtype=torch.float64) / RATIO  # Λ, without 1/σ²
        self.mean: Tensor = torch.linalg.solve(self.precision, design.mT @ t)
        self.a = SHAPE + 0.5 * len(t)
        self.b: float = RATE + 0.5 * (t @ t - self.mean @ self.precision @ self.mean).item()

    def log_prob(self, point: Tensor) -> Tensor:
        """Return [S] for [S, 11]; the last number is log σ, whose density has the factor dσ²/d log σ = 2σ²."""
        theta, log_noise = point[:, :CENTRES], point[:, CENTRES]
        x = theta - self.mean
        quadratic = ((x @ self.precision) * x).sum(-1)
        normal = 0.5 * torch.linalg.slogdet(self.precision).logabsdet - CENTRES * (log_noise + 0.5 * log(2 * pi))
        normal = normal - 0.5 * quadratic * (-2 * log_noise).exp()
        noise = self.a * log(self.b) - lgamma(self.a) - 2 * (self.a + 1) * log_noise - self.b * (-2 * log_noise).exp()
        return normal + noise + log(2) + 2 * log_noise

    def draw(self, S: int, generator: torch.Generator) -> Tensor:
        """Return exact draws [S, 11]; half the sum of 2a squared normals is a gamma variable of shape a."""
        options: Any = {"generator": generator, "dtype": torch.float64}
        squares = torch.randn(S, round(2 * self.a), **options).square().sum(-1)
        log_noise = 0.5 * (self.b / (0.5 * squares)).log()
        factor = torch.linalg.cholesky(torch.linalg.inv(self.precision))
        theta = self.mean + log_noise.exp().unsqueeze(-1) * (torch.randn(S, CENTRES, **options) @ factor.mT)
        return torch.cat([theta, log_noise.unsqueeze(-1)], dim=-1)


def data_set(settings: Settings, index: int) -> Data:
    options = {"generator": settings.generator("regression", index), "dtype": torch.float64}
    theta = torch.randn(CENTRES, **options)
    x = RANGE[0] + (RANGE[1] - RANGE[0]) * torch.rand(OBSERVATIONS, **options)
    t = features(x) @ theta + NOISE * torch.randn(OBSERVATIONS, **options)
    return Data(theta, x, t)
