"""Sums over the rows of what programs have left, in float64: torch takes longer for few columns and many rows."""

# Triton's decorators hide what is called with what:
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

#: rows from which on it pays; programs that are wanted, one for each multiprocessor; numbers of a tile
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_MANY, _PROGRAMS, _TILE = 256 if _INTERPRETED else 1024, 132, 1024
_WIDEST = 128


def sum_rows(partial: Tensor) -> Tensor:
    """Σ_n of [n, w] in float64: [w]."""
    return partial.sum(0, dtype=torch.float64) if len(partial) < _MANY else fold_rows(partial).sum(0)


def fold_rows(partial: Tensor) -> Tensor:
    """Few rows with the same sum, in float64: [n, w] → [m, w], m at most a hundred or so."""
    n, w = partial.shape
    if n < _MANY:
        return partial.sum(0, dtype=torch.float64).unsqueeze(0)
    wide = min(_WIDEST, triton.next_power_of_2(w))
    tall = _TILE // wide
    rows = tall * triton.cdiv(n, tall * _PROGRAMS)
    out = partial.new_empty(triton.cdiv(n, rows), w, dtype=torch.float64)
    _fold[(len(out), triton.cdiv(w, wide))](
        partial.contiguous(), out, n, w, ROWS=rows, TALL=tall, WIDE=wide, num_warps=4
    )  # fmt: skip
    return out


@triton.jit
def _fold(partial, out, n, w, ROWS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    first = tl.program_id(0) * ROWS
    total = tl.zeros((TALL, WIDE), tl.float64)
    for start in range(0, ROWS, TALL):
        row = first + start + tl.arange(0, TALL)
        mask = (row < n)[:, None] & (column < w)[None, :]
        at = row[:, None].to(tl.int64) * w + column[None, :]
        total += tl.load(partial + at, mask=mask, other=0.0).to(tl.float64)
    tl.store(out + tl.program_id(0) * w + column, tl.sum(total, 0), mask=column < w)
