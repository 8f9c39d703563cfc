"""Sums over the P weights, accumulated in float64, and the K×K algebra of a diagonal plus a low-rank matrix.

Products are taken in blocks of the weights in their own precision and the blocks are added in float64: the error
does not grow with P, and nothing of size P is ever copied to float64.
"""

import torch
from torch import Tensor

_BLOCK = 4096


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


def project(x: Tensor, factor: Tensor) -> Tensor:
    """x F in float64: [S, P], [P, K] → [S, K]."""
    P = x.shape[-1]
    if x.dtype == torch.float64 or P <= _BLOCK:
        return x.double() @ factor.double()
    (x, x_rest), (factor, factor_rest) = torch.split(x, _blocks(P), dim=-1), torch.split(factor, _blocks(P))
    blocks = torch.bmm(x.unflatten(-1, (-1, _BLOCK)).transpose(0, 1), factor.unflatten(0, (-1, _BLOCK)))  # [., S, K]
    return blocks.sum(0, dtype=torch.float64) + (x_rest @ factor_rest).double()


def capacitance(factor: Tensor) -> Tensor:
    """Lower Cholesky factor of I_K + FᵀF in float64: [P, K] → [K, K]."""
    gram = project(factor.mT, factor)
    return torch.linalg.cholesky(gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))


def solve(cholesky: Tensor, x: Tensor) -> Tensor:
    """x M⁻¹ for M = L Lᵀ: [K, K], [S, K] → [S, K]."""
    return torch.cholesky_solve(x.mT, cholesky).mT


def half_log_det(cholesky: Tensor) -> Tensor:
    """½ log det M = Σ log diag L."""
    return cholesky.diagonal().log().sum()
