"""What is done with a few numbers of each draw around the network, in two launches on a GPU instead of twenty."""

# Triton's decorators hide what is called with what:
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from ctypes import c_float
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def shares(
    weight: Tensor, factor: Any, temperature: Any, upscaled: float, slope: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As in `by_hand`; factor and λ are both numbers, or both on the device."""
    S, on_device = len(weight), isinstance(factor, Tensor)
    out = torch.empty(4, S, dtype=weight.dtype, device=weight.device)
    if not on_device:
        factor, temperature = float(factor), float(temperature)
    _shares[(1,)](
        weight.contiguous(), factor, temperature, float(upscaled), float(slope or 0.0), out,
        S=S, PADDED=_padded(S), ON_DEVICE=on_device, num_warps=1,
    )  # fmt: skip
    likelihood, prior, log_q, to_theta = out.unbind()
    return likelihood, prior, log_q, None if slope is None else to_theta


def told(
    log_likelihood: Tensor, log_prior: Tensor, log_q: Tensor, weight: Tensor, upscaled: float, groups: int
) -> Tensor:
    """As in `by_hand`."""
    S = len(weight)
    out = torch.empty(2, groups, dtype=torch.float64, device=weight.device)
    high = c_float(upscaled).value  # a number comes to a kernel in float32, and this one is wanted in float64
    _told[(groups,)](
        log_likelihood.contiguous(), log_prior.contiguous(), log_q.contiguous(), weight.contiguous(),
        high, upscaled - high, out, groups, EACH=S // groups, PADDED=_padded(S // groups), num_warps=1,
    )  # fmt: skip
    return out


def _padded(count: int) -> int:
    return max(2, triton.next_power_of_2(count))


@triton.jit
def _shares(
    weight, factor, temperature, upscaled, slope, out,
    S: tl.constexpr, PADDED: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, PADDED)
    mask = at < S
    of_draw = tl.load(factor).to(tl.float32) if ON_DEVICE else factor
    cooled = tl.load(temperature).to(tl.float32) if ON_DEVICE else temperature
    share = tl.load(weight + at, mask=mask, other=0.0) * of_draw
    prior = share * cooled
    tl.store(out + at, share * upscaled, mask=mask)
    tl.store(out + S + at, prior, mask=mask)
    tl.store(out + 2 * S + at, -prior, mask=mask)
    tl.store(out + 3 * S + at, prior * slope, mask=mask)


@triton.jit
def _told(
    log_likelihood, log_prior, log_q, weight, high, low, out, groups,
    EACH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    draw = tl.arange(0, PADDED)
    mask = draw < EACH
    at = tl.program_id(0) * EACH + draw
    share = groups * tl.load(weight + at, mask=mask, other=0.0).to(tl.float64)
    fit = tl.load(log_likelihood + at, mask=mask, other=0.0).to(tl.float64)
    fit = fit * high + fit * low
    value = fit + tl.load(log_prior + at, mask=mask, other=0.0).to(tl.float64)
    value -= tl.load(log_q + at, mask=mask, other=0.0).to(tl.float64)
    tl.store(out + tl.program_id(0), tl.sum(share * value, 0))
    tl.store(out + groups + tl.program_id(0), tl.sum(share * fit, 0))
