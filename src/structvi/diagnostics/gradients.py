"""How much of a stochastic gradient is signal: by group of variational parameters, and by coupling."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from math import inf, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..couplings import Coupling, naive, paired, unscented
from ..families.family import Family
from ..families.low_rank import factors
from ..models.bayesian_model import batch_size
from ..models.target import Target
from ..objective import Estimator, Kind, elbo
from ..predict.predictive import split
from ..util.checks import check_integer, check_seed
from ..util.random_streams import borrowed_stream
from .importance_weights import Problem

if TYPE_CHECKING:
    from ..posterior import Posterior

#: Below this ratio a step is mostly noise: a hundred of them are needed to see where the gradient points.
MOSTLY_NOISE = 0.1
#: A coupling is recommended where it has at most this part of the noise variance.
WORTH_CHANGING = 0.5


class Ratio(NamedTuple):
    """The gradient of some parameters: |E g| and (E|g − E g|²)^½ at a given number of evaluations."""

    signal: float
    noise: float

    @property
    def snr(self) -> float:
        """inf without noise."""
        return self.signal / self.noise if self.noise else inf


@dataclass(frozen=True)
class GradientNoise:
    """Signal and noise of the ELBO's gradient, one step's worth of it. `print` gives the table and the advice.

    Attributes:
        groups: coupling → group of parameters ("mean", "log_scale", "factor", ..) → `Ratio`.
        draws: coupling → how many draws a step took, as nearly equal as whole groups allow.
        repeats: from how many gradients this is.
        full: whether every gradient saw all data, so that the noise is the draws' alone.
    """

    groups: dict[str, dict[str, Ratio]]
    draws: dict[str, int]
    repeats: int
    full: bool

    @property
    def reference(self) -> str:
        """The coupling that others are held against: "paired", the default of a fit, where it was measured."""
        return "paired" if "paired" in self.groups else next(iter(self.groups))

    def relative_noise(self, coupling: str) -> dict[str, float]:
        """Group → the coupling's noise variance over that of the reference, at equally many draws."""
        more = self.draws[coupling] / self.draws[self.reference]
        own, other = self.groups[coupling], self.groups[self.reference]
        return {group: more * (own[group].noise / other[group].noise) ** 2 for group in own if other[group].noise}

    @property
    def noisy(self) -> dict[str, Ratio]:
        """The groups of parameters whose gradient is mostly noise, with the reference coupling."""
        return {name: r for name, r in self.groups[self.reference].items() if r.noise and r.snr < MOSTLY_NOISE}

    @property
    def better(self) -> dict[str, dict[str, float]]:
        """Couplings with much less noise than the reference → by how much, for each group."""
        found = {}
        for coupling in self.groups:
            relative = self.relative_noise(coupling)
            if any(relative[group] <= WORTH_CHANGING for group in relative if "." not in group):  # of the family
                found[coupling] = relative
        return found

    @property
    def advice(self) -> list[str]:
        """What follows, in words."""
        lines = []
        if self.noisy:
            which = ", ".join(f"{name} ({ratio.snr:.2g})" for name, ratio in self.noisy.items())
            more = "more draws (groups=4 doubles the ratio)"
            more += "" if self.full else " or larger batches (accumulate=4)"
            lines.append(
                f"mostly noise: the gradient of {which}; as it should be at an optimum, and where the ELBO still "
                f"rises, take {more}"
            )
        for coupling, relative in self.better.items():
            parts = ", ".join(f"{value:.2g} for {group}" for group, value in relative.items())
            lines.append(f"coupling={coupling} at as many draws has of the present noise variance {parts}")
        return lines or ["no group is mostly noise, and no coupling is much better than the present one"]

    def __str__(self) -> str:
        data = "all data" if self.full else "minibatches"
        lines = [f"signal-to-noise ratio of one gradient, {data}, from {self.repeats} gradients"]
        names = list(next(iter(self.groups.values())))
        widths = [max(12, len(name) + 2) for name in names]
        lines.append(f"{'coupling':<12}{'draws':>6}" + "".join(f"{n:>{w}}" for n, w in zip(names, widths, strict=True)))
        for coupling, own in self.groups.items():
            ratios = "".join(f"{own[name].snr:>{width}.3g}" for name, width in zip(names, widths, strict=True))
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
    full: bool = False,
    seed: int = 0,
) -> GradientNoise:
    """|E g| over (E|g − E g|²)^½ of the ELBO's gradient g, for each group of variational parameters and coupling.

    |E g|² is estimated without bias, |ḡ|² less its noise, and is 0 where that is negative. Ratios grow with the root
    of the number of draws.

    Args:
        q: a posterior, or a bound family.
        data: the posterior's loader, or the family's target.
        couplings: by name; naive, paired and, of families with a factor, unscented by at most four directions.
        evaluations: how many draws a gradient takes, rounded to whole groups of the coupling, at least one.
        repeats: how many gradients.
        estimator: the kind, as in `Estimator`.
        full: every gradient sees all data, the same draws for each batch; otherwise one minibatch after the other, and
            the noise is that of draws and data.
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
    chosen = _couplings(problem.family) if couplings is None else couplings
    everything = full or problem.batches is None
    sums: dict[str, _Sums] = {}
    draws: dict[str, int] = {}
    for name, coupling in chosen.items():
        with torch.no_grad():
            size = problem.family().draw(1, coupling, problem.generator(seed)).weight.shape[0]
        groups = max(1, evaluations // size)
        draws[name] = groups * size
        total = _Sums()
        for gradient in _gradients(problem, coupling, groups, repeats, estimator, everything, seed):
            total.add(gradient)
        sums[name] = total
    names = [group for group, _ in _parameters(problem)]
    ratios = {name: _ratios(names, total) for name, total in sums.items()}
    return GradientNoise(ratios, draws, repeats, everything)


def _parameters(problem: Problem) -> list[tuple[str, Tensor]]:
    """What a fit learns, with the group it counts to: the last part of its name, or beside the family the whole."""
    named = problem.family.named_parameters()
    found: list[tuple[str, Tensor]] = [(name.rpartition(".")[2], x) for name, x in named if x.requires_grad]
    if problem.posterior is not None:
        outside = problem.posterior.outside_family().items()
        found += [(name.removeprefix("model."), value) for name, value in outside if value.requires_grad]
    return found


def _couplings(family: Family) -> dict[str, Coupling]:
    """Those that are measured where none are given."""
    own: dict[str, Coupling] = {"naive": naive, "paired": paired}
    ranks = [factor.shape[-1] for factor in factors(family)]
    return own | ({"unscented": unscented(directions=min(4, *ranks))} if ranks and min(ranks) else {})


def _gradients(
    problem: Problem, coupling: Coupling, groups: int, repeats: int, estimator: Kind, full: bool, seed: int
) -> Iterator[list[Tensor]]:
    values = [value for _, value in _parameters(problem)]
    portions = _portions(problem, full)
    for repeat in range(repeats):
        total = [torch.zeros_like(value) for value in values]
        for batch, share in next(portions):
            with torch.enable_grad(), borrowed_stream(problem.generator(seed + repeat)), problem.mode():
                bound = elbo(
                    problem.family, problem.target, batch, Estimator(estimator, groups, coupling),
                    problem.generator(seed + repeat),  # the same draws for every batch
                )  # fmt: skip
                gradients = torch.autograd.grad(share * bound, values, allow_unused=True)
            for own, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    own += gradient
        yield total


def _portions(problem: Problem, full: bool) -> Iterator[list[tuple[Any, float]]]:
    """For each gradient the batches it sees and each one's share of the ELBO: all of them, or one after the other."""
    if problem.batches is None:
        while True:
            yield [(None, 1.0)]
    if full:
        batches = list(problem.batches.everything())
        assert problem.posterior is not None
        rows = [batch_size(split(problem.posterior, batch)[1]) for batch in batches]
        while True:
            yield [(batch, B / sum(rows)) for batch, B in zip(batches, rows, strict=True)]
    for epoch in count():
        for batch in problem.batches.epoch(epoch):
            yield [(batch, 1.0)]


class _Sums:
    """Mean and sum of squared deviations of a stream of gradients, in float64 (Welford)."""

    def __init__(self) -> None:
        self.count, self.mean, self.square = 0, [], []

    def add(self, gradients: list[Tensor]) -> None:
        self.count += 1
        if self.count == 1:
            self.mean = [torch.zeros_like(g, dtype=torch.float64) for g in gradients]
            self.square = [torch.zeros_like(g, dtype=torch.float64) for g in gradients]
        for mean, square, gradient in zip(self.mean, self.square, gradients, strict=True):
            deviation = gradient.double() - mean
            mean += deviation / self.count
            square += deviation * (gradient.double() - mean)


def _ratios(names: list[str], sums: _Sums) -> dict[str, Ratio]:
    """The gradient's signal and noise, by group."""
    signal, variance, R = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), sums.count
    for name, mean, square in zip(names, sums.mean, sums.square, strict=True):
        spread = square / (R - 1)
        signal[name] += (mean.square() - spread / R).sum().item()  # an unbiased estimate of (E g)²
        variance[name] += spread.sum().item()
    return {name: Ratio(sqrt(max(0.0, signal[name])), sqrt(variance[name])) for name in names}
