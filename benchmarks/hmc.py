"""Hamiltonian Monte Carlo on all chains at once, for the truth where there is no closed form.

A chain at θ [P] draws a momentum r ~ N(0, I), follows the leapfrog steps

    r ← r + ½ε∇log p(θ),  θ ← θ + εr,  r ← r + ½ε∇log p(θ)

and accepts the end with probability min(1, exp(ΔH)), H = log p(θ) − ½|r|². The number of steps is drawn evenly from 1
to L for each draw, for all chains, which keeps orbits from closing. While it warms up, ε follows the acceptance rate
(dual averaging: Nesterov 2009; Hoffman and Gelman, JMLR 15:1593, 2014), then it is fixed.
"""

from math import exp, log
from typing import NamedTuple

import torch
from torch import Tensor

from structvi.models.target import Target

#: acceptance rate that the step size is led to
RATE = 0.8
#: of dual averaging: shrinkage, first steps that count little, and the power at which steps are forgotten
GAMMA, EARLY, FORGET = 0.05, 10, 0.75


class Chains(NamedTuple):
    """Draws [n, C, P] after the warm-up, log p there [n, C], the acceptance rate, the step size and evaluations."""

    theta: Tensor
    log_p: Tensor
    accepted: float
    step: float
    evaluations: int


def hmc(target: Target, start: Tensor, draws: int, warm_up: int, leaps: int, seed: int) -> Chains:
    """C chains from start [C, P]; each draw takes 1 to `leaps` gradients a chain."""
    generator = torch.Generator().manual_seed(seed)
    theta, (value, gradient) = start, at(target, start)
    first = 1.0 / start.shape[-1]
    log_step, averaged, away = log(first), log(first), 0.0
    kept, values, rates, evaluations = [], [], [], len(start)
    for index in range(warm_up + draws):
        leap = exp(log_step if index < warm_up else averaged)
        number = int(torch.randint(1, leaps + 1, (1,), generator=generator))
        momentum = torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
        end, end_value, end_gradient, change = _followed(target, theta, value, gradient, momentum, leap, number)
        evaluations += number * len(theta)
        chance = change.exp().clamp(max=1.0).nan_to_num(nan=0.0)
        taken = torch.rand(len(theta), generator=generator, dtype=theta.dtype) < chance
        theta = torch.where(taken.unsqueeze(-1), end, theta)
        gradient = torch.where(taken.unsqueeze(-1), end_gradient, gradient)
        value = torch.where(taken, end_value, value)
        if index < warm_up:
            t = index + 1
            away += (RATE - chance.mean().item() - away) / (t + EARLY)
            log_step = log(10 * first) - t**0.5 / GAMMA * away
            averaged += (log_step - averaged) * t**-FORGET
        else:
            kept.append(theta)
            values.append(value)
            rates.append(chance.mean().item())
    return Chains(torch.stack(kept), torch.stack(values), sum(rates) / len(rates), exp(averaged), evaluations)


def at(target: Target, theta: Tensor) -> tuple[Tensor, Tensor]:
    """log p [C] and its gradient [C, P]."""
    theta = theta.detach().requires_grad_()
    value = target.log_joint(theta)
    return value.detach(), torch.autograd.grad(value.sum(), theta)[0]


def _followed(
    target: Target, theta: Tensor, value: Tensor, gradient: Tensor, momentum: Tensor, leap: float, number: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The end of a path, log p and its gradient there, and the change of H [C]."""
    before = value - momentum.square().sum(-1) / 2
    for _ in range(number):
        momentum = momentum + leap / 2 * gradient
        theta = theta + leap * momentum
        value, gradient = at(target, theta)
        momentum = momentum + leap / 2 * gradient
    return theta, value, gradient, value - momentum.square().sum(-1) / 2 - before


def r_hat(values: Tensor) -> Tensor:
    """Of chains [n, C, ...], each cut in halves: √((W(m − 1)/m + B)/W), near one where all have the same mean and
    variance (Gelman et al., Bayesian Data Analysis, 2013, section 11.4)."""
    half = len(values) // 2
    parts = torch.cat([values[:half], values[half : 2 * half]], dim=1)  # [m, 2C, ...]
    within, between = parts.var(0).mean(0), parts.mean(0).var(0)
    return ((within * (half - 1) / half + between) / within).sqrt()
