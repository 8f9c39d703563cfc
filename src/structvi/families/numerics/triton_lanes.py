"""The passes of `triton_kernels` with a row of the factor in each thread: products with it stay in its registers.

Where a row is split over threads, every product of a draw is added up through shuffles and moved through shared memory
to where the draw is stored, which takes longer than to read it. Here a tile is four numbers wide, so that Triton gives
all four to one thread, and has as many rows as the program has threads. The rows of u and z are read as such tiles too,
of one address in all rows. Which of the ways is used: `serve`.
"""

# Triton's decorators hide what is called with what:
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: RUF005 (Triton adds tuples, and does not unpack them)

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_rows import fold_rows, sum_rows
from .triton_tiles import TUPLES, aligned

#: from so many draws on; and warps of a program
SERVES = 2
PLACE_WARPS, COVARIANCE_WARPS, PRECISION_WARPS = 1, 1, 1
_WIDEST = 16  # numbers of a row that a thread holds, twice on the way back


def serve(S: int, factor: Tensor) -> bool:
    """Whether these passes are used for S draws: rows [K] of four numbers at a time, one after the other in memory."""
    K = factor.shape[-1]
    return TUPLES and SERVES <= S <= 16 and 0 < K <= _WIDEST and K % 4 == 0 and factor.is_contiguous()


def place(mean: Tensor, scale: Tensor, factor: Tensor, unit: Tensor, precision: bool, epsilon: Tensor, a: Tensor):
    """θ = μ + s∘(ε + G a) [S, P], and θ·θ [S] in float64."""
    S, (P, K), block = len(epsilon), factor.shape, 32 * PLACE_WARPS
    programs = triton.cdiv(P, block)
    theta, squares = aligned(epsilon), mean.new_empty(programs, S)
    _place[(programs,)](
        mean, scale, factor, unit, epsilon.contiguous(), a.contiguous(), theta, squares, P, theta.stride(0),
        S=S, K=K, PRECISION=precision, BLOCK=block, num_warps=PLACE_WARPS,
    )  # fmt: skip
    return theta, sum_rows(squares)


def back_covariance(
    scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, u: Tensor, z: Tensor, g: Tensor, g_q: Tensor,
    theta: Tensor, slope: Tensor,
):  # fmt: skip
    """Gradients of μ and log s, A = s₀∘g' with g' = g + slope·θ + g_q·score, and the squares of all three."""
    S, (P, K), block = len(epsilon), factor.shape, 32 * COVARIANCE_WARPS
    programs = triton.cdiv(P, block)
    mean_gradient, scale_gradient = torch.empty_like(scale), torch.empty_like(scale)
    A, squares = torch.empty_like(epsilon), scale.new_empty(programs, 3)
    _back_covariance[(programs,)](
        scale, factor, unit, epsilon.contiguous(), u.contiguous(), z.contiguous(), g.contiguous(), g_q.contiguous(),
        theta, slope, mean_gradient, scale_gradient, A, squares, P, theta.stride(0),
        S=S, K=K, BLOCK=block, num_warps=COVARIANCE_WARPS,
    )  # fmt: skip
    return mean_gradient, scale_gradient, A, fold_rows(squares)


def back_precision(scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, u: Tensor, v: Tensor, g: Tensor):
    """Gradients of μ and log s, A = [r∘(s∘g' − G v); −r∘y] with y = (θ − μ)/s = ε + G u, and the squares of all."""
    S, (P, K), block = len(epsilon), factor.shape, 32 * PRECISION_WARPS
    programs = triton.cdiv(P, block)
    mean_gradient, scale_gradient = torch.empty_like(scale), torch.empty_like(scale)
    A, squares = epsilon.new_empty(2 * S, P), scale.new_empty(programs, 3)
    _back_precision[(programs,)](
        scale, factor, unit, epsilon.contiguous(), u.contiguous(), v.contiguous(), g.contiguous(),
        mean_gradient, scale_gradient, A, squares, P,
        S=S, K=K, BLOCK=block, num_warps=PRECISION_WARPS,
    )  # fmt: skip
    return mean_gradient, scale_gradient, A, fold_rows(squares)


@triton.jit
def _four(x, rows, at: tl.constexpr, K: tl.constexpr):
    """Where x[row, at : at + 4] of rows [K] is: [BLOCK, 4]."""
    return x + (rows * K)[:, None] + (at + tl.arange(0, 4))[None, :]


@triton.jit
def rows_of(factor, p, inside, K: tl.constexpr):
    """The rows of the factor at weights p, four numbers of each at a time."""
    rows = ()
    for k in tl.static_range(0, K, 4):
        rows = rows + (tl.load(_four(factor, p.to(tl.int64), k, K), mask=inside[:, None], other=0.0),)
    return rows


@triton.jit
def vectors_of(x, p, inside, wide, S: tl.constexpr):
    """x[draw, p] of all draws, so many numbers apart, read before anything is stored."""
    vectors = ()
    for draw in tl.static_range(0, S):
        vectors = vectors + (tl.load(x + draw * wide.to(tl.int64) + p, mask=inside, other=0.0),)
    return vectors


@triton.jit
def times(rows, a, p, K: tl.constexpr):
    """F a of a [K] in memory: [BLOCK]."""
    total = tl.sum(rows[0] * tl.load(_four(a, 0 * p, 0, K)), 1)
    for k in tl.static_range(4, K, 4):
        total += tl.sum(rows[k // 4] * tl.load(_four(a, 0 * p, k, K)), 1)
    return total


@triton.jit
def _place(
    mean, scale, factor, unit, epsilon, a, theta, squares, P, wide,
    S: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = p < P
    rows = rows_of(factor, p, inside, K)
    noise = vectors_of(epsilon, p, inside, P, S)
    m = tl.load(mean + p, mask=inside, other=0.0)
    s = tl.load(scale + p, mask=inside, other=1.0)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    weight = s * s / s0 if PRECISION else s0
    for draw in tl.static_range(0, S):
        value = m + s * noise[draw] + weight * times(rows, a + draw * K, p, K)
        tl.store(theta + draw * wide.to(tl.int64) + p, value, mask=inside)
        tl.store(squares + tl.program_id(0) * S + draw, tl.sum(tl.where(inside, value * value, 0.0)))


@triton.jit
def _back_covariance(
    scale, factor, unit, epsilon, u, z, g, g_q, theta, slope, to_mean, to_scale, A, squares, P, wide,
    S: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = p < P
    rows = rows_of(factor, p, inside, K)
    noise = vectors_of(epsilon, p, inside, P, S)
    given = vectors_of(g, p, inside, P, S)
    drawn = vectors_of(theta, p, inside, wide, S)
    s = tl.load(scale + p, mask=inside, other=1.0)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    mean_gradient = tl.zeros((BLOCK,), tl.float32)
    scale_gradient = tl.zeros((BLOCK,), tl.float32)
    sides = ()
    for draw in tl.static_range(0, S):
        t = noise[draw] + s0 / s * times(rows, u + draw * K, p, K)
        pulled = given[draw] - tl.load(g_q + draw) * t / s + tl.load(slope + draw) * drawn[draw]
        mean_gradient += pulled
        scale_gradient += pulled * noise[draw]
        sides = sides + (tl.where(inside, s0 * pulled, 0.0),)
    norm = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(0, K, 4):
        gradient = tl.zeros((BLOCK, 4), tl.float32)
        for draw in tl.static_range(0, S):
            gradient += sides[draw][:, None] * tl.load(_four(z + draw * K, 0 * p, k, K))
        norm += tl.sum(gradient * gradient, 1)
    for draw in tl.static_range(0, S):
        tl.store(A + draw * P.to(tl.int64) + p, sides[draw], mask=inside)
    scale_gradient *= s
    tl.store(to_mean + p, mean_gradient, mask=inside)
    tl.store(to_scale + p, scale_gradient, mask=inside)
    squares += 3 * tl.program_id(0)
    tl.store(squares, tl.sum(tl.where(inside, mean_gradient * mean_gradient, 0.0)))
    tl.store(squares + 1, tl.sum(tl.where(inside, scale_gradient * scale_gradient, 0.0)))
    tl.store(squares + 2, tl.sum(norm))


@triton.jit
def _back_precision(
    scale, factor, unit, epsilon, u, v, g, to_mean, to_scale, A, squares, P,
    S: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = p < P
    rows = rows_of(factor, p, inside, K)
    noise = vectors_of(epsilon, p, inside, P, S)
    given = vectors_of(g, p, inside, P, S)
    s = tl.load(scale + p, mask=inside, other=1.0)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    r = s / s0
    mean_gradient = tl.zeros((BLOCK,), tl.float32)
    scale_gradient = tl.zeros((BLOCK,), tl.float32)
    sides = ()
    for draw in tl.static_range(0, S):
        Fu, Fv = times(rows, u + draw * K, p, K), times(rows, v + draw * K, p, K)
        y = noise[draw] + r * Fu
        w = s * given[draw] - r * Fv
        mean_gradient += given[draw]
        scale_gradient += given[draw] * y + (w * Fu - y * Fv) / s0
        sides = sides + (tl.where(inside, r * w, 0.0), tl.where(inside, -r * y, 0.0))
    for draw in tl.static_range(0, S):  # before u and v are read again: they would be held in registers
        tl.store(A + draw * P.to(tl.int64) + p, sides[2 * draw], mask=inside)
        tl.store(A + (S + draw) * P.to(tl.int64) + p, sides[2 * draw + 1], mask=inside)
    norm = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(0, K, 4):
        gradient = tl.zeros((BLOCK, 4), tl.float32)
        for draw in tl.static_range(0, S):
            gradient += sides[2 * draw][:, None] * tl.load(_four(u + draw * K, 0 * p, k, K))
            gradient += sides[2 * draw + 1][:, None] * tl.load(_four(v + draw * K, 0 * p, k, K))
        norm += tl.sum(gradient * gradient, 1)
    scale_gradient *= s
    tl.store(to_mean + p, mean_gradient, mask=inside)
    tl.store(to_scale + p, scale_gradient, mask=inside)
    squares += 3 * tl.program_id(0)
    tl.store(squares, tl.sum(tl.where(inside, mean_gradient * mean_gradient, 0.0)))
    tl.store(squares + 1, tl.sum(tl.where(inside, scale_gradient * scale_gradient, 0.0)))
    tl.store(squares + 2, tl.sum(norm))
