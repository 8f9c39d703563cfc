"""Sums over the P weights, accumulated in float64, and the K×K algebra of a diagonal plus a low-rank matrix.

Products are taken in blocks of the weights in their own precision and the blocks are added in float64: the error
does not grow with P, and nothing of size P is ever copied to float64.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...util.checks import reads

_BLOCK = 4096  # weights whose products are added in their own precision
_LEAST = 256  # a block that leaves no rest has at least so many
_SLAB = 16 * _BLOCK  # weights whose rows of the factor are scaled at once


@lru_cache(maxsize=256)
def _cut(P: int) -> tuple[int, list[int]]:
    """The size of a block; and P as whole blocks and a rest, which is none where a divisor of P is a good size.

    Example:
        >>> _cut(10_000), _cut(10_007)
        ((2500, [10000, 0]), (4096, [8192, 1815]))
    """
    block = next((size for size in range(_BLOCK, _LEAST - 1, -1) if P % size == 0), _BLOCK)
    rest = P % block
    return block, [P - rest, rest]


def sum_weights(x: Tensor) -> Tensor:
    """Σ_p x[.., p] in float64: [.., P] → [..]."""
    P = x.shape[-1]
    if x.dtype == torch.float64 or P <= _BLOCK:
        return x.sum(-1, dtype=torch.float64)
    block, (size, rest) = _cut(P)
    if not rest:
        return x.unflatten(-1, (-1, block)).sum(-1).sum(-1, dtype=torch.float64)
    whole, few = x.split_with_sizes((size, rest), -1)
    return whole.unflatten(-1, (-1, block)).sum(-1).sum(-1, dtype=torch.float64) + few.sum(-1, dtype=torch.float64)


class SumSquares(torch.autograd.Function):
    """Σ_p x² in float64 without x² in memory, forward or backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        P = x.shape[-1]
        if x.dtype == torch.float64 or P <= _BLOCK:
            return x.square().sum(-1, dtype=torch.float64)
        block, (size, rest) = _cut(P)
        whole, few = x.split_with_sizes((size, rest), -1) if rest else (x, None)
        norms = torch.linalg.vector_norm(whole.unflatten(-1, (-1, block)), dim=-1).double()
        squares = norms.square().sum(-1)
        return squares if few is None else squares + few.square().sum(-1, dtype=torch.float64)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return (2 * gradient).to(x.dtype).unsqueeze(-1) * x


def sum_squares(x: Tensor) -> Tensor:
    """Σ_p x[.., p]² in float64: [.., P] → [..]."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return SumSquares.forward(x)
    return SumSquares.apply(x)  # pyright: ignore[reportReturnType]


def project(x: Tensor, factor: Tensor) -> Tensor:
    """x F in float64: [S, P], [P, K] → [S, K]."""
    P = x.shape[-1]
    if x.dtype == torch.float64 or P <= _BLOCK:
        return x.double() @ factor.double()
    block, sizes = _cut(P)
    (x, x_rest), (factor, factor_rest) = torch.split(x, sizes, dim=-1), torch.split(factor, sizes)
    blocks = torch.bmm(x.unflatten(-1, (-1, block)).transpose(0, 1), factor.unflatten(0, (-1, block)))  # [., S, K]
    whole = blocks.sum(0, dtype=torch.float64)
    return whole + (x_rest @ factor_rest).double() if sizes[1] else whole


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
    if cholesky.is_cuda:  # of many matrices at once, under vmap, `cholesky_solve` cannot be captured as a CUDA graph
        half = torch.linalg.solve_triangular(cholesky, x.mT, upper=False)
        return torch.linalg.solve_triangular(cholesky.mT, half, upper=True).mT
    return torch.cholesky_solve(x.mT, cholesky).mT


def half_log_det(cholesky: Tensor) -> Tensor:
    """½ log det M = Σ log diag L."""
    return cholesky.diagonal().log().sum()
