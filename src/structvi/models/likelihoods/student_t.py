"""Noise with heavy tails: Student's t, known or learned."""

from collections.abc import Mapping
from math import log, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.distributions import StudentT as TorchStudentT

from ...util.checks import is_positive
from .base import NO_VALUES
from .gaussian import BOUND, NoiseLikelihood

#: learned degrees of freedom lie between these: below there is no variance; above it is a normal
FEWEST, MOST = 2.0, 1000.0


class StudentTNoise(TorchStudentT):
    """torch's Student-t, with a distribution function and quantiles, and constants that do not lose their digits."""

    def log_prob(self, value: Tensor) -> Tensor:
        z = (value - self.loc) / self.scale
        return _constant(self.df).to(z) - self.scale.log() - 0.5 * (self.df + 1) * torch.log1p(z.square() / self.df)

    def cdf(self, value: Tensor) -> Tensor:
        return students_t_cdf((value - self.loc) / self.scale, self.df)

    def icdf(self, value: Tensor) -> Tensor:
        """Return z with P(T ≤ z) = `value`, one probability, by bisection in asinh z; there may be few ν."""
        df, where = self.df.double().unique(return_inverse=True)
        low = torch.full_like(df, -torch.finfo(df.dtype).max).asinh()
        high, middle = torch.zeros_like(df), low / 2
        while bool(((low < middle) & (middle < high)).any()):  # until the ends are neighbours
            below = students_t_cdf(middle.sinh(), df) < torch.minimum(value, 1 - value)
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
            middle = (low + high) / 2
        z = middle.sinh() if value <= 0.5 else -middle.sinh()
        return self.loc + self.scale * z.to(self.loc)[where]


class StudentT(NoiseLikelihood):
    """t = y + σ T_ν, T_ν Student's t with ν degrees of freedom, independently for every element of the output.

        log p(t | y) = log Γ((ν+1)/2) − log Γ(ν/2) − ½ log(νπ) − log σ − (ν+1)/2 log(1 + (t − y)²/(νσ²))

    Few observations far from the others do not move the fit: their pull falls as 1/|t − y|.

    Args:
        noise: the scale σ: a number > 0, "point" for one that is learned, the parameter `log_noise`, or "head" for one
            per element, from the network, as of `Gaussian("head")`.
        df: ν: a number > 0, or "point" for one that is learned, between 2 and 1000, from 4 on.
        initial: where σ starts for "point".

    Example:
        >>> StudentT(noise=1.0, df=3.0)(torch.zeros(2, 1), torch.tensor([[0.0], [30.0]])).squeeze(-1)
        tensor([ -1.0009, -12.4151])
        >>> StudentT().df_value().item()
        4.0
    """

    log_excess: Tensor

    def __init__(
        self,
        noise: float | str = "point",
        df: float | str = "point",
        initial: float = 1.0,
    ):
        super().__init__(noise, ("point", "head"), initial, BOUND)
        if df != "point" and not is_positive(df):
            raise ValueError(f'df must be a positive number or "point", got {df!r}')
        self.df: float | str = df if isinstance(df, str) else float(df)
        if df == "point":
            self.log_excess = nn.Parameter(torch.tensor(log(2.0)))  # ν = 4

    def df_value(self) -> Tensor:
        """Return the present ν."""
        if isinstance(self.df, float):
            return torch.tensor(self.df, dtype=torch.float64)
        return FEWEST + self.log_excess.clamp(max=log(MOST - FEWEST)).exp()

    def log_prob(self, output: Any, target: Tensor) -> Tensor:
        z, log_noise = self.residual(output, target)
        df = self.df_value()
        return _constant(df).to(z) - log_noise - 0.5 * (df + 1).to(z) * torch.log1p(z.square() / df.to(z))

    def distribution(self, output: Any, values: Mapping[str, Tensor] = NO_VALUES) -> Distribution:
        y, log_noise = self.mean_and_log_noise(output, 2)
        return StudentTNoise(self.df_value().to(y), y, log_noise.to(y).exp(), validate_args=False)


def _constant(df: Tensor) -> Tensor:
    """Return log Γ((ν+1)/2) − log Γ(ν/2) − ½ log(νπ), in float64: the difference of large numbers."""
    df = df.double()
    return torch.lgamma((df + 1) / 2) - torch.lgamma(df / 2) - 0.5 * (df.log() + log(pi))


def students_t_cdf(z: Tensor, df: Tensor) -> Tensor:
    """Return P(T ≤ z) = 1 − ½ I_x(ν/2, ½) for z ≥ 0, x = ν/(ν + z²), by symmetry below; I the incomplete beta function.

    Example:
        >>> students_t_cdf(torch.tensor([0.0, 1.0]), torch.tensor(1.0)).tolist()
        [0.5, 0.75]
    """
    df, square = torch.broadcast_tensors(df.double(), z.double().square())
    x, rest, a, half = df / (df + square), square / (df + square), df / 2, torch.full_like(df, 0.5)
    swap = x > rest
    tail = 0.5 * torch.where(swap, 1 - _incomplete_beta(rest, x, half, a), _incomplete_beta(x, rest, a, half))
    return torch.where(z > 0, 1 - tail, tail).to(z)


def _incomplete_beta(x: Tensor, rest: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return I_x(a, b) = xᵃ (1−x)ᵇ / (a B(a, b)) · Σₙ (a+b)ₙ / (a+1)ₙ · xⁿ for x ≤ ½, rest = 1 − x."""
    x = x.clamp(max=0.5)  # what is larger is not asked for
    term, n = torch.ones_like(x), 0
    total = term
    while bool((term > torch.finfo(x.dtype).eps * total).any()):
        term = term * x * (a + b + n) / (a + 1 + n)
        total, n = total + term, n + 1
    size = torch.xlogy(a, x) + torch.xlogy(b, rest) + torch.lgamma(a + b) - torch.lgamma(a + 1) - torch.lgamma(b)
    return (size + total.log()).exp().clamp(max=1.0)  # a total may be infinite, where x^a is zero
