"""IVON (Shen et al. 2024, "Variational learning is effective for large deep networks"), written after algorithm 1."""

import math
import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from structvi.parameters import Parameters


class Loader(Iterable[Any], Protocol):
    """Batches, of a known number."""

    def __len__(self) -> int: ...


def fit_ivon(
    net: nn.Module,
    loader: Loader,
    epochs: int,
    *,
    lr: float,
    ess: float,
    h0: float,
    decay: float,
    beta1: float,
    beta2: float,
    warmup: float,
    seed: int,
    radius: float = math.inf,
    loss: Any = cross_entropy,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return mean and scales [P] after so many epochs of one draw a step.

    With g the gradient at θ ~ N(m, σ²), ĥ = g (θ − m)/σ²:

        g ← β₁ g + (1 − β₁) ĝ,   h ← β₂ h + (1 − β₂) ĥ + ½ (1 − β₂)² (h − ĥ)²/(h + δ)
        m ← m − α clip((g/(1 − β₁ᵗ) + δ m)/(h + δ)),   σ² = 1/(λ (h + δ))

    Args:
        net: where the mean starts.
        loader: batches; their order is the loader's.
        epochs: how many.
        lr: α, the highest; it rises linearly and falls to zero along a cosine.
        ess: λ, the effective sample size.
        h0: where h starts.
        decay: δ.
        beta1, beta2: of the averages.
        warmup: the part of the steps in which the rate rises.
        seed: of the draws.
        radius: to which every number of the mean's step is clipped, before α.
        loss: of outputs and targets, the mean over a batch.
    """
    space = Parameters.of(net)
    mean = parameters_to_vector(net.parameters()).detach().clone()
    momentum, h = torch.zeros_like(mean), torch.full_like(mean, h0)
    started = (ess * (h + decay)).rsqrt()
    generator = torch.Generator(mean.device).manual_seed(seed)
    total, step, start = epochs * len(loader), 0, time.perf_counter()
    for _ in range(epochs):
        for x, t in loader:
            sigma = (ess * (h + decay)).rsqrt()
            noise = sigma * torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
            theta = (mean + noise).requires_grad_(True)
            (g,) = torch.autograd.grad(loss(functional_call(net, space.unravel(theta), (x,)), t), theta)
            curvature = g * noise / sigma.square()
            momentum.lerp_(g, 1 - beta1)
            correction = 0.5 * (1 - beta2) ** 2 * (h - curvature).square() / (h + decay)
            h.lerp_(curvature, 1 - beta2).add_(correction)
            change = (momentum / (1 - beta1 ** (step + 1)) + decay * mean) / (h + decay)
            mean.sub_(lr * schedule(step, total, warmup) * change.clamp_(-radius, radius))
            step += 1
    scale = (ess * (h + decay)).rsqrt()
    moved = float((scale / started).log().abs().mean())
    return mean, scale, {"ms": 1000 * (time.perf_counter() - start) / step, "moved": moved}


def schedule(step: int, total: int, warmup: float) -> float:
    """Return the factor of a linear warm-up, then of a cosine to zero, as in `bayes.fit`."""
    rise = round(warmup * total)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, total - rise)))
