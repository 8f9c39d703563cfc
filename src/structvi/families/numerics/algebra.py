"""Sums over the P weights, accumulated in float64, and the K×K algebra of a diagonal plus a low-rank matrix.

Products are taken in blocks of the weights in their own precision and the blocks are added in float64: the error
does not grow with P, and nothing of size P is ever copied to float64.
"""

from typing import Any

import torch
from torch import Tensor

from ...basics.host_reads import reads

_BLOCK = 4096  # weights whose products are added in their own precision
_SLAB = 16 * _BLOCK  # weights whose rows of the factor are scaled at once


def _blocks(P: int) -> list[int]:
    """P as whole blocks and a rest."""
    rest = P % _BLOCK
    return [P - rest, rest]


def sum_weights(x: Tensor) -> Tensor:
    """Σ_p x[.., p] in float64: [.., P] → [..]."""
    P = x.shape[-1]
    if x.dtype == torch.float64 or P <= _BLOCK:
        return x.sum(-1, dtype=torch.float64)
    whole, rest = torch.split(x, _blocks(P), dim=-1)
    return whole.unflatten(-1, (-1, _BLOCK)).sum(-1).sum(-1, dtype=torch.float64) + rest.sum(-1, dtype=torch.float64)


class SumSquares(torch.autograd.Function):
    """Σ_p x² in float64 without x² in memory, forward or backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        P = x.shape[-1]
        if x.dtype == torch.float64 or P <= _BLOCK:
            return x.square().sum(-1, dtype=torch.float64)
        whole, rest = torch.split(x, _blocks(P), dim=-1)
        whole = whole.unflatten(-1, (-1, _BLOCK))
        norms = torch.linalg.vector_norm(whole, dim=-1).double()
        return norms.square().sum(-1) + rest.square().sum(-1, dtype=torch.float64)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return (2 * gradient).to(x.dtype).unsqueeze(-1) * x


def sum_squares(x: Tensor) -> Tensor:
    """Σ_p x[.., p]² in float64: [.., P] → [..]."""
    return SumSquares.apply(x)  # pyright: ignore[reportReturnType]


def project(x: Tensor, factor: Tensor) -> Tensor:
    """x F in float64: [S, P], [P, K] → [S, K]."""
    P = x.shape[-1]
    if x.dtype == torch.float64 or P <= _BLOCK:
        return x.double() @ factor.double()
    (x, x_rest), (factor, factor_rest) = torch.split(x, _blocks(P), dim=-1), torch.split(factor, _blocks(P))
    blocks = torch.bmm(x.unflatten(-1, (-1, _BLOCK)).transpose(0, 1), factor.unflatten(0, (-1, _BLOCK)))  # [., S, K]
    return blocks.sum(0, dtype=torch.float64) + (x_rest @ factor_rest).double()


class _Gram(torch.autograd.Function):
    """Fᵀ diag(r)² F in float64, from slabs of rows: neither r∘F nor anything else of size PK is kept for backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(factor: Tensor, ratio: Tensor) -> Tensor:
        K = factor.shape[-1]
        gram = factor.new_zeros(K, K, dtype=torch.float64)
        for rows, r in zip(factor.split(_SLAB), ratio.split(_SLAB), strict=True):
            slab = rows * r.unsqueeze(-1)
            gram += project(slab.mT, slab)
        return gram

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        factor, ratio = ctx.saved_tensors
        product = factor @ (gradient + gradient.mT).to(factor.dtype)  # [P, K]
        ratio_gradient = ratio * torch.linalg.vecdot(product, factor)
        return product * ratio.square().unsqueeze(-1), ratio_gradient


def capacitance(factor: Tensor, ratio: Tensor) -> Tensor:
    """Lower Cholesky factor of I_K + Fᵀ diag(r)² F in float64: [P, K], [P] → [K, K]."""
    gram = _Gram.apply(factor, ratio)
    M = gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.linalg.cholesky(M) if reads() else torch.linalg.cholesky_ex(M)[0]


def solve(cholesky: Tensor, x: Tensor) -> Tensor:
    """x M⁻¹ for M = L Lᵀ: [K, K], [S, K] → [S, K]."""
    return torch.cholesky_solve(x.mT, cholesky).mT


def half_log_det(cholesky: Tensor) -> Tensor:
    """½ log det M = Σ log diag L."""
    return cholesky.diagonal().log().sum()
