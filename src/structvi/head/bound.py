"""E_q log p(T | θ) of a normal q over a linear head, with its gradient in the mean and the precision it asks for.

With y = W φ + c and q(θ) = N(μ, Σ) every output y is normal. The normal that maximises

    F(μ, Σ) = κ E_q log p(T | θ) − KL[q‖p],    p(θ) = N(m, diag(π)⁻¹)

has Λ = diag(π) + κ E_q[Σ_n H_n ⊗ φ_n φ_nᵀ] and κ E_q ∇ log p(T | θ) = π (μ − m), with H_n = −∂² log p/∂y². F is concave
for the likelihoods here (Challis and Barber, 2013). Numbers of θ lie output by output: M = C·D.
"""

from collections.abc import Iterator
from functools import partial
from math import exp, log, pi
from typing import NamedTuple

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from ..models.likelihoods import Gaussian
from ..networks.last_layer import LastLayer
from .rows import Rows, log_noise_of

#: quasi-random draws of the C logits of a row, or 8 C if that is more
DRAWS = 256
#: random rotations of these draws, by which errors of rows cancel
ROTATIONS = 64
#: numbers of drawn logits, or of features times outputs, that are held at once
NUMBERS = 2**22


class Expected(NamedTuple):
    """E_q log p(T | θ), its gradient in the mean, and the precision that it asks for: −2 ∂/∂Σ."""

    value: float
    gradient: Tensor  # [M]
    precision: Tensor  # [M, M]


class GaussianBound:
    """Gaussian noise: sums over the rows are all that is stored of the data."""

    def __init__(self, layer: LastLayer, likelihood: Gaussian):
        self.outputs, self.width, self.log_noise = layer.outputs, layer.width, log_noise_of(likelihood)
        zeros = partial(torch.zeros, self.outputs, dtype=torch.float64, device=layer.layer.weight.device)
        self.gram, self.product = zeros(self.width, self.width), zeros(self.width)  # ΦᵀΦ and Φᵀt of every output
        self.square, self.count = zeros(), zeros()

    def add(self, rows: Rows) -> None:
        features, weight = rows.features, rows.weight
        t = weight * rows.target
        for c in range(self.outputs):
            self.gram[c] += features.mT @ (weight[:, c : c + 1] * features)
        self.product += t.mT @ features
        self.square += t.square().sum(0)
        self.count += weight.sum(0)

    def residual(self, mean: Tensor) -> Tensor:
        """Return Σ (t − y)² at the mean [M]."""
        own = mean.view(self.outputs, self.width)
        fitted = torch.einsum("gi,gij,gj->g", own, self.gram, own)
        return (self.square - 2 * (own * self.product).sum(-1) + fitted).sum().clamp(min=0.0)

    def spread(self, covariance: Tensor) -> Tensor:
        """Return Σ var y."""
        blocks = covariance.view(self.outputs, self.width, self.outputs, self.width)
        return torch.einsum("gij,gigj->", self.gram, blocks)

    def least_noise(self, dtype: torch.dtype) -> float:
        """Return log σ of residuals that are the rounding of an output of this type and of the sums here."""
        rounding = max(torch.finfo(dtype).eps ** 2, 10 * torch.finfo(torch.float64).eps)
        mean = float(self.square.sum() / self.count.sum().clamp(min=1.0))
        return 0.5 * log(max(rounding * mean, torch.finfo(torch.float64).tiny))

    def expect(self, mean: Tensor, covariance: Tensor) -> Expected:
        """Return the expectation at N(mean [M], covariance [M, M])."""
        precision = exp(-2 * self.log_noise)
        square = self.residual(mean) + self.spread(covariance)
        value = -0.5 * square * precision - self.count.sum() * (self.log_noise + 0.5 * log(2 * pi))
        own = mean.view(self.outputs, self.width)
        gradient = (self.product - (self.gram @ own.unsqueeze(-1)).squeeze(-1)) * precision
        return Expected(float(value), gradient.reshape(-1), torch.block_diag(*(self.gram * precision)))


class LabelBound:
    """Labels, binary ones or classes: the features are stored, and the C logits of every row drawn at fixed points."""

    log_noise = 0.0

    def __init__(self, layer: LastLayer, is_binary: bool, seed: int):
        self.outputs, self.width, self.is_binary, self.seed = layer.outputs, layer.width, is_binary, seed
        self.draws = max(DRAWS, 8 * layer.outputs)
        self.rows: list[Rows] = []

    def add(self, rows: Rows) -> None:
        self.rows.append(rows)

    def expect(self, mean: Tensor, covariance: Tensor, other: int = 0) -> Expected:
        """Return the expectation at N(mean [M], covariance [M, M]), on the k-th other set of draws."""
        C, D = self.outputs, self.width
        total, gradient, precision = 0.0, mean.new_zeros(C, D), mean.new_zeros(C, D, C * D)
        for rows, logits in self._drawn(mean, covariance, self.seed + other):  # logits [n, S, C]
            weight, t = rows.weight, rows.target
            if self.is_binary:
                p, log_prob = logits.sigmoid(), t.unsqueeze(1) * logits - torch.nn.functional.softplus(logits)
                curvature = torch.diag_embed(weight * (p * (1 - p)).mean(1))
            else:
                log_p = logits.log_softmax(-1)
                p, log_prob = log_p.exp(), t.unsqueeze(1) * log_p
                curvature = (torch.diag_embed(p.mean(1)) - p.mT @ p / self.draws) * weight.unsqueeze(-1)
            total += float((weight * log_prob.mean(1)).sum())
            gradient += (weight * (t - p.mean(1))).mT @ rows.features
            for c in range(C):  # the upper triangle of blocks
                sides = curvature[:, c, c:].unsqueeze(-1) * rows.features.unsqueeze(1)  # [n, C − c, D]
                precision[c, :, c * D :] += rows.features.mT @ sides.flatten(1)
        upper = precision.view(C * D, C * D).triu()
        return Expected(total, gradient.reshape(-1), upper + upper.triu(1).mT)

    def _drawn(self, mean: Tensor, covariance: Tensor, seed: int) -> Iterator[tuple[Rows, Tensor]]:
        """Yield some rows at a time with draws of their logits."""
        C, D = self.outputs, self.width
        points, turns = quasi_normal(self.draws, C, seed).to(mean), _rotations(C, seed).to(mean)
        chunk = max(1, NUMBERS // (C * max(self.draws, D)))
        for batch in self.rows:
            for start in range(0, len(batch.features), chunk):
                rows = Rows(*(part[start : start + chunk] for part in batch))
                root = _root(_covariances(rows.features, covariance.view(C, D, C * D)))
                turn = turns[torch.arange(len(root), device=mean.device) % ROTATIONS]
                centre = (rows.features @ mean.view(C, D).mT).unsqueeze(1)
                yield rows, centre + points @ (root @ turn).mT


def _covariances(features: Tensor, blocks: Tensor) -> Tensor:
    """Return the covariances of the logits of every row: [n, D] and Σ [C, D, C·D] → [n, C, C]."""
    (n, D), C = features.shape, len(blocks)
    found = features.new_empty(n, C, C)
    for c in range(C):
        row = ((features @ blocks[c, :, c * D :]).view(n, C - c, D) @ features.unsqueeze(-1)).squeeze(-1)
        found[:, c, c:] = row
        found[:, c:, c] = row
    return found


def _root(covariance: Tensor) -> Tensor:
    """Return a lower root of covariances [n, C, C] that may be zero."""
    size = covariance.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]
    ridge = torch.eye(covariance.shape[-1]).to(covariance) * (1e-12 * size + 1e-30)
    return torch.linalg.cholesky(covariance + ridge)


def quasi_normal(count: int, dimensions: int, seed: int) -> Tensor:
    """Return quasi-random normal numbers in pairs ±z, their second moments exactly one: [count, dimensions]."""
    uniform = SobolEngine(dimensions, scramble=True, seed=seed).draw(count // 2, dtype=torch.float64)
    z = torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9))
    z = torch.linalg.solve_triangular(torch.linalg.cholesky(z.mT @ z / len(z)), z.mT, upper=False).mT
    return torch.cat([z, -z])


def _rotations(dimensions: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(ROTATIONS, dimensions, dimensions, generator=generator, dtype=torch.float64))[0]
