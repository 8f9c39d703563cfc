"""Signal and noise of the ELBO's stochastic gradient, by group of variational parameters and by coupling."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, repeat
from math import inf, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..couplings import Coupling, naive, paired, unscented
from ..families.family import Family
from ..families.low_rank import factors
from ..models.target import Target
from ..objective import Estimator, Kind, elbo
from ..util.checks import check_integer, check_seed
from ..util.random_streams import borrowed_stream
from .importance_weights import Problem

if TYPE_CHECKING:
    from ..posterior import Posterior

#: signal over noise below which a hundred steps are needed to see where the gradient points
MOSTLY_NOISE = 0.1
#: a coupling is recommended if it has at most this share of the noise variance
WORTH_CHANGING = 0.5


class Ratio(NamedTuple):
    """The gradient of some parameters: |E g| and (E|g − E g|²)^½ at a given number of evaluations."""

    signal: float
    noise: float

    @property
    def snr(self) -> float:
        """Signal over noise; inf without noise."""
        return self.signal / self.noise if self.noise else inf


@dataclass(frozen=True)
class GradientNoise:
    """Signal and noise of the gradient in one step. `print` shows the table and the advice.

    Attributes:
        groups: coupling → group of parameters ("mean", "log_scale", "factor", ..) → `Ratio`.
        draws: coupling → draws in a step, as nearly equal as whole groups allow.
        repeats: the number of gradients.
    """

    groups: dict[str, dict[str, Ratio]]
    draws: dict[str, int]
    repeats: int

    @property
    def reference(self) -> str:
        """The coupling to compare with: "paired", the default of a fit, if it was measured."""
        return "paired" if "paired" in self.groups else next(iter(self.groups))

    @property
    def noisy(self) -> dict[str, Ratio]:
        """The groups of parameters whose gradient is mostly noise, with the reference coupling."""
        return {name: r for name, r in self.groups[self.reference].items() if r.noise and r.snr < MOSTLY_NOISE}

    @property
    def better(self) -> dict[str, dict[str, float]]:
        """Couplings with much less noise → the share of the reference's noise variance, for each group."""
        found, other = {}, self.groups[self.reference]
        for coupling, own in self.groups.items():
            more = self.draws[coupling] / self.draws[self.reference]
            share = {name: more * (own[name].noise / other[name].noise) ** 2 for name in own if other[name].noise}
            if any(value <= WORTH_CHANGING for name, value in share.items() if "." not in name):  # of the family
                found[coupling] = share
        return found

    @property
    def advice(self) -> list[str]:
        """Sentences on what to change."""
        lines = []
        if self.noisy:
            which = ", ".join(f"{name} ({ratio.snr:.2g})" for name, ratio in self.noisy.items())
            lines.append(
                f"mostly noise: the gradient of {which}. At an optimum that is right; if the ELBO still rises, take "
                "more draws (groups=4 doubles the ratio) or larger batches (accumulate=4)"
            )
        for coupling, share in self.better.items():
            parts = ", ".join(f"{value:.2g} for {name}" for name, value in share.items())
            lines.append(f"coupling={coupling} at as many draws has of the present noise variance {parts}")
        return lines or ["no group is mostly noise, and no coupling is much better than the present one"]

    def __str__(self) -> str:
        lines = [f"signal-to-noise ratio of one gradient, from {self.repeats} gradients"]
        widths = {name: max(12, len(name) + 2) for name in self.groups[self.reference]}
        lines.append(f"{'coupling':<12}{'draws':>6}" + "".join(f"{name:>{width}}" for name, width in widths.items()))
        for coupling, own in self.groups.items():
            ratios = "".join(f"{own[name].snr:>{width}.3g}" for name, width in widths.items())
            lines.append(f"{coupling:<12}{self.draws[coupling]:>6}{ratios}")
        return "\n".join([*lines, *self.advice])


def gradient_noise(
    q: "Posterior | Family",
    data: Target | Iterable[Any],
    *,
    couplings: Mapping[str, Coupling] | None = None,
    evaluations: int = 16,
    repeats: int = 32,
    estimator: Kind = "path",
    seed: int = 0,
) -> GradientNoise:
    """Return |E g| and (E|g − E g|²)^½ of the ELBO's gradient g, for each group of parameters and each coupling.

    Each gradient is of one minibatch. |E g|² is estimated without bias, |ḡ|² less its noise, and is 0 where that is
    negative. Ratios grow with the root of the number of draws.

    Args:
        q: a posterior, or a bound family.
        data: the posterior's loader, or the family's target.
        couplings: by name; naive, paired and, of families with a factor, unscented by at most four directions.
        evaluations: draws in a gradient, rounded to whole groups of the coupling, at least one.
        repeats: the number of gradients.
        estimator: the kind, as in `Estimator`.
        seed: of the draws.

    Example:
        >>> from structvi import LogDensity, MeanField, Parameters
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> target = LogDensity(lambda p: -0.5 * (p["z"] - 3).square().sum(), space)
        >>> noise = gradient_noise(MeanField().bind(space), target)
        >>> noise.groups["paired"]["mean"].snr > 100  # a pair's noise cancels
        True
    """
    check_seed(seed)
    problem = Problem.of(q, data)
    check_integer("evaluations", evaluations)
    check_integer("repeats", repeats, least=2)
    ratios, draws = {}, {}
    for name, coupling in (_couplings(problem.family) if couplings is None else couplings).items():
        with torch.no_grad():
            size = problem.family().draw(1, coupling, problem.generator(seed)).weight.shape[0]
        groups = max(1, evaluations // size)
        draws[name] = groups * size
        ratios[name] = _ratios(problem, Estimator(estimator, groups, coupling), repeats, seed)
    return GradientNoise(ratios, draws, repeats)


def _couplings(family: Family) -> dict[str, Coupling]:
    """Return the couplings that are measured by default."""
    own: dict[str, Coupling] = {"naive": naive, "paired": paired}
    ranks = [factor.shape[-1] for factor in factors(family)]
    return own | ({"unscented": unscented(directions=min(4, *ranks))} if ranks and min(ranks) else {})


def _ratios(problem: Problem, estimator: Estimator, repeats: int, seed: int) -> dict[str, Ratio]:
    """Return the gradient's signal and noise, by group."""
    named = _parameters(problem)
    values = [value for _, value in named]
    mean = [torch.zeros_like(value, dtype=torch.float64) for value in values]
    square = [torch.zeros_like(value, dtype=torch.float64) for value in values]
    for index, batch in zip(range(repeats), _batches(problem), strict=False):
        draws = problem.generator(seed + index)
        with torch.enable_grad(), borrowed_stream(problem.generator(seed + index)), problem.mode():
            bound = elbo(problem.family, problem.target, batch, estimator, draws)
            gradients = torch.autograd.grad(bound, values, allow_unused=True, materialize_grads=True)
        for own, spread, gradient in zip(mean, square, gradients, strict=True):  # Welford's sums
            deviation = gradient.double() - own
            own += deviation / (index + 1)
            spread += deviation * (gradient.double() - own)
    signal, variance = ({name: 0.0 for name, _ in named} for _ in range(2))
    for (name, _), own, spread in zip(named, mean, square, strict=True):
        spread /= repeats - 1
        signal[name] += (own.square() - spread / repeats).sum().item()  # an unbiased estimate of (E g)²
        variance[name] += spread.sum().item()
    return {name: Ratio(sqrt(max(0.0, signal[name])), sqrt(variance[name])) for name in signal}


def _parameters(problem: Problem) -> list[tuple[str, Tensor]]:
    """Return what a fit learns, with its group: in the family the last part of the name, elsewhere the whole name."""
    named = problem.family.named_parameters()
    found: list[tuple[str, Tensor]] = [(name.rpartition(".")[2], x) for name, x in named if x.requires_grad]
    if problem.posterior is not None:
        outside = problem.posterior.outside_family().items()
        found += [(name.removeprefix("model."), value) for name, value in outside if value.requires_grad]
    return found


def _batches(problem: Problem) -> Iterator[Any]:
    """Give minibatches without end; None for a log density."""
    if problem.batches is None:
        return repeat(None)
    return (batch for epoch in count() for batch in problem.batches.epoch(epoch))
