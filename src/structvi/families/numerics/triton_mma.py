"""Sums over the weights on tensor cores, whose operands are read from memory where they are used.

`tl.dot` of 16 columns moves its operands through shared memory, which takes longer than to read them. Here a program is
one warp, and a product of tensor cores (m16n8k8) is written out: thread 4g + t holds of each operand what belongs to
row g and column t, and reads just that: the same numbers are both sides of GᵀG. Nothing is moved between threads. A
group is eight weights, of which a thread has 2t and 2t + 1, and of the factor's columns 2g and 2g + 1.

float32 is split into two numbers of eleven bits, x = big + small, and a product is big·big + big·small + small·big.
"""

# Triton's decorators hide what is called with what:
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_rows import sum_rows
from .triton_tiles import TUPLES

#: whether it is used at all, for a comparison
SERVES = True
#: groups of eight weights whose products are added on tensor cores, which round towards zero, before float32 takes over
GROUPS = 4
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_PROGRAMS, _FEWEST, _MOST = 2640, 32 if _INTERPRETED else 256, 2048  # that are wanted; weights of a program


def serve(S: int, factor: Tensor) -> bool:
    """Whether it is used for S draws: of at most 16 columns, one row after the other in memory."""
    K = factor.shape[-1]
    there = _INTERPRETED or torch.cuda.get_device_capability(factor.device) == (9, 0)  # tried on these
    return SERVES and TUPLES and there and S <= 8 and 0 < K <= 16 and K % 4 == 0 and factor.is_contiguous()


def sums(
    log_scale: Tensor, factor: Tensor, unit: Tensor, precision: bool, epsilon: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """s = exp(log s) [P]; GᵀG [K, K], Gᵀε [S, K], ε·ε [S] and Σ log s in float64."""
    S, (P, K), scale = len(epsilon), factor.shape, log_scale.exp()
    step = 8 * GROUPS
    rows = min(_MOST, max(_FEWEST, step * triton.cdiv(P, step * _PROGRAMS)))
    programs, sizes = triton.cdiv(P, rows), [K * K, S * K, S, 1]
    partial = scale.new_empty(programs, sum(sizes))
    _sums[(programs,)](
        log_scale, scale, factor, unit, epsilon.contiguous(), partial, P,
        S=S, K=K, PRECISION=precision, ROWS=rows, GROUPS=GROUPS, WIDTH=sum(sizes),
        QUICK=not _INTERPRETED, num_warps=1,
    )  # fmt: skip
    gram, projection, noise, total = sum_rows(partial).split(sizes)
    return scale, gram.view(K, K), projection.view(S, K), noise, total.view(())


@triton.jit
def _two(x, at, mask):
    """x[at] and x[at + 1], `at` even, read as one number of 64 bits: [32] each."""
    both = tl.load((x + at).to(tl.pointer_type(tl.int64)), mask=mask, other=0)
    first = (both & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return first, (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _split(x):
    """big + small = x, as the bits that tensor cores take."""
    big = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return big, (x - big.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)


@triton.jit
def _one_mma(c0, c1, c2, c3, a0, a1, a2, a3, b0, b1, QUICK: tl.constexpr):
    """C + A B of the warp: thread 4g + t has A[g, t], A[g + 8, t], A[g, t + 4], A[g + 8, t + 4], B[t, g], B[t + 4, g]
    and C[g, 2t], C[g, 2t + 1], C[g + 8, 2t], C[g + 8, 2t + 1]."""
    if QUICK:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            (tl.float32, tl.float32, tl.float32, tl.float32), True, 1,
        )  # fmt: skip
    x0, x1 = _block(a0, a2, b0, b1)
    x2, x3 = _block(a1, a3, b0, b1)
    return c0 + x0, c1 + x1, c2 + x2, c3 + x3


@triton.jit
def _block(a0, a1, b0, b1):
    """For the interpreter: eight rows of A B, as the threads have them."""
    left = _of_bits(a0)[:, None, :] * _of_bits(b0)[None, :, :] + _of_bits(a1)[:, None, :] * _of_bits(b1)[None, :, :]
    even, odd = tl.split(tl.reshape(tl.sum(left, 2), (8, 4, 2)))
    return tl.reshape(even, (32,)), tl.reshape(odd, (32,))


@triton.jit
def _of_bits(x):
    return tl.reshape((x & -0x2000).to(tl.float32, bitcast=True), (8, 4))


@triton.jit
def _mma(c, a, small_a, b, small_b, QUICK: tl.constexpr):
    """C + A B in the precision of float32."""
    c = _one_mma(c[0], c[1], c[2], c[3], small_a[0], small_a[1], small_a[2], small_a[3], b[0], b[1], QUICK)
    c = _one_mma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], small_b[0], small_b[1], QUICK)
    return _one_mma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b[0], b[1], QUICK)


@triton.jit
def _added(x, y):
    return x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]


@triton.jit
def _store_gram(out, c, g, mask, K: tl.constexpr):
    """Rows 2g and 2g + 1, every other column."""
    tl.store(out + 2 * g * K, c[0], mask=mask)
    tl.store(out + 2 * g * K + 2, c[1], mask=mask)
    tl.store(out + (2 * g + 1) * K, c[2], mask=mask)
    tl.store(out + (2 * g + 1) * K + 2, c[3], mask=mask)


@triton.jit
def _sums(
    log_scale, scale, factor, unit, epsilon, out, P,
    S: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, 32)
    g, t = lane // 4, lane % 4
    zero = tl.zeros((32,), tl.float32)
    some, there, first = g < S, 2 * g < K, g == 0
    here = g * P.to(tl.int64)
    none = (zero, zero, zero, zero)
    even, odd, projection = none, none, none
    of_noise, total = zero, zero
    for start in range(0, ROWS, 8 * GROUPS):
        now_even, now_odd, now_projection = none, none, none
        for group in tl.static_range(0, GROUPS):
            base = tl.program_id(0) * ROWS + start + 8 * group
            p, q = base + 2 * t, base + 2 * t + 1
            p_in, q_in = p < P, q < P
            at, next_at = p.to(tl.int64), q.to(tl.int64)
            s, s_next = tl.load(scale + p, mask=p_in, other=1.0), tl.load(scale + q, mask=q_in, other=1.0)
            s0, s0_next = tl.load(unit + p, mask=p_in, other=1.0), tl.load(unit + q, mask=q_in, other=1.0)
            total += tl.load(log_scale + p, mask=p_in & first, other=0.0)
            total += tl.load(log_scale + q, mask=q_in & first, other=0.0)
            e = tl.load(epsilon + here + at, mask=p_in & some, other=0.0)
            e_next = tl.load(epsilon + here + next_at, mask=q_in & some, other=0.0)
            of_noise += e * e + e_next * e_next
            r, r_next = (s / s0, s_next / s0_next) if PRECISION else (s0 / s, s0_next / s_next)
            x0, x1 = _two(factor, at * K + 2 * g, p_in & there)
            x2, x3 = _two(factor, next_at * K + 2 * g, q_in & there)
            a0, b0 = _split(r * x0)
            a1, b1 = _split(r * x1)
            a2, b2 = _split(r_next * x2)
            a3, b3 = _split(r_next * x3)
            a, small = (a0, a1, a2, a3), (b0, b1, b2, b3)
            now_even = _mma(now_even, a, small, (a0, a2), (b0, b2), QUICK)
            now_odd = _mma(now_odd, a, small, (a1, a3), (b1, b3), QUICK)
            n0, m0 = _split(e)
            n1, m1 = _split(e_next)
            now_projection = _mma(now_projection, a, small, (n0, n1), (m0, m1), QUICK)
        even = _added(even, now_even)
        odd = _added(odd, now_odd)
        projection = _added(projection, now_projection)
    out += tl.program_id(0).to(tl.int64) * WIDTH
    _store_gram(out + 4 * t, even, g, there & (4 * t < K), K)
    _store_gram(out + 4 * t + 1, odd, g, there & (4 * t < K), K)
    out += K * K
    tl.store(out + 2 * t * K + 2 * g, projection[0], mask=there & (2 * t < S))
    tl.store(out + 2 * t * K + 2 * g + 1, projection[2], mask=there & (2 * t < S))
    tl.store(out + (2 * t + 1) * K + 2 * g, projection[1], mask=there & (2 * t + 1 < S))
    tl.store(out + (2 * t + 1) * K + 2 * g + 1, projection[3], mask=there & (2 * t + 1 < S))
    draws = tl.arange(0, 8)
    tl.store(out + S * K + draws, tl.sum(tl.reshape(of_noise, (8, 4)), 1), mask=draws < S)
    tl.store(out + S * K + S, tl.sum(total, 0))
