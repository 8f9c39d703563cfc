"""Draws of the covariance form and the sums over the weights, with a row of the factor in each thread.

Each thread adds up Gᵀε and GᵀG over its own rows in registers, and a program adds its threads' once at its end: two
kernels, as a thread has no room for both. As matrix products of 16×16 both sums wait for shared memory
(`triton_sums.py`). In the covariance form θ needs nothing of the sums, and comes with Gᵀε.
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

from . import triton_lanes
from .triton_lanes import rows_of, times, vectors_of
from .triton_rows import sum_rows
from .triton_tiles import aligned

#: from so many draws on
SERVES = 2
_SUMS = 32  # numbers of Gᵀε that a thread adds up: with 128 nine warps are at work, and wait
_BLOCK = 32  # threads of a program
_PROGRAMS, _FEWEST, _MOST = 1320, 256, 2048  # that an H200 has at once; rows of a program


def joins(S: int, factor: Tensor) -> bool:
    """Whether `sums_and_draws` is used."""
    return S >= SERVES and S * factor.shape[-1] <= _SUMS and triton_lanes.serve(S, factor)


def sums_and_draws(mean: Tensor, log_scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, z: Tensor):
    """s = exp(log s) [P]; GᵀG [K, K], Gᵀε [S, K], ε·ε [S] and Σ log s; θ = μ + s∘(ε + G z) [S, P] and θ·θ [S]."""
    S, (P, K), scale = len(epsilon), factor.shape, log_scale.exp()
    rows = _rows(P)
    programs, sizes = triton.cdiv(P, rows), [S * K, S, S, 1]
    theta, partial = aligned(epsilon), scale.new_empty(programs, sum(sizes))
    shape = {"K": K, "ROWS": rows, "BLOCK": _BLOCK, "num_warps": 1}
    _draw[(programs,)](
        mean, log_scale, scale, factor, unit, epsilon.contiguous(), z.contiguous(), theta, partial, P, theta.stride(0),
        S=S, WIDTH=sum(sizes), **shape,
    )  # fmt: skip
    squares = scale.new_empty(programs, K * K)
    _gram[(programs,)](scale, factor, unit, squares, P, **shape)
    projection, noise, drawn, total = sum_rows(partial).split(sizes)
    gram = sum_rows(squares).view(K, K)
    return scale, gram, projection.view(S, K), noise, total.view(()), theta, drawn, None


def pulls(S: int, factor: Tensor) -> bool:
    """Whether `pull` is used."""
    return S >= SERVES and S * factor.shape[-1] <= _SUMS and triton_lanes.serve(S, factor)


def pull(
    scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, z: Tensor, g: Tensor, g_q: Tensor,
    theta: Tensor, slope: Tensor,
):  # fmt: skip
    """g' = g + slope·θ + g_q·score in the precision form, and Gᵀ(s∘g') in float64."""
    S, (P, K) = len(epsilon), factor.shape
    rows = _rows(P)
    programs = triton.cdiv(P, rows)
    pulled, projection = torch.empty_like(epsilon), factor.new_empty(programs, S * K)
    _pull[(programs,)](
        scale, factor, unit, epsilon.contiguous(), z.contiguous(), g.contiguous(), g_q.contiguous(), theta, slope,
        pulled, projection, P, theta.stride(0),
        S=S, K=K, ROWS=rows, BLOCK=_BLOCK, num_warps=1,
    )  # fmt: skip
    return pulled, sum_rows(projection).view(S, K)


def _rows(P: int) -> int:
    """Of a program."""
    return min(_MOST, max(_FEWEST, _BLOCK * triton.cdiv(P, _BLOCK * _PROGRAMS)))


@triton.jit
def _draw(
    mean, log_scale, scale, factor, unit, epsilon, z, theta, out, P, wide,
    S: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    zero, four = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK, 4), tl.float32)
    products, squares, drawn, total = (), (), (), zero
    for _ in tl.static_range(0, S):
        squares, drawn = squares + (zero,), drawn + (zero,)
    for _ in tl.static_range(0, S * K, 4):
        products = products + (four,)
    for start in range(0, ROWS, BLOCK):
        p = tl.program_id(0) * ROWS + start + tl.arange(0, BLOCK)
        inside = p < P
        rows = rows_of(factor, p, inside, K)
        noise = vectors_of(epsilon, p, inside, P, S)
        m = tl.load(mean + p, mask=inside, other=0.0)
        s = tl.load(scale + p, mask=inside, other=1.0)
        s0 = tl.load(unit + p, mask=inside, other=1.0)
        total += tl.load(log_scale + p, mask=inside, other=0.0)
        now, of_noise, of_draws = (), (), ()
        for draw in tl.static_range(0, S):
            e = noise[draw]
            value = m + s * e + s0 * times(rows, z + draw * K, p, K)
            tl.store(theta + draw * wide.to(tl.int64) + p, value, mask=inside)
            of_noise = of_noise + (squares[draw] + e * e,)
            of_draws = of_draws + (drawn[draw] + tl.where(inside, value * value, 0.0),)
            weighted = (s0 / s * e)[:, None]
            for k in tl.static_range(0, K, 4):
                now = now + (products[(draw * K + k) // 4] + weighted * rows[k // 4],)
        products, squares, drawn = now, of_noise, of_draws
    out += tl.program_id(0).to(tl.int64) * WIDTH
    for draw in tl.static_range(0, S):
        for k in tl.static_range(0, K, 4):
            tl.store(out + draw * K + k + tl.arange(0, 4), tl.sum(products[(draw * K + k) // 4], 0))
        tl.store(out + S * K + draw, tl.sum(squares[draw]))
        tl.store(out + S * K + S + draw, tl.sum(drawn[draw]))
    tl.store(out + WIDTH - 1, tl.sum(total))


@triton.jit
def _columns(tile, BLOCK: tl.constexpr):
    """The columns of a tile [BLOCK, 4]."""
    even, odd = tl.split(tl.reshape(tile, (BLOCK, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _gram(
    scale, factor, unit, out, P,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """PerLayer of four columns on the diagonal and above; those below are their mirror images."""
    products = ()
    for k in tl.static_range(0, K):
        for _ in tl.static_range(k // 4 * 4, K, 4):
            products = products + (tl.zeros((BLOCK, 4), tl.float32),)
    for start in range(0, ROWS, BLOCK):
        p = tl.program_id(0) * ROWS + start + tl.arange(0, BLOCK)
        inside = p < P
        rows = rows_of(factor, p, inside, K)
        r = tl.load(unit + p, mask=inside, other=1.0) / tl.load(scale + p, mask=inside, other=1.0)
        now = ()
        for own in tl.static_range(0, K, 4):
            columns = _columns(rows[own // 4] * (r * r)[:, None], BLOCK)
            for k in tl.static_range(0, 4):
                for other in tl.static_range(own, K, 4):
                    now = now + (products[len(now)] + columns[k][:, None] * rows[other // 4],)
        products = now
    out += tl.program_id(0).to(tl.int64) * (K * K)
    stored = ()
    for k in tl.static_range(0, K):
        for other in tl.static_range(k // 4 * 4, K, 4):
            row = tl.sum(products[len(stored)], 0)
            tl.store(out + k * K + other + tl.arange(0, 4), row)
            if other > k:
                tl.store(out + (other + tl.arange(0, 4)) * K + k, row)
            stored = stored + (k,)


@triton.jit
def _pull(
    scale, factor, unit, epsilon, z, g, g_q, theta, slope, pulled_out, out, P, wide,
    S: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    products = ()
    for _ in tl.static_range(0, S * K, 4):
        products = products + (tl.zeros((BLOCK, 4), tl.float32),)
    for start in range(0, ROWS, BLOCK):
        p = tl.program_id(0) * ROWS + start + tl.arange(0, BLOCK)
        inside = p < P
        rows = rows_of(factor, p, inside, K)
        noise = vectors_of(epsilon, p, inside, P, S)
        given = vectors_of(g, p, inside, P, S)
        drawn = vectors_of(theta, p, inside, wide, S)
        s = tl.load(scale + p, mask=inside, other=1.0)
        r = s / tl.load(unit + p, mask=inside, other=1.0)
        now = ()
        for draw in tl.static_range(0, S):
            t = noise[draw] + r * times(rows, z + draw * K, p, K)
            pulled = given[draw] - tl.load(g_q + draw) * t / s + tl.load(slope + draw) * drawn[draw]
            tl.store(pulled_out + draw * P.to(tl.int64) + p, pulled, mask=inside)
            weighted = (s * r * pulled)[:, None]
            for k in tl.static_range(0, K, 4):
                now = now + (products[(draw * K + k) // 4] + weighted * rows[k // 4],)
        products = now
    out += tl.program_id(0).to(tl.int64) * (S * K)
    for k in tl.static_range(0, S * K, 4):
        tl.store(out + k + tl.arange(0, 4), tl.sum(products[k // 4], 0))
