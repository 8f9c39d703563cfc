"""The bound of a normal over a linear head, and the normal that maximises it.

With y = W φ + c and q(θ) = N(μ, Σ) every output is normal, and the bound

    F(μ, Σ) = κ E_q log p(T | θ) − KL[q‖p],    p(θ) = N(m, diag(π)⁻¹)

has its maximum where

    Λ = diag(π) + κ E_q[Σ_n H_n ⊗ φ_n φ_nᵀ],    κ E_q ∇ log p(T | θ) = π (μ − m),

H_n = −∂² log p/∂y². It is concave for the likelihoods here (Challis and Barber, 2013), so there is one. The steps are
those of the natural gradient: Λ ← (1−ρ) Λ + ρ Λ*, μ ← μ + ρ Λ⁻¹ ∇F, with ρ = 1 where that raises F, else less. For
Gaussian noise the first is exact. Numbers lie as [G, M]: G groups of outputs that are independent of each other given
θ, M = outputs of a group × D.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import exp, log, nan, pi
from typing import NamedTuple

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from .head_rows import Rows

#: nodes of the quadrature over a logit
NODES = 64
#: rows take turns with so many rotations of the draws
ROTATIONS = 64
#: so many numbers of drawn logits, or of features times outputs, are held at once
NUMBERS = 2**22
#: the shortest step, as a fraction of the whole one
SHORTEST = 2.0**-8


class Expected(NamedTuple):
    """E_q log p(T | θ), its gradient in the mean, and the precision that it asks for: −2 ∂/∂Σ."""

    value: float
    gradient: Tensor  # [G, M]
    precision: Tensor  # [G, M, M]


class HeadBound(ABC):
    """E_q log p(T | θ) of rows that have been added; all in float64."""

    groups: int
    size: int  # M

    @abstractmethod
    def add(self, rows: Rows) -> None:
        """The rows of a batch."""

    @abstractmethod
    def expect(self, mean: Tensor, covariance: Tensor) -> Expected:
        """At a normal of mean [G, M] and covariance [G, M, M]."""


class GaussianBound(HeadBound):
    """Gaussian noise: ΦᵀΦ, Φᵀt and tᵀt of every output are all that is kept of the data."""

    def __init__(self, outputs: int, width: int, log_noise: float, device: torch.device):
        self.groups, self.size, self.log_noise = outputs, width, log_noise
        kind = {"dtype": torch.float64, "device": device}
        self.gram = torch.zeros(outputs, width, width, **kind)
        self.product = torch.zeros(outputs, width, **kind)
        self.square = torch.zeros(outputs, **kind)
        self.count = torch.zeros(outputs, **kind)

    def add(self, rows: Rows) -> None:
        features, weight = rows.features.double(), rows.weight
        t = weight * (rows.target - rows.offset)  # [n, C]
        if bool((weight == 1).all()):
            self.gram += features.mT @ features
        else:
            for c in range(self.groups):
                self.gram[c] += features.mT @ (weight[:, c : c + 1] * features)
        self.product += t.mT @ features
        self.square += t.square().sum(0)
        self.count += weight.sum(0)

    def residual(self, mean: Tensor) -> Tensor:
        """Σ (t − y)² at the mean."""
        fitted = torch.einsum("gi,gij,gj->g", mean, self.gram, mean)
        return (self.square - 2 * (mean * self.product).sum(-1) + fitted).sum().clamp(min=0.0)

    def least_noise(self, dtype: torch.dtype) -> float:
        """log σ of residuals that are rounding alone: of a target that the features tell exactly there are no others.

        An output of this type is rounded by ε t, and the sums here to a few ε t² of float64.
        """
        rounding = max(torch.finfo(dtype).eps ** 2, 10 * torch.finfo(torch.float64).eps)
        mean = float(self.square.sum() / self.count.sum().clamp(min=1.0))
        return 0.5 * log(max(rounding * mean, torch.finfo(torch.float64).tiny))

    def spread(self, covariance: Tensor) -> Tensor:
        """Σ var y."""
        return (self.gram * covariance).sum()

    def expect(self, mean: Tensor, covariance: Tensor) -> Expected:
        precision = exp(-2 * self.log_noise)
        square = self.residual(mean) + self.spread(covariance)
        value = -0.5 * square * precision - self.count.sum() * (self.log_noise + 0.5 * log(2 * pi))
        gradient = (self.product - (self.gram @ mean.unsqueeze(-1)).squeeze(-1)) * precision
        return Expected(float(value), gradient, self.gram * precision)


class BernoulliBound(HeadBound):
    """Labels 0 and 1 by Gauss–Hermite quadrature over each logit; the features are kept."""

    def __init__(self, outputs: int, width: int):
        self.groups, self.size = outputs, width
        self.rows: list[Rows] = []

    def add(self, rows: Rows) -> None:
        self.rows.append(rows)

    def expect(self, mean: Tensor, covariance: Tensor) -> Expected:
        nodes, node_weights = hermite(NODES, mean)
        total, gradient, precision = 0.0, torch.zeros_like(mean), torch.zeros_like(covariance)
        for rows in _pieces(self.rows, NODES + self.size):
            features = rows.features.double()
            for g in range(self.groups):
                t, weight = rows.target[:, g], rows.weight[:, g]
                deviation = ((features @ covariance[g]) * features).sum(-1).clamp(min=0.0).sqrt()
                logits = (features @ mean[g] + rows.offset[:, g]).unsqueeze(-1) + deviation.unsqueeze(-1) * nodes
                p = logits.sigmoid()
                log_p = t * (logits @ node_weights) - torch.nn.functional.softplus(logits) @ node_weights
                total += float((weight * log_p).sum())
                gradient[g] += features.mT @ (weight * (t - p @ node_weights))
                curvature = weight * ((p * (1 - p)) @ node_weights)
                precision[g] += features.mT @ (curvature.unsqueeze(-1) * features)
        return Expected(total, gradient, precision)


class CategoricalBound(HeadBound):
    """Class labels by quasi-random draws of the C logits, always the same; the features are kept."""

    def __init__(self, outputs: int, width: int, draws: int, seed: int):
        self.groups, self.size = 1, outputs * width
        self.outputs, self.width = outputs, width
        self.draws, self.seed = draws, seed
        self.rows: list[Rows] = []

    def add(self, rows: Rows) -> None:
        self.rows.append(rows)

    def expect(self, mean: Tensor, covariance: Tensor) -> Expected:
        C, D = self.outputs, self.width
        total, gradient = 0.0, mean.new_zeros(C, D)
        precision = mean.new_zeros(C, D, C * D)
        for features, weight, one_hot, log_p in self._drawn(mean, covariance, self.seed):
            p = log_p.exp()  # [n, S, C]
            average = p.mean(1)
            total += float((weight * one_hot * log_p.mean(1)).sum())
            gradient += (weight * (one_hot - average)).mT @ features
            curvature = (torch.diag_embed(average) - p.mT @ p / self.draws) * weight.unsqueeze(-1)
            for c in range(C):  # the upper triangle of blocks
                sides = curvature[:, c, c:].unsqueeze(-1) * features.unsqueeze(1)  # [n, C − c, D]
                precision[c, :, c * D :] += features.mT @ sides.flatten(1)
        upper = precision.view(C * D, C * D).triu()
        whole = upper + upper.triu(1).mT
        return Expected(total, gradient.view(1, C * D), whole.unsqueeze(0))

    def values(self, mean: Tensor, covariance: Tensor, sets: int) -> Tensor:
        """E log p(T | θ) on sets of draws that no fit has seen: [sets]."""
        found = []
        for seed in range(self.seed + 1, self.seed + 1 + sets):
            drawn = self._drawn(mean, covariance, seed)
            found.append(sum(float((weight * one_hot * log_p.mean(1)).sum()) for _, weight, one_hot, log_p in drawn))
        return torch.tensor(found, dtype=torch.float64)

    def _drawn(self, mean: Tensor, covariance: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Features [n, D], weights [n, 1], labels [n, C] and drawn log probabilities [n, S, C], some rows at a time."""
        C, D = self.outputs, self.width
        noise, turns = quasi_normal(self.draws, C, seed).to(mean), rotations(C, seed).to(mean)
        for rows in _pieces(self.rows, C * max(self.draws, D)):
            features = rows.features.double()
            turn = turns[torch.arange(len(features), device=turns.device) % ROTATIONS]
            # turned, so that errors of rows cancel
            root = _root(_covariances(features, covariance.view(C, D, C * D))) @ turn  # [n, C, C]
            logits = (features @ mean.view(C, D).mT + rows.offset).unsqueeze(1) + noise @ root.mT
            one_hot = torch.nn.functional.one_hot(rows.target, C).double()
            yield features, rows.weight, one_hot, logits.log_softmax(-1)


def _covariances(features: Tensor, blocks: Tensor) -> Tensor:
    """Of the logits of every row: [n, D] and Σ [C, D, C·D] → [n, C, C]."""
    n, D = features.shape
    C = len(blocks)
    found = features.new_empty(n, C, C)
    for c in range(C):
        row = ((features @ blocks[c, :, c * D :]).view(n, C - c, D) @ features.unsqueeze(-1)).squeeze(-1)
        found[:, c, c:] = row
        found[:, c:, c] = row
    return found


def hermite(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights for E f(z), z ~ N(0, 1): exact for polynomials of a degree below 2·count.

    Example:
        >>> nodes, weights = hermite(8, torch.zeros(1))
        >>> round(float(weights @ nodes**4), 6)
        3.0
    """
    side = torch.arange(1, count, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(side, 1) + torch.diag(side, -1))
    return nodes.to(like.device), vectors[0].square().to(like.device)


def quasi_normal(count: int, dimensions: int, seed: int) -> Tensor:
    """Quasi-random normal numbers in pairs ±z, their second moments exactly one: [count, dimensions]."""
    uniform = SobolEngine(dimensions, scramble=True, seed=seed).draw(count // 2, dtype=torch.float64)
    z = torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9))
    z = torch.linalg.solve_triangular(torch.linalg.cholesky(z.mT @ z / len(z)), z.mT, upper=False).mT
    return torch.cat([z, -z])


def rotations(dimensions: int, seed: int) -> Tensor:
    """[`ROTATIONS`, C, C], random and orthogonal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(ROTATIONS, dimensions, dimensions, generator=generator, dtype=torch.float64))[0]


def _root(covariance: Tensor) -> Tensor:
    """A lower root of covariances [n, C, C] that may be zero."""
    size = covariance.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]
    ridge = torch.eye(covariance.shape[-1]).to(covariance) * (1e-12 * size + 1e-30)
    return torch.linalg.cholesky(covariance + ridge)


def _pieces(batches: Sequence[Rows], numbers: int):
    """Rows, as many at once as `numbers` for each allow."""
    chunk = max(1, NUMBERS // numbers)
    for rows in batches:
        for start in range(0, len(rows.features), chunk):
            yield Rows(*(part[start : start + chunk] for part in rows))


# ------------------------------------------------------------------------------------------- its maximum


class Normal(NamedTuple):
    """q, where the bound has been evaluated."""

    mean: Tensor  # [G, M]
    covariance: Tensor  # [G, M, M]
    precision: Tensor  # [G, M, M]
    log_det: float  # of the covariance
    expected: Expected
    kl: float
    objective: float  # κ E log p(T | θ) − KL

    @property
    def variance(self) -> Tensor:
        return self.covariance.diagonal(dim1=-2, dim2=-1)


class Prior(NamedTuple):
    """N(centre, diag(precision)⁻¹): [G, M] each."""

    centre: Tensor
    precision: Tensor


def evaluate(bound: HeadBound, prior: Prior, scale: float, mean: Tensor, precision: Tensor, root: Tensor) -> Normal:
    """The bound at N(mean, precision⁻¹), κ = `scale`; root is the precision's, from Cholesky."""
    covariance = torch.cholesky_inverse(root)
    log_det = -2 * float(root.diagonal(dim1=-2, dim2=-1).log().sum())
    expected = bound.expect(mean, covariance)
    return scored(Normal(mean, covariance, precision, log_det, expected, nan, nan), prior, scale)


def scored(q: Normal, prior: Prior, scale: float) -> Normal:
    """The same normal under another prior."""
    square = (q.mean - prior.centre).square() + q.variance
    cost = (prior.precision * square).sum() - q.mean.numel() - prior.precision.log().sum()
    kl = 0.5 * (float(cost) - q.log_det)
    return q._replace(kl=kl, objective=scale * q.expected.value - kl)


def start(bound: HeadBound, prior: Prior, scale: float, mean: Tensor) -> Normal:
    """At a mean [G, M] with the curvature there: a Laplace approximation."""
    there = bound.expect(mean, mean.new_zeros(bound.groups, bound.size, bound.size))
    precision = torch.diag_embed(prior.precision) + scale * there.precision
    return evaluate(bound, prior, scale, mean, precision, torch.linalg.cholesky(precision))


def step(bound: HeadBound, prior: Prior, scale: float, q: Normal) -> Normal:
    """A step of the natural gradient, as long as raises the bound; `q` itself where none does."""
    wanted = torch.diag_embed(prior.precision) + scale * q.expected.precision
    gradient = scale * q.expected.gradient - prior.precision * (q.mean - prior.centre)
    length = 1.0
    while length >= SHORTEST:
        precision = torch.lerp(q.precision, wanted, length)
        root = torch.linalg.cholesky(precision)
        move = torch.cholesky_solve(gradient.unsqueeze(-1), root).squeeze(-1)
        there = evaluate(bound, prior, scale, q.mean + length * move, precision, root)
        if there.objective > q.objective:
            return there
        length /= 4
    return q
