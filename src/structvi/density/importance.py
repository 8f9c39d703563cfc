"""Importance weights p/q at draws of q and at draws with longer tails: k̂, corrected moments, evidence."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import lgamma, log, pi
from typing import Any

import torch
from torch import Tensor

from ..families.family import Density
from ..families.mixture import weighted_normals
from ..models.target import Target
from ..objective import NonFiniteError
from ..parameters import Parameters
from ..predict.sample import IndependentDraws
from .gaussian import Normal, Place
from .mixture import mass_beside
from .targets import Counted

#: k̂ from which on importance weights cannot be trusted at any practical number of draws (Vehtari et al.)
K_LIMIT = 0.7
#: least draws whose tail a Pareto distribution is fitted to
FEWEST = 25
#: degrees of freedom of draws with tails, and rounds of such draws
NU, ROUNDS = 5, 4
#: numbers up to which draws with tails are made
MOST = 200
#: effective draws for each number that count as much as the moments before
PER_NUMBER = 5
#: share of a correction's evaluations that looks for mass beside q
SEARCHING = 0.3
#: weights that are all below so many times their mean end at a bound: they have no tail
BOUND = 5.0

Function = Callable[[dict[str, Tensor]], Tensor]
LogJoint = Callable[[Tensor], Tensor]


class Unavailable(ValueError):
    """Something that does not exist for this posterior or these data; the message says why."""


def psis(log_weights: Tensor) -> tuple[Tensor, float]:
    """Return Pareto-smoothed importance weights, which sum to one, and k̂, the shape of their tail.

    The largest weights, min(S/5, 3√S) of them, are replaced by quantiles of a generalised Pareto distribution fitted to
    them (Vehtari et al., JMLR 25:72, 2024). Its shape k̂ says how many moments the weights have: fewer than 1/k̂. Below
    0.5 their variance is finite, below 0.7 estimates are good in practice, from 0.7 on they are not, and from 1 on not
    even the weights' mean exists. Weights that are equal to the rounding of log densities have no tail: k̂ is 0 then.

    Args:
        log_weights: log p − log q at independent draws of q, [S], up to a constant; −inf where p is zero.

    Example:
        >>> weights, k = psis(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
        >>> round(weights.sum().item(), 6), k < 0.7
        (1.0, True)
    """
    psislw = psislw_of_arviz()
    if log_weights.ndim != 1 or len(log_weights) < FEWEST:
        raise ValueError(f"psis expects log weights [S] of S ≥ {FEWEST} draws, got {tuple(log_weights.shape)}")
    values = log_weights.detach().double().cpu()
    highest = values.max().item()
    if not -torch.inf < highest < torch.inf:
        raise NonFiniteError(
            f"the log weights have a maximum of {highest}: look at where the log density is not finite"
        )
    possible = values[values > -torch.inf]
    if highest - possible.min().item() <= 1e-6 * (1 + possible.abs().max().item()):
        return torch.softmax(values, 0).to(log_weights.device), 0.0
    with warnings.catch_warnings():  # it takes 1/∞ for the zero that it is
        warnings.filterwarnings("ignore", "overflow encountered in exp", RuntimeWarning)
        smoothed, k = psislw((highest - values).numpy())  # it takes log likelihoods, of weights 1/p
    return torch.as_tensor(smoothed).exp().to(log_weights.device), float(k)


def psislw_of_arviz() -> Callable[..., Any]:
    """Return arviz-stats's function, or raise an error that says how to get it."""
    try:
        from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]
    except ImportError:
        raise ImportError('k̂ and smoothed weights need arviz-stats: pip install "structvi[diagnostics]"') from None
    return array_stats.psislw


@dataclass(frozen=True)
class Moments:
    """Means and standard deviations under the posterior, by weights, and under q, at the same draws."""

    mean: Tensor
    sd: Tensor
    #: Monte Carlo standard error of `mean`
    standard_error: Tensor
    q_mean: Tensor
    q_sd: Tensor

    @property
    def shift(self) -> Tensor:
        """The distance of the corrected mean from q's, in corrected standard deviations."""
        return (self.mean - self.q_mean) / self.sd

    @property
    def width(self) -> Tensor:
        """q's standard deviation over the corrected one."""
        return self.q_sd / self.sd


@dataclass(frozen=True)
class Importance:
    """Weighted draws of the posterior: those of q, with Pareto-smoothed weights p/q.

    Attributes:
        log_weights: log p(data, θ_s) − log q(θ_s) at the draws of q, [S], float64, unsmoothed.
        weights: smoothed, they sum to one: [S]; with R rounds of tails [(1 + R)S], of p over the even mixture of all.
        k: k̂ of `log_weights`; see `psis`.
        k_weights: k̂ of `weights`, with tails the larger of the last two rounds; without tails the same.
        space: the tensors.
        draws: the θ_s of q, made again when they are asked for.
        tails: as many more draws for each round, with tails, [R·S, P].
        beside: normals beside q that the tails are around too.
        evaluations: of the log density, with those of the search for mass beside q.
    """

    log_weights: Tensor
    weights: Tensor
    k: float
    k_weights: float
    space: Parameters
    draws: IndependentDraws
    tails: Tensor
    beside: int
    evaluations: int

    @property
    def trusted(self) -> bool:
        """True if k̂ allows to correct by these weights."""
        return self.k_weights < K_LIMIT

    @property
    def effective(self) -> float:
        """The effective number of draws, 1/Σ w²."""
        return 1 / self.weights.square().sum().item()

    @property
    def theta(self) -> Tensor:
        """All draws, in the order of `weights`: [S, P], or [(1 + R)S, P]."""
        return torch.cat([*(draws.theta for draws in self.draws), self.tails])

    @property
    def log_evidence(self) -> float:
        """log (1/S) Σ p/q: an estimate of log p(data), from below in expectation; of a log density its log integral."""
        return (self.log_weights.logsumexp(0) - log(len(self.log_weights))).item()

    def refuse(self, what: str) -> None:
        """Raise if k̂ says that the weights correct nothing."""
        if not self.trusted:
            raise Unavailable(
                f"no corrected {what}: k̂ of the importance weights is {self.k_weights:.2f}, and from {K_LIMIT} on they "
                "cannot be trusted, for q misses part of the posterior. Take a family nearer to it (FullNormal(), a "
                "Mixture), write the model in other parameters (theta = mu + tau * z of a hierarchy), use MCMC, or "
                'have q led to the posterior step by step, corrected="annealed"; corrected=False gives q itself'
            )

    def moments(self, function: Function | None = None) -> Moments:
        """Return Σ_s w_s f(θ_s) and the standard deviations, with what q says at the same draws.

        Args:
            function: of the named values at S draws, [S, *shape] each, to a tensor [S, ..]; the flat θ if None, whose
                moments `space.unravel` names.

        Example:
            >>> from structvi import LogDensity, MeanField, diagnostics
            >>> space = Parameters({"z": torch.zeros(2)})
            >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
            >>> q = MeanField(initial_scale=0.35).bind(space)
            >>> weighted = diagnostics.importance(q, target, draws=2000, seed=0)
            >>> weighted.moments(lambda p: p["z"].square().sum(-1)).mean.round()  # E z² = 1, twice
            tensor(2., dtype=torch.float64)
        """
        theta = self.theta
        values = theta if function is None else function(self.space.constrain(theta))
        if values.shape[:1] != theta.shape[:1]:
            raise ValueError(
                f"the function must return one row for each of {len(theta)} draws, got {tuple(values.shape)}"
            )
        values = values.double()
        own, mean = values[: len(self.log_weights)], torch.tensordot(self.weights, values, dims=1)
        square = (values - mean).square()
        variance, error = (torch.tensordot(w, square, dims=1) for w in (self.weights, self.weights.square()))
        return Moments(mean, variance.sqrt(), error.sqrt(), own.mean(0), own.std(0, correction=0))


@torch.no_grad()
def correct(
    density: Density, target: Target, evaluations: int, generator: torch.Generator, draws: int | None = None
) -> Importance:
    """Return importance weights towards a log density, at draws of q and, around normals, at draws with longer tails.

    A part of the evaluations looks for mass beside q, around which draws are made too.

    Args:
        density: q.
        target: the log density.
        evaluations: of the log density, at most.
        generator: of all draws.
        draws: of q, and of each round with tails; by default as many as the evaluations allow.
    """
    check_available(density)
    psislw_of_arviz()  # before the search, not after
    own, searched = normals_of(density), Counted(target, SEARCHING * evaluations, checked=True)
    seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
    beside = mass_beside(density, own, searched, seed)
    around = (beside or own) if density.P <= MOST or beside else []
    spent = searched.evaluations
    draws = draws or max(100, (evaluations - spent) // (1 + ROUNDS * bool(around)))
    counted = Counted(target, checked=True)
    made = weigh(density, target.space, counted.log_joint, draws, around=around, generator=generator)
    return replace(made, beside=max(0, len(around) - len(own)), evaluations=spent + counted.evaluations)


@torch.no_grad()
def weigh(
    density: Density,
    space: Parameters,
    log_joint: LogJoint,
    draws: int,
    *,
    around: Sequence[Place] = (),
    generator: torch.Generator | None = None,
) -> Importance:
    """Return importance weights of a log density at independent draws of q, and at more with tails around normals.

    Draws with tails come in four rounds: around the normals that you give, then around what the weights of all draws so
    far tell. All draws are weighed together, as draws of the even mixture of q and the rounds.

    Args:
        density: q.
        space: the tensors that θ holds.
        log_joint: log p(θ), up to a constant: [S, P] → [S].
        draws: S.
        around: normals that draws with tails are around; none without them.
        generator: of the draws.

    Example:
        >>> from structvi import MeanField
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> q = MeanField(initial_scale=1 / 3).bind(space)()  # scales of one
        >>> log_p = lambda theta: -0.5 * theta.square().sum(-1)
        >>> weigh(q, space, log_p, 1000, generator=torch.Generator().manual_seed(0)).k < 0.7
        True
    """
    check_available(density)
    generator = generator or torch.Generator(density.mean.device).manual_seed(int(torch.randint(2**62, ())))
    sample = IndependentDraws(density, draws, generator)
    log_p, log_q = _at(log_joint, density, (one.theta for one in sample))
    own = log_p - log_q
    if bool(own.isnan().any()):
        raise NonFiniteError(f"log p − log q is not a number at {int(own.isnan().sum())} of {draws} draws")
    weights, k = psis(own)
    tails = density.mean.new_empty(0, density.P)
    if not around:
        return Importance(own, weights, k, k, space, sample, tails, 0, draws)
    theta, parts, proposals, last = torch.cat([one.theta for one in sample]), list(around), [], k
    for _ in range(ROUNDS):
        new = tailed_draws(parts, draws, generator).to(theta.dtype)
        more_p, more_q = _at(log_joint, density, new.split(sample.sizes))
        log_p, log_q, theta = torch.cat([log_p, more_p]), torch.cat([log_q, more_q]), torch.cat([theta, new])
        proposals.append(parts)
        each = [each_log_prob(one, theta).logsumexp(0) for one in proposals]
        log_weights = log_p - torch.stack([log_q, *each]).logsumexp(0)
        before = last
        weights, last = psis(torch.where(log_weights.isnan(), -torch.inf, log_weights))
        parts = _moved(parts, theta.double(), weights)
    raw, k_weights = log_weights.softmax(0), max(before, last)  # by chance one of them is low now and then
    if raw.max().item() * len(raw) <= BOUND:
        weights, k_weights = raw, min(k_weights, 0.0)
    return Importance(own, weights, k, k_weights, space, sample, theta[draws:], 0, len(theta))


@torch.no_grad()
def normals_of(density: Density) -> list[Place]:
    """Return the normals that a density is a mixture of, with the logarithms of their weights; [] for all others."""
    made = []
    for weight, normal in weighted_normals(density):
        root, failed = torch.linalg.cholesky_ex(normal.covariance().detach().double())
        if failed.item():  # lost to rounding: any root makes a proposal
            root = normal.variance.double().clamp_min(1e-300).sqrt().diag()
        made.append(Place(Normal(normal.mean.detach().double(), root), log(max(weight, 1e-300))))
    return made


def tailed_draws(parts: Sequence[Place], n: int, generator: torch.Generator) -> Tensor:
    """Return draws of normals chosen by weight, with a multivariate Student-t's tails: [n, P].

    A Gaussian hardly draws from the longer tails of a posterior, and weights correct nothing without draws. In an
    even mixture of R such proposals and q no weight is more than R + 1 times its weight under q alone.
    """
    mean = torch.stack([part.normal.mean for part in parts])
    root = torch.stack([part.normal.root for part in parts])
    chosen = torch.multinomial(_shares(parts).to(generator.device), n, replacement=True, generator=generator)
    like = {"generator": generator, "dtype": torch.float64, "device": generator.device}
    radius = torch.randn(n, NU, **like).square().mean(-1, keepdim=True).rsqrt()
    t = (radius * torch.randn(n, mean.shape[1], **like)).to(mean.device)
    return mean[chosen] + torch.einsum("nij,nj->ni", root[chosen], t)


def each_log_prob(parts: Sequence[Place], theta: Tensor) -> Tensor:
    """Return log of weight and density of every part of `tailed_draws`: [n, P] → [C, n]."""
    P, made = theta.shape[1], []
    constant = lgamma((NU + P) / 2) - lgamma(NU / 2) - 0.5 * P * log(NU * pi)
    for part, share in zip(parts, _shares(parts).tolist(), strict=True):
        mean, root, _ = part.normal
        square = torch.linalg.solve_triangular(root, (theta.double() - mean).mT, upper=False).square().sum(0)
        log_det = root.diagonal().log().sum()
        made.append(log(share) + constant - log_det - 0.5 * (NU + P) * torch.log1p(square / NU))
    return torch.stack(made)


def _shares(parts: Sequence[Place]) -> Tensor:
    """Return the parts' shares of the mass, [C]."""
    return torch.tensor([part.log_mass for part in parts], dtype=torch.float64).softmax(0).clamp(min=1e-300)


def _moved(parts: list[Place], theta: Tensor, weights: Tensor) -> list[Place]:
    """Return parts with the moments of the draws that are theirs by weight, as far as those are effective.

    No part has less than a quarter of its weight before.
    """
    theirs, made = each_log_prob(parts, theta).softmax(0) * weights, []  # [C, n]
    for part, before, own in zip(parts, _shares(parts).tolist(), theirs, strict=True):
        (mean, root, _), share = part.normal, own.sum().clamp(min=1e-300)
        effective = share.square() / own.square().sum().clamp(min=1e-300)
        believed = effective / (effective + PER_NUMBER * len(mean))
        moved = mean + believed * (own / share @ (theta - mean))
        x = theta - moved
        covariance = (x * (own / share).unsqueeze(-1)).mT @ x
        new, failed = torch.linalg.cholesky_ex(believed * covariance + (1 - believed) * root @ root.mT)
        normal = part.normal if failed.item() else Normal(moved, new)
        made.append(Place(normal, log(max(share.item(), before / 4))))
    return made


def _at(log_joint: LogJoint, density: Density, chunks: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return log p(data, θ) and log q(θ) at draws, in float64: [S], [S]."""
    pairs = [(log_joint(theta).double(), density.log_prob(theta).double()) for theta in chunks]
    log_p, log_q = (torch.cat(column) for column in zip(*pairs, strict=True))
    return log_p, log_q


def check_available(density: Density) -> None:
    """Raise unless the density has a log density to weigh against."""
    if not density.bound:
        raise Unavailable("part of q is a point mass, which has no density to weigh against the posterior's")
    if not density.offers("log_prob"):
        raise Unavailable(f"{type(density).__name__} offers no log_prob")
