"""The passes of `fused` over the parameters as Triton kernels: each reads the factor once and writes no [P, K] matrix.

Measured on an H200 against the same passes in torch (docs/performance.md). Sums over the weights are taken in float32
over 1024 of them and added in float64, as everywhere.
"""

# Triton's decorators hide what is called with what:
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import triton_lane_sums, triton_lanes, triton_mma, triton_sums, triton_tiles
from .triton_rows import fold_rows, sum_rows
from .triton_solve import solve, solves
from .triton_sums import DRAWS, load_factor, ratio_of
from .triton_tiles import aligned, padded

__all__ = ["back_covariance", "back_precision", "joins", "place", "pull", "solve", "solves", "sums", "sums_and_draws"]

_ROWS = 1024  # weights whose products are added in float32
_TILE = 2048  # numbers of the factor that one program holds


def sums(
    log_scale: Tensor, factor: Tensor, unit: Tensor, precision: bool, epsilon: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """s = exp(log s) [P]; and GᵀG [K, K], Gᵀε [S, K], ε·ε [S] and Σ log s in float64."""
    way = triton_mma if triton_mma.serve(len(epsilon), factor) else triton_sums
    return way.sums(log_scale, factor, unit, precision, epsilon)


def joins(S: int, factor: Tensor, precision: bool) -> bool:
    """Whether `sums_and_draws` is used: in the covariance form θ needs nothing of the sums."""
    return not precision and triton_lane_sums.joins(S, factor)


def sums_and_draws(mean: Tensor, log_scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, z: Tensor):
    """`sums` of the covariance form, θ = μ + s∘(ε + G z) [S, P] and θ·θ [S], in one pass."""
    return triton_lane_sums.sums_and_draws(mean, log_scale, factor, unit, epsilon, z)


def place(mean: Tensor, scale: Tensor, factor: Tensor, unit: Tensor, precision: bool, epsilon: Tensor, a: Tensor):
    """θ = μ + s∘(ε + G a) [S, P], and θ·θ [S] in float64."""
    if len(epsilon) > DRAWS:
        some = zip(epsilon.split(DRAWS), a.split(DRAWS), strict=True)
        parts = [place(mean, scale, factor, unit, precision, *one) for one in some]
        return tuple(map(torch.cat, zip(*parts, strict=True)))
    S, (P, K) = len(epsilon), factor.shape
    if triton_lanes.serve(S, factor):
        return triton_lanes.place(mean, scale, factor, unit, precision, epsilon, a)
    if triton_tiles.serve(S, K):
        return triton_tiles.place(mean, scale, factor, unit, precision, epsilon, a)
    block = _block(K)
    programs = triton.cdiv(P, block)
    theta, squares = aligned(epsilon), mean.new_empty(programs, S)
    _place[(programs,)](
        mean, scale, factor, unit, epsilon.contiguous(), a.contiguous(), theta, squares, P, theta.stride(0),
        *factor.stride(),
        S=S, K=K, KP=triton.next_power_of_2(max(K, 1)), PRECISION=precision, BLOCK=block,
    )  # fmt: skip
    return theta, sum_rows(squares)


def back_covariance(
    scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, u: Tensor, z: Tensor, g: Tensor, g_q: Tensor,
    theta: Tensor, slope: Tensor,
):  # fmt: skip
    """Gradients of μ and log s, A = s₀∘g' with g' = g + slope·θ + g_q·score, and the squares of all three, |AᵀZ|² the
    last; of many draws None in their place."""
    if len(epsilon) > DRAWS:
        some = zip(*(x.split(DRAWS) for x in (epsilon, u, z, g, g_q, theta, slope)), strict=True)
        means, scales, rows, _ = zip(*(back_covariance(scale, factor, unit, *one) for one in some), strict=True)
        return sum(means), sum(scales), torch.cat(rows) if factor.shape[-1] else g, None
    S, (P, K) = len(epsilon), factor.shape
    if triton_lanes.serve(S, factor):
        return triton_lanes.back_covariance(scale, factor, unit, epsilon, u, z, g, g_q, theta, slope)
    if triton_tiles.serve(S, K):
        return triton_tiles.back_covariance(scale, factor, unit, epsilon, u, z, g, g_q, theta, slope)
    mean_gradient, scale_gradient = torch.empty_like(scale), torch.empty_like(scale)
    A = torch.empty_like(epsilon) if K else g
    block = _block(K)
    programs = triton.cdiv(P, block)
    squares = scale.new_empty(programs, 3)
    _back_covariance[(programs,)](
        scale, factor, unit, epsilon.contiguous(), u.contiguous(), z.contiguous(), g.contiguous(), g_q.contiguous(),
        theta, slope, mean_gradient, scale_gradient, A, squares, P, theta.stride(0), *factor.stride(),
        S=S, K=K, KP=triton.next_power_of_2(max(K, 1)), BLOCK=block,
    )  # fmt: skip
    return mean_gradient, scale_gradient, A, fold_rows(squares)


def pull(
    scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, z: Tensor, g: Tensor, g_q: Tensor,
    theta: Tensor, slope: Tensor,
):  # fmt: skip
    """g' = g + slope·θ + g_q·score in the precision form, and Gᵀ(s∘g') in float64."""
    if len(epsilon) > DRAWS:
        some = zip(*(x.split(DRAWS) for x in (epsilon, z, g, g_q, theta, slope)), strict=True)
        return tuple(map(torch.cat, zip(*(pull(scale, factor, unit, *one) for one in some), strict=True)))
    S, (P, K) = len(epsilon), factor.shape
    if triton_lane_sums.pulls(S, factor):
        return triton_lane_sums.pull(scale, factor, unit, epsilon, z, g, g_q, theta, slope)
    pulled = torch.empty_like(epsilon)
    programs = triton.cdiv(P, _ROWS)
    projection = factor.new_empty(programs, S, K)
    _pull[(programs,)](
        scale, factor, unit, epsilon.contiguous(), z.contiguous(), g.contiguous(), g_q.contiguous(), theta, slope,
        pulled, projection, P, theta.stride(0), *factor.stride(),
        S=S, K=K, KP=padded(K), SP=padded(S), ROWS=_ROWS, BLOCK=32, num_warps=1, num_stages=3,
    )  # fmt: skip
    return pulled, sum_rows(projection.flatten(1)).view(S, K)


def back_precision(scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, u: Tensor, v: Tensor, g: Tensor):
    """Gradients of μ and log s, A = [r∘(s∘g' − G v); −r∘y] with y = (θ − μ)/s = ε + G u, and the squares
    of all three; of many draws None in their place."""
    if len(epsilon) > DRAWS:
        some = zip(*(x.split(DRAWS) for x in (epsilon, u, v, g)), strict=True)
        means, scales, rows, _ = zip(*(back_precision(scale, factor, unit, *one) for one in some), strict=True)
        sides = zip(*(A.chunk(2) for A in rows), strict=True)
        return sum(means), sum(scales), torch.cat([one for side in sides for one in side]), None
    S, (P, K) = len(epsilon), factor.shape
    if triton_lane_sums.pulls(S, factor):
        return triton_lanes.back_precision(scale, factor, unit, epsilon, u, v, g)
    if triton_tiles.serve(S, K):
        return triton_tiles.back_precision(scale, factor, unit, epsilon, u, v, g)
    mean_gradient, scale_gradient = torch.empty_like(scale), torch.empty_like(scale)
    A = epsilon.new_empty(2 * S, P)
    block = _block(K)
    programs = triton.cdiv(P, block)
    squares = scale.new_empty(programs, 3)
    _back_precision[(programs,)](
        scale, factor, unit, epsilon.contiguous(), u.contiguous(), v.contiguous(), g.contiguous(),
        mean_gradient, scale_gradient, A, squares, P, *factor.stride(),
        S=S, K=K, KP=triton.next_power_of_2(max(K, 1)), BLOCK=block,
    )  # fmt: skip
    return mean_gradient, scale_gradient, A, fold_rows(squares)


def _block(K: int) -> int:
    """Rows of the factor that one program holds."""
    return max(16, _TILE // triton.next_power_of_2(max(K, 1))) if K else 1024


@triton.jit
def _place(
    mean, scale, factor, unit, epsilon, a, theta, squares, P, wide, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = p < P
    k = tl.arange(0, KP)
    m = tl.load(mean + p, mask=inside, other=0.0)
    s = tl.load(scale + p, mask=inside, other=1.0)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    weight = s * ratio_of(s, s0, PRECISION)
    F = load_factor(factor, p, k, inside, along, across, K)
    for draw in tl.range(0, S, loop_unroll_factor=8):
        at = draw * P.to(tl.int64) + p
        value = m + s * tl.load(epsilon + at, mask=inside, other=0.0)
        if K > 0:
            row = tl.load(a + draw * K + k, mask=k < K, other=0.0)
            value += weight * tl.sum(F * row[None, :], 1)
        tl.store(theta + draw * wide.to(tl.int64) + p, value, mask=inside)
        tl.store(squares + tl.program_id(0) * S + draw, tl.sum(tl.where(inside, value * value, 0.0)))


@triton.jit
def _back_covariance(
    scale, factor, unit, epsilon, u, z, g, g_q, theta, slope, to_mean, to_scale, A, squares, P, wide, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = p < P
    k = tl.arange(0, KP)
    s = tl.load(scale + p, mask=inside, other=1.0)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    F = load_factor(factor, p, k, inside, along, across, K)
    mean_gradient = tl.zeros((BLOCK,), tl.float32)
    scale_gradient = tl.zeros((BLOCK,), tl.float32)
    gradient = tl.zeros((BLOCK, KP), tl.float32)
    for draw in tl.range(0, S, loop_unroll_factor=8):
        at = draw * P.to(tl.int64) + p
        e = tl.load(epsilon + at, mask=inside, other=0.0)
        t = e
        if K > 0:
            row = tl.load(u + draw * K + k, mask=k < K, other=0.0)
            t += s0 / s * tl.sum(F * row[None, :], 1)
        pulled = tl.load(g + at, mask=inside, other=0.0) - tl.load(g_q + draw) * t / s
        pulled += tl.load(slope + draw) * tl.load(theta + draw * wide.to(tl.int64) + p, mask=inside, other=0.0)
        mean_gradient += pulled
        scale_gradient += pulled * e
        if K > 0:
            tl.store(A + at, s0 * pulled, mask=inside)
            row = tl.load(z + draw * K + k, mask=k < K, other=0.0)
            gradient += (s0 * pulled)[:, None] * row[None, :]
    scale_gradient *= s
    tl.store(to_mean + p, mean_gradient, mask=inside)
    tl.store(to_scale + p, scale_gradient, mask=inside)
    squares += 3 * tl.program_id(0)
    tl.store(squares, tl.sum(tl.where(inside, mean_gradient * mean_gradient, 0.0)))
    tl.store(squares + 1, tl.sum(tl.where(inside, scale_gradient * scale_gradient, 0.0)))
    tl.store(squares + 2, tl.sum(tl.where(inside[:, None], gradient * gradient, 0.0)))


@triton.jit
def _pull(
    scale, factor, unit, epsilon, z, g, g_q, theta, slope, pulled_out, projection_out, P, wide, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, 
):  # fmt: skip
    program = tl.program_id(0)
    k, draws = tl.arange(0, KP), tl.arange(0, SP)
    some = draws < S
    projection = tl.zeros((SP, KP), tl.float32)
    Z = tl.load(z + draws[:, None] * K + k[None, :], mask=some[:, None] & (k < K)[None, :], other=0.0)
    cotangent = tl.load(g_q + draws, mask=some, other=0.0)
    towards = tl.load(slope + draws, mask=some, other=0.0)
    for start in range(0, ROWS, BLOCK):
        p = program * ROWS + start + tl.arange(0, BLOCK)
        inside = p < P
        s = tl.load(scale + p, mask=inside, other=1.0)
        s0 = tl.load(unit + p, mask=inside, other=1.0)
        r = s / s0
        F = load_factor(factor, p, k, inside, along, across, K)
        at = draws[:, None].to(tl.int64) * P + p[None, :]
        both = some[:, None] & inside[None, :]
        t = tl.load(epsilon + at, mask=both, other=0.0)
        t += tl.dot(Z, tl.trans(F), input_precision="tf32x3") * r[None, :]
        pulled = tl.load(g + at, mask=both, other=0.0) - cotangent[:, None] * t / s[None, :]
        drawn = theta + draws[:, None].to(tl.int64) * wide + p[None, :]
        pulled += towards[:, None] * tl.load(drawn, mask=both, other=0.0)
        tl.store(pulled_out + at, pulled, mask=both)
        projection += tl.dot(pulled * (s * r)[None, :], F, input_precision="tf32x3")
    at = program.to(tl.int64) * S * K + draws[:, None] * K + k[None, :]
    tl.store(projection_out + at, projection, mask=some[:, None] & (k < K)[None, :])


@triton.jit
def _back_precision(
    scale, factor, unit, epsilon, u, v, g, to_mean, to_scale, A, squares, P, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = p < P
    k = tl.arange(0, KP)
    s = tl.load(scale + p, mask=inside, other=1.0)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    r = s / s0
    F = load_factor(factor, p, k, inside, along, across, K)
    mean_gradient = tl.zeros((BLOCK,), tl.float32)
    scale_gradient = tl.zeros((BLOCK,), tl.float32)
    gradient = tl.zeros((BLOCK, KP), tl.float32)
    for draw in tl.range(0, S, loop_unroll_factor=8):
        at = draw * P.to(tl.int64) + p
        U = tl.load(u + draw * K + k, mask=k < K, other=0.0)
        V = tl.load(v + draw * K + k, mask=k < K, other=0.0)
        Fu, Fv = tl.sum(F * U[None, :], 1), tl.sum(F * V[None, :], 1)
        pulled = tl.load(g + at, mask=inside, other=0.0)
        y = tl.load(epsilon + at, mask=inside, other=0.0) + r * Fu
        w = s * pulled - r * Fv
        mean_gradient += pulled
        scale_gradient += pulled * y + (w * Fu - y * Fv) / s0
        tl.store(A + at, r * w, mask=inside)
        tl.store(A + at + S * P.to(tl.int64), -r * y, mask=inside)
        gradient += (r * w)[:, None] * U[None, :] - (r * y)[:, None] * V[None, :]
    scale_gradient *= s
    tl.store(to_mean + p, mean_gradient, mask=inside)
    tl.store(to_scale + p, scale_gradient, mask=inside)
    squares += 3 * tl.program_id(0)
    tl.store(squares, tl.sum(tl.where(inside, mean_gradient * mean_gradient, 0.0)))
    tl.store(squares + 1, tl.sum(tl.where(inside, scale_gradient * scale_gradient, 0.0)))
    tl.store(squares + 2, tl.sum(tl.where(inside[:, None], gradient * gradient, 0.0)))
