"""The rows that come to a linear layer: log density, gradient, curvature and maximum, for a normal over the layer.

The rows' curvature is G = Σ_n H_n ⊗ φ_n φ_nᵀ with H_n = −∂² log p/∂y². Its axes are the eigenvectors of the nearest
Kronecker product B ⊗ A, found by alternating least squares. Along them the diagonal of G is exact:
g_kj = Σ_n (a_kᵀ H_n a_k)(q_jᵀ φ_n)², and the normal with scales (1 + g)^(−½) has the least KL to N(μ, (G + π)⁻¹) of all
with these axes. For Gaussian noise that all outputs share, G is a Kronecker product, and the normal the posterior.
For labels everything is averaged over draws of the outputs y: then the fixed point has the highest ELBO.
Everything is in units r of the prior, N(0, τ²r_d²) for column d: other τ need no new axes.
"""

from collections.abc import Iterator
from math import ceil, exp, log, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..families.matrix_normal import OutputNormals
from ..models.likelihoods import Categorical, Gaussian
from .rows import Rows, log_noise_of

#: rows times the larger of outputs and features that are held at once
NUMBERS = 4_000_000
#: rows times pairs of draws of their outputs, at least
DRAWN = 4_000
#: rounds of least squares for the nearest Kronecker product: A of B, B of A, A of B
ROUNDS = 3
#: steps of Newton's method for the mean in a round; its gain in nats for each row at which it has converged; its
#: shortest step
STEPS, CONVERGED, SHORTEST = 5, 1e-5, 1e-4


class Axes(NamedTuple):
    """Eigenvectors of outputs and of features, in units of the prior, and the curvature along both."""

    left: Tensor  # [C, C]
    right: Tensor  # [D, D]
    curvature: Tensor  # g [C, D]

    def scale(self, width: float) -> Tensor:
        """Return the scales (1 + τ² g)^(−½) [C, D]."""
        return (1 + width**2 * self.curvature).rsqrt()


class LayerData:
    """The rows that come to a linear layer, at any matrix [C, D] of it.

    Args:
        rows: of one pass of the network.
        likelihood: `Gaussian`, `Bernoulli` or `Categorical`.
        unit: r [D], the prior's scale for each column.
        factor: κ, N over the rows that were read.
    """

    def __init__(self, rows: list[Rows], likelihood: Any, unit: Tensor, factor: float):
        self.rows = Rows(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
        self.is_number, self.is_class = isinstance(likelihood, Gaussian), isinstance(likelihood, Categorical)
        self.unit, self.factor = unit, factor
        self.log_noise = log_noise_of(likelihood) if isinstance(likelihood, Gaussian) else 0.0

        self.off: Tensor | None = None  # draws of the outputs around their means, [S, n, C]

    def draw(self, axes: Axes, width: float, seed: int) -> None:
        """Average over draws of the outputs from now on, in pairs around their means; numbers need none."""
        n, C = self.rows.target.shape
        if not self.is_number:
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn(ceil(DRAWN / n), n, C, generator=generator, dtype=self.unit.dtype)
            self.off = self.outputs(self.rows.features, axes, width).draw(noise.to(self.unit))

    def chunks(self, T: Tensor) -> Iterator[tuple[Rows, Tensor]]:
        """Yield some rows at a time with their outputs [n, C] at a matrix T, or with each draw of these."""
        each = 1 if self.off is None else 2 * len(self.off)
        size = max(1, NUMBERS // (each * max(T.shape)))
        for start in range(0, len(self.rows.features), size):
            rows = Rows(*(part[start : start + size] for part in self.rows))
            y = rows.features @ T.mT
            if self.off is not None:
                off = self.off[:, start : start + size]
                y = torch.cat([y + off, y - off]).flatten(0, 1)
                rows = Rows(*(part.repeat(each, 1) for part in rows))
                rows = rows._replace(weight=rows.weight / each)
            yield rows, y

    def at(self, y: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Return Σ log p, its gradient in y [n, C], and what the curvature H_n is made of [n, C].

        H_n is diag(h) of numbers and binary labels, and w (diag(h) − hhᵀ) of classes, with h the probabilities.
        """
        t, w = rows.target, rows.weight
        if self.is_number:
            precision, residual = exp(-2 * self.log_noise), w * (t - y)
            constant = float(w.sum(dtype=torch.float64)) * (self.log_noise + 0.5 * log(2 * pi))
            value = -0.5 * precision * residual.square().sum() - constant
            return value, precision * residual, precision * w.expand_as(y)
        if self.is_class:
            log_p = y.log_softmax(-1)
            p = log_p.exp()
            return (w * t * log_p).sum(), w * (t - p), p
        p = y.sigmoid()
        return (w * (t * y + logsigmoid(-y))).sum(), w * (t - p), w * p * (1 - p)

    def along(self, h: Tensor, rows: Rows, vectors: Tensor) -> Tensor:
        """Return a_kᵀ H_n a_k for the columns of [C, K]: [n, K]."""
        first = h @ vectors.square()
        return rows.weight * (first - (h @ vectors).square()) if self.is_class else first

    @torch.no_grad()
    def axes(self, T: Tensor) -> Axes:
        """Return axes and curvature at a matrix T."""
        C, D = T.shape
        A, B = T.new_zeros(D, D), torch.eye(C).to(T)
        for turn in range(ROUNDS):
            found = torch.zeros_like(B if turn % 2 else A)
            for rows, y in self.chunks(T):
                phi = rows.features * self.unit
                *_, h = self.at(y, rows)
                if turn % 2:
                    weight = ((phi @ A) * phi).sum(-1, keepdim=True) * (rows.weight if self.is_class else 1.0)
                    found += torch.diag((weight * h).sum(0))
                    if self.is_class:
                        found -= (weight * h).mT @ h
                else:
                    inner = h @ B.diagonal()
                    if self.is_class:
                        inner = rows.weight.squeeze(-1) * (inner - ((h @ B) * h).sum(-1))
                    found += phi.mT @ (inner.unsqueeze(-1) * phi)
            found = found / found.norm().clamp(min=torch.finfo(T.dtype).tiny)
            A, B = (A, found) if turn % 2 else (found, B)
        left, right = (torch.linalg.eigh(one.double()).eigenvectors.to(T) for one in (B, A))
        return Axes(left, right, self.curvature(T, left, right))

    def curvature(self, T: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return κ times the diagonal of the curvature along given axes: g [C, D]."""
        found = torch.zeros_like(T)
        for rows, y in self.chunks(T):
            *_, h = self.at(y, rows)
            found += self.along(h, rows, left).mT @ ((rows.features * self.unit) @ right).square()
        return self.factor * found

    def outputs(self, features: Tensor, axes: Axes, width: float) -> OutputNormals:
        """Return the normals of the outputs at features [n, D]."""
        inner = (features * (width * self.unit)) @ axes.right
        return OutputNormals(axes.left, inner.square() @ axes.scale(width).square().mT)

    def residual(self, T: Tensor) -> tuple[float, float]:
        """Return κ Σ (t − y)² at a matrix T, at least that of rounding, and κ times how many numbers were observed."""
        w, size = self.rows.weight, float((self.rows.weight * self.rows.target.square()).sum())
        square = sum(float((rows.weight * (rows.target - y).square()).sum()) for rows, y in self.chunks(T))
        rounding = max(torch.finfo(T.dtype).eps ** 2, 10 * torch.finfo(torch.float64).eps)  # of these sums
        least = max(rounding * size, torch.finfo(torch.float32).tiny)
        return self.factor * max(square, least), self.factor * float(w.sum(dtype=torch.float64))

    @property
    def is_exact(self) -> bool:
        """Return whether the curvature is a Kronecker product; the normal is then the posterior."""
        weight = self.rows.weight
        return self.is_number and bool((weight == weight[:, :1]).all())

    def log_likelihood(self, T: Tensor) -> tuple[float, Tensor]:
        """Return κ Σ log p and its gradient [C, D]."""
        value, gradient = 0.0, torch.zeros_like(T)
        for rows, y in self.chunks(T):
            own, slope, _ = self.at(y, rows)
            value += float(own)
            gradient += slope.mT @ rows.features
        return self.factor * value, self.factor * gradient

    def log_joint(self, T: Tensor, width: float) -> tuple[float, Tensor]:
        """Return κ Σ log p − ½|T/τr|² and its gradient [C, D]."""
        (value, gradient), inner = self.log_likelihood(T), T / (width * self.unit)
        return value - 0.5 * float(inner.square().sum()), gradient - inner / (width * self.unit)

    @torch.no_grad()
    def maximum(self, T: Tensor, axes: Axes, width: float) -> Tensor:
        """Return the maximum of `log_joint`, by conjugate directions of Newton's method with these axes."""
        variance, right = axes.scale(width).square(), (width * self.unit).unsqueeze(-1) * axes.right
        last, direction, before = torch.zeros_like(T), torch.zeros_like(T), 1.0
        value, gradient = self.log_joint(T, width)
        for step in range(STEPS):
            newton = axes.left @ ((axes.left.mT @ gradient @ right) * variance) @ right.mT
            decrement = float((gradient * newton).sum())
            beta = max(0.0, float((newton * (gradient - last)).sum()) / before) if step else 0.0  # Polak and Ribière
            last, direction, before = gradient, newton + beta * direction, decrement
            if not float(slope := (gradient * direction).sum()) > 0:
                direction, slope = newton, decrement
            length = float(slope) / self._bend(T, direction, width)
            while length > SHORTEST:
                there = T + length * direction
                found, gradient = self.log_joint(there, width)
                if found >= value:
                    value, T = found, there
                    break
                length /= 4
            if decrement < 2 * CONVERGED * len(self.rows.target) or length <= SHORTEST:
                break
        return T

    def _bend(self, T: Tensor, direction: Tensor, width: float) -> float:
        """Return −∂² of the log joint along a direction."""
        bend = float((direction / (width * self.unit)).square().sum())
        for rows, y in self.chunks(T):
            along = rows.features @ direction.mT
            *_, h = self.at(y, rows)
            square = (h * along.square()).sum(-1)
            if self.is_class:
                square = rows.weight.squeeze(-1) * (square - (h * along).sum(-1).square())
            bend += self.factor * float(square.sum())
        return bend
