"""The passes of `fused` over the factor as Triton kernels: each reads F once, and no [P, K] matrix but ∂F is written.

Sums over the weights are taken in float32 over a thousand of them and added in float64, as everywhere.
"""

# Triton's decorators hide what is called with what:
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

#: weights whose products are added in float32; four times as many of a wide factor, whose K² sums are long to write
ROWS = 1024
#: numbers of the factor that a program holds in registers
TILE = 2048


def sums(
    log_scale: Tensor, scale: Tensor, factor: Tensor, unit: Tensor, precision: bool, epsilon: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return GᵀG [K, K], εᵀG [S, K], ε·ε [S] and Σ log s, in float64."""
    S, (P, K) = len(epsilon), factor.shape
    KP = _side(K)
    rows = ROWS if KP <= 32 else 4 * ROWS
    sizes = [K * K, S * K, S, 1]
    partial = scale.new_empty(triton.cdiv(P, rows), sum(sizes))
    _sums[(len(partial),)](
        log_scale, scale, factor, unit, epsilon.contiguous(), partial, P, *factor.stride(),
        S=S, K=K, KP=KP, SP=_side(S), PRECISION=precision, ROWS=rows, WIDTH=sum(sizes),
        BLOCK={16: 64, 32: 64, 64: 32}.get(KP, 16), num_warps={16: 1, 32: 1, 64: 4}.get(KP, 8), num_stages=1,
    )  # fmt: skip
    gram, projection, squares, total = partial.sum(0, dtype=torch.float64).split(sizes)
    return gram.view(K, K), projection.view(S, K), squares, total.view(())


def place(mean: Tensor, scale: Tensor, factor: Tensor, unit: Tensor, precision: bool, epsilon: Tensor, a: Tensor):
    """Return θ = μ + s∘(ε + G a), [S, P]."""
    theta = torch.empty_like(epsilon)
    _place[_programs(factor)](
        mean, scale, factor, unit, epsilon.contiguous(), a.contiguous(), theta, len(mean), *factor.stride(),
        PRECISION=precision, **_shape(factor, len(epsilon)),
    )  # fmt: skip
    return theta


def back_covariance(
    scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, u: Tensor, z: Tensor, g: Tensor, g_q: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of μ, log s and F in the covariance form."""
    to_mean, to_scale, to_factor = torch.empty_like(scale), torch.empty_like(scale), torch.empty_like(factor)
    _back_covariance[_programs(factor)](
        scale, factor, unit, epsilon.contiguous(), u.contiguous(), z.contiguous(), g, g_q,
        to_mean, to_scale, to_factor, len(scale), *factor.stride(), **_shape(factor, len(g)),
    )  # fmt: skip
    return to_mean, to_scale, to_factor


def pull(
    scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, z: Tensor, g: Tensor, g_q: Tensor
) -> tuple[Tensor, Tensor]:
    """Return g' = g + c∇ log q in the precision form [S, P], and Gᵀ(s∘g') [S, K] in float64."""
    S, (P, K) = len(g), factor.shape
    pulled, partial = torch.empty_like(g), factor.new_empty(triton.cdiv(P, ROWS), S, K)
    _pull[(len(partial),)](
        scale, factor, unit, epsilon.contiguous(), z.contiguous(), g, g_q, pulled, partial, P, *factor.stride(),
        S=S, K=K, KP=_side(K), SP=_side(S), ROWS=ROWS, BLOCK=32, num_warps=1, num_stages=3,
    )  # fmt: skip
    return pulled, partial.sum(0, dtype=torch.float64)


def back_precision(
    scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, u: Tensor, v: Tensor, pulled: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of μ, log s and F in the precision form."""
    to_mean, to_scale, to_factor = torch.empty_like(scale), torch.empty_like(scale), torch.empty_like(factor)
    _back_precision[_programs(factor)](
        scale, factor, unit, epsilon.contiguous(), u.contiguous(), v.contiguous(), pulled,
        to_mean, to_scale, to_factor, len(scale), *factor.stride(), **_shape(factor, len(pulled)),
    )  # fmt: skip
    return to_mean, to_scale, to_factor


def _side(n: int) -> int:
    """Return the side of a tile of matrix products: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(max(n, 1)))


def _block(K: int) -> int:
    return max(16, TILE // triton.next_power_of_2(K)) if K else 1024


def _programs(factor: Tensor) -> tuple[int]:
    return (triton.cdiv(factor.shape[0], _block(factor.shape[1])),)


def _shape(factor: Tensor, S: int) -> dict[str, int]:
    K = factor.shape[1]
    return {"S": S, "K": K, "KP": triton.next_power_of_2(max(K, 1)), "BLOCK": _block(K)}


@triton.jit
def _rows_at(p, k, along, across):
    return p[:, None].to(tl.int64) * along + k[None, :].to(tl.int64) * across


@triton.jit
def _ratio(s, s0, PRECISION: tl.constexpr):
    if PRECISION:
        return s / s0
    return s0 / s


@triton.jit
def _sums(
    log_scale, scale, factor, unit, epsilon, out, P, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    k, draws = tl.arange(0, KP), tl.arange(0, SP)
    gram = tl.zeros((KP, KP), tl.float32)
    projection = tl.zeros((SP, KP), tl.float32)
    squares = tl.zeros((SP,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, ROWS, BLOCK):
        p = program * ROWS + start + tl.arange(0, BLOCK)
        inside = p < P
        total += tl.load(log_scale + p, mask=inside, other=0.0)
        at = draws[:, None].to(tl.int64) * P + p[None, :]
        e = tl.load(epsilon + at, mask=(draws < S)[:, None] & inside[None, :], other=0.0)
        squares += tl.sum(e * e, 1)
        if K > 0:
            s = tl.load(scale + p, mask=inside, other=1.0)
            s0 = tl.load(unit + p, mask=inside, other=1.0)
            mask = inside[:, None] & (k < K)[None, :]
            G = tl.load(factor + _rows_at(p, k, along, across), mask=mask, other=0.0)
            G *= _ratio(s, s0, PRECISION)[:, None]
            projection += tl.dot(e, G, input_precision="tf32x3")
            gram += tl.dot(tl.trans(G), G, input_precision="tf32x3")
    out += program.to(tl.int64) * WIDTH
    if K > 0:
        tl.store(out + k[:, None] * K + k[None, :], gram, mask=(k < K)[:, None] & (k < K)[None, :])
        at = K * K + draws[:, None] * K + k[None, :]
        tl.store(out + at, projection, mask=(draws < S)[:, None] & (k < K)[None, :])
    tl.store(out + K * K + S * K + draws, squares, mask=draws < S)
    tl.store(out + WIDTH - 1, tl.sum(total, 0))


@triton.jit
def _place(
    mean, scale, factor, unit, epsilon, a, theta, P, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k, inside = tl.arange(0, KP), p < P
    m = tl.load(mean + p, mask=inside, other=0.0)
    s = tl.load(scale + p, mask=inside, other=1.0)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    weight = s * _ratio(s, s0, PRECISION)
    F = tl.load(factor + _rows_at(p, k, along, across), mask=inside[:, None] & (k < K)[None, :], other=0.0)
    for draw in tl.range(0, S, loop_unroll_factor=8):
        at = draw * P.to(tl.int64) + p
        value = m + s * tl.load(epsilon + at, mask=inside, other=0.0)
        if K > 0:
            row = tl.load(a + draw * K + k, mask=k < K, other=0.0)
            value += weight * tl.sum(F * row[None, :], 1)
        tl.store(theta + at, value, mask=inside)


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
    scale, factor, unit, epsilon, z, g, g_q, pulled_out, projection_out, P, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    k, draws = tl.arange(0, KP), tl.arange(0, SP)
    some = draws < S
    projection = tl.zeros((SP, KP), tl.float32)
    Z = tl.load(z + draws[:, None] * K + k[None, :], mask=some[:, None] & (k < K)[None, :], other=0.0)
    cotangent = tl.load(g_q + draws, mask=some, other=0.0)
    for start in range(0, ROWS, BLOCK):
        p = program * ROWS + start + tl.arange(0, BLOCK)
        inside = p < P
        s = tl.load(scale + p, mask=inside, other=1.0)
        s0 = tl.load(unit + p, mask=inside, other=1.0)
        mask = inside[:, None] & (k < K)[None, :]
        G = tl.load(factor + _rows_at(p, k, along, across), mask=mask, other=0.0) * (s / s0)[:, None]
        at, both = draws[:, None].to(tl.int64) * P + p[None, :], some[:, None] & inside[None, :]
        t = tl.load(epsilon + at, mask=both, other=0.0) + tl.dot(Z, tl.trans(G), input_precision="tf32x3")
        pulled = tl.load(g + at, mask=both, other=0.0) - cotangent[:, None] * t / s[None, :]
        tl.store(pulled_out + at, pulled, mask=both)
        projection += tl.dot(pulled * s[None, :], G, input_precision="tf32x3")
    at = program.to(tl.int64) * S * K + draws[:, None] * K + k[None, :]
    tl.store(projection_out + at, projection, mask=some[:, None] & (k < K)[None, :])


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
