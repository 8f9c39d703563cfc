"""Mirrored pairs of draws on a CPU: half of what `fused` does with as many draws that have nothing in common.

With d = s∘(ε + G z) and t = ε + G u (G, z and u as in `fused`, covariance form; without a factor t = ε) a pair is

    θ± = μ ± d,   log q(θ₊) = log q(θ₋),   ∇ log q(θ±) = ∓t/s

and of g±' = g± + σ± θ± + c± ∇ log q(θ±), the gradients at its draws with all that is added to them, the sum is that of
μ. The difference h = g₊' − g₋' has the rest: s∘ε∘h is the gradient of log s, and (s₀∘h) zᵀ that of the factor.
"""

import torch
from torch import Tensor

from . import detached as fused
from .way_back import sloped


def serve(state: fused.State) -> bool:
    """Whether pairs are drawn here: in the covariance form, of all weights, on a CPU, where they are one slab."""
    mean, factor, K = state.mean, state.factor, state.factor.shape[-1]
    whole = state.reduce is None and mean.device.type == "cpu" and not fused.kernels_serve(factor)
    return whole and (K == 0 or fused.one_slab(factor, state.precision))


def forward(state: fused.State, epsilon: Tensor, z: Tensor) -> tuple[Tensor, Tensor, fused.Saved]:
    """θ [2G, P] and log q(θ) [2G], pair by pair, of noise [G, P], [G, K]; and what `backward` needs."""
    first, log_q, _, saved = fused.forward(state, epsilon, z)
    theta = first.new_empty(len(first), 2, first.shape[-1])
    theta[:, 0] = first
    torch.sub(2 * state.mean, first, out=theta[:, 1])
    return theta.flatten(0, 1), log_q.repeat_interleave(2), saved


@torch.no_grad()
def backward(
    saved: fused.Saved, g: Tensor, g_q: Tensor, theta: Tensor | None = None, slope: Tensor | None = None
) -> tuple[Tensor, Tensor, fused.LowRankGradient]:
    """As `fused.backward`, with gradients [2G, P] and [2G]; the factor's has one row for a pair."""
    spare = theta is not None and slope is not None
    if theta is not None and slope is not None:
        g = sloped(g, theta, slope)
    scale, epsilon, cotangents = saved.scale, saved.epsilon, g_q.tolist()
    A = epsilon if saved.scaled is None else torch.addmm(epsilon, saved.u, saved.scaled)  # t, then s₀∘h
    to_mean = to_scale = None
    for pair, t in enumerate(A):
        (first, second), (plus, minus) = g[2 * pair : 2 * pair + 2], cotangents[2 * pair : 2 * pair + 2]
        total = first + second
        h = torch.sub(first, second, out=first if spare else None)
        if plus != minus:
            total.addcdiv_(t, scale, value=minus - plus)
        h.addcdiv_(t, scale, value=-(plus + minus))
        to_mean = total if to_mean is None else to_mean.add_(total)
        to_scale = h * epsilon[pair] if to_scale is None else to_scale.addcmul_(h, epsilon[pair])
        if saved.scaled is not None:
            torch.mul(h, saved.unit, out=t)
    assert to_mean is not None
    assert to_scale is not None
    return to_mean, to_scale.mul_(scale), fused.LowRankGradient(A, saved.z)
