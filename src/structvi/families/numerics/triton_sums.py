"""Sums over the weights that the K×K algebra needs, GᵀG and Gᵀε, as Triton kernels.

Sums are taken in float32 over 1024 weights, of more than 32 columns over 4096, and added in float64, as everywhere.
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

from .triton_rows import sum_rows
from .triton_tiles import padded

_ROWS = 1024  # weights whose products are added in float32
_SMALL = 32  # sums of products that a thread holds one by one
DRAWS = 32  # draws that a program takes: with hundreds it would have thousands of registers, and minutes to compile


class Dot(NamedTuple):
    """How the matrix products GᵀG and Gᵀε are made."""

    rows: int  # of one product
    warps: int
    precision: str


DOT = Dot(128, 1, "ieee")
#: of more than 32 columns, whose sums one warp cannot hold: it would have thousands of products, and minutes to compile
WIDE = {64: Dot(32, 4, "ieee"), 128: Dot(16, 8, "ieee")}


def sums(
    log_scale: Tensor, factor: Tensor, unit: Tensor, precision: bool, epsilon: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """s = exp(log s) [P]; and GᵀG [K, K], Gᵀε [S, K], ε·ε [S] and Σ log s in float64."""
    if len(epsilon) > DRAWS:
        parts = [sums(log_scale, factor, unit, precision, some) for some in epsilon.split(DRAWS)]
        scale, gram, _, _, total = parts[0]
        return scale, gram, torch.cat([one[2] for one in parts]), torch.cat([one[3] for one in parts]), total
    S, (P, K) = len(epsilon), factor.shape
    dot = WIDE.get(padded(K), DOT)
    rows = _ROWS if dot is DOT else 4 * _ROWS  # of K² sums each program writes
    programs, sizes = triton.cdiv(P, rows), [K * K, S * K, S, 1]
    scale, partial = log_scale.exp(), factor.new_empty(programs, sum(sizes))
    arguments = log_scale, scale, factor, unit, epsilon.contiguous(), partial, P, *factor.stride()
    common = {"S": S, "K": K, "PRECISION": precision, "ROWS": rows, "WIDTH": sum(sizes)}
    k, draws = triton.next_power_of_2(max(K, 1)), triton.next_power_of_2(S)
    if k * max(k, draws) <= _SMALL:  # a matrix product would mostly be padding
        _sums_small[(programs,)](*arguments, **common, KP=k, SP=draws, BLOCK=128)
    else:
        _sums[(programs,)](
            *arguments, **common, KP=padded(K), SP=padded(S),
            BLOCK=dot.rows, DOT=dot.precision, num_warps=dot.warps, num_stages=1,
        )  # fmt: skip
    gram, projection, squares, total = sum_rows(partial).split(sizes)
    return scale, gram.view(K, K), projection.view(S, K), squares, total.view(())


@triton.jit
def load_factor(factor, p, k, inside, along, across, K: tl.constexpr):
    at = p[:, None].to(tl.int64) * along + k[None, :].to(tl.int64) * across
    return tl.load(factor + at, mask=inside[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def ratio_of(s, s0, PRECISION: tl.constexpr):
    if PRECISION:
        return s / s0
    return s0 / s


@triton.jit
def _sums(
    log_scale, scale, factor, unit, epsilon, out, P, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
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
        if K > 0:
            s = tl.load(scale + p, mask=inside, other=1.0)
            s0 = tl.load(unit + p, mask=inside, other=1.0)
            G = load_factor(factor, p, k, inside, along, across, K) * ratio_of(s, s0, PRECISION)[:, None]
        at = draws[:, None].to(tl.int64) * P + p[None, :]
        e = tl.load(epsilon + at, mask=(draws < S)[:, None] & inside[None, :], other=0.0)
        squares += tl.sum(e * e, 1)
        if K > 0:
            projection += tl.dot(e, G, input_precision=DOT)
            gram += tl.dot(tl.trans(G), G, input_precision=DOT)
    out += program.to(tl.int64) * WIDTH
    if K > 0:
        both = (k < K)[:, None] & (k < K)[None, :]
        tl.store(out + k[:, None] * K + k[None, :], gram, mask=both)
        at = K * K + draws[:, None] * K + k[None, :]
        tl.store(out + at, projection, mask=(draws < S)[:, None] & (k < K)[None, :])
    tl.store(out + K * K + S * K + draws, squares, mask=draws < S)
    tl.store(out + WIDTH - 1, tl.sum(total, 0))


@triton.jit
def _sums_small(
    log_scale, scale, factor, unit, epsilon, out, P, along, across,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    k, draws = tl.arange(0, KP), tl.arange(0, SP)
    gram = tl.zeros((BLOCK, KP, KP), tl.float32)
    projection = tl.zeros((BLOCK, SP, KP), tl.float32)
    squares = tl.zeros((BLOCK, SP), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, ROWS, BLOCK):
        p = program * ROWS + start + tl.arange(0, BLOCK)
        inside = p < P
        total += tl.load(log_scale + p, mask=inside, other=0.0)
        at = draws[None, :].to(tl.int64) * P + p[:, None]
        e = tl.load(epsilon + at, mask=inside[:, None] & (draws < S)[None, :], other=0.0)
        squares += e * e
        if K > 0:
            s = tl.load(scale + p, mask=inside, other=1.0)
            s0 = tl.load(unit + p, mask=inside, other=1.0)
            G = load_factor(factor, p, k, inside, along, across, K) * ratio_of(s, s0, PRECISION)[:, None]
            gram += G[:, :, None] * G[:, None, :]
            projection += e[:, :, None] * G[:, None, :]
    out += program.to(tl.int64) * WIDTH
    if K > 0:
        both = (k < K)[:, None] & (k < K)[None, :]
        tl.store(out + k[:, None] * K + k[None, :], tl.sum(gram, 0), mask=both)
        at = K * K + draws[:, None] * K + k[None, :]
        tl.store(out + at, tl.sum(projection, 0), mask=(draws < S)[:, None] & (k < K)[None, :])
    tl.store(out + K * K + S * K + draws, tl.sum(squares, 0), mask=draws < S)
    tl.store(out + WIDTH - 1, tl.sum(total, 0))
