"""Batched matrix products of float32 on tensor cores, in the precision of float32.

cuBLAS makes them on plain units where TF32 is not allowed, at two thirds of what those can do at the sizes of small
networks. Here each number is two of TF32 (tf32x3): three products on tensor cores for one, and as exact.
"""

# Triton's decorators hide what is called with what:
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Shape(NamedTuple):
    """Of a program: its tile [rows, columns], how much of the sum it takes at once, warps, and steps read ahead."""

    rows: int
    columns: int
    sum: int
    warps: int
    stages: int


#: of a product in general; with few columns; with few rows
LARGE, NARROW, FLAT = Shape(64, 32, 32, 2, 4), Shape(16, 16, 128, 2, 3), Shape(16, 64, 64, 4, 2)
_FEW = 32


def product(
    x: Tensor, y: Tensor, shape: Shape | None = None, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """x y of each draw, and a bias [S, N] to each row: [S, M, K], [S, K, N] → [S, M, N]."""
    (S, M, K), N = x.shape, y.shape[-1]
    if shape is None:
        shape = NARROW if N <= _FEW else FLAT if M <= _FEW else LARGE
    out = x.new_empty(S, M, N) if out is None else out
    assert out.stride()[1:] == (N, 1) and (bias is None or bias.stride(1) == 1)  # noqa: PT018
    tiles = triton.cdiv(M, shape.rows) * triton.cdiv(N, shape.columns)
    _product[(tiles, S)](
        x, y, out, x if bias is None else bias, M, N, K, *x.stride(), *y.stride(), out.stride(0),
        0 if bias is None else bias.stride(0), BIASED=bias is not None,
        ROWS=shape.rows, COLUMNS=shape.columns, SUM=min(shape.sum, max(16, triton.next_power_of_2(K))),
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out


@triton.jit
def _product(
    x, y, out, bias, M, N, K, x_draw, x_row, x_column, y_draw, y_row, y_column, apart, bias_draw,
    BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    draw, across = tl.program_id(1).to(tl.int64), tl.cdiv(N, COLUMNS)
    m = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, SUM)
    left = x + draw * x_draw + m[:, None] * x_row + k[None, :] * x_column
    right = y + draw * y_draw + k[:, None] * y_row + n[None, :] * y_column
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, SUM):
        there = start + k < K
        a = tl.load(left, mask=(m < M)[:, None] & there[None, :], other=0.0)
        b = tl.load(right, mask=there[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="tf32x3")
        left += SUM * x_column
        right += SUM * y_row
    if BIASED:
        total += tl.load(bias + draw * bias_draw + n, mask=n < N, other=0.0)[None, :]
    at = m[:, None] * N + n[None, :]
    tl.store(out + draw * apart + at, total, mask=(m < M)[:, None] & (n < N)[None, :])
