"""Positive matrices that are a diagonal plus low rank, in P·r numbers: products, roots, inverses, eigenvectors."""

from typing import NamedTuple

import torch
from torch import Tensor

#: least and greatest 1 + v that is kept
LEAST, MOST = 1e-10, 1e10
#: of the parts of a basis that are others' sums, but for rounding
DEPENDENT = 1e-9
#: columns beyond those asked for, multiplications of one round, and rounds of a search for eigenvectors
SPARE, POWERS, ROUNDS = 8, 2, 12
#: relative residual of eigenvectors that are found
RESIDUAL = 1e-6


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
        return LowRankMatrix(a, a.new_zeros(len(a), 0), a.new_zeros(0))

    @staticmethod
    def of(a: Tensor, columns: Tensor, inner: Tensor, rank: int, least: float = LEAST) -> "LowRankMatrix":
        """Near diag(a) + W C Wᵀ: the `rank` parts that say most, 1 + v kept from `least` to its inverse.

        Where 1 + v is negative it is turned, as a step of Newton's method does.
        """
        basis, triangle = torch.linalg.qr(columns / a.sqrt().unsqueeze(-1))
        inner = triangle @ inner @ triangle.mT
        values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
        values = 1 + values
        values = torch.where(values > 0, values.clamp(least, 1 / least), values.abs().clamp(max(least, 1e-2), 0.25))
        most = (values - 1 - values.log()).topk(min(rank, len(values))).indices
        return LowRankMatrix(a, basis @ vectors[:, most], values[most] - 1)

    def scaled(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Diagonal [P] and columns [P, r] of diag(s) M diag(s) = diag(d) + X diag(v) Xᵀ."""
        size = s * self.a.sqrt()
        return size.square(), self.U * size.unsqueeze(-1)

    def product(self, x: Tensor) -> Tensor:
        """M x for rows: [n, P] → [n, P]."""
        size = self.a.sqrt()
        x = x * size
        return size * (x + (x @ self.U * self.v) @ self.U.mT)

    def root(self, x: Tensor) -> Tensor:
        """diag(√a)(I + U diag(v) Uᵀ)^½ x for rows."""
        return self.a.sqrt() * (x + (x @ self.U * ((1 + self.v).sqrt() - 1)) @ self.U.mT)

    def root_transposed(self, x: Tensor) -> Tensor:
        """(I + U diag(v) Uᵀ)^½ diag(√a) x for rows."""
        x = x * self.a.sqrt()
        return x + (x @ self.U * ((1 + self.v).sqrt() - 1)) @ self.U.mT

    def inverse(self) -> "LowRankMatrix":
        return LowRankMatrix(1 / self.a, self.U, -self.v / (1 + self.v))

    def diagonal(self) -> Tensor:
        return self.a * (1 + self.U.square() @ self.v)

    def log_det(self) -> float:
        return (self.a.log().sum() + self.v.log1p().sum()).item()

    def trace_of(self, other: "LowRankMatrix") -> float:
        """tr(M N), for N of the same kind."""
        trace = (self.a * other.diagonal()).sum()
        if len(self.v):
            columns = (self.U * self.a.sqrt().unsqueeze(-1)).mT
            trace = trace + (self.v * (columns * other.product(columns)).sum(-1)).sum()
        return trace.item()

    def mixed(self, other: "LowRankMatrix", share: float, rank: int) -> "LowRankMatrix":
        """(1 − share) M + share N."""
        a = (1 - share) * self.a + share * other.a
        columns = torch.cat([one.U * one.a.sqrt().unsqueeze(-1) for one in (self, other)], dim=-1)
        return LowRankMatrix.of(a, columns, torch.cat([(1 - share) * self.v, share * other.v]).diag(), rank)


def independent(columns: Tensor, given: Tensor | None = None) -> Tensor:
    """An orthonormal basis of what columns [P, n] add to orthonormal ones that are given."""
    columns = columns / columns.norm(dim=0).clamp(min=1e-300)
    if given is not None:
        for _ in range(2):
            columns = columns - given @ (given.mT @ columns)
    values, vectors = torch.linalg.eigh(columns.mT @ columns)
    kept = values > DEPENDENT
    basis = columns @ (vectors[:, kept] * values[kept].rsqrt())
    return torch.linalg.qr(basis - given @ (given.mT @ basis) if given is not None else basis).Q


def top_eigenvectors(d: Tensor, X: Tensor, v: Tensor, rank: int, start: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The greatest eigenvalues of diag(d) + X diag(v) Xᵀ, their vectors, and a start for a matrix near this one.

    A block Krylov search: [P], [P, r], [r] → [rank], [P, rank], [P, rank + some].
    """
    n = min(rank + SPARE, len(d))
    if start is None or start.shape[-1] < n:
        gain = v * X.square().sum(0)
        columns = X[:, gain.topk(min(n, len(gain))).indices]
        units = torch.zeros(len(d), n, dtype=d.dtype, device=d.device)
        units[d.topk(n).indices, torch.arange(n, device=d.device)] = 1.0
        start = torch.cat([columns, units], dim=-1)
    vectors = independent(start)
    values = vectors.new_zeros(0)
    for _ in range(ROUNDS):
        blocks = [vectors]
        for _ in range(POWERS):
            blocks.append(_product(d, X, v, blocks[-1]))
            blocks[-1] = blocks[-1] / blocks[-1].norm(dim=0)
        basis = independent(torch.cat(blocks, dim=-1))
        inner = basis.mT @ _product(d, X, v, basis)
        values, turn = torch.linalg.eigh((inner + inner.mT) / 2)
        values, vectors = values.flip(0)[:n], basis @ turn.flip(1)[:, :n]
        residual = (_product(d, X, v, vectors[:, :rank]) - vectors[:, :rank] * values[:rank]).norm(dim=0)
        if not bool((residual > RESIDUAL * values[:rank].abs()).any()):
            break
    return values[:rank], vectors[:, :rank], vectors


def _product(d: Tensor, X: Tensor, v: Tensor, y: Tensor) -> Tensor:
    return d.unsqueeze(-1) * y + X @ (v.unsqueeze(-1) * (X.mT @ y))
