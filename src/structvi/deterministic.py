"""Fit a family to a log density on fixed draws: the ELBO becomes a plain function, and L-BFGS maximises it.

starts ─ mean field ─▶ coordinates in which scales are 1 ─ gradients ─▶ a normal with the target's mean curvature
                                                                          │ costs no evaluation: the family's best
                                                                          ▼ approximation of that normal
                                  the family on S, 4S, 16S.. draws, until more draws no longer move it
"""

import copy
import sys
import time
from dataclasses import dataclass
from math import inf, isinf, nan
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from .couplings import naive
from .elbo import NonFiniteError, elbo_groups
from .estimate import Estimate, not_finite
from .families import Family, FullNormal, MeanField, StructuredPrecision
from .families.base import MAX_DENSE
from .families.low_rank import LowRankFamily
from .fixed_draws import FixedDraws, dimension, distance, fixed_elbo, least_draws
from .lbfgs import Curvature, flat, minimise
from .parameters import Parameters
from .targets import BayesianModel, Target
from .whitening import Counted, Limit, Movable, Moved, NormalTarget, principal, standard, standardising, to_theta

#: searches from different points, where none is asked for
STARTS = 4
#: factors from which a low-rank family's approximation of a normal is sought, which costs no evaluation
FACTORS = 8
#: draws are multiplied by this from one level to the next
GROWTH = 4
#: most draws that the fit takes by itself
MAX_DRAWS = 1 << 12
#: iid draws of the ELBO that is reported
FRESH = 1024
#: of the penalty on (log s − log s₀)² that keeps a low-rank family's scales finite
RIDGE = 1e-6
#: least curvature that is believed of the estimate from gradients, relative to mean field's; its inverse the greatest
FLOOR = 1e-4
#: tolerance of searches that only choose between starts
ROUGH = 0.1
#: a mean this far from zero, or an ELBO this high, is a fit that found no end
FAR = 1e12
#: more draws must gain less than this many tolerances
ENOUGH = 10


class Step(NamedTuple):
    """One evaluation of the objective that improved on all before it in the same search."""

    stage: str
    evaluations: int
    draws: int
    elbo: float


@dataclass(frozen=True, repr=False)
class DensityFit:
    """What `fit` hands back. `print(result)` says what it came to."""

    #: bound, at the optimum that was found
    family: Family
    #: on fresh independent draws, with its standard error
    elbo: Estimate
    #: what the fit came to, in words
    verdict: str
    #: whether the verdict is "converged"
    converged: bool
    #: points at which the log density was computed: those of the fit, each with its gradient, and the fresh ones
    evaluations: int
    seconds: float
    #: fixed draws of the last search
    draws: int
    #: points to start from; a limit of evaluations may have left some out
    starts: int
    trace: list[Step]

    def __str__(self) -> str:
        return (
            f"{self.verdict}\n"
            f"ELBO: {self.elbo} ({FRESH} fresh draws)\n"
            f"evaluations of the log density: {self.evaluations}, starts: {self.starts}, seconds: {self.seconds:.3g}"
        )

    __repr__ = __str__  # a notebook shows what print does


def fit(
    target: Target,
    family: Family,
    *,
    draws: int | None = None,
    starts: int | None = None,
    seed: int = 0,
    max_evaluations: int | None = None,
    tolerance: float = 1e-3,
    progress: bool = True,
) -> DensityFit:
    """Maximise the ELBO of a log density without a step size: L-BFGS on draws that stay the same.

    Mean field is fitted first, from several points, on few draws. Where it ends, the gradients at its draws tell
    the average curvature, and a Gaussian family starts at its best approximation of the normal that has it, in
    coordinates in which that normal (for the full family) or mean field (for others) is round. Then the draws are
    multiplied by four until that gains less than ten tolerances. Mixtures and families of your own start as they are
    bound.

    Give the parameters in float64. Constrained ones go through a transformation of yours inside the log density, with
    the logarithm of its Jacobian.

    Args:
        target: `LogDensity`, or anything with `space`, whose values are the first start, and `log_joint` [S, P] → [S].
        family: a recipe, or a bound family, whose copy goes on from where it is.
        draws: a fixed number of them, at least 2(P + K); by default as many as are needed, up to 4096.
        starts: how many points to start from, the first at the space's values, others normal around it with its scales;
            the best by ELBO is gone on with. By default 4, and 1 for a bound family.
        seed: of starts and draws: the same seed gives the same fit.
        max_evaluations: of the log density, all in all.
        tolerance: in nats of the ELBO.
        progress: a bar, in a terminal.

    Example:
        >>> from structvi import FullNormal, LogDensity
        >>> space = Parameters({"z": torch.zeros(2, dtype=torch.float64)})
        >>> target = LogDensity(lambda p: -0.5 * (p["z"] - 3).square().sum(), space)
        >>> result = fit(target, FullNormal(), progress=False)
        >>> result.converged, [round(x, 3) for x in result.family().mean.tolist()]
        (True, [3.0, 3.0])
    """
    _check(target, family, draws, starts, max_evaluations, tolerance)
    began = time.perf_counter()
    run = _Run(target, inf if max_evaluations is None else max_evaluations - FRESH, seed, tolerance, progress)
    starts = 1 if family.is_bound else starts or STARTS
    if family.is_bound:
        found = run.levels(copy.deepcopy(family), run.target, Curvature(), draws)
    elif isinstance(family, Movable):
        found = run.gaussian(family, starts, draws)
    else:
        found = run.any(family, starts, draws)
    run.bar.close()
    fresh = _fresh(found.family, target, seed)
    verdict = run.verdict(found, fresh)
    counts = run.target.evaluations + FRESH, time.perf_counter() - began, run.draws, starts
    return DensityFit(found.family, fresh, verdict, verdict.startswith("converged"), *counts, run.trace)


class _Found(NamedTuple):
    """Where a search ended: ELBO on its draws, what it gained, and whether it is an optimum."""

    family: Family
    elbo: float
    gain: float
    converged: bool


class _Run:
    """One call of `fit`: the target and its count, and the searches."""

    def __init__(self, target: Target, limit: float, seed: int, tolerance: float, progress: bool):
        self.target = Counted(target, limit)
        self.space = target.space
        self.seed, self.tolerance = seed, tolerance
        self.generator = torch.Generator().manual_seed(seed)
        self.trace: list[Step] = []
        self.stage, self.draws = "start", 0
        self.bar = tqdm(unit=" evaluations", disable=not (progress and sys.stderr.isatty()))

    def gaussian(self, recipe: Movable, starts: int, draws: int | None) -> _Found:
        """Mean field, the normal with the target's curvature, then the family, in the coordinates of these two."""
        around, least = self.mean_field(starts)
        mean, precision = self.curvature(around)
        place = around
        if isinstance(recipe, FullNormal):
            root = torch.linalg.cholesky(torch.linalg.inv(precision))
            place = Moved(self.target, around.theta(mean), around.root.unsqueeze(-1) * root)
            q, curvature = standard(recipe, place.space, self.generator), Curvature()
        else:
            q, curvature = self.approximate(recipe, place.space, mean, precision)
        found = self.levels(q, place, curvature, draws)
        if found.elbo < least - 1 and not self.target.exhausted:  # the curvature misled: begin again at mean field
            place = around
            found = self.levels(standard(recipe, place.space, self.generator), place, Curvature(), draws)
        to_theta(found.family, place)
        return found

    def mean_field(self, starts: int) -> tuple[Moved, float]:
        """Coordinates in which the best mean field from several points is standard normal, and its ELBO."""
        self.stage = "mean field"
        draws, tries = least_draws(self.space.size), []
        for index in range(starts):
            for shrink in (1.0, 0.01):
                recipe = MeanField(initial_scale=0.1 * shrink)
                tries.append(self.maximise(recipe.bind(self.start(index)), self.target, draws, ROUGH))
                if not isinf(tries[-1].elbo):
                    break
        best = max(tries, key=lambda one: one.elbo)
        if isinf(best.elbo):
            tried = f"{starts} starts;"
            if self.target.exhausted:
                tried = "the starts that max_evaluations= left room for; raise it, or"
            raise NonFiniteError(
                f"the log density is not finite around any of {tried} give the parameters values at which it is "
                "finite: Parameters({name: value, ..})"
            )
        place = standardising(self.target, best.family)
        again = self.maximise(standard(MeanField(), place.space, None), place, draws, self.tolerance)
        to_theta(again.family, place)
        return standardising(self.target, again.family), max(best.elbo, again.elbo)

    def curvature(self, place: Moved) -> tuple[Tensor, Tensor]:
        """Mean and precision of the normal whose log density has the expected gradient and Hessian of the target's.

        Under N(0, I), by Stein's identity E ∇² log p(ε) = E ∇log p(ε) εᵀ: exact on fixed draws for a quadratic.
        """
        P, like = self.space.size, place.shift
        nothing = torch.zeros_like(like), torch.eye(P, dtype=like.dtype, device=like.device)  # mean field itself
        draws = GROWTH * least_draws(P)
        noise = FixedDraws(draws, self.seed)(1, P, 0, dtype=like.dtype, device=like.device).diagonal
        z = noise.clone().requires_grad_()
        try:
            (gradient,) = torch.autograd.grad(place.log_joint(z).sum(), z)  # [S, P]
        except Limit:
            return nothing
        hessian = gradient.mT @ noise / draws
        if not bool(torch.isfinite(hessian).all()):  # a draw farther out than mean field's
            return nothing
        values, vectors = torch.linalg.eigh(-(hessian + hessian.mT) / 2)
        precision = (vectors * values.clamp(FLOOR, 1 / FLOOR)) @ vectors.mT
        return torch.linalg.solve(precision, gradient.mean(0)), precision

    def approximate(
        self, recipe: MeanField | LowRankFamily, space: Parameters, mean: Tensor, precision: Tensor
    ) -> tuple[Family, Curvature]:
        """The family's best approximation of N(mean, precision⁻¹), from several factors, and what was learned."""
        self.stage = "curvature"
        draws = least_draws(space.size + getattr(recipe, "rank", 0))
        normal = NormalTarget(space, mean, torch.linalg.cholesky(precision))
        tries = []
        for index in range(FACTORS if isinstance(recipe, LowRankFamily) and recipe.rank else 1):
            q, curvature = standard(recipe, space, self.generator), Curvature()
            with torch.no_grad():
                q.mean.copy_(mean)
                if index == 0 and isinstance(q, LowRankFamily):
                    q.factor.copy_(principal(precision, q.rank, isinstance(q, StructuredPrecision)))
                elif index:  # optima are many: other scales lead to other ones
                    q.log_scale.copy_(0.5 * (1 + index % 4) * self.noise())
            tries.append((self.maximise(q, normal, draws, self.tolerance, curvature, iterations=100), curvature))
        best, curvature = max(tries, key=lambda one: one[0].elbo)
        return self.maximise(best.family, normal, draws, 1e-2 * self.tolerance, curvature).family, curvature

    def any(self, recipe: Family, starts: int, draws: int | None) -> _Found:
        """A family of which nothing is known: the best of several starts."""
        self.stage = "starts"
        tries = []
        for index in range(starts):
            q, curvature = recipe.bind(self.start(index), self.generator), Curvature()
            draws_each = least_draws(dimension(q()))
            tries.append((self.maximise(q, self.target, draws_each, ROUGH, curvature), curvature))
        best, curvature = max(tries, key=lambda one: one[0].elbo)
        return self.levels(best.family, self.target, curvature, draws)

    def levels(self, family: Family, target: Target, curvature: Curvature, draws: int | None) -> _Found:
        """More and more draws, until that gains next to nothing."""
        self.stage = "family"
        if draws is not None:
            return self.maximise(family, target, draws, self.tolerance, curvature)
        S = least_draws(dimension(family()))
        while True:
            S *= GROWTH
            found = self.maximise(family, target, S, self.tolerance, curvature)
            if found.gain < ENOUGH * self.tolerance or S * GROWTH > MAX_DRAWS or self.target.exhausted:
                return found

    def start(self, index: int) -> Parameters:
        """The space, for all but the first start at other values."""
        space = self.space
        if index == 0:
            return space
        return space.at(space.initial + space.scale * self.noise())

    def noise(self) -> Tensor:
        """[P]"""
        return torch.randn(self.space.size, generator=self.generator, dtype=torch.float64).to(self.space.initial)

    def maximise(
        self,
        family: Family,
        target: Target,
        draws: int,
        tolerance: float,
        curvature: Curvature | None = None,
        iterations: int = 1000,
    ) -> _Found:
        """Leave the family at the best point found on so many fixed draws, also where the evaluations end."""
        coupling = FixedDraws(draws, self.seed)
        self.draws = draws
        parameters = [p for p in family.parameters() if p.requires_grad]
        start = flat(parameters).detach()
        first, best, best_x = nan, -inf, start

        def load(x: Tensor) -> None:
            with torch.no_grad():
                for parameter, part in zip(parameters, x.split([p.numel() for p in parameters]), strict=True):
                    parameter.copy_(part.view(parameter.shape))

        def function(x: Tensor) -> tuple[float, Tensor]:
            nonlocal first, best, best_x
            load(x)
            try:
                value = fixed_elbo(family, target, coupling)
                loss = RIDGE * distance(family) - value
                gradient = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            except (NonFiniteError, torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
                return inf, torch.zeros_like(x)
            first = value.item() if first != first else first
            if value.item() > best:
                best, best_x = value.item(), x
                self.record(best)
            return loss.item(), flat(gradient)

        converged = False
        try:
            *_, converged = minimise(function, start, tolerance=tolerance, curvature=curvature, iterations=iterations)
        except Limit:
            self.target.exhausted = True
        load(best_x)
        return _Found(family, best, best - first, converged)

    def record(self, value: float) -> None:
        self.trace.append(Step(self.stage, self.target.evaluations, self.draws, value))
        self.bar.n = self.target.evaluations
        self.bar.set_postfix_str(f"{self.stage}, {self.draws} draws: ELBO {value:.6g}")

    def verdict(self, found: _Found, fresh: Estimate) -> str:
        if max(found.family().mean.abs().max().item(), fresh.value) > FAR:
            return "not sound: the ELBO grows without bound: is the log density one that can be normalised?"
        if self.target.exhausted:
            count = self.target.evaluations
            stopped = f"stopped at the limit of evaluations, {count} of them and in the stage '{self.stage}'"
            if isinf(fresh.value):
                return (
                    f"{stopped}, before an ELBO could be estimated: the log density is not finite at some draws; raise "
                    "max_evaluations=, or write the log density in parameters that take every real value"
                )
            return f"{stopped}: ELBO {fresh}; raise max_evaluations="
        if isinf(fresh.value):
            return (
                "not sound: the log density is not finite at some draws of the fitted posterior, which reaches where "
                "there is none; write the log density in parameters that take every real value"
            )
        if not found.converged:
            return f"not converged: the search on {self.draws} draws ended without an optimum; ELBO {fresh}"
        if found.elbo - fresh.value > 3 * fresh.standard_error + ENOUGH * self.tolerance:
            return (
                f"the draws are over-fitted: ELBO {found.elbo:.2f} on the {self.draws} draws fitted, {fresh} on fresh "
                f"ones; raise draws="
            )
        return f"converged: ELBO {fresh}, {self.draws} draws"


def _fresh(family: Family, target: Target, seed: int) -> Estimate:
    """The ELBO on draws that the fit has not seen."""
    generator = torch.Generator().manual_seed(seed + 1)
    try:
        with torch.no_grad():
            values = elbo_groups(family, target, groups=FRESH, coupling=naive, estimator="log_q", generator=generator)
    except NonFiniteError:
        return not_finite(FRESH)
    return Estimate.of(values)


def _check(
    target: Target, family: Family, draws: int | None, starts: int | None, limit: int | None, tolerance: float
) -> None:
    if isinstance(target, BayesianModel):
        raise TypeError(
            "fit is for log densities; a network with data is fitted in batches: variationalize(net, ..).fit(loader)"
        )
    if not isinstance(target, Target):
        raise TypeError(
            f"the target must have `space` and `log_joint`, got {type(target).__name__}; "
            "write LogDensity(fn, parameters)"
        )
    if not isinstance(family, Family):
        raise TypeError(f"fit expects a family, got {type(family).__name__}; write FullNormal(), for example")
    few = FRESH + 16 * least_draws(target.space.size)
    for name, value, least in (("draws", draws, 2), ("starts", starts, 1), ("max_evaluations", limit, few)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ValueError(f"{name} must be None or an integer ≥ {least}, got {value!r}")
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool) or not 0 < tolerance < inf:
        raise ValueError(f"tolerance must be a positive number of nats, got {tolerance!r}")
    if family.is_bound and starts not in (None, 1):
        raise ValueError(
            f"a bound family goes on from where it is, got starts={starts}; give a recipe, such as "
            f"{type(family).__name__}(..), to start from several points"
        )
    P = target.space.size
    if P > MAX_DENSE:
        raise ValueError(
            f"fixed draws need more than 2P of them, and P = {P} is beyond {MAX_DENSE}: maximise `elbo` with an "
            "optimizer of torch and fresh draws"
        )
    density = (family if family.is_bound else family.bind(target.space, torch.Generator()))()
    if not density.has_density:
        raise ValueError(f"{type(density).__name__} has no density, and so no ELBO; give a family that has one")
    n = dimension(density)
    if draws is not None and (draws % 2 or draws < 2 * n):
        raise ValueError(
            f"draws must be even and at least 2(P + K) = {2 * n}, got {draws}: with fewer the ELBO on them has no "
            "maximum"
        )
