"""From gradients at the draws to those of mean and scale, in torch, where no slabs are needed: see `fused`."""

import torch
from torch import Tensor


def sloped(g: Tensor, theta: Tensor, slope: Tensor) -> Tensor:
    """g + slope·θ, in its place; g itself where θ stands for nothing."""
    return g if theta is g else g.addcmul_(theta, slope.unsqueeze(-1))


def back_diagonal(scale: Tensor, epsilon: Tensor, g: Tensor, g_q: Tensor, spare: bool) -> tuple[Tensor, Tensor]:
    """Gradients of μ and log s where there is no factor, with g' = g − g_q·ε/s.

    Args:
        scale, epsilon: s [P] and the noise [S, P].
        g, g_q: the gradients at the draws [S, P] and at log q [S].
        spare: whether what is in g may be lost.
    """
    first, *others = g_q.tolist()
    to_mean = torch.addcdiv(g[0], epsilon[0], scale, value=-first, out=g[0] if spare else None)
    to_scale = to_mean * epsilon[0]
    for draw, cotangent in enumerate(others, 1):
        pulled = torch.addcdiv(g[draw], epsilon[draw], scale, value=-cotangent, out=g[draw] if spare else None)
        to_scale.addcmul_(pulled, epsilon[draw])
        to_mean.add_(pulled)
    return to_mean, to_scale.mul_(scale)


def back_scaled(
    scaled: Tensor, scale: Tensor, unit: Tensor, epsilon: Tensor, u: Tensor, g: Tensor, g_q: Tensor, theta: Tensor,
    slope: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of μ and log s, and A, where G is at hand: with t = ε + G u, in whose place A = s₀∘g' is put."""
    spare, g = theta is not g, sloped(g, theta, slope)
    A = torch.addmm(epsilon, u, scaled)
    to_mean = g[0] if spare and len(g) == 1 else torch.empty_like(scale)  # in its place, where nobody else has it
    to_scale = torch.empty_like(scale)
    for draw, cotangent in enumerate(g_q.tolist()):
        pulled = A[draw] if draw else to_mean  # the first is where the sum begins
        torch.addcdiv(g[draw], A[draw], scale, value=-cotangent, out=pulled)
        if draw:
            to_scale.addcmul_(pulled, epsilon[draw])
            to_mean.add_(pulled)
            pulled.mul_(unit)
        else:
            torch.mul(pulled, epsilon[draw], out=to_scale)
            torch.mul(pulled, unit, out=A[draw])
    return to_mean, to_scale.mul_(scale), A


def back_at_once(
    scale: Tensor, factor: Tensor, unit: Tensor, epsilon: Tensor, u: Tensor, g: Tensor, g_q: Tensor
) -> tuple[Tensor, Tensor, Tensor, None]:
    """Of all draws together, of which the host reads nothing: for a captured step."""
    t = torch.addcmul(epsilon, u @ factor.mT, unit / scale) if factor.shape[-1] else epsilon
    pulled = torch.addcmul(g, t / scale, g_q.unsqueeze(-1), value=-1)
    A = pulled * unit if factor.shape[-1] else g
    return pulled.sum(0), (pulled * epsilon).sum(0) * scale, A, None
