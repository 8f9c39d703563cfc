"""Adam as Triton kernels: a factor moves by its gradient AᵀZ, never written, with its vectors in one launch."""

# Triton's decorators hide what is called with what:
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # numbers of the factor that one program holds


def adam(
    factor: Tensor, first: Tensor, second: Tensor, A: Tensor, Z: Tensor,
    step: Tensor, lr: Tensor, coefficient: Tensor, make: Tensor, betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """Adam's step with the gradient AᵀZ, which is never written: in place.

    Args:
        factor, first, second: the parameter and its moments, [P, K].
        A, Z: the gradient's sides, [R, P], [R, K].
        step, lr, coefficient, make: t, the learning rate, what the gradient is multiplied by, and 0 to leave
            everything as it is: scalars on the device.
        betas, eps: Adam's β₁, β₂ and ε.
    """
    P, K = factor.shape
    assert factor.stride() == first.stride() == second.stride()
    block = max(16, TILE // triton.next_power_of_2(K))
    _adam[(triton.cdiv(P, block),)](
        factor, first, second, A.contiguous(), Z.contiguous(), step, lr, coefficient, make, P, *factor.stride(),
        R=len(A), K=K, KP=triton.next_power_of_2(K), BLOCK=block,
        BETA1=betas[0], BETA2=betas[1], LOG1=log(betas[0]), LOG2=log(betas[1]), EPS=eps,
    )  # fmt: skip


def clipped(elbo: Tensor, norm: Tensor, clip: float, make: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the gradient is multiplied by, min(1, clip/norm); and `make` where ELBO and norm are finite, else 0.

    A dozen launches of torch otherwise, each on one number.
    """
    out = elbo.new_empty(2, dtype=torch.float32)
    groups = elbo.numel()
    _clipped[(1,)](
        elbo, norm, out, norm if make is None else make, clip,
        GROUPS=groups, PADDED=triton.next_power_of_2(groups), MAKE=make is not None, num_warps=1,
    )  # fmt: skip
    return out[0], out[1]


class Moved(NamedTuple):
    """A parameter with its moments, its count of steps and its learning rate, a number or on the device."""

    value: Tensor
    first: Tensor
    second: Tensor
    step: Tensor
    lr: Tensor | float


def adam_family(
    factor: Moved, A: Tensor, Z: Tensor, vectors: Sequence[tuple[Moved, Tensor]],
    coefficient: Tensor, make: Tensor, betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """`adam` of a factor [P, K] with the gradient AᵀZ and of two vectors [P] with theirs, in one launch."""
    P, K = factor.value.shape
    assert factor.value.stride() == factor.first.stride() == factor.second.stride()
    (mean, to_mean), (scale, to_scale) = vectors
    block = max(16, TILE // triton.next_power_of_2(K))
    _adam_family[(triton.cdiv(P, block),)](
        *factor, A.contiguous(), Z.contiguous(), *mean, to_mean.contiguous(), *scale, to_scale.contiguous(),
        coefficient, make, P, *factor.value.stride(),
        R=len(A), K=K, KP=triton.next_power_of_2(K), BLOCK=block, ON_DEVICE=isinstance(factor.lr, Tensor),
        BETA1=betas[0], BETA2=betas[1], LOG1=log(betas[0]), LOG2=log(betas[1]), EPS=eps,
    )  # fmt: skip


@triton.jit
def _clipped(elbo, norm, out, make, clip, GROUPS: tl.constexpr, PADDED: tl.constexpr, MAKE: tl.constexpr):
    at = tl.arange(0, PADDED)
    size = tl.load(norm)
    total = tl.sum(tl.load(elbo + at, mask=at < GROUPS, other=0.0), 0) + size
    finite = tl.where(total - total == 0, 1.0, 0.0)  # not so of nan and ±∞
    ratio = clip / tl.where(size > 1e-30, size, 1e-30)
    tl.store(out, tl.where(ratio < 1.0, ratio, 1.0).to(tl.float32))
    if MAKE:
        finite *= tl.load(make)
    tl.store(out + 1, finite.to(tl.float32))


@triton.jit
def _adam_sizes(step, lr, ON_DEVICE: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr):
    """Of a step t: the rate over 1 − β₁ᵗ, and √(1 − β₂ᵗ)."""
    t = tl.load(step).to(tl.float64)
    rate = tl.load(lr) if ON_DEVICE else lr
    return (rate / (1 - tl.exp(t * LOG1))).to(tl.float32), tl.sqrt(1 - tl.exp(t * LOG2)).to(tl.float32)


@triton.jit
def _adam_at(
    value, first, second, at, mask, stored, gradient, size, root,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    m = BETA1 * tl.load(first + at, mask=mask, other=0.0) + (1 - BETA1) * gradient
    v = BETA2 * tl.load(second + at, mask=mask, other=0.0) + (1 - BETA2) * gradient * gradient
    moved = tl.load(value + at, mask=mask, other=0.0) - size * m / (tl.sqrt(v) / root + EPS)
    tl.store(first + at, m, mask=stored)
    tl.store(second + at, v, mask=stored)
    tl.store(value + at, moved, mask=stored)


@triton.jit
def _product(
    A, Z, p, k, inside, P,
    R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """AᵀZ at rows p: [BLOCK, KP]"""
    gradient = tl.zeros((BLOCK, KP), tl.float32)
    for row in tl.range(0, R, loop_unroll_factor=8):
        a = tl.load(A + row * P.to(tl.int64) + p, mask=inside, other=0.0)
        z = tl.load(Z + row * K + k, mask=k < K, other=0.0)
        gradient += a[:, None] * z[None, :]
    return gradient


@triton.jit
def _adam(
    factor, first, second, A, Z, step, lr, coefficient, make, P, along, across,
    R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = p < P
    k = tl.arange(0, KP)
    moves = p < tl.where(tl.load(make) > 0, P, 0)  # and no branch: nothing that is read waits for it
    size, root = _adam_sizes(step, lr, True, LOG1, LOG2)
    at = p[:, None].to(tl.int64) * along + k[None, :].to(tl.int64) * across
    gradient = _product(A, Z, p, k, inside, P, R, K, KP, BLOCK) * tl.load(coefficient)
    mask, stored = inside[:, None] & (k < K)[None, :], moves[:, None] & (k < K)[None, :]
    _adam_at(factor, first, second, at, mask, stored, gradient, size, root, BETA1, BETA2, EPS)


@triton.jit
def _adam_family(
    factor, first, second, step, lr, A, Z,
    mean, mean_first, mean_second, mean_step, mean_lr, to_mean,
    scale, scale_first, scale_second, scale_step, scale_lr, to_scale,
    coefficient, make, P, along, across,
    R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, ON_DEVICE: tl.constexpr,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = p < P
    k = tl.arange(0, KP)
    moves, clip = p < tl.where(tl.load(make) > 0, P, 0), tl.load(coefficient)
    size, root = _adam_sizes(step, lr, ON_DEVICE, LOG1, LOG2)
    at = p[:, None].to(tl.int64) * along + k[None, :].to(tl.int64) * across
    gradient = _product(A, Z, p, k, inside, P, R, K, KP, BLOCK) * clip
    mask, stored = inside[:, None] & (k < K)[None, :], moves[:, None] & (k < K)[None, :]
    _adam_at(factor, first, second, at, mask, stored, gradient, size, root, BETA1, BETA2, EPS)
    size, root = _adam_sizes(mean_step, mean_lr, ON_DEVICE, LOG1, LOG2)
    gradient = tl.load(to_mean + p, mask=inside, other=0.0) * clip
    _adam_at(mean, mean_first, mean_second, p, inside, moves, gradient, size, root, BETA1, BETA2, EPS)
    size, root = _adam_sizes(scale_step, scale_lr, ON_DEVICE, LOG1, LOG2)
    gradient = tl.load(to_scale + p, mask=inside, other=0.0) * clip
    _adam_at(scale, scale_first, scale_second, p, inside, moves, gradient, size, root, BETA1, BETA2, EPS)
