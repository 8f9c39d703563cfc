"""Diagonal plus low rank: positive matrices of that form, and the best normal of that form for a given precision."""

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.normal import Diagonal, LowRank
from .lbfgs import ascend

#: least eigenvalue of I + U diag(v) Uᵀ, its inverse the greatest
LEAST = 1e-9
#: eigenvalue in place of one that is negative: a normal with this precision, relative to q's, is wider than q
WIDER = 0.25
#: squared length of a column, relative to the others, below which it depends on them
DEPENDENT = 1e-9
#: eigenvectors beyond those that are asked for
SPARE = 8
#: relative residual of eigenvectors that are found
RESIDUAL = 1e-6
#: rounds of a search for eigenvectors, at most
ROUNDS = 12
#: least squared column of a factor, so that a gradient can still move it
SMALL = 1e-4
#: weight of the penalty on (log s − log s₀)², which keeps scales finite at optima on the boundary
RIDGE = 1e-6


class LowRankMatrix(NamedTuple):
    """M = diag(√a)(I + U diag(v) Uᵀ)diag(√a) with orthonormal columns U and v > −1.

    Example:
        >>> M = LowRankMatrix(torch.tensor([1.0, 4.0]), torch.tensor([[1.0], [0.0]]), torch.tensor([2.0]))
        >>> M.product(torch.eye(2)), M.inverse().diagonal()
        (tensor([[3., 0.],
                [0., 4.]]), tensor([0.3333, 0.2500]))
    """

    a: Tensor  # [P]
    U: Tensor  # [P, r]
    v: Tensor  # [r]

    @staticmethod
    def diag(a: Tensor) -> "LowRankMatrix":
        """Return diag(a)."""
        return LowRankMatrix(a, a.new_zeros(len(a), 0), a.new_zeros(0))

    @staticmethod
    def of(a: Tensor, columns: Tensor, inner: Tensor, rank: int) -> "LowRankMatrix":
        """Return diag(a) + W C Wᵀ with the `rank` parts that say most; negative eigenvalues become small ones."""
        basis, triangle = torch.linalg.qr(columns / a.sqrt().unsqueeze(-1))
        inner = triangle @ inner @ triangle.mT
        values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
        values = 1 + values
        values = torch.where(values > 0, values.clamp(LEAST, 1 / LEAST), WIDER)
        most = (values - 1 - values.log()).topk(min(rank, len(values))).indices
        return LowRankMatrix(a, basis @ vectors[:, most], values[most] - 1)

    @staticmethod
    def precision_of(root: Diagonal | LowRank) -> "LowRankMatrix":
        """Return the precision of a normal with this root, in float64."""
        scale = root.scale.double()
        if isinstance(root, Diagonal):
            return LowRankMatrix.diag(scale**-2)
        U, size, _ = torch.linalg.svd(root.factor.double(), full_matrices=False)
        if root.of_precision:
            return LowRankMatrix(scale**-2, U, size.square())
        return LowRankMatrix(scale.square(), U, size.square()).inverse()

    def scaled(self, s: Tensor) -> "LowRankMatrix":
        """Return diag(s) M diag(s)."""
        return self._replace(a=self.a * s.square())

    def product(self, x: Tensor) -> Tensor:
        """Return M x of rows: [n, P] → [n, P]."""
        x = x * self.a.sqrt()
        return self.a.sqrt() * (x + (x @ self.U * self.v) @ self.U.mT)

    def root(self, x: Tensor) -> Tensor:
        """Return diag(√a)(I + U diag(v) Uᵀ)^½ x of rows."""
        return self.a.sqrt() * (x + (x @ self.U * ((1 + self.v).sqrt() - 1)) @ self.U.mT)

    def root_transposed(self, x: Tensor) -> Tensor:
        """Return (I + U diag(v) Uᵀ)^½ diag(√a) x of rows."""
        x = x * self.a.sqrt()
        return x + (x @ self.U * ((1 + self.v).sqrt() - 1)) @ self.U.mT

    def inverse(self) -> "LowRankMatrix":
        """Return M⁻¹."""
        return LowRankMatrix(1 / self.a, self.U, -self.v / (1 + self.v))

    def diagonal(self) -> Tensor:
        """Return the diagonal, [P]."""
        return self.a * (1 + self.U.square() @ self.v)

    def log_det(self) -> float:
        """Return log det M."""
        return (self.a.log().sum() + self.v.log1p().sum()).item()

    def trace_of(self, other: "LowRankMatrix") -> float:
        """Return tr(M N)."""
        columns = (self.U * self.a.sqrt().unsqueeze(-1)).mT
        low_rank = (self.v * (columns * other.product(columns)).sum(-1)).sum()
        return ((self.a * other.diagonal()).sum() + low_rank).item()

    def mixed(self, other: "LowRankMatrix", share: float, rank: int) -> "LowRankMatrix":
        """Return (1 − share) M + share N."""
        a = (1 - share) * self.a + share * other.a
        columns = torch.cat([one.U * one.a.sqrt().unsqueeze(-1) for one in (self, other)], dim=-1)
        return LowRankMatrix.of(a, columns, torch.cat([(1 - share) * self.v, share * other.v]).diag(), rank)

    def top(self, rank: int, start: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the greatest eigenvalues, their vectors, and a start for a matrix near this one.

        A block Krylov search: [rank], [P, rank], [P, rank + some].
        """
        d, n = self.a, min(rank + SPARE, len(self.a))
        if start is None:
            weight = self.v * (self.U * d.sqrt().unsqueeze(-1)).square().sum(0)
            columns = (self.U * d.sqrt().unsqueeze(-1))[:, weight.topk(min(n, len(weight))).indices]
            units = d.new_zeros(len(d), n)
            units[d.topk(n).indices, torch.arange(n, device=d.device)] = 1.0
            start = torch.cat([columns, units], dim=-1)
        vectors, values = independent(start), d.new_zeros(0)
        for _ in range(ROUNDS):
            first = self.product(vectors.mT).mT
            first = first / first.norm(dim=0)
            second = self.product(first.mT).mT
            basis = independent(torch.cat([vectors, first, second / second.norm(dim=0)], dim=-1))
            inner = basis.mT @ self.product(basis.mT).mT
            values, turn = torch.linalg.eigh((inner + inner.mT) / 2)
            values, vectors = values.flip(0)[:n], basis @ turn.flip(1)[:, :n]
            residual = self.product(vectors[:, :rank].mT).mT - vectors[:, :rank] * values[:rank]
            if not bool((residual.norm(dim=0) > RESIDUAL * values[:rank].abs()).any()):
                break
        return values[:rank], vectors[:, :rank], vectors


def independent(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of columns [P, n], without those that depend on others."""
    columns = columns / columns.norm(dim=0).clamp(min=1e-300)
    values, vectors = torch.linalg.eigh(columns.mT @ columns)
    kept = values > DEPENDENT
    return torch.linalg.qr(columns @ (vectors[:, kept] * values[kept].rsqrt())).Q


class Approximation:
    """The best normals of one form for given precisions: N(·, Λ⁻¹), Λ dense or a `LowRankMatrix`.

    For given scales s the best factor is known: with λ the eigenvalues of SΛS, each costs ½(λ − 1 − log λ) nats, but
    for the `rank` greatest above one or, of the covariance form, the least below one. L-BFGS finds the scales.

    Args:
        rank: columns of the factor.
        of_precision: the form.
    """

    def __init__(self, rank: int, of_precision: bool):
        self.rank, self.of_precision = rank, of_precision
        self._vectors: dict[int, Tensor] = {}

    def best(
        self, precision: Tensor | LowRankMatrix, starts: Tensor, tolerance: float = 1e-5, iterations: int = 300
    ) -> tuple[LowRank, float]:
        """Return the best root over searches from scales [n, P], and its KL."""
        if self.rank == 0:
            diagonal = precision.diagonal()
            scale = diagonal.rsqrt()
            return LowRank(scale, scale.new_zeros(len(scale), 0), self.of_precision), 0.0
        self._vectors.clear()
        origin = starts.log()

        def function(x: Tensor) -> tuple[Tensor, Tensor]:
            kl, gradient, _, _ = self.kl(x, precision)
            away = x - origin[:1]
            return -kl - RIDGE * away.square().sum(-1), -gradient - 2 * RIDGE * away

        ends = ascend(function, origin, tolerance=tolerance, iterations=iterations, memory=20)
        x = ends.z[ends.value.argmax()].unsqueeze(0)
        kl, _, held, vectors = self.kl(x, precision)
        factor = vectors[0] * (held[0] - 1).clamp(min=SMALL).sqrt()
        return LowRank(x[0].exp(), factor, self.of_precision), kl.item()

    def kl(self, log_scale: Tensor, precision: Tensor | LowRankMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the KL of the best for scales [n, P], its gradient, and eigenvalues and vectors of the factor.

        The KL is ∞ where rounding spoils the least eigenvalues.
        """
        scale = log_scale.exp()
        diagonal = precision.diagonal() * scale.square()
        if isinstance(precision, Tensor):
            log_det = torch.linalg.slogdet(precision).logabsdet
            values, vectors, sound = self._dense_pairs(scale, precision)
        else:
            log_det = precision.log_det()
            pairs = [self._low_rank_pairs(row, one, precision) for row, one in enumerate(scale)]
            values, vectors = (torch.stack(x) for x in zip(*pairs, strict=True))
            sound = values.isfinite().all(-1)
        held = values.clamp(1.0, 1 / LEAST)
        known = held if self.of_precision else 1 / held
        kl = (diagonal - 1 - 2 * log_scale).sum(-1) - log_det - (known - 1 - known.log()).sum(-1)
        gradient = diagonal - 1 - torch.einsum("npk,nk->np", vectors.square(), known - 1)
        return torch.where(sound, 0.5 * kl, inf), gradient, held, vectors

    def _dense_pairs(self, scale: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        matrix = scale.unsqueeze(-1) * precision * scale.unsqueeze(-2)
        sound = matrix.isfinite().flatten(1).all(-1)
        eye = torch.eye(len(precision), dtype=precision.dtype, device=precision.device)
        values, vectors = torch.linalg.eigh(torch.where(sound.view(-1, 1, 1), matrix, eye))  # ascending
        sound &= values[:, 0] > 1e-13 * values[:, -1]
        if self.of_precision:
            return values.flip(-1)[:, : self.rank], vectors.flip(-1)[..., : self.rank], sound
        return 1 / values[:, : self.rank].clamp(min=1e-300), vectors[..., : self.rank], sound

    def _low_rank_pairs(self, row: int, scale: Tensor, precision: LowRankMatrix) -> tuple[Tensor, Tensor]:
        matrix = precision.scaled(scale)
        matrix = matrix if self.of_precision else matrix.inverse()
        values, vectors, self._vectors[row] = matrix.top(self.rank, self._vectors.get(row))
        return values, vectors


def between_scales(conditional: Tensor, marginal: Tensor) -> Tensor:
    """Return starts [3, P] for scales: conditional, between, marginal.

    Example:
        >>> between_scales(torch.ones(2), torch.full((2,), 4.0))[:, 0]
        tensor([1., 2., 4.])
    """
    return torch.stack([conditional, (conditional * marginal).sqrt(), marginal])
