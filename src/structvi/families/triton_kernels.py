"""The passes over the factor as Triton kernels: each reads F once, and no [P, K] matrix but ∂F is written.

Sums over the weights are taken in float32 over some hundreds of them and added in float64, as everywhere.
"""

# Triton's decorators hide the types of calls:
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: columns of the smallest matrix product; a product of more columns has as many more warps, for room
SIDE = 16
#: rows of one product of GᵀG (16 columns on an H200, P = 11.2·10⁶: 0.39 ms instead of 0.50 with 128 rows)
ROWS = 32
#: weights whose products GᵀG are added in float32, for each column: sums of many columns are long to write
ROWS_PER_COLUMN = 64
#: numbers of the factor that a program holds in registers
TILE = 2048
#: columns of a factor that these kernels serve
MOST_COLUMNS = TILE // SIDE


def gram(precision: bool, factor: Tensor, scale: Tensor, unit: Tensor) -> Tensor:
    """Return GᵀG [K, K] in float64."""
    P, K = factor.shape
    if K == 0:
        return factor.new_zeros(0, 0, dtype=torch.float64)
    side = max(SIDE, triton.next_power_of_2(K))
    rows = ROWS_PER_COLUMN * side
    partial = factor.new_empty(triton.cdiv(P, rows), K, K)
    _gram[(len(partial),)](
        factor, scale, unit, partial, P, *factor.stride(),
        K=K, KP=side, PRECISION=precision, ROWS=rows, BLOCK=ROWS, num_warps=side // SIDE, num_stages=1,
    )  # fmt: skip
    return partial.sum(0, dtype=torch.float64)


def project(
    precision: bool, factor: Tensor, mean: Tensor, log_scale: Tensor, unit: Tensor, epsilon: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return s = exp(log s) [P]; εᵀG [S, K], ε·ε [S] and Σ log s in float64; and θ [S, P] of the covariance form."""
    S, K = z.shape
    sizes, scale, theta = [S * K, S, 1], torch.empty_like(log_scale), epsilon.new_empty(epsilon.shape)
    partial = scale.new_empty(*_programs(factor), sum(sizes))
    given, found = (mean, log_scale, unit, epsilon, z), (scale, theta, partial)
    _run(_project, factor, S, given, found, WIDTH=sum(sizes), PRECISION=precision)
    projection, squares, total = partial.sum(0, dtype=torch.float64).split(sizes)
    return scale, projection.view(S, K), squares, total.view(()), theta


def back(
    precision: bool, factor: Tensor, scale: Tensor, unit: Tensor, epsilon: Tensor, u: Tensor, x: Tensor, g: Tensor,
    g_q: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of μ, log s and F from x = z and g, or in the precision form from x = v and g'."""
    found = torch.empty_like(scale), torch.empty_like(scale), torch.empty_like(factor)
    _run(_back, factor, len(u), (scale, unit, epsilon, u, x, g, g_q), found, PRECISION=precision)
    return found


def _block(K: int) -> int:
    return max(SIDE, TILE // triton.next_power_of_2(K)) if K else TILE


def _programs(factor: Tensor) -> tuple[int]:
    return (triton.cdiv(factor.shape[0], _block(factor.shape[1])),)


def _run(
    kernel: Any, factor: Tensor, S: int, given: tuple[Tensor, ...], found: tuple[Tensor, ...], **settings: Any
) -> None:
    P, K = factor.shape
    shape = {"S": S, "K": K, "KP": triton.next_power_of_2(max(K, 1)), "BLOCK": _block(K)}
    tensors = *(x.contiguous() for x in given), *found
    kernel[_programs(factor)](factor, *tensors, P, *factor.stride(), **shape, **settings)


@triton.jit
def _ratio(s, s0, PRECISION: tl.constexpr):
    if PRECISION:
        return s / s0
    return s0 / s


@triton.jit
def _places(p, along, across, KP: tl.constexpr):
    return p[:, None].to(tl.int64) * along + tl.arange(0, KP)[None, :].to(tl.int64) * across


@triton.jit
def _mask(inside, K: tl.constexpr, KP: tl.constexpr):
    return inside[:, None] & (tl.arange(0, KP) < K)[None, :]


@triton.jit
def _row(x, draw, K: tl.constexpr, KP: tl.constexpr):
    """Return the row of one draw, of a matrix [S, K]."""
    k = tl.arange(0, KP)
    return tl.load(x + draw * K + k, mask=k < K, other=0.0)


@triton.jit
def _gram(
    factor, scale, unit, out, P, along, across,
    K: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, KP)
    gram = tl.zeros((KP, KP), tl.float32)
    for start in range(0, ROWS, BLOCK):
        p = tl.program_id(0) * ROWS + start + tl.arange(0, BLOCK)
        inside = p < P
        s = tl.load(scale + p, mask=inside, other=1.0)
        s0 = tl.load(unit + p, mask=inside, other=1.0)
        F = tl.load(factor + _places(p, along, across, KP), mask=_mask(inside, K, KP), other=0.0)
        G = F * _ratio(s, s0, PRECISION)[:, None]
        gram += tl.dot(tl.trans(G), G, input_precision="ieee")
    at = tl.program_id(0).to(tl.int64) * K * K + k[:, None] * K + k[None, :]
    tl.store(out + at, gram, mask=(k < K)[:, None] & (k < K)[None, :])


@triton.jit
def _project(
    factor, mean, log_scale, unit, epsilon, z, scale, theta, out, P, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k, inside = tl.arange(0, KP), p < P
    log_s = tl.load(log_scale + p, mask=inside, other=0.0)
    s = tl.exp(log_s)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    m = tl.load(mean + p, mask=inside, other=0.0)
    F = tl.load(factor + _places(p, along, across, KP), mask=_mask(inside, K, KP), other=0.0)
    G = F * _ratio(s, s0, PRECISION)[:, None]
    tl.store(scale + p, s, mask=inside)
    out += tl.program_id(0).to(tl.int64) * WIDTH
    for draw in tl.range(0, S, loop_unroll_factor=8):
        at = draw * P.to(tl.int64) + p
        y = tl.load(epsilon + at, mask=inside, other=0.0)
        tl.store(out + S * K + draw, tl.sum(y * y, 0))
        if K > 0:
            tl.store(out + draw * K + k, tl.sum(G * y[:, None], 0), mask=k < K)
            y += tl.sum(G * _row(z, draw, K, KP)[None, :], 1)
        if not PRECISION:
            tl.store(theta + at, m + s * y, mask=inside)
    tl.store(out + WIDTH - 1, tl.sum(log_s, 0))


@triton.jit
def _back(
    factor, scale, unit, epsilon, u, x, g, g_q, to_mean, to_scale, to_factor, P, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = p < P
    s = tl.load(scale + p, mask=inside, other=1.0)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    r = _ratio(s, s0, PRECISION)
    F = tl.load(factor + _places(p, along, across, KP), mask=_mask(inside, K, KP), other=0.0)
    G = F * r[:, None]
    mean_gradient = tl.zeros((BLOCK,), tl.float32)
    scale_gradient = tl.zeros((BLOCK,), tl.float32)
    gradient = tl.zeros((BLOCK, KP), tl.float32)
    for draw in tl.range(0, S, loop_unroll_factor=8):
        at = draw * P.to(tl.int64) + p
        U, X = _row(u, draw, K, KP), _row(x, draw, K, KP)
        Gu = tl.sum(G * U[None, :], 1)
        e = tl.load(epsilon + at, mask=inside, other=0.0)
        pulled = tl.load(g + at, mask=inside, other=0.0)
        if PRECISION:
            Gv = tl.sum(G * X[None, :], 1)
            y = e + Gu
            w = s * pulled - Gv
            scale_gradient += s * pulled * y + w * Gu - y * Gv
            gradient += (r * w)[:, None] * U[None, :] - (r * y)[:, None] * X[None, :]
        else:
            pulled -= tl.load(g_q + draw) * (e + Gu) / s
            scale_gradient += s * pulled * e
            gradient += (s0 * pulled)[:, None] * X[None, :]
        mean_gradient += pulled
    tl.store(to_mean + p, mean_gradient, mask=inside)
    tl.store(to_scale + p, scale_gradient, mask=inside)
    tl.store(to_factor + _places(p, along, across, KP), gradient, mask=_mask(inside, K, KP))
