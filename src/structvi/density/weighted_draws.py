"""Importance weights p/q at draws of q: how far q is from the posterior, and moments corrected for it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor

from ..families.density import Density, Draws, NormalPart
from ..objective import NonFiniteError
from ..parameters import Parameters
from ..predict.draws import IndependentDraws
from .pareto import psis, psislw_of_arviz
from .tails import MixedTails, Tails

#: Rounds of draws with tails, and the most numbers that they are made for.
ROUNDS, MOST = 4, 200
#: Effective draws for each number from which a covariance is believed.
PER_NUMBER = 5
#: Under draws with tails weights end at a bound where none is above so many times their mean and so many are effective.
BOUND, EFFECTIVE = 5.0, 0.8

Function = Callable[[dict[str, Tensor]], Tensor]
LogJoint = Callable[[Tensor], Tensor]


class Unavailable(ValueError):
    """What does not exist for this posterior or these data; the message says why."""


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
        beside: normals beside q that these are around too.
    """

    log_weights: Tensor
    weights: Tensor
    k: float
    k_weights: float
    space: Parameters
    draws: IndependentDraws
    tails: tuple[Tails | MixedTails, ...] = ()
    beside: int = 0

    @property
    def effective(self) -> float:
        """The effective number of draws, 1/Σ w²."""
        return 1 / self.weights.square().sum().item()

    @property
    def cut_short(self) -> bool:
        """Whether rounds of tails ended early, with too few effective draws for a covariance: more draws may help."""
        return 0 < len(self.tails) < ROUNDS

    @property
    def theta(self) -> Tensor:
        """All draws, in the order of `weights`: [S, P], or [(1 + R)S, P]."""
        return torch.cat([draws.theta for part in (self.draws, *self.tails) for draws in part])

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

        def at(every: Iterable[Draws]) -> Iterator[Tensor]:
            for draws in every:
                values = draws.theta if function is None else function(self.space.constrain(draws.theta))
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


def weigh(
    density: Density,
    space: Parameters,
    log_joint: LogJoint,
    draws: int,
    *,
    tails: bool | None = None,
    around: Sequence[NormalPart] = (),
    generator: torch.Generator | None = None,
) -> Importance:
    """Importance weights of a log density at independent draws of q, and at 4S more with tails.

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
    can = density.P <= MOST and bool(density.normals())
    if tails and not can:
        raise ValueError(
            f"tails=True needs a Gaussian, or a mixture of them, of at most {MOST} numbers, got "
            f"{type(density).__name__}"
        )
    if generator is None:
        generator = torch.Generator(density.mean.device).manual_seed(int(torch.randint(2**62, ())))
    sample = IndependentDraws(density, draws, generator)
    log_p, log_q = _at(log_joint, density, sample)
    log_weights = log_p - log_q
    if bool(log_weights.isnan().any()):
        raise NonFiniteError(f"log p − log q is not a number at {int(log_weights.isnan().sum())} of {draws} draws")
    weights, k = psis(log_weights)
    result = Importance(log_weights, weights, k, k, space, sample)
    if not (can if tails is None else tails):
        return result
    own = density.normals()
    result = replace(result, beside=max(0, len(around) - len(own)))
    return _with_tails(log_joint, density, around or own, result, log_p, log_q, generator)


@torch.no_grad()
def _with_tails(
    log_joint: LogJoint,
    density: Density,
    around: Sequence[NormalPart],
    plain: Importance,
    log_p: Tensor,
    log_q: Tensor,
    generator: torch.Generator,
) -> Importance:
    """Rounds of draws with tails: first around these normals, then around what the weights of all draws so far tell."""
    result, theta, sizes = plain, torch.cat([chunk.theta for chunk in plain.draws]), plain.draws.sizes
    parts = list(around)
    for _ in range(ROUNDS):
        more = Tails(*parts[0][1:], sizes, generator) if len(parts) == 1 else MixedTails(parts, sizes, generator)
        farther, of_q = _at(log_joint, density, more)
        if bool((farther.isnan() | (farther == torch.inf)).any()):  # no density so far out: what there is must do
            break
        log_p, log_q = torch.cat([log_p, farther]), torch.cat([log_q, of_q])
        theta = torch.cat([theta, *(chunk.theta for chunk in more)])
        tails = (*result.tails, more)
        mixture = torch.stack([log_q, *(part.log_prob(theta) for part in tails)]).logsumexp(0)
        weights, k = _smoothed(log_p - mixture)
        result = replace(result, weights=weights, k_weights=k, tails=tails)
        if result.effective < PER_NUMBER * density.P:
            break
        if isinstance(more, MixedTails):
            parts = more.moved(theta, weights, PER_NUMBER * density.P)
            continue
        mean = (weights @ theta.double()).to(theta.dtype)
        x = (theta - mean).double()
        parts = [NormalPart(0.0, mean, (x * weights.unsqueeze(-1)).mT @ x)]
    return result


def _smoothed(log_weights: Tensor) -> tuple[Tensor, float]:
    """Weights under draws with tails, and their k̂.

    Where weights end at a bound they have no tail, and k̂ is at most 0: fitted to the largest of them it says where many
    weights lie close together, not how the few beyond fall off (a normal and an inverse gamma: 0.7 to 1.4, with 90 % of
    the draws effective and no weight above 2.4 times the mean).
    """
    weights, k = psis(log_weights)
    raw = torch.softmax(log_weights, 0)
    if raw.max().item() * len(raw) <= BOUND and 1 / raw.square().sum().item() >= EFFECTIVE * len(raw):
        return raw, min(k, 0.0)
    return weights, k


@torch.no_grad()
def _at(log_joint: LogJoint, density: Density, draws: Iterable[Draws]) -> tuple[Tensor, Tensor]:
    """log p(data, θ) and log q(θ) at draws, in float64: [S], [S]."""
    pairs = [(log_joint(chunk.theta).double(), density.log_prob(chunk.theta).double()) for chunk in draws]
    log_p, log_q = (torch.cat(column) for column in zip(*pairs, strict=True))
    return log_p, log_q


def check_available(density: Density) -> None:
    if not density.bound:
        raise Unavailable("part of q is a point mass, which has no density to weigh against the posterior's")
    if not density.offers("log_prob"):
        raise Unavailable(f"{type(density).__name__} offers no log_prob")
    with torch.no_grad():
        if density.draw(1, generator=torch.Generator(density.mean.device).manual_seed(0)).latent is not None:
            raise Unavailable("the family masks weights: the network sees other weights than log q is of")
