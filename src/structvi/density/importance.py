"""Importance weights p/q at draws of q and at draws with longer tails: k̂, corrected moments, evidence."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, lgamma, log, pi
from typing import Any

import torch
from torch import Tensor

from ..families.family import Density
from ..families.mixture import weighted_normals
from ..objective import NonFiniteError
from ..parameters import Parameters
from ..predict.sample import IndependentDraws
from .gaussian import Normal, Place

#: k̂ from which on importance weights cannot be trusted at any practical number of draws
K_LIMIT = 0.7
#: least draws whose tail a Pareto distribution is fitted to
FEWEST = 25
#: degrees of freedom of draws with tails
NU = 5
#: rounds of draws with tails
ROUNDS = 4
#: numbers up to which draws with tails are made
MOST = 200
#: effective draws for each number that count as much as the moments before
PER_NUMBER = 5
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
    if not isinstance(log_weights, Tensor) or log_weights.ndim != 1 or log_weights.shape[0] < FEWEST:
        came = tuple(log_weights.shape) if isinstance(log_weights, Tensor) else type(log_weights).__name__
        raise ValueError(f"psis expects log weights [S] of S ≥ {FEWEST} draws, got {came}")
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
        tails: rounds of as many more draws, with tails, [S, P] each.
        beside: normals beside q that the tails are around too.
    """

    log_weights: Tensor
    weights: Tensor
    k: float
    k_weights: float
    space: Parameters
    draws: IndependentDraws
    tails: tuple[Tensor, ...] = ()
    beside: int = 0

    @property
    def effective(self) -> float:
        """The effective number of draws, 1/Σ w²."""
        return 1 / self.weights.square().sum().item()

    @property
    def theta(self) -> Tensor:
        """All draws, in the order of `weights`: [S, P], or [(1 + R)S, P]."""
        return torch.cat([*(draws.theta for draws in self.draws), *self.tails])

    @property
    def efficiency(self) -> float:
        """The share of q's own draws that is effective: (Σ w)²/(S Σ w²) of their unsmoothed weights."""
        return 1 / (self.log_weights.softmax(0).square().sum().item() * len(self.log_weights))

    @property
    def log_evidence(self) -> float:
        """log (1/S) Σ p/q: an estimate of log p(data), from below in expectation; of a log density its log integral."""
        return (self.log_weights.logsumexp(0) - log(len(self.log_weights))).item()

    def moments(self, function: Function | None = None) -> Moments:
        """Return Σ_s w_s f(θ_s) and the standard deviations, with what q says at the same draws.

        Args:
            function: of the named values at s draws, [s, *shape] each, to a tensor [s, ..]; the flat θ if None, whose
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

        def at(every: Iterable[Tensor]) -> Iterator[Tensor]:
            for theta in every:
                values, S = theta if function is None else function(self.space.constrain(theta)), len(theta)
                if not isinstance(values, Tensor) or values.shape[:1] != (S,):
                    came = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                    raise ValueError(f"the function must return one row for each of {S} draws, got {came}")
                yield values.double()

        def weighted() -> Iterator[tuple[Tensor, Tensor]]:
            weights = self.weights.split([*self.draws.sizes, *(len(theta) for theta in self.tails)])
            yield from zip(weights, at([*own(), *self.tails]), strict=True)

        def own() -> Iterator[Tensor]:
            return (draws.theta for draws in self.draws)

        def total(parts: Iterable[Tensor]) -> Tensor:
            return torch.as_tensor(sum(parts))

        S = len(self.log_weights)
        mean = total(torch.tensordot(w, f, dims=1) for w, f in weighted())
        q_mean = total(f.sum(0) / S for f in at(own()))
        variance = total(torch.tensordot(w, (f - mean).square(), dims=1) for w, f in weighted())
        error = total(torch.tensordot(w.square(), (f - mean).square(), dims=1) for w, f in weighted())
        q_variance = total((f - q_mean).square().sum(0) / S for f in at(own()))
        return Moments(mean, variance.sqrt(), error.sqrt(), q_mean, q_variance.sqrt())


@torch.no_grad()
def weigh(
    density: Density,
    space: Parameters,
    log_joint: LogJoint,
    draws: int,
    *,
    tails: bool | None = None,
    around: Sequence[Place] = (),
    generator: torch.Generator | None = None,
) -> Importance:
    """Return importance weights of a log density at independent draws of q, and at 4S more with tails.

    Draws with tails come in four rounds: around q's normals or those that you give, then around what the weights of all
    draws so far tell. All draws are weighed together, as draws of the even mixture of q and the rounds.

    Args:
        density: q.
        space: the tensors that θ holds.
        log_joint: log p(θ), up to a constant: [S, P] → [S].
        draws: S.
        tails: whether to take more draws, with tails; by default under Gaussians and mixtures of them, of at most 200
            numbers.
        around: normals that draws with tails are around, in place of q's own: with what is beside q.
        generator: of the draws.

    Example:
        >>> from structvi import MeanField
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> q = MeanField(initial_scale=1 / 3).bind(space)()  # scales of one
        >>> log_p = lambda theta: -0.5 * theta.square().sum(-1)
        >>> weigh(q, space, log_p, 1000, generator=torch.Generator().manual_seed(0)).k < 0.7
        True
    """
    psislw_of_arviz()  # before the draws, not after
    check_available(density)
    own = normals_of(density) if density.P <= MOST else []
    if tails and not own:
        raise ValueError(
            f"tails=True needs a Gaussian, or a mixture of them, of at most {MOST} numbers, got "
            f"{type(density).__name__}"
        )
    if generator is None:
        generator = torch.Generator(density.mean.device).manual_seed(int(torch.randint(2**62, ())))
    sample = IndependentDraws(density, draws, generator)
    log_p, log_q = _at(log_joint, density, (draws.theta for draws in sample))
    log_weights = log_p - log_q
    if bool(log_weights.isnan().any()):
        raise NonFiniteError(f"log p − log q is not a number at {int(log_weights.isnan().sum())} of {draws} draws")
    weights, k = psis(log_weights)
    result = Importance(log_weights, weights, k, k, space, sample)
    if not own or tails is False:
        return result
    parts, theta, rounds, proposals, before = list(around or own), result.theta, [], [], k
    for _ in range(ROUNDS):
        new = tailed_draws(parts, draws, generator).to(theta.dtype)
        more_p, more_q = _at(log_joint, density, new.split(sample.sizes))
        log_p, log_q, theta = torch.cat([log_p, more_p]), torch.cat([log_q, more_q]), torch.cat([theta, new])
        rounds.append(new)
        proposals.append(parts)
        each = [each_log_prob(one, theta).logsumexp(0) for one in proposals]
        log_weights = log_p - torch.stack([log_q, *each]).logsumexp(0)
        before = k
        weights, k = psis(torch.where(log_weights.isnan(), -torch.inf, log_weights))
        parts = _moved(parts, theta.double(), weights)
    raw, k = log_weights.softmax(0), max(before, k)  # by chance one of them is low now and then
    if raw.max().item() * len(raw) <= BOUND:
        weights, k = raw, min(k, 0.0)
    return Importance(
        result.log_weights, weights, result.k, k, space, sample, tuple(rounds), max(0, len(around) - len(own))
    )


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


def _log_shares(parts: Sequence[Place]) -> Tensor:
    """Return the logarithms of the parts' shares of the mass, [C]."""
    return torch.tensor([part.log_mass for part in parts], dtype=torch.float64).log_softmax(0)


def tailed_draws(parts: Sequence[Place], n: int, generator: torch.Generator) -> Tensor:
    """Return draws of normals chosen by weight, with a multivariate Student-t's tails: [n, P].

    A Gaussian hardly draws from the longer tails of a posterior, and weights correct nothing without draws. In an
    even mixture of R such proposals and q no weight is more than R + 1 times its weight under q alone.
    """
    mean = torch.stack([part.normal.mean for part in parts])
    root = torch.stack([part.normal.root for part in parts])
    shares = _log_shares(parts).exp().to(generator.device)
    chosen = torch.multinomial(shares, n, replacement=True, generator=generator)
    like = {"generator": generator, "dtype": torch.float64, "device": generator.device}
    radius = torch.randn(n, NU, **like).square().mean(-1, keepdim=True).rsqrt()
    t = (radius * torch.randn(n, mean.shape[1], **like)).to(mean.device)
    return mean[chosen] + torch.einsum("nij,nj->ni", root[chosen], t)


def each_log_prob(parts: Sequence[Place], theta: Tensor) -> Tensor:
    """Return log of weight and density of every part of `tailed_draws`: [n, P] → [C, n]."""
    P, made = theta.shape[1], []
    constant = lgamma((NU + P) / 2) - lgamma(NU / 2) - 0.5 * P * log(NU * pi)
    for (mean, root, _), log_share in zip((part.normal for part in parts), _log_shares(parts).tolist(), strict=True):
        square = torch.linalg.solve_triangular(root, (theta.double() - mean).mT, upper=False).square().sum(0)
        made.append(log_share + constant - root.diagonal().log().sum() - 0.5 * (NU + P) * torch.log1p(square / NU))
    return torch.stack(made)


def _moved(parts: list[Place], theta: Tensor, weights: Tensor) -> list[Place]:
    """Return parts with the moments of the draws that are theirs by weight, as far as those are effective.

    No part has less than a quarter of its weight before.
    """
    theirs, made = each_log_prob(parts, theta).softmax(0) * weights, []  # [C, n]
    for part, log_share, own in zip(parts, _log_shares(parts).tolist(), theirs, strict=True):
        share, (before, root, _) = own.sum().item(), part.normal
        effective = share**2 / own.square().sum().clamp(min=1e-300).item()
        believed = effective / (effective + PER_NUMBER * len(before))
        mean = before + believed * (own @ (theta - before)) / max(share, 1e-300)
        x = theta - mean
        covariance = (x * (own / max(share, 1e-300)).unsqueeze(-1)).mT @ x
        new, failed = torch.linalg.cholesky_ex(believed * covariance + (1 - believed) * root @ root.mT)
        normal = part.normal if failed.item() else Normal(mean, new)
        made.append(Place(normal, log(max(share, exp(log_share) / 4))))
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
