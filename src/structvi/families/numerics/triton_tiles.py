"""The passes of `triton_kernels` for many draws: a program takes all draws at once, products with the factor as tiles.

One draw after the other reads little and waits much; matrix products of [S, K] and [K, weights] do not. tf32x3 has the
precision of float32. Which of the two is used: `SERVES`.
"""

# Triton's decorators hide what is called with what:
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_rows import fold_rows, sum_rows


class Shape(NamedTuple):
    """Of a program: how many weights it takes, and in how many warps."""

    weights: int
    warps: int


#: whether this Triton knows kernels that hand tuples on; they were tried with 3.6
TUPLES = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
#: from so many draws on
SERVES = 4
PLACE, COVARIANCE, PRECISION = Shape(64, 4), Shape(64, 4), Shape(64, 4)


def serve(S: int, K: int) -> bool:
    """Whether these passes are used for S draws of rank K; wide factors leave no room for tiles of all draws."""
    return S >= SERVES and 0 < K <= 64


def place(mean: Tensor, scale: Tensor, factor: Tensor, unit: Tensor, precision: bool, epsilon: Tensor, a: Tensor):
    """θ = μ + s∘(ε + G a) [S, P], and θ·θ [S] in float64."""
    P, programs = len(mean), triton.cdiv(len(mean), PLACE.weights)
    theta, squares = aligned(epsilon), mean.new_empty(programs, len(epsilon))
    _place[(programs,)](
        mean, scale, factor, unit, epsilon.contiguous(), a.contiguous(), theta, squares, P, theta.stride(0),
        *factor.stride(),
        **_sizes(epsilon, factor), PRECISION=precision, BLOCK=PLACE.weights, num_warps=PLACE.warps,
    )  # fmt: skip
    return theta, sum_rows(squares)


def back_covariance(
    scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, u: Tensor, z: Tensor, g: Tensor, g_q: Tensor,
    theta: Tensor, slope: Tensor,
):  # fmt: skip
    """Gradients of μ and log s, A = s₀∘g' with g' = g + slope·θ + g_q·score, and the squares of all three."""
    P, A = len(scale), torch.empty_like(epsilon)
    programs = triton.cdiv(P, COVARIANCE.weights)
    mean_gradient, scale_gradient = torch.empty_like(scale), torch.empty_like(scale)
    squares = scale.new_empty(programs, 3)
    _back_covariance[(programs,)](
        scale, factor, unit, epsilon.contiguous(), u.contiguous(), z.contiguous(), g.contiguous(), g_q.contiguous(),
        theta, slope, mean_gradient, scale_gradient, A, squares, P, theta.stride(0), *factor.stride(),
        **_sizes(epsilon, factor), BLOCK=COVARIANCE.weights, num_warps=COVARIANCE.warps,
    )  # fmt: skip
    return mean_gradient, scale_gradient, A, fold_rows(squares)


def back_precision(scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, u: Tensor, v: Tensor, g: Tensor):
    """Gradients of μ and log s, A = [r∘(s∘g' − G v); −r∘y] with y = (θ − μ)/s = ε + G u, and the squares of all."""
    (S, P), programs = epsilon.shape, triton.cdiv(len(scale), PRECISION.weights)
    A = epsilon.new_empty(2 * S, P)
    mean_gradient, scale_gradient = torch.empty_like(scale), torch.empty_like(scale)
    squares = scale.new_empty(programs, 3)
    _back_precision[(programs,)](
        scale, factor, unit, epsilon.contiguous(), u.contiguous(), v.contiguous(), g.contiguous(),
        mean_gradient, scale_gradient, A, squares, P, *factor.stride(),
        **_sizes(epsilon, factor), BLOCK=PRECISION.weights, num_warps=PRECISION.warps,
    )  # fmt: skip
    return mean_gradient, scale_gradient, A, fold_rows(squares)


def aligned(x: Tensor) -> Tensor:
    """Room for draws [S, P], each of which begins at a multiple of 128 bytes: products with its matrices are faster."""
    S, P = x.shape
    return x.new_empty(S, triton.cdiv(P, 32) * 32)[:, :P]


def padded(n: int) -> int:
    """A side of a tile: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(max(n, 1)))


def _sizes(epsilon: Tensor, factor: Tensor) -> dict[str, int]:
    S, K = len(epsilon), factor.shape[-1]
    return {"S": S, "K": K, "KP": padded(K), "SP": padded(S)}


@triton.jit
def _factor_tile(factor, p, k, inside, along, across, K: tl.constexpr):
    """Fᵀ at weights p: [KP, BLOCK]"""
    at = k[:, None].to(tl.int64) * across + p[None, :].to(tl.int64) * along
    return tl.load(factor + at, mask=(k < K)[:, None] & inside[None, :], other=0.0)


@triton.jit
def _rows(x, draws, k, S: tl.constexpr, K: tl.constexpr):
    """[S, K] in a tile [SP, KP]."""
    mask = (draws < S)[:, None] & (k < K)[None, :]
    return tl.load(x + draws[:, None] * K + k[None, :], mask=mask, other=0.0)


@triton.jit
def _place(
    mean, scale, factor, unit, epsilon, a, theta, squares, P, wide, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k, draws, inside = tl.arange(0, KP), tl.arange(0, SP), p < P
    s = tl.load(scale + p, mask=inside, other=1.0)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    weight = s * s / s0 if PRECISION else s0
    F = _factor_tile(factor, p, k, inside, along, across, K)
    at = draws[:, None].to(tl.int64) * P + p[None, :]
    both = (draws < S)[:, None] & inside[None, :]
    value = tl.load(mean + p, mask=inside, other=0.0)[None, :] + s[None, :] * tl.load(
        epsilon + at, mask=both, other=0.0
    )
    value += weight[None, :] * tl.dot(_rows(a, draws, k, S, K), F, input_precision="tf32x3")
    tl.store(theta + draws[:, None].to(tl.int64) * wide + p[None, :], value, mask=both)
    own = tl.sum(tl.where(both, value * value, 0.0), 1)
    tl.store(squares + tl.program_id(0) * S + draws, own, mask=draws < S)


@triton.jit
def _back_covariance(
    scale, factor, unit, epsilon, u, z, g, g_q, theta, slope, to_mean, to_scale, A, squares, P, wide, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k, draws, inside = tl.arange(0, KP), tl.arange(0, SP), p < P
    s = tl.load(scale + p, mask=inside, other=1.0)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    F = _factor_tile(factor, p, k, inside, along, across, K)
    at = draws[:, None].to(tl.int64) * P + p[None, :]
    both = (draws < S)[:, None] & inside[None, :]
    e = tl.load(epsilon + at, mask=both, other=0.0)
    t = e + (s0 / s)[None, :] * tl.dot(_rows(u, draws, k, S, K), F, input_precision="tf32x3")
    cotangent = tl.load(g_q + draws, mask=draws < S, other=0.0)
    pulled = tl.load(g + at, mask=both, other=0.0) - cotangent[:, None] * t / s[None, :]
    towards = tl.load(slope + draws, mask=draws < S, other=0.0)
    drawn = theta + draws[:, None].to(tl.int64) * wide + p[None, :]
    pulled += towards[:, None] * tl.load(drawn, mask=both, other=0.0)
    mean_gradient, scale_gradient = tl.sum(pulled, 0), s * tl.sum(pulled * e, 0)
    tl.store(to_mean + p, mean_gradient, mask=inside)
    tl.store(to_scale + p, scale_gradient, mask=inside)
    own = tl.where(both, s0[None, :] * pulled, 0.0)
    tl.store(A + at, own, mask=both)
    gradient = tl.dot(tl.trans(own), _rows(z, draws, k, S, K), input_precision="tf32x3")
    squares += 3 * tl.program_id(0)
    tl.store(squares, tl.sum(tl.where(inside, mean_gradient * mean_gradient, 0.0)))
    tl.store(squares + 1, tl.sum(tl.where(inside, scale_gradient * scale_gradient, 0.0)))
    tl.store(squares + 2, tl.sum(gradient * gradient))


@triton.jit
def _back_precision(
    scale, factor, unit, epsilon, u, v, g, to_mean, to_scale, A, squares, P, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k, draws, inside = tl.arange(0, KP), tl.arange(0, SP), p < P
    s = tl.load(scale + p, mask=inside, other=1.0)
    s0 = tl.load(unit + p, mask=inside, other=1.0)
    r = s / s0
    F = _factor_tile(factor, p, k, inside, along, across, K)
    at = draws[:, None].to(tl.int64) * P + p[None, :]
    both = (draws < S)[:, None] & inside[None, :]
    U, V = _rows(u, draws, k, S, K), _rows(v, draws, k, S, K)
    Fu = tl.dot(U, F, input_precision="tf32x3")
    Fv = tl.dot(V, F, input_precision="tf32x3")
    pulled = tl.load(g + at, mask=both, other=0.0)
    y = tl.load(epsilon + at, mask=both, other=0.0) + r[None, :] * Fu
    w = s[None, :] * pulled - r[None, :] * Fv
    own = tl.where(both, pulled * y + (w * Fu - y * Fv) / s0[None, :], 0.0)
    mean_gradient, scale_gradient = tl.sum(pulled, 0), s * tl.sum(own, 0)
    tl.store(to_mean + p, mean_gradient, mask=inside)
    tl.store(to_scale + p, scale_gradient, mask=inside)
    first, second = tl.where(both, r[None, :] * w, 0.0), tl.where(both, -r[None, :] * y, 0.0)
    tl.store(A + at, first, mask=both)
    tl.store(A + at + S * P.to(tl.int64), second, mask=both)
    gradient = tl.dot(tl.trans(first), U, input_precision="tf32x3")
    gradient += tl.dot(tl.trans(second), V, input_precision="tf32x3")
    squares += 3 * tl.program_id(0)
    tl.store(squares, tl.sum(tl.where(inside, mean_gradient * mean_gradient, 0.0)))
    tl.store(squares + 1, tl.sum(tl.where(inside, scale_gradient * scale_gradient, 0.0)))
    tl.store(squares + 2, tl.sum(gradient * gradient))
