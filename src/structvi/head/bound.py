"""E_q log p(T | θ) of a normal q over a linear head, with its gradient in the mean and the precision it asks for.

With y = W φ + c and q(θ) = N(μ, Σ) every output y is normal. The normal that maximises

    F(μ, Σ) = κ E_q log p(T | θ) − KL[q‖p],    p(θ) = N(m, diag(π)⁻¹)

has Λ = diag(π) + κ E_q[Σ_n H_n ⊗ φ_n φ_nᵀ] and κ E_q ∇ log p(T | θ) = π (μ − m), with H_n = −∂² log p/∂y². F is concave
for the likelihoods here (Challis and Barber, 2013). Numbers of θ lie output by output: M = C·D.
"""

from collections.abc import Iterator
from math import exp, log, pi
from typing import NamedTuple

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from .features import Rows

#: nodes of the Gauss–Hermite quadrature over one logit: exact to rounding for logits of any head
NODES = 64
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

    def __init__(self, outputs: int, width: int, log_noise: float, device: torch.device):
        self.outputs, self.width, self.log_noise = outputs, width, log_noise
        kind = {"dtype": torch.float64, "device": device}
        self.gram = torch.zeros(outputs, width, width, **kind)  # ΦᵀΦ of every output
        self.product = torch.zeros(outputs, width, **kind)  # Φᵀt
        self.square, self.count = torch.zeros(outputs, **kind), torch.zeros(outputs, **kind)

    def add(self, rows: Rows) -> None:
        features, weight = rows.features, rows.weight
        t = weight * (rows.target - rows.offset)
        if bool((weight == 1).all()):
            self.gram += features.mT @ features
        else:
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
    """Labels: the features are stored, and the logits of every row are drawn, always at the same points.

    Binary labels are independent given their logits: each logit is integrated by a quadrature. Class labels have
    quasi-random draws of all C logits.
    """

    def __init__(self, outputs: int, width: int, is_binary: bool, seed: int):
        self.outputs, self.width, self.is_binary, self.seed = outputs, width, is_binary, seed
        self.draws = NODES if is_binary else max(DRAWS, 8 * outputs)
        self.rows: list[Rows] = []

    def add(self, rows: Rows) -> None:
        self.rows.append(rows)

    def expect(self, mean: Tensor, covariance: Tensor) -> Expected:
        """Return the expectation at N(mean [M], covariance [M, M])."""
        C, D = self.outputs, self.width
        total, gradient, precision = 0.0, mean.new_zeros(C, D), mean.new_zeros(C, D, C * D)
        for rows, log_prob, p, weights in self._drawn(mean, covariance, self.seed):
            total += float((rows.weight * (log_prob @ weights)).sum())
            average = torch.einsum("nsc,s->nc", p, weights)
            gradient += (rows.weight * (rows.target - average)).mT @ rows.features
            if self.is_binary:
                curvature = torch.diag_embed(rows.weight * torch.einsum("nsc,s->nc", p * (1 - p), weights))
            else:
                second = p.mT @ (p * weights.unsqueeze(-1))
                curvature = (torch.diag_embed(average) - second) * rows.weight.unsqueeze(-1)
            for c in range(C):  # the upper triangle of blocks
                sides = curvature[:, c, c:].unsqueeze(-1) * rows.features.unsqueeze(1)  # [n, C − c, D]
                precision[c, :, c * D :] += rows.features.mT @ sides.flatten(1)
        upper = precision.view(C * D, C * D).triu()
        return Expected(total, gradient.reshape(-1), upper + upper.triu(1).mT)

    def values(self, mean: Tensor, covariance: Tensor, sets: int) -> Tensor:
        """Return E log p(T | θ) on sets of draws that no fit has seen: [sets]."""
        found = []
        for seed in range(self.seed + 1, self.seed + 1 + sets):
            every = self._drawn(mean, covariance, seed)
            found.append(sum(float((rows.weight * (log_p @ w)).sum()) for rows, log_p, _, w in every))
        return torch.tensor(found, dtype=torch.float64)

    def _drawn(self, mean: Tensor, covariance: Tensor, seed: int) -> Iterator[tuple[Rows, Tensor, Tensor, Tensor]]:
        """Yield rows, log p of their labels [n, C, S] or [n, 1, S], probabilities [n, S, C] and weights [S]."""
        C, D = self.outputs, self.width
        if self.is_binary:
            points, weights = (part.to(mean) for part in hermite(NODES))
        else:
            points, turns = quasi_normal(self.draws, C, seed).to(mean), _rotations(C, seed).to(mean)
            weights = mean.new_full((self.draws,), 1 / self.draws)
        chunk = max(1, NUMBERS // (C * max(self.draws, D)))
        for batch in self.rows:
            for start in range(0, len(batch.features), chunk):
                rows = Rows(*(part[start : start + chunk] for part in batch))
                centre = (rows.features @ mean.view(C, D).mT + rows.offset).unsqueeze(1)  # [n, 1, C]
                spread = _covariances(rows.features, covariance.view(C, D, C * D))
                if self.is_binary:
                    deviation = spread.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt().unsqueeze(1)
                    logits = centre + deviation * points.view(-1, 1)
                    softplus = torch.nn.functional.softplus(logits)
                    log_prob = (rows.target.unsqueeze(1) * logits - softplus).mT
                    yield rows, log_prob, logits.sigmoid(), weights
                    continue
                turn = turns[torch.arange(len(spread), device=mean.device) % ROTATIONS]
                logits = centre + points @ (_root(spread) @ turn).mT
                log_p = logits.log_softmax(-1)
                yield rows, (log_p * rows.target.unsqueeze(1)).sum(-1).unsqueeze(1), log_p.exp(), weights


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


def hermite(count: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights for E f(z), z ~ N(0, 1): exact for polynomials of a degree below 2·count.

    Example:
        >>> nodes, weights = hermite(8)
        >>> round(float(weights @ nodes**4), 6)
        3.0
    """
    side = torch.arange(1, count, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(side, 1) + torch.diag(side, -1))
    return nodes, vectors[0].square()


def quasi_normal(count: int, dimensions: int, seed: int) -> Tensor:
    """Return quasi-random normal numbers in pairs ±z, their second moments exactly one: [count, dimensions]."""
    uniform = SobolEngine(dimensions, scramble=True, seed=seed).draw(count // 2, dtype=torch.float64)
    z = torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9))
    z = torch.linalg.solve_triangular(torch.linalg.cholesky(z.mT @ z / len(z)), z.mT, upper=False).mT
    return torch.cat([z, -z])


def _rotations(dimensions: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(ROTATIONS, dimensions, dimensions, generator=generator, dtype=torch.float64))[0]
