"""The normal numbers that `torch.randn` would make from each of many generators of a GPU, in one launch.

torch's generator on a GPU is Philox, which counts: number i of a call is a function of the seed, the offset of the call
and i, as long as the call has no more numbers than the device has threads at once. cuRAND makes normal numbers of two
words by Box–Muller, of which torch then takes the sine. Whoever uses this compares it with `torch.randn` first.
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

#: by how much a call moves the offset of its generator
OFFSET = 4
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def normals(
    seeds: Tensor, offsets: Tensor, groups: int, P: int, K: int, mirrored: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of M generators what `naive`, or mirrored `paired`, makes of each: [M, S, P] and [M, S, K].

    Args:
        seeds, offsets: of the generators, [M] as 64-bit integers.
        groups, P, K: of the call.
        mirrored: each group of two draws, the second the negative of the first.
        dtype: float32 or float64.
    """
    M, S, n = len(seeds), groups * (1 + mirrored), groups * (P + K)
    diagonal, low_rank = (torch.empty(M, S, size, dtype=dtype, device=seeds.device) for size in (P, K))
    _normals[(M, triton.cdiv(n, 256))](
        seeds, offsets, diagonal, low_rank, groups, P, K,
        MIRRORED=mirrored, DOUBLE=dtype == torch.float64, QUICK=not _INTERPRETED, BLOCK=256,
    )  # fmt: skip
    return diagonal, low_rank


@triton.jit
def _normals(
    seeds, offsets, diagonal, low_rank, groups, P, K,
    MIRRORED: tl.constexpr, DOUBLE: tl.constexpr, QUICK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counter = tl.load(offsets + member) // 4
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = (0 * i).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seeds + member), zero + low, zero + high, i.to(tl.uint32), zero)
    if DOUBLE:
        first = (a.to(tl.uint64) ^ (b.to(tl.uint64) << 21)).to(tl.float64)
        second = (c.to(tl.uint64) ^ (d.to(tl.uint64) << 21)).to(tl.float64)
        u = first * 1.1102230246251565e-16 + 5.551115123125783e-17  # 2⁻⁵³
        v = second * 2.220446049250313e-16 + 1.1102230246251565e-16
        value = tl.sqrt(-2.0 * tl.log(u)) * tl.sin(3.141592653589793 * v)
    else:
        u = a.to(tl.float32) * 2.3283064e-10 + 1.1641532e-10  # 2⁻³²
        v = b.to(tl.float32) * 1.4629181e-09 + 7.3145903e-10  # 2π 2⁻³²
        if QUICK:  # cuRAND's sine
            sine = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [v], tl.float32, True, 1)
        else:
            sine = tl.sin(v)
        value = tl.sqrt_rn(-2.0 * tl.log(u)) * sine
    of_diagonal = i < groups * P
    inside = i < groups * (P + K)
    size = tl.where(of_diagonal, P, K)
    at = tl.where(of_diagonal, i, i - groups * P)
    width = tl.where(size > 0, size, 1)
    group, column = at // width, at % width
    twice = 2 if MIRRORED else 1
    start = (member.to(tl.int64) * groups + group) * twice * size + column
    tl.store(diagonal + start, value, mask=of_diagonal)
    tl.store(low_rank + start, value, mask=inside & (i >= groups * P))
    if MIRRORED:
        tl.store(diagonal + start + size, -value, mask=of_diagonal)
        tl.store(low_rank + start + size, -value, mask=inside & (i >= groups * P))
