"""Simulation-based calibration: is a method's posterior the posterior, on data simulated from the prior?"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..families.family import Density, Family
from ..predict.sample import IndependentDraws
from ..util.checks import check_seed, is_integer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..posterior import Posterior

Simulate = Callable[[torch.Generator], tuple[Any, Any]]
Fit = Callable[[Any], "Posterior | Family | Density | Tensor | Mapping[str, Tensor]"]

#: Sets of uniform ranks from which the bands are made.
SIMULATIONS = 4000


@dataclass(frozen=True)
class SBCResult:
    """Ranks of the true parameters among posterior draws; uniform on 0 … L where the method is right.

    Attributes:
        ranks: [R, P], how many of L draws are below the truth.
        draws: L.
        names: of the P numbers.
        p_values: of uniform ranks, [P]: twice the smaller of two: by the χ² statistic of a histogram, and by the
            largest deviation of the ranks' distribution function, in its standard deviations.
        level: a method is caught where the smallest p-value times P is below.
    """

    ranks: Tensor
    draws: int
    names: tuple[str, ...]
    p_values: Tensor
    level: float

    @property
    def passed(self) -> bool:
        return bool(self.p_values.min() * len(self.names) >= self.level)

    @property
    def verdict(self) -> str:
        """The result in words, with the parameters that are wrong."""
        R, P = self.ranks.shape
        if self.passed:
            return f"no miscalibration seen in {R} replications (smallest p-value {self.p_values.min():.2g} of {P})"
        caught = (self.p_values * P < self.level).nonzero().flatten().tolist()
        shown = [f"{self.names[i]} {self._shape(i)} (p = {self.p_values[i]:.1g})" for i in caught[:5]]
        more = f" and {len(caught) - 5} more" if len(caught) > 5 else ""
        return f"not calibrated: {'; '.join(shown)}{more}, in {R} replications"

    def _shape(self, index: int) -> str:
        """Return what mean and spread of the ranks show beyond three standard errors."""
        u = (self.ranks[:, index].double() + 0.5) / (self.draws + 1)
        tilt = (u.mean().item() - 0.5) / sqrt(1 / 12 / len(u))
        spread = ((u - 0.5).square().mean().item() - 1 / 12) / sqrt(1 / 180 / len(u))
        words = []
        if abs(tilt) > 3:
            words.append("too low" if tilt > 0 else "too high")
        if abs(spread) > 3:
            words.append("too narrow" if spread > 0 else "too wide")
        return "is " + " and ".join(words) if words else "has ranks that are not uniform"

    def plot(self, parameter: int | str = 0, ax: "Axes | None" = None) -> "Axes":
        """Draw the ranks' distribution function less the uniform one, and the band that holds all of it in 95 %."""
        from ..plots import BLUE, GREY, axes_of, finish

        index = self.names.index(parameter) if isinstance(parameter, str) else parameter
        ax = axes_of(ax)
        grid = _grid(self.draws)
        R = len(self.ranks)
        width = _largest(R, self.draws).quantile(0.95).item() * (grid * (1 - grid) / R).sqrt()
        difference = _distribution(self.ranks[:, index], self.draws) - grid
        ax.fill_between(grid, -width, width, color=GREY, alpha=0.25, linewidth=0, label="uniform, 95 %")
        ax.step(grid, difference, where="post", color=BLUE, label=self.names[index])
        ax.set_xlabel("fraction of draws below the truth")
        ax.set_ylabel("distribution function − uniform")
        return finish(ax, loc="best")

    def __str__(self) -> str:
        return self.verdict


def sbc(
    simulate: Simulate,
    fit: Fit,
    *,
    draws: int = 99,
    replications: int = 200,
    level: float = 0.01,
    seed: int = 0,
    together: bool = False,
) -> SBCResult:
    """Rank each θ ~ prior among the posterior's draws for data ~ p(data | θ), and test whether ranks are uniform.

    This is simulation-based calibration (Talts et al., arXiv:1804.06788). Ranks are uniform for the exact posterior
    alone, among methods that use the data.

    Args:
        simulate: called with a generator, gives (θ, data): θ a tensor, or a dict of named ones.
        fit: called with the data, gives a posterior, a bound family, a density, or draws: a tensor [L, *θ.shape] or a
            dict of such, at least `draws` of them and independent.
        draws: L. With 99 ranks fall evenly into 10 or 20 bins.
        replications: R, how many times.
        level: of a false alarm.
        seed: of data and draws.
        together: all data are simulated first, and `fit` is called once with the list of them and gives a list: by
            `vi.fit_many` the fits of small networks are then one computation.

    Example:
        >>> def simulate(generator):  # θ ~ N(0, 1), t | θ ~ N(θ, 1)
        ...     theta = torch.randn(1, generator=generator)
        ...     return theta, theta + torch.randn(1, generator=generator)
        >>> exact = torch.Generator().manual_seed(1)
        >>> sbc(simulate, lambda t: t / 2 + 0.5**0.5 * torch.randn(99, 1, generator=exact)).passed
        True
    """
    check_seed(seed)
    for name, value in (("draws", draws), ("replications", replications)):
        if not is_integer(value, 20):
            raise ValueError(f"{name} must be an integer ≥ 20 for ranks to say anything, got {value!r}")
    generator = torch.Generator().manual_seed(seed)
    names: tuple[str, ...] = ()
    ranks = []
    for theta, fitted in _replications(simulate, fit, replications, generator, together):
        truth, names = _flat(theta)
        drawn = _posterior_draws(fitted, theta, draws, generator)
        if drawn.shape != (draws, truth.shape[0]):
            raise ValueError(f"expected {draws} draws of {truth.shape[0]} numbers from fit, got {tuple(drawn.shape)}")
        # ties, of discrete draws, fall to either side by chance
        ties = (drawn == truth).sum(0)
        above = (torch.rand(truth.shape, generator=generator) * (ties + 1)).long()
        ranks.append((drawn < truth).sum(0) + above.minimum(ties))
    all_ranks = torch.stack(ranks)
    largest = _largest(replications, draws)
    p_values = [_p_value(all_ranks[:, i], draws, largest) for i in range(all_ranks.shape[1])]
    return SBCResult(all_ranks, draws, names, torch.tensor(p_values, dtype=torch.float64), level)


def _replications(
    simulate: Simulate, fit: Fit, count: int, generator: torch.Generator, together: bool
) -> Iterator[tuple[Any, Any]]:
    """Give θ and the posterior fitted to data from it."""
    if not together:
        for _ in range(count):
            theta, data = simulate(generator)
            yield theta, fit(data)
        return
    pairs = [simulate(generator) for _ in range(count)]
    fitted = fit([data for _, data in pairs])
    if not isinstance(fitted, Sequence) or len(fitted) != count:
        raise ValueError(
            f"with together=True fit must return a list with a posterior for each of the {count} data sets"
        )
    yield from zip([theta for theta, _ in pairs], fitted, strict=True)


def _flat(theta: Any) -> tuple[Tensor, tuple[str, ...]]:
    named = theta if isinstance(theta, Mapping) else {"theta": theta}
    if not all(isinstance(value, Tensor) for value in named.values()):
        raise TypeError("simulate must return (θ, data), θ a tensor or a dict of named tensors")
    labels = tuple(
        f"{name}[{index}]" if value.numel() > 1 else name
        for name, value in named.items()
        for index in range(value.numel())
    )
    return torch.cat([value.detach().double().cpu().reshape(-1) for value in named.values()]), labels


def _posterior_draws(fitted: Any, theta: Any, count: int, generator: torch.Generator) -> Tensor:
    """Return draws [L, P] in the order of θ."""
    if not isinstance(fitted, Family) and isinstance(family := getattr(fitted, "family", None), Family):
        fitted = family  # of a posterior
    density = fitted() if isinstance(fitted, Family) else fitted
    if isinstance(density, Density):
        space = density.named_space()
        flat = torch.cat([space.join(one.theta, one.fixed) for one in IndependentDraws(density, count, generator)])
        fitted = space.constrain(flat) if isinstance(theta, Mapping) else flat
    if isinstance(theta, Mapping):
        if not isinstance(fitted, Mapping) or not set(theta) <= set(fitted):
            raise ValueError(f"θ has the tensors {sorted(theta)}, and fit's draws do not")
        fitted = torch.cat([fitted[name][:count].reshape(min(count, len(fitted[name])), -1) for name in theta], dim=-1)
    if not isinstance(fitted, Tensor):
        raise TypeError(f"fit must return a posterior, a family, a density or draws, got {type(fitted).__name__}")
    return fitted[:count].detach().double().cpu().reshape(min(count, len(fitted)), -1)


def _grid(L: int) -> Tensor:
    """Return at most 100 points in (0, 1) that ranks can reach, to compare the distribution function there."""
    points = torch.arange(1, L + 1, dtype=torch.float64)
    step = -(-L // 100)
    return points[step - 1 :: step] / (L + 1)


def _distribution(ranks: Tensor, L: int) -> Tensor:
    """Return P(rank < (L + 1) u) on the grid: u for uniform ranks. [.., R] → [.., G]."""
    points = (_grid(L) * (L + 1)).round().long().expand(*ranks.shape[:-1], -1).contiguous()
    return torch.searchsorted(ranks.sort(-1).values, points).double() / ranks.shape[-1]


def _deviation(ranks: Tensor, L: int) -> Tensor:
    """Return the largest deviation of the distribution function, in its standard deviations: [.., R] → [..]."""
    grid = _grid(L)
    return ((_distribution(ranks, L) - grid).abs() / (grid * (1 - grid) / ranks.shape[-1]).sqrt()).amax(-1)


def _largest(R: int, L: int) -> Tensor:
    """Return `_deviation` for many sets of uniform ranks: its distribution if the method is right."""
    generator = torch.Generator().manual_seed(0)
    return _deviation(torch.randint(L + 1, (SIMULATIONS, R), generator=generator), L)


def _p_value(ranks: Tensor, L: int, largest: Tensor) -> float:
    R = len(ranks)
    deviation = (1 + (largest >= _deviation(ranks, L)).sum().item()) / (1 + len(largest))
    bins = min(20, max(2, R // 10), L + 1)
    index = ranks * bins // (L + 1)
    size = torch.bincount(torch.arange(L + 1) * bins // (L + 1), minlength=bins).double() * R / (L + 1)
    chi2 = ((torch.bincount(index, minlength=bins) - size).square() / size).sum()
    histogram = torch.special.gammaincc(torch.tensor((bins - 1) / 2, dtype=torch.float64), chi2 / 2).item()
    return min(1.0, 2 * min(deviation, histogram))
