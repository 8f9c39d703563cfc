"""All covariances of a small last layer: the fixed point of the ELBO.

The steps are those of the natural gradient: Λ ← (1−ρ) Λ + ρ Λ*, μ ← μ + ρ Λ⁻¹ ∇F, with ρ = 1 if that raises F, else
less. For Gaussian noise the first is exact. Scales of the prior and the noise, if they are learned, maximise the bound:
MacKay's update s² = |μ|²/γ, γ = n − tr Σ/s², and if that does not raise it s² = (|μ|² + tr Σ)/n, which always does.
"""

import sys
from math import exp, log, nan
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..families.normal import NormalForm, Triangle
from ..laplace.place import trained_values
from ..models.likelihoods import Gaussian
from ..networks.last_layer import LastLayer
from ..objective import Estimate
from .bound import Expected, GaussianBound, LabelBound

if TYPE_CHECKING:
    from ..posterior import Posterior

#: a step that gains less has converged, in nats
TOLERANCE = 1e-2
#: the shortest step of the natural gradient, as a fraction of the whole one
SHORTEST = 2.0**-8
#: a scale that is learned is at least this fraction of the layer's initialisation scale
LEAST = 1e-3
#: the longest step of the logarithm of a scale
LONGEST = 2.0
#: sets of draws for the ELBO that is reported
SETS = 8


class _Normal(NamedTuple):
    """q, and the bound there."""

    mean: Tensor  # [M]
    covariance: Tensor  # [M, M]
    precision: Tensor  # [M, M]
    log_det: float  # of the covariance
    expected: Expected
    kl: float = nan
    elbo: float = nan  # κ E log p(T | θ) − KL


class Climb:
    """A normal on its way to the maximum of the bound.

    Args:
        posterior: over the layer.
        layer: the layer.
        bound: with all rows.
        scale: κ, N over the rows that were read.
        log_scale: of each tensor's prior; None if they are learned.
    """

    def __init__(
        self, posterior: "Posterior", layer: LastLayer, bound: GaussianBound | LabelBound, scale: float,
        log_scale: Tensor | None,
    ):  # fmt: skip
        self.bound, self.scale, self.order = bound, scale, layer.order
        space, likelihood = posterior.model.net_space, posterior.model.likelihood
        self.owner = torch.arange(len(space)).repeat_interleave(torch.tensor(space.numels)).to(self.order)[self.order]
        self.learns_prior = log_scale is None
        self.least = (LEAST * space.scales.double()).log().to(self.order.device)
        self.log_scale = torch.zeros_like(self.least) if log_scale is None else log_scale
        self.learns_noise = isinstance(likelihood, Gaussian) and likelihood.noise == "point"
        self.dtype = space.dtype
        mean = trained_values(posterior).double()[self.order]
        at_mean = bound.expect(mean, torch.zeros(len(mean), len(mean)).to(mean))
        precision = torch.diag(self._prior()) + scale * at_mean.precision
        self.q = self._at(mean, precision, torch.linalg.cholesky(precision))
        self.path = [self.q.elbo]

    def _prior(self) -> Tensor:
        """Return the prior's precision [M]."""
        return (-2 * self.log_scale)[self.owner].exp()

    def run(self, iterations: int, progress: bool) -> bool:
        """Take at most so many steps; return whether the last one has converged."""
        for k in range(iterations):
            elbo = self.q.elbo
            if self.learns_prior or self.learns_noise:
                self._learn()
            else:
                self.q = self._step(self.q)
            self.path.append(self.q.elbo)
            if progress:
                print(f"fit_head: step {k + 1}, ELBO {self.q.elbo:.5g} nats", file=sys.stderr)
            if self.q.elbo - elbo < TOLERANCE:
                return True
        return False

    def _at(self, mean: Tensor, precision: Tensor, root: Tensor) -> _Normal:
        """Return the bound at N(mean, precision⁻¹); root is the precision's, from Cholesky."""
        covariance = torch.cholesky_inverse(root)
        log_det, expected = -2 * float(root.diagonal().log().sum()), self.bound.expect(mean, covariance)
        return self._scored(_Normal(mean, covariance, precision, log_det, expected))

    def _scored(self, q: _Normal) -> _Normal:
        """Return the same normal under the present prior."""
        precision = self._prior()
        square = q.mean.square() + q.covariance.diagonal()
        cost = (precision * square).sum() - len(q.mean) - precision.log().sum()
        kl = 0.5 * (float(cost) - q.log_det)
        return q._replace(kl=kl, elbo=self.scale * q.expected.value - kl)

    def _step(self, q: _Normal) -> _Normal:
        """Take a step of the natural gradient as long as raises the bound; return `q` itself if none does."""
        prior = self._prior()
        wanted = torch.diag(prior) + self.scale * q.expected.precision
        gradient = self.scale * q.expected.gradient - prior * q.mean
        length = 1.0
        while length >= SHORTEST:
            precision = torch.lerp(q.precision, wanted, length)
            root = torch.linalg.cholesky(precision)
            move = torch.cholesky_solve(gradient.unsqueeze(-1), root).squeeze(-1)
            there = self._at(q.mean + length * move, precision, root)
            if there.elbo > q.elbo:
                return there
            length /= 4
        return q

    def _learn(self) -> None:
        """Update prior scales and noise at this q, and then q: by MacKay's update if that raises the bound."""
        q, log_scale, bound, log_noise = self.q, self.log_scale, self.bound, self.bound.log_noise
        for faster in (True, False):
            if self.learns_prior:
                self.log_scale = (log_scale + self._change_of_scales(faster)).maximum(self.least)
            there = q
            if isinstance(bound, GaussianBound) and self.learns_noise:
                least = bound.least_noise(self.dtype)
                bound.log_noise = max(log_noise + self._change_of_noise(bound, faster), least)
                there = q._replace(expected=bound.expect(q.mean, q.covariance))
            there = self._step(self._scored(there))
            if there.elbo > q.elbo:
                self.q = there
                return
            self.log_scale, bound.log_noise = log_scale, log_noise

    def _change_of_scales(self, faster: bool) -> Tensor:
        """Return ½ log |μ|²/(s² γ) with γ = n − tr Σ/s², or ½ log (|μ|² + tr Σ)/(n s²): [K]."""
        precision = self._prior()

        def sums(values: Tensor) -> Tensor:
            return values.new_zeros(len(self.log_scale)).index_add(0, self.owner, values)

        count, square = sums(torch.ones_like(precision)), sums(precision * self.q.mean.square())
        spread = sums(precision * self.q.covariance.diagonal())
        ratio = (square + spread) / count
        if faster:
            determined = count - spread
            ratio = torch.where(determined > 1e-3 * count, square / determined.clamp(min=1e-12), ratio)
        return (0.5 * ratio.clamp(min=1e-12).log()).clamp(-LONGEST, LONGEST)

    def _change_of_noise(self, bound: GaussianBound, faster: bool) -> float:
        """Return the change of log σ: likewise, with γ = tr(ΦᵀΦ Σ)/σ²."""
        variance, count = exp(2 * bound.log_noise), float(bound.count.sum())
        residual, spread = float(bound.residual(self.q.mean)), float(bound.spread(self.q.covariance))
        ratio = (residual + spread) / (count * variance)
        if faster and (rest := count - spread / variance) > 1e-3 * count:
            ratio = residual / (rest * variance)
        return min(max(0.5 * log(max(ratio, 1e-12)), -LONGEST), LONGEST)

    def form(self) -> NormalForm:
        """Return q in the order of θ."""
        back = torch.argsort(self.order)
        root = torch.linalg.cholesky(self.q.covariance[back][:, back])
        return NormalForm(self.q.mean[back].to(self.dtype), Triangle(root.to(self.dtype)))

    def elbo(self) -> Estimate:
        """Return the ELBO; of labels on draws that the fit has not seen."""
        if isinstance(self.bound, GaussianBound):
            return Estimate(self.q.elbo, 0.0, torch.tensor([self.q.elbo], dtype=torch.float64))
        found = [self.bound.expect(self.q.mean, self.q.covariance, 1 + k).value for k in range(SETS)]
        return Estimate.of(self.scale * torch.tensor(found, dtype=torch.float64) - self.q.kl)
