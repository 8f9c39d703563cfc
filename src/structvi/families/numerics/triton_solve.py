"""The K×K algebra of a draw in one program: u = M⁻¹(z − p), log q and M⁻¹, thirty launches of torch otherwise."""

# Triton's decorators hide what is called with what:
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

_SOLVED = 32  # the largest K×K matrix that one program inverts


def solves(K: int) -> bool:
    """Whether `solve` takes matrices of this size: one program holds all of it."""
    return K <= _SOLVED


def solve(gram: Tensor, projection: Tensor, squares: Tensor, log_scale: Tensor, z: Tensor, precision: bool, P: int):
    """u = M⁻¹(z − p) [S, K], log q [S] and M⁻¹ [K, K] in float64, by elimination in one program."""
    S, K = z.shape
    u, log_q = torch.empty_like(z), torch.empty(S, dtype=z.dtype, device=z.device)
    inverse = torch.empty_like(gram)
    KP = triton.next_power_of_2(max(K, 1))
    _solve[(1,)](
        gram, projection, squares, log_scale, z.contiguous(), u, log_q, inverse, P,
        S=S, K=K, KP=KP, PRECISION=precision, num_warps=1 if KP <= 16 else 4,
    )  # fmt: skip
    return u, log_q, inverse


@triton.jit
def _solve(
    gram_in, projection, squares, log_scale, z, u_out, log_q_out, inverse_out, P,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M = I + GᵀG is at least I: elimination without pivots, whose pivots' product is det M."""
    k = tl.arange(0, KP)
    row, column = k[:, None], k[None, :]
    both = (row < K) & (column < K)
    total = tl.load(log_scale)
    half_log_det = 0.0 * total
    if K > 0:
        gram = tl.load(gram_in + row * K + column, mask=both, other=0.0)
        M = gram + tl.where(row == column, 1.0, 0.0).to(tl.float64)
        pivots = tl.full((KP,), 1.0, tl.float64)
        for i in tl.range(0, K):
            across = tl.sum(tl.where(row == i, M, 0.0), 0)  # M[i, :]
            down = tl.sum(tl.where(column == i, M, 0.0), 1)  # M[:, i]
            pivot = tl.sum(tl.where(k == i, across, 0.0), 0)
            pivots = tl.where(k == i, pivot, pivots)  # all logarithms at once, and one division: they take longest
            inverse = 1.0 / pivot
            across, scaled = across * inverse, down * inverse
            rest = M - down[:, None] * across[None, :]
            rest = tl.where(row == i, across[None, :], rest)
            rest = tl.where(column == i, -scaled[:, None], rest)
            M = tl.where((row == i) & (column == i), inverse, rest)
        half_log_det += 0.5 * tl.sum(tl.log(pivots), 0)
        tl.store(inverse_out + row * K + column, M, mask=both)
    constant = total + 0.9189385332046727 * P.to(tl.float64)  # log √(2π)
    sign = -1.0 if PRECISION else 1.0
    for draw in tl.range(0, S):
        quadratic = tl.load(squares + draw)
        if K > 0:
            p = tl.load(projection + draw * K + k, mask=k < K, other=0.0)
            own = tl.load(z + draw * K + k, mask=k < K, other=0.0).to(tl.float64)
            u = tl.sum((own - p)[:, None] * M, 0)
            tl.store(u_out + draw * K + k, u, mask=k < K)
            quadratic += tl.sum(p * own + (p + tl.sum(own[:, None] * gram, 0)) * u, 0)
        tl.store(log_q_out + draw, -0.5 * quadratic - constant - sign * half_log_det)
