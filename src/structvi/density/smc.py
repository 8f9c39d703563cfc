"""Draws of a posterior that q is too far from for importance weights: q is made wider, and led to p step by step.

Populations of draws of q₀, which is q stretched around its mean, go through the densities

    log π_t(θ) = (1 − t) log q₀(θ) + t log p(θ) + const,  t from 0 to 1.

From one t to the next each draw has the weight (p/q₀)^Δt, with Δt such that half of them stay effective; they are
resampled, and moved by Hamiltonian Monte Carlo, which leaves π_t unchanged (sequential Monte Carlo: Del Moral, Doucet
and Jasra, JRSS B 68:411, 2006). At t = 1 moves go on until populations, each in two halves of its moves, agree.
"""

from math import ceil, inf, log, pi
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.family import Density
from ..parameters import Parameters
from ..predict.sample import IndependentDraws
from .importance import LogJoint, Unavailable, check_available

#: populations that know nothing of each other, and draws of each
POPULATIONS, EACH = 4, 32
#: width of q₀ relative to q: what q has missed beside it is then in reach
STRETCH = 4.0
#: values of t at most, and steps of a path at most
TEMPERATURES, LEAPS = 400, 64
#: moves of the first round at t = 1; each further round is twice as long
MOVES = 16
#: evaluations after which no further round begins
ENOUGH = 100_000
#: acceptance that steps are led to, and how fast
RATE, SPEED = 0.8, 0.5
#: least part of a step that a draw takes by chance
PART = 0.3
#: R̂ below which populations agree
AGREE = 1.05
#: nats of energy that a broken path has lost, and share of such paths from which on there may be necks
BROKEN, NECKS = 10.0, 0.02


class Annealed(NamedTuple):
    """Draws of the posterior, and how far populations agree."""

    theta: Tensor  # [S, P]
    #: the largest R̂ of log p and of the numbers, between populations and halves of their moves
    r_hat: float
    #: index of the number that it is of; P for log p
    worst: int
    #: share of the paths that lost more than ten nats of energy: they met a neck or a bend
    broken: float
    #: log ∫ p by each population
    log_evidence: tuple[float, ...]

    def doubts(self, space: Parameters) -> str:
        """Return what there is to be said against them; "" if nothing."""
        words = []
        if not self.r_hat < AGREE:
            name = "log p" if self.worst == space.size else space.label(self.worst)
            words.append(f"populations do not agree, R̂ of {name} is {self.r_hat:.2f} and should be below {AGREE}")
        if self.broken > NECKS:
            words.append(
                f"{100 * self.broken:.0f} % of the paths broke off, which is where the posterior has a neck or is "
                "strongly bent: what lies beyond may have too few draws"
            )
        return "; ".join(words)


class _At(NamedTuple):
    """Draws, and both log densities with their slopes there."""

    theta: Tensor  # [S, P]
    log_p: Tensor  # [S], −∞ where there is none
    log_q: Tensor
    slope_p: Tensor  # [S, P]
    slope_q: Tensor

    def value(self, t: float) -> Tensor:
        return (1 - t) * self.log_q + t * self.log_p

    def slope(self, t: float) -> Tensor:
        return (1 - t) * self.slope_q + t * self.slope_p


class Annealing:
    """Both densities, and the count of evaluations of p.

    Args:
        density: q, with `log_prob`.
        log_joint: log p, up to a constant: [S, P] → [S].
        generator: of all draws.
    """

    def __init__(self, density: Density, log_joint: LogJoint, generator: torch.Generator):
        check_available(density)
        self.density, self.log_joint, self.generator = density, log_joint, generator
        self.mean, self.evaluations = density.mean.detach(), 0
        self.broken: list[float] = []
        self.step = 0.5 / len(self.mean) ** 0.25

    def run(self, n: int) -> Annealed:
        """Return at least n draws."""
        draws, evidence = self.annealed()
        moves, r_hat = max(MOVES, ceil(n / POPULATIONS / EACH)), torch.full((1,), inf)
        while True:
            kept, self.broken = [], []
            for _ in range(moves):
                draws = self.moved(draws, 1.0)
                kept.append(torch.cat([draws.theta, draws.log_p.unsqueeze(-1)], dim=-1))
            values = torch.stack(kept)  # [moves, S, P + 1]
            r_hat = nested_r_hat(values.view(moves, POPULATIONS, EACH, -1))
            if float(r_hat.max()) < AGREE or self.evaluations > ENOUGH:
                break
            moves *= 2
        theta = values[..., :-1].flatten(0, 1)
        return Annealed(theta, r_hat.max().item(), int(r_hat.argmax()), fmean(self.broken), tuple(evidence.tolist()))

    def annealed(self) -> tuple[_At, Tensor]:
        """Return draws at t = 1, and the log evidence of each population."""
        sample = IndependentDraws(self.density, POPULATIONS * EACH, self.generator)
        theta = torch.cat([one.theta for one in sample]).detach()
        draws = self.at(self.mean + STRETCH * (theta - self.mean))
        t, evidence = 0.0, torch.zeros(POPULATIONS, dtype=torch.float64)
        for _ in range(TEMPERATURES):
            ratio = (draws.log_p - draws.log_q).view(POPULATIONS, EACH).double()
            new = next_temperature(ratio, t)
            weight = (new - t) * ratio
            evidence += weight.logsumexp(-1).cpu() - log(EACH)
            index = self.resampled(weight)
            draws, t = self.moved(_At(*(x[index] for x in draws)), new), new
            if t == 1:
                return draws, evidence
        raise Unavailable(f"no annealed draws: {TEMPERATURES} steps from q do not reach the posterior")

    def at(self, theta: Tensor) -> _At:
        """Return both densities at θ."""
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            log_p = self.log_joint(theta)
            (slope_p,) = torch.autograd.grad(log_p.sum(), theta)
        theta, log_p = theta.detach(), log_p.detach()
        self.evaluations += len(theta)
        is_number = log_p.isfinite() & slope_p.isfinite().all(-1)
        log_p, slope_p = torch.where(is_number, log_p, -inf), torch.where(is_number.unsqueeze(-1), slope_p, 0.0)
        inside = self.mean + (theta - self.mean) / STRETCH
        with torch.no_grad():
            log_q = self.density.log_prob(inside) - len(self.mean) * log(STRETCH)
        return _At(theta, log_p, log_q, slope_p, self.density.score(inside) / STRETCH)

    def resampled(self, log_weights: Tensor) -> Tensor:
        """Return indices [S] of draws, of each population its own, evenly by weight."""
        weights = log_weights.softmax(-1)
        points = (torch.arange(EACH, device=weights.device) + self.random(POPULATIONS, 1)) / EACH
        index = torch.searchsorted(weights.cumsum(-1), points).clamp_max(EACH - 1)
        return (index + EACH * torch.arange(POPULATIONS, device=weights.device).unsqueeze(-1)).flatten()

    def moved(self, draws: _At, t: float) -> _At:
        """Return the ends of leapfrog paths of up to half an orbit, taken or not, in units of the draws' covariance."""
        root = _root(draws.theta)
        number = int(self.random(1).item() * min(LEAPS, ceil(pi / self.step))) + 1
        like = {"generator": self.generator, "dtype": root.dtype, "device": self.generator.device}
        momentum = torch.randn(draws.theta.shape, **like)
        step = self.step * (PART + (1 - PART) * self.random(len(momentum), 1)).to(root.dtype)
        end, before = draws, draws.value(t) - momentum.square().sum(-1) / 2
        for _ in range(number):
            momentum = momentum + step / 2 * (end.slope(t) @ root)
            end = self.at(end.theta + step * (momentum @ root.mT))
            momentum = momentum + step / 2 * (end.slope(t) @ root)
        change = end.value(t) - momentum.square().sum(-1) / 2 - before
        self.broken.append((~(change > -BROKEN)).double().mean().item())
        chance = change.exp().clamp(max=1.0).nan_to_num(nan=0.0)
        self.step *= float(torch.exp(SPEED * (chance.mean() - RATE)))
        taken = self.random(len(chance)).to(chance.dtype) < chance
        pairs = zip(end, draws, strict=True)
        return _At(*(torch.where(taken if x.ndim == 1 else taken.unsqueeze(-1), x, y) for x, y in pairs))

    def random(self, *size: int) -> Tensor:
        """Return uniform numbers."""
        return torch.rand(size, generator=self.generator, dtype=torch.float64, device=self.generator.device)


def next_temperature(ratio: Tensor, t: float) -> float:
    """Return the largest t at which half of the draws of every population stay effective, for log p/q₀ [R, n].

    Example:
        >>> next_temperature(torch.zeros(2, 8), 0.0)
        1.0
    """
    possible = int((ratio > -inf).sum(-1).min())
    if not possible:
        raise Unavailable("no annealed draws: the log density is not finite at any draw of a population around q")

    def is_enough(new: float) -> bool:
        weights = ((new - t) * ratio).softmax(-1)
        return (1 / weights.square().sum(-1)).min().item() >= possible / 2

    if is_enough(1.0):
        return 1.0
    low, high = t, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if is_enough(middle) else (low, middle)
    return high


def nested_r_hat(values: Tensor) -> Tensor:
    """Return R̂ of populations that are each one long chain, in two halves: [moves, R, n, ...] → [...].

    √(1 + B/W), B the variance of the 2R means, W the mean variance within (Margossian et al., 2024). With n draws that
    know nothing of each other it is about √(1 + 1/n).

    Example:
        >>> draws = torch.randn(10, 4, 500, generator=torch.Generator().manual_seed(0))
        >>> bool(nested_r_hat(draws) < 1.01), bool(nested_r_hat(draws + torch.arange(4.0).view(4, 1)) > 1.4)
        (True, True)
    """
    half = len(values) // 2
    parts = torch.stack([values[:half], values[half : 2 * half]], dim=1).double()  # [m, 2, R, n, ...]
    within = parts.transpose(1, 3).flatten(0, 1).var(0).flatten(0, 1).mean(0)
    between = parts.mean((0, 3)).flatten(0, 1).var(0)
    return (1 + between / within.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()


def _root(theta: Tensor) -> Tensor:
    """Return a root of the draws' covariance, drawn a little towards independence; scales alone for few draws."""
    x = theta - theta.mean(0)
    covariance = x.mT @ x / len(x)
    root, failed = torch.linalg.cholesky_ex(0.9 * covariance + 0.1 * covariance.diagonal().diag())
    return theta.std(0).diag() if len(theta) < 4 * theta.shape[1] or failed.item() else root
