"""Draws of a posterior that q is too far from for importance weights: q is made wider, and led to p step by step.

Populations of draws of q₀, which is q stretched around its mean, go through the densities

    log π_t(θ) = (1 − t) log q₀(θ) + t log p(θ) + const,  t from 0 to 1.

From one t to the next each draw has the weight (p/q₀)^Δt, with Δt such that half of them stay effective; they are
resampled, and moved by Hamiltonian Monte Carlo, which leaves π_t as it is (sequential Monte Carlo: Del Moral, Doucet
and Jasra, JRSS B 68:411, 2006). At t = 1 moves go on until populations, each in two halves of its moves, agree.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf, log
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.density import Density
from ..parameters import Parameters
from .weighted_draws import LogJoint, Unavailable, check_available

#: populations that know nothing of each other, and draws of each
POPULATIONS, EACH = 4, 32
#: q₀ is so many times as wide as q: what q has missed beside it is then in reach
STRETCH = 4.0
#: share of a population's draws that stays effective from one t to the next
EFFECTIVE = 0.5
#: most t's, most steps of a move's path, and moves of the first round at t = 1; each further round is twice as long
TEMPERATURES, LEAPS, MOVES = 400, 64, 16
#: evaluations after which no further round begins
ENOUGH = 100_000
#: longest path in standard deviations, about half an orbit
PATH = 3.0
#: acceptance that steps are led to, how fast, and the least part of a step that a draw takes by chance
RATE, SPEED, PART = 0.8, 0.5, 0.3
#: populations agree below this R̂
AGREE = 1.05
#: nats of energy that a broken path has lost, and the share of such paths from which on there may be necks
BROKEN, NECKS = 10.0, 0.02


class Annealed(NamedTuple):
    """Draws of the posterior, and how far populations agree."""

    theta: Tensor  # [S, P]
    #: the largest R̂ of log p and of the numbers, between populations and halves of their moves
    r_hat: float
    #: what it is of: −1 for log p
    worst: int
    #: share of the moves' paths that lost more than ten nats of energy: they met a neck or a bend
    broken: float
    #: log ∫ p as each population has it
    log_evidence: tuple[float, ...]
    temperatures: int
    evaluations: int

    def doubts(self, space: Parameters) -> str:
        """What there is to be said against them; "" where nothing is."""
        words = []
        if not self.r_hat < AGREE:
            own = [name for name in space.names if space.slice(name).start <= self.worst < space.slice(name).stop]
            name = own[0] if own else "log p"
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

    def take(self, index: Tensor) -> "_At":
        return _At(*(x[index] for x in self))

    def where(self, taken: Tensor, other: "_At") -> "_At":
        pairs = zip(self, other, strict=True)
        return _At(*(torch.where(taken if x.ndim == 1 else taken.unsqueeze(-1), x, y) for x, y in pairs))


@dataclass
class _Mover:
    """Hamiltonian Monte Carlo in the units of a root [P, P], or of scales [P]; its step follows the acceptance."""

    units: Callable[[Tensor], Tensor]
    step: float
    root: Tensor = field(default_factory=lambda: torch.ones(()))
    #: mean squared jump of an evaluation, in standard deviations
    jump: float = 0.0

    def along(self, x: Tensor) -> Tensor:
        return x @ self.root.mT if self.root.ndim == 2 else x * self.root

    def back(self, gradient: Tensor) -> Tensor:
        return gradient @ self.root if self.root.ndim == 2 else gradient * self.root


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
        self.mean = density.mean.detach()
        self.evaluations = 0
        self.broken: list[float] = []
        P = len(self.mean)
        scales = _Mover(lambda x: x.std(0), 0.5 / P**0.25)
        self.movers = [scales] if POPULATIONS * EACH < 4 * P else [scales, _Mover(_root, 0.5 / P**0.25)]

    def run(self, n: int) -> Annealed:
        """At least n draws."""
        draws, evidence, count = self.annealed()
        best, moves = max(self.movers, key=lambda mover: mover.jump), max(MOVES, ceil(n / POPULATIONS / EACH))
        while True:
            kept, self.broken = [], []
            for _ in range(moves):
                draws = self.moved(draws, 1.0, best)
                kept.append((draws.theta, draws.log_p))
            theta, log_p = (torch.stack(x) for x in zip(*kept, strict=True))
            values = torch.cat([theta, log_p.unsqueeze(-1)], dim=-1)
            r_hat = nested_r_hat(values.view(len(values), POPULATIONS, EACH, -1))
            moves *= 2
            if float(r_hat.max()) < AGREE or self.evaluations > ENOUGH:
                break
        worst = int(r_hat.argmax())
        return Annealed(
            theta.flatten(0, 1), r_hat.max().item(), -1 if worst == len(self.mean) else worst, fmean(self.broken),
            tuple(evidence.tolist()), count, self.evaluations,
        )  # fmt: skip

    def annealed(self) -> tuple[_At, Tensor, int]:
        """Draws at t = 1, the log evidence of each population, and how many t's there were."""
        draws = self.at(self.mean + STRETCH * (self.drawn() - self.mean))
        t, evidence, count = 0.0, torch.zeros(POPULATIONS, dtype=torch.float64), 0
        while t < 1:
            count += 1
            if count > TEMPERATURES:
                raise Unavailable(f"no annealed draws: {TEMPERATURES} steps from q do not reach the posterior")
            ratio = (draws.log_p - draws.log_q).view(POPULATIONS, EACH).double()
            new = next_temperature(ratio, t)
            weight = (new - t) * ratio
            evidence += weight.logsumexp(-1).cpu() - log(EACH)
            draws, t = draws.take(self.resampled(weight)), new
            for mover in self.movers:
                draws = self.moved(draws, t, mover)
        return draws, evidence, count

    @torch.no_grad()
    def drawn(self) -> Tensor:
        """Independent draws of q, [S, P]."""
        draws = self.density.draw(POPULATIONS * EACH, generator=self.generator)
        if len(draws.theta) == POPULATIONS * EACH:
            return draws.theta
        chosen = torch.multinomial(draws.weight, POPULATIONS * EACH, replacement=True, generator=self.generator)
        return draws.theta[chosen]

    def at(self, theta: Tensor) -> _At:
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            log_p = self.log_joint(theta)
            (slope_p,) = torch.autograd.grad(log_p.sum(), theta)
        theta, log_p = theta.detach(), log_p.detach()
        self.evaluations += len(theta)
        is_number = log_p.isfinite() & slope_p.isfinite().all(-1)
        inside = self.mean + (theta - self.mean) / STRETCH
        with torch.no_grad():
            log_q = self.density.log_prob(inside) - len(self.mean) * log(STRETCH)
        slope_q = self.density.score(inside) / STRETCH
        return _At(
            theta, torch.where(is_number, log_p, -inf), log_q,
            torch.where(is_number.unsqueeze(-1), slope_p, 0.0), slope_q,
        )  # fmt: skip

    def resampled(self, log_weights: Tensor) -> Tensor:
        """Indices [S] of draws, of each population its own, evenly by weight."""
        weights = log_weights.softmax(-1)
        offset = self.random(POPULATIONS, 1)
        points = (torch.arange(EACH, device=weights.device) + offset) / EACH
        index = torch.searchsorted(weights.cumsum(-1), points).clamp_max(EACH - 1)
        return (index + EACH * torch.arange(POPULATIONS, device=weights.device).unsqueeze(-1)).flatten()

    def moved(self, draws: _At, t: float, mover: _Mover) -> _At:
        """One path of leapfrog steps for each draw, of 1 to `LEAPS`, taken or not."""
        scale = draws.theta.std(0)
        mover.root = mover.units(draws.theta)
        longest = min(LEAPS, ceil(PATH / mover.step))
        number = int(torch.randint(1, longest + 1, (), generator=self.generator, device=self.generator.device))
        momentum = torch.randn(
            draws.theta.shape, generator=self.generator, dtype=scale.dtype, device=self.generator.device
        )
        step = mover.step * (PART + (1 - PART) * self.random(len(momentum), 1)).to(scale.dtype)
        end, before = draws, draws.value(t) - momentum.square().sum(-1) / 2
        for _ in range(number):
            momentum = momentum + step / 2 * mover.back(end.slope(t))
            end = self.at(end.theta + step * mover.along(momentum))
            momentum = momentum + step / 2 * mover.back(end.slope(t))
        change = end.value(t) - momentum.square().sum(-1) / 2 - before
        self.broken.append((~(change > -BROKEN)).double().mean().item())
        chance = change.exp().clamp(max=1.0).nan_to_num(nan=0.0)
        taken = self.random(len(chance)).to(chance.dtype) < chance
        mover.step *= float(torch.exp(SPEED * (chance.mean() - RATE)))
        jump = ((end.theta - draws.theta) / scale).square().mean(-1)
        mover.jump += 0.3 * ((chance * jump.nan_to_num(posinf=0.0)).mean().item() / number - mover.jump)
        return end.where(taken, draws)

    def random(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator, dtype=torch.float64, device=self.generator.device)


def next_temperature(ratio: Tensor, t: float) -> float:
    """The largest t at which enough draws of every population stay effective, for ratios log p/q₀ [R, n].

    Example:
        >>> next_temperature(torch.zeros(2, 8), 0.0)
        1.0
    """
    if not bool((ratio > -inf).any(-1).all()):
        raise Unavailable("no annealed draws: the log density is not finite at any draw of a population around q")

    def enough(new: float) -> bool:
        weights = ((new - t) * ratio).softmax(-1)
        least = (1 / weights.square().sum(-1)).min().item()
        return least >= EFFECTIVE * min(ratio.shape[-1], int((ratio > -inf).sum(-1).min()))

    if enough(1.0):
        return 1.0
    low, high = t, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return high


def nested_r_hat(values: Tensor) -> Tensor:
    """R̂ of populations that are each one long chain, in two halves: [moves, R, n, ...] → [...].

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
    """A root of the draws' covariance, drawn a little towards independence."""
    x = theta - theta.mean(0)
    covariance = x.mT @ x / len(x)
    root, failed = torch.linalg.cholesky_ex(0.9 * covariance + 0.1 * covariance.diagonal().diag())
    return x.std(0).diag() if failed.item() else root
