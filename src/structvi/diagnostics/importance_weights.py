"""Importance weights p/q at draws of q: how far q is from the posterior, and moments corrected for it."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import log
from typing import Any

import torch
from torch import Tensor

from ..families.density import Density, Draws
from ..families.family import Family
from ..families.gaussian import Gaussian
from ..models.target import Target
from ..objective import NonFiniteError
from ..parameters import Parameters
from ..posterior import PosteriorBase
from ..predicting.draws import IndependentDraws
from .problem import Problem, Unavailable
from .tails import Tails

#: From this k̂ on, importance weights cannot be trusted at any practical number of draws.
K_LIMIT = 0.7
#: Fewer draws have no tail to fit a Pareto distribution to.
FEWEST = 25
#: Rounds of draws with tails, and the most numbers that they are made for.
ROUNDS, MOST = 4, 200
#: Effective draws for each number from which a covariance is believed.
PER_NUMBER = 5

Function = Callable[[dict[str, Tensor]], Tensor]


def psis(log_weights: Tensor) -> tuple[Tensor, float]:
    """Pareto-smoothed importance sampling: weights that sum to one, and k̂, the shape of their tail.

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
    psislw = _psislw()
    if not isinstance(log_weights, Tensor) or log_weights.ndim != 1 or log_weights.shape[0] < FEWEST:
        came = tuple(log_weights.shape) if isinstance(log_weights, Tensor) else type(log_weights).__name__
        raise ValueError(f"psis expects log weights [S] of S ≥ {FEWEST} draws, got {came}")
    values = log_weights.detach().double().cpu()
    highest = values.max().item()
    if not -torch.inf < highest < torch.inf:
        raise NonFiniteError(
            f"the log weights have a maximum of {highest}: look at where the log density is not finite"
        )
    spread = highest - values.min().item()
    if spread <= 1e-6 * (1 + values.abs().max().item()):
        return torch.softmax(values, 0).to(log_weights.device), 0.0
    with warnings.catch_warnings():  # it takes 1/∞ for the zero that it is
        warnings.filterwarnings("ignore", "overflow encountered in exp", RuntimeWarning)
        smoothed, k = psislw((values - highest).numpy())
    return torch.as_tensor(smoothed).exp().to(log_weights.device), float(k)


def _psislw() -> Callable[..., Any]:
    try:
        from arviz import psislw
    except ImportError:
        raise ImportError('k̂ and smoothed weights need arviz: pip install "structvi[diagnostics]"') from None
    return psislw


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
        """How far the corrected mean is from q's, in corrected standard deviations."""
        return (self.mean - self.q_mean) / self.sd

    @property
    def width(self) -> Tensor:
        """q's standard deviation over the corrected one."""
        return self.q_sd / self.sd


@dataclass(frozen=True)
class Importance:
    """Weighted draws of the posterior: those of q, with Pareto-smoothed weights p/q.

    Attributes:
        log_weights: log p(data, θ_s) − log q(θ_s) at the draws of q, [S], float64, as they are.
        weights: smoothed, they sum to one: [S]; with R rounds of tails [(1 + R)S], of p over the even mixture of all.
        k: k̂ of `log_weights`; see `psis`.
        k_weights: k̂ of `weights`; without tails the same.
        space: the tensors.
        draws: the θ_s of q, made again when they are asked for.
        tails: rounds of as many more, with tails.
    """

    log_weights: Tensor
    weights: Tensor
    k: float
    k_weights: float
    space: Parameters
    draws: IndependentDraws
    tails: tuple[Tails, ...] = ()

    @property
    def effective(self) -> float:
        """The effective number of draws, 1/Σ w²."""
        return 1 / self.weights.square().sum().item()

    @property
    def efficiency(self) -> float:
        """Of q's own draws the part that is effective: (Σ w)²/(S Σ w²) of their weights p/q as they are."""
        return 1 / (self.log_weights.softmax(0).square().sum().item() * len(self.log_weights))

    @property
    def log_evidence(self) -> float:
        """log (1/S) Σ p/q: an estimate of log p(data), from below in expectation; of a log density its log integral."""
        return (self.log_weights.logsumexp(0) - log(len(self.log_weights))).item()

    def moments(self, function: Function | None = None) -> Moments:
        """Σ_s w_s f(θ_s) and the standard deviations, with what q says at the same draws.

        Args:
            function: of the named tensors at s draws, [s, *shape] each, to a tensor [s, ..]; the flat θ if None, whose
                moments `space.unravel` names.

        Example:
            >>> from structvi import LogDensity, MeanField
            >>> space = Parameters({"z": torch.zeros(2)})
            >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
            >>> weighted = importance(MeanField(initial_scale=0.35).bind(space), target, draws=2000, seed=0)
            >>> weighted.moments(lambda p: p["z"].square().sum(-1)).mean.round()  # E z² = 1, twice
            tensor(2., dtype=torch.float64)
        """

        def at(every: Iterable[Draws]) -> Iterator[Tensor]:
            for draws in every:
                values = draws.theta if function is None else function(self.space.unravel(draws.theta))
                S = len(draws.theta)
                if not isinstance(values, Tensor) or values.shape[:1] != (S,):
                    came = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                    raise ValueError(f"the function must return one row for each of {S} draws, got {came}")
                yield values.double()

        def weighted() -> Iterator[tuple[Tensor, Tensor]]:
            parts = [self.draws, *self.tails]
            weights = self.weights.split([size for part in parts for size in part.sizes])
            yield from zip(weights, (f for part in parts for f in at(part)), strict=True)

        S = len(self.log_weights)
        mean = sum(torch.tensordot(w, f, dims=1) for w, f in weighted())
        q_mean = sum(f.sum(0) / S for f in at(self.draws))
        variance = sum(torch.tensordot(w, (f - mean).square(), dims=1) for w, f in weighted())
        error = sum(torch.tensordot(w.square(), (f - mean).square(), dims=1) for w, f in weighted())
        q_variance = sum((f - q_mean).square().sum(0) / S for f in at(self.draws))
        parts = (torch.as_tensor(x) for x in (mean, variance, error, q_mean, q_variance))
        mean, variance, error, q_mean, q_variance = parts
        return Moments(mean, variance.sqrt(), error.sqrt(), q_mean, q_variance.sqrt())


def importance(
    q: PosteriorBase | Family,
    data: Target | Iterable[Any],
    draws: int = 1000,
    *,
    tails: bool | None = None,
    seed: int = 0,
) -> Importance:
    """Importance weights of the joint over the full data, at independent draws of q.

    For the corrected moments of a log density under a Gaussian as many draws again are taken with longer tails than
    q's, and three times more around the mean and with the covariance that the weights so far tell; all are weighted by
    p over the mixture of the five. `k` is that of q's own draws.

    Where they do not exist this raises `Unavailable` with the reason: point masses, families without `log_prob` or
    with masks, a network that is itself random, data that the loader does not give in full.

    Args:
        q: a posterior, or a bound family.
        data: the posterior's loader, or the family's target, such as `LogDensity`.
        draws: S. For a network every draw is a pass over the data.
        tails: whether to take 4S more draws, with tails; by default for log densities, under Gaussians of at most 200
            numbers.
        seed: of the draws.

    Example:
        >>> from structvi import LogDensity, MeanField
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
        >>> importance(MeanField(initial_scale=1 / 3).bind(space), target).k < 0.7  # scales of one: q is the target
        True
    """
    problem = Problem.of(q, data)
    _psislw()  # before the draws, not after
    _check_available(problem)
    density = problem.family()
    can = isinstance(density, Gaussian) and density.P <= MOST
    if tails and not can:
        raise ValueError(f"tails=True needs a Gaussian of at most {MOST} numbers, got {type(density).__name__}")
    generator = problem.generator(seed)
    sample = IndependentDraws(density, draws, generator)
    log_p, log_q = _at(problem, density, sample)
    log_weights = log_p - log_q
    if bool(log_weights.isnan().any()):
        raise NonFiniteError(f"log p − log q is not a number at {int(log_weights.isnan().sum())} of {draws} draws")
    weights, k = psis(log_weights)
    result = Importance(log_weights, weights, k, k, problem.space, sample)
    if not (can and problem.posterior is None if tails is None else tails):
        return result
    return _with_tails(problem, density, result, log_p, log_q, generator)


@torch.no_grad()
def _with_tails(
    problem: Problem, density: Density, plain: Importance, log_p: Tensor, log_q: Tensor, generator: torch.Generator
) -> Importance:
    """Rounds of draws with tails: first around q, then around what the weights of all draws so far tell."""
    result, theta = plain, torch.cat([chunk.theta for chunk in plain.draws])
    mean, covariance = density.mean, density.covariance()
    for _ in range(ROUNDS):
        more = Tails(mean, covariance, plain.draws.sizes, generator)
        farther, of_q = _at(problem, density, more)
        if bool((farther.isnan() | (farther == torch.inf)).any()):  # no density so far out: what there is must do
            break
        log_p, log_q = torch.cat([log_p, farther]), torch.cat([log_q, of_q])
        theta = torch.cat([theta, *(chunk.theta for chunk in more)])
        tails = (*result.tails, more)
        mixture = torch.stack([log_q, *(part.log_prob(theta) for part in tails)]).logsumexp(0)
        weights, k = psis(log_p - mixture)
        result = replace(result, weights=weights, k_weights=k, tails=tails)
        if result.effective < PER_NUMBER * density.P:
            break
        mean = (weights @ theta.double()).to(theta.dtype)
        x = (theta - mean).double()
        covariance = (x * weights.unsqueeze(-1)).mT @ x
    return result


@torch.no_grad()
def _at(problem: Problem, density: Density, draws: Iterable[Draws]) -> tuple[Tensor, Tensor]:
    """log p(data, θ) and log q(θ) at draws, in float64: [S], [S]."""
    with problem.mode():
        pairs = [(problem.log_joint(chunk.theta), density.log_prob(chunk.theta).double()) for chunk in draws]
    log_p, log_q = (torch.cat(column) for column in zip(*pairs, strict=True))
    return log_p, log_q


def _check_available(problem: Problem) -> None:
    density, posterior, batches = problem.family(), problem.posterior, problem.batches
    if not density.bound:
        raise Unavailable("part of q is a point mass, which has no density to weigh against the posterior's")
    if not density.offers("log_prob"):
        raise Unavailable(f"{type(density).__name__} offers no log_prob")
    with torch.no_grad():
        if density.draw(1, generator=problem.generator(0)).latent is not None:
            raise Unavailable("the family masks weights: the network sees other weights than log q is of")
    if posterior is None or batches is None:
        return
    if posterior.dropout == "on":
        raise Unavailable("the network's dropout is on: the log likelihood at a draw is itself random")
    if posterior.batch_norm == "reestimated":
        raise Unavailable('batch_norm="reestimated": the log likelihood depends on how the data are batched')
    if batches.length is None:
        raise Unavailable("the loader does not know its length: whether it gives the full data is not known")
