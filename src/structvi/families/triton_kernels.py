"""The passes over the factor as Triton kernels: each reads F once, and no [P, K] matrix but ∂F is written.

Sums over the weights are taken in float32 over some hundreds of them and added in float64, as everywhere.
"""

# Triton's decorators hide the types of calls:
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: weights whose products GᵀG are added in float32; four times as many of a wide factor, whose K² sums are long to write
ROWS = 1024
#: numbers of the factor that a program holds in registers
TILE = 2048


class Dot(NamedTuple):
    """The matrix products of GᵀG: rows of one product, and warps."""

    rows: int
    warps: int


#: by the side of GᵀG; one warp has no room for the sums of 64 columns (16 columns on an H200: 0.39 ms instead of 0.50
#: with 128 rows, P = 11.2·10⁶)
DOTS = {16: Dot(32, 1), 32: Dot(64, 1), 64: Dot(32, 4), 128: Dot(16, 8)}


def gram(scale: Tensor, factor: Tensor, unit: Tensor, precision: bool) -> Tensor:
    """Return GᵀG [K, K] in float64."""
    P, K = factor.shape
    if K == 0:
        return factor.new_zeros(0, 0, dtype=torch.float64)
    side = max(16, triton.next_power_of_2(K))
    rows, dot = ROWS if side <= 32 else 4 * ROWS, DOTS[side]
    partial = factor.new_empty(triton.cdiv(P, rows), K, K)
    _gram[(len(partial),)](
        scale, factor, unit, partial, P, *factor.stride(),
        K=K, KP=side, PRECISION=precision, ROWS=rows, BLOCK=dot.rows, num_warps=dot.warps, num_stages=1,
    )  # fmt: skip
    return partial.sum(0, dtype=torch.float64)


def project(
    mean: Tensor, log_scale: Tensor, factor: Tensor, unit: Tensor, precision: bool, epsilon: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return s = exp(log s) [P]; εᵀG [S, K], ε·ε [S] and Σ log s in float64; and θ [S, P] of the covariance form."""
    S, K = len(epsilon), factor.shape[1]
    sizes, scale, theta = [S * K, S, 1], torch.empty_like(log_scale), torch.empty_like(epsilon)
    partial = scale.new_empty(*_programs(factor), sum(sizes))
    own = mean, log_scale, scale, factor, unit, epsilon.contiguous(), z.contiguous(), theta, partial
    _run(_project, factor, S, *own, WIDTH=sum(sizes), PRECISION=precision)
    projection, squares, total = partial.sum(0, dtype=torch.float64).split(sizes)
    return scale, projection.view(S, K), squares, total.view(()), theta


def place(mean: Tensor, scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, u: Tensor) -> Tensor:
    """Return θ = μ + s∘(ε + G u) of the precision form, [S, P]."""
    theta = torch.empty_like(epsilon)
    _run(_place, factor, len(epsilon), mean, scale, factor, unit, epsilon.contiguous(), u.contiguous(), theta)
    return theta


def back_covariance(
    scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, u: Tensor, z: Tensor, g: Tensor, g_q: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of μ, log s and F in the covariance form."""
    found = torch.empty_like(scale), torch.empty_like(scale), torch.empty_like(factor)
    given = epsilon.contiguous(), u.contiguous(), z.contiguous(), g, g_q
    _run(_back_covariance, factor, len(g), scale, factor, unit, *given, *found)
    return found


def pull(
    scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, z: Tensor, g: Tensor, g_q: Tensor
) -> tuple[Tensor, Tensor]:
    """Return g' = g + c∇ log q in the precision form [S, P], and Gᵀ(s∘g') [S, K] in float64."""
    S, K = len(g), factor.shape[1]
    pulled, partial = torch.empty_like(g), factor.new_empty(*_programs(factor), S, K)
    given = epsilon.contiguous(), z.contiguous(), g, g_q
    _run(_pull, factor, S, scale, factor, unit, *given, pulled, partial)
    return pulled, partial.sum(0, dtype=torch.float64)


def back_precision(
    scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, u: Tensor, v: Tensor, pulled: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of μ, log s and F in the precision form."""
    found = torch.empty_like(scale), torch.empty_like(scale), torch.empty_like(factor)
    given = epsilon.contiguous(), u.contiguous(), v.contiguous(), pulled
    _run(_back_precision, factor, len(pulled), scale, factor, unit, *given, *found)
    return found


def _block(K: int) -> int:
    return max(16, TILE // triton.next_power_of_2(K)) if K else 1024


def _programs(factor: Tensor) -> tuple[int]:
    return (triton.cdiv(factor.shape[0], _block(factor.shape[1])),)


def _run(kernel: Any, factor: Tensor, S: int, *tensors: Tensor, **settings: Any) -> None:
    P, K = factor.shape
    shape = {"S": S, "K": K, "KP": triton.next_power_of_2(max(K, 1)), "BLOCK": _block(K)}
    kernel[_programs(factor)](*tensors, P, *factor.stride(), **shape, **settings)


@triton.jit
def _rows_at(p, k, along, across):
    return p[:, None].to(tl.int64) * along + k[None, :].to(tl.int64) * across


@triton.jit
def _ratio(s, s0, PRECISION: tl.constexpr):
    if PRECISION:
        return s / s0
    return s0 / s


@triton.jit
def _gram(
    scale, factor, unit, out, P, along, across,
    K: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, KP)
    gram = tl.zeros((KP, KP), tl.float32)
    for start in range(0, ROWS, BLOCK):
        p = tl.program_id(0) * ROWS + start + tl.arange(0, BLOCK)
        inside = p < P
        s = tl.load(scale + p, mask=inside, other=1.0)
        s0 = tl.load(unit + p, mask=inside, other=1.0)
        mask = inside[:, None] & (k < K)[None, :]
        G = tl.load(factor + _rows_at(p, k, along, across), mask=mask, other=0.0) * _ratio(s, s0, PRECISION)[:, None]
        gram += tl.dot(tl.trans(G), G, input_precision="ieee")
    at = tl.program_id(0).to(tl.int64) * K * K + k[:, None] * K + k[None, :]
    tl.store(out + at, gram, mask=(k < K)[:, None] & (k < K)[None, :])


@triton.jit
def _project(
    mean, log_scale, scale, factor, unit, epsilon, z, theta, out, P, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k, inside = tl.arange(0, KP), p < P
    log_s = tl.load(log_scale + p, mask=inside, other=0.0)
    s = tl.exp(log_s)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    m = tl.load(mean + p, mask=inside, other=0.0)
    mask = inside[:, None] & (k < K)[None, :]
    G = tl.load(factor + _rows_at(p, k, along, across), mask=mask, other=0.0) * _ratio(s, s0, PRECISION)[:, None]
    tl.store(scale + p, s, mask=inside)
    out += tl.program_id(0).to(tl.int64) * WIDTH
    for draw in tl.range(0, S, loop_unroll_factor=8):
        at = draw * P.to(tl.int64) + p
        y = tl.load(epsilon + at, mask=inside, other=0.0)
        tl.store(out + S * K + draw, tl.sum(y * y, 0))
        if K > 0:
            tl.store(out + draw * K + k, tl.sum(G * y[:, None], 0), mask=k < K)
            y += tl.sum(G * tl.load(z + draw * K + k, mask=k < K, other=0.0)[None, :], 1)
        if not PRECISION:
            tl.store(theta + at, m + s * y, mask=inside)
    tl.store(out + WIDTH - 1, tl.sum(log_s, 0))


@triton.jit
def _place(
    mean, scale, factor, unit, epsilon, u, theta, P, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k, inside = tl.arange(0, KP), p < P
    m = tl.load(mean + p, mask=inside, other=0.0)
    s = tl.load(scale + p, mask=inside, other=1.0)
    r = s / tl.load(unit + p, mask=inside, other=1.0)
    F = tl.load(factor + _rows_at(p, k, along, across), mask=inside[:, None] & (k < K)[None, :], other=0.0)
    for draw in tl.range(0, S, loop_unroll_factor=8):
        at = draw * P.to(tl.int64) + p
        row = tl.load(u + draw * K + k, mask=k < K, other=0.0)
        y = tl.load(epsilon + at, mask=inside, other=0.0) + r * tl.sum(F * row[None, :], 1)
        tl.store(theta + at, m + s * y, mask=inside)


@triton.jit
def _back_covariance(
    scale, factor, unit, epsilon, u, z, g, g_q, to_mean, to_scale, to_factor, P, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k, inside = tl.arange(0, KP), p < P
    s = tl.load(scale + p, mask=inside, other=1.0)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    rows, mask = _rows_at(p, k, along, across), inside[:, None] & (k < K)[None, :]
    F = tl.load(factor + rows, mask=mask, other=0.0)
    mean_gradient = tl.zeros((BLOCK,), tl.float32)
    scale_gradient = tl.zeros((BLOCK,), tl.float32)
    gradient = tl.zeros((BLOCK, KP), tl.float32)
    for draw in tl.range(0, S, loop_unroll_factor=8):
        at = draw * P.to(tl.int64) + p
        e = tl.load(epsilon + at, mask=inside, other=0.0)
        t = e
        if K > 0:
            t += s0 / s * tl.sum(F * tl.load(u + draw * K + k, mask=k < K, other=0.0)[None, :], 1)
        pulled = tl.load(g + at, mask=inside, other=0.0) - tl.load(g_q + draw) * t / s
        mean_gradient += pulled
        scale_gradient += pulled * e
        if K > 0:
            gradient += (s0 * pulled)[:, None] * tl.load(z + draw * K + k, mask=k < K, other=0.0)[None, :]
    tl.store(to_mean + p, mean_gradient, mask=inside)
    tl.store(to_scale + p, s * scale_gradient, mask=inside)
    tl.store(to_factor + rows, gradient, mask=mask)


@triton.jit
def _pull(
    scale, factor, unit, epsilon, z, g, g_q, pulled_out, out, P, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k, inside = tl.arange(0, KP), p < P
    s = tl.load(scale + p, mask=inside, other=1.0)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    mask = inside[:, None] & (k < K)[None, :]
    G = tl.load(factor + _rows_at(p, k, along, across), mask=mask, other=0.0) * (s / s0)[:, None]
    for draw in tl.range(0, S, loop_unroll_factor=8):
        at = draw * P.to(tl.int64) + p
        row = tl.load(z + draw * K + k, mask=k < K, other=0.0)
        t = tl.load(epsilon + at, mask=inside, other=0.0) + tl.sum(G * row[None, :], 1)
        pulled = tl.load(g + at, mask=inside, other=0.0) - tl.load(g_q + draw) * t / s
        tl.store(pulled_out + at, pulled, mask=inside)
        projected = tl.sum(G * (s * pulled)[:, None], 0)
        tl.store(out + (tl.program_id(0).to(tl.int64) * S + draw) * K + k, projected, mask=k < K)


@triton.jit
def _back_precision(
    scale, factor, unit, epsilon, u, v, g, to_mean, to_scale, to_factor, P, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k, inside = tl.arange(0, KP), p < P
    s = tl.load(scale + p, mask=inside, other=1.0)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    r = s / s0
    rows, mask = _rows_at(p, k, along, across), inside[:, None] & (k < K)[None, :]
    G = tl.load(factor + rows, mask=mask, other=0.0) * r[:, None]
    mean_gradient = tl.zeros((BLOCK,), tl.float32)
    scale_gradient = tl.zeros((BLOCK,), tl.float32)
    gradient = tl.zeros((BLOCK, KP), tl.float32)
    for draw in tl.range(0, S, loop_unroll_factor=8):
        at = draw * P.to(tl.int64) + p
        U = tl.load(u + draw * K + k, mask=k < K, other=0.0)
        V = tl.load(v + draw * K + k, mask=k < K, other=0.0)
        Gu, Gv = tl.sum(G * U[None, :], 1), tl.sum(G * V[None, :], 1)
        pulled = tl.load(g + at, mask=inside, other=0.0)
        y = tl.load(epsilon + at, mask=inside, other=0.0) + Gu
        w = s * pulled - Gv
        mean_gradient += pulled
        scale_gradient += s * pulled * y + w * Gu - y * Gv
        gradient += (r * w)[:, None] * U[None, :] - (r * y)[:, None] * V[None, :]
    tl.store(to_mean + p, mean_gradient, mask=inside)
    tl.store(to_scale + p, scale_gradient, mask=inside)
    tl.store(to_factor + rows, gradient, mask=mask)
