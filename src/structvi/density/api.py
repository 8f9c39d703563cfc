"""`vi.fit_density`: a family fitted to a log density."""

import copy
import time
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any

import torch

from ..families.family import MAX_DENSE, Family
from ..families.mixture import mixture_of
from ..models.bayesian_model import BayesianModel
from ..models.target import LogDensity, Target
from ..objective import Estimate, Estimator, NonFiniteError, elbo_terms, not_finite
from ..util.checks import check_integer, check_positive, check_seed, is_positive
from .adam import fit_minibatches
from .fixed_draws import fresh_draws, least_draws
from .large import CHUNK, fit_large, large_root
from .mixture import fit_mixture
from .properness import runaway
from .result import FRESH, DensityFit, judge
from .schedule import MAX_DRAWS, Search
from .targets import Counted

#: searches from different points, unless you ask for another number
STARTS = 4
#: evaluations for each number, and at least, that a normal and the check after a fit may take unless you allow more:
#: twenty times those of a log density that a normal fits (median of posteriordb: 400 of ten numbers)
EACH, LEAST = 600, 20_000


def fit_density(
    target: Target,
    family: Family,
    loader: Iterable[Any] | None = None,
    *,
    draws: int | None = None,
    starts: int | None = None,
    seed: int = 0,
    max_evaluations: int | None = None,
    tolerance: float = 1e-3,
    steps: int | None = None,
    lr: float = 0.05,
    progress: bool = True,
) -> DensityFit:
    """Maximise the ELBO of a log density without a step size: Newton's method on fixed draws.

    From several points log p is climbed, one gradient a step. Around the best hill the gradients at draws of a normal
    tell the quadratic that log p is on average; the family goes to its best approximation of the normal that is best
    for it, and so on. Then new draws, more each time, until they move it by less than ten tolerances.
    L-BFGS on the fixed draws goes on where these steps are slow. Families without a `normal()` start where they are
    bound, and L-BFGS alone fits them.

    A family that is a diagonal plus low rank over more than 256 numbers is fitted without a P×P matrix, from products
    of the mean curvature with few directions (`large.py`).

    For a mixture the modes are looked for first, by climbs from many points, and each part starts at one
    (`mixture.py`); if a mode with mass has no part, the status is `MISSED_MODES`.

    Then every number is led far away from the fit (`properness.py`): if nothing stops it the log density cannot be
    normalised, the status is `DIVERGED`, and the verdict names the numbers that need a prior.

    With a `loader` the log density is seen in minibatches, `fn(parameters, batch)` an unbiased estimate of the whole:
    log prior + (N/B) Σ log likelihood, B the rows of the batch. Adam fits it, with a number of steps
    (`adam.py`).

    Give the parameters in float64. Constrained ones are given as `positive`, `interval`, `simplex`, `ordered` or
    `cholesky_correlation`; the log density is written of their values. A point at which the log density raises a
    `LinAlgError`, an `ArithmeticError` or a `ValueError` has no density; `refused` counts them.

    Args:
        target: `LogDensity`, or anything with `space`, whose values are the first start, and `log_joint` [S, P] → [S].
        family: a recipe, or a bound family, whose copy goes on from where it is.
        loader: a `DataLoader` or a list of batches, for log densities of two arguments; it needs `steps`.
        draws: a fixed number of them, at least 2(P + K); by default as many as are needed, up to 4096. With it there
            are P×P matrices whatever P is.
        starts: how many points to start from, the first at the space's values, others normal around it with its scales;
            the best by ELBO is gone on with. By default 4, and 1 for a bound family; not for mixtures, whose modes are
            looked for.
        seed: of starts and draws: the same seed gives the same fit.
        max_evaluations: of the log density, all in all; of the check after the fit, as many again. By default a normal
            is given up after 600 for each number, at least 20,000: such a log density is to be sampled or written in
            other parameters.
        tolerance: in nats of the ELBO.
        steps, lr: with a loader, how many steps, one batch each, and the highest learning rate, which falls to zero.
        progress: one line that moves, in a terminal or a notebook.

    Example:
        >>> from structvi import FullNormal, LogDensity, Parameters
        >>> space = Parameters({"z": torch.zeros(2, dtype=torch.float64)})
        >>> target = LogDensity(lambda p: -0.5 * (p["z"] - 3).square().sum(), space)
        >>> result = fit_density(target, FullNormal(), progress=False)
        >>> result.converged, [round(x, 3) for x in result.family().mean.tolist()]
        (True, [3.0, 3.0])
    """
    check_seed(seed)
    check_positive(lr, "lr")
    began = time.perf_counter()
    _check_types(target, family)
    if loader is not None or steps is not None:
        for name, value in (("draws", draws), ("starts", starts), ("max_evaluations", max_evaluations)):
            if value is not None:
                raise ValueError(f"{name}= is for fits of a whole log density; with a loader give steps= and lr=")
        if loader is None or steps is None:
            raise ValueError(
                "minibatches need a loader and a number of steps: fit_density(target, family, loader, steps=2000)"
            )
        fit = fit_minibatches(target, family, loader, steps=steps, lr=lr, seed=seed, progress=progress)
        return replace(fit, notes=_notes(target), seconds=time.perf_counter() - began)
    q = copy.deepcopy(family) if family.is_bound else _bound(family, target)
    form = None if q.parts() else q.normal()
    is_large = not draws and large_root(form) is not None
    _check_options(q, family, is_large, draws, starts, max_evaluations, tolerance)
    patience = max(LEAST, EACH * target.space.size)
    limit = max_evaluations - FRESH if max_evaluations else inf if form is None else patience
    run = Search(Counted(target, limit), seed, tolerance, progress)
    mixed, mixture, starts = None, mixture_of(family), 1 if family.is_bound else starts or STARTS
    if is_large:
        found = fit_large(run, q, starts, goes_on=family.is_bound)
    elif form is not None:
        found = run.gaussian(q, starts, draws, goes_on=family.is_bound)
    elif family.is_bound:
        found = run.levels(q, run.target, draws)
    elif mixture is not None:
        mixed = fit_mixture(run, mixture, starts, draws)
        found = mixed.found
    else:
        found = run.any(family, starts, draws)
    run.bar.close()
    counted = run.target
    fresh = _fresh(found.family, target, seed)
    checked = Counted(target, max_evaluations or patience, checked=True)
    improper = runaway(checked, found.family, found.converged, found.curvature)
    status, verdict = judge(
        found, fresh, improper, draws=run.draws, tolerance=tolerance,
        exhausted=bool(max_evaluations) and (counted.exhausted or counted.shortened),
        evaluations=counted.evaluations, stage=run.stage, is_normal=form is not None,
    )  # fmt: skip
    notes = _notes(target, counted)
    if mixed is not None:
        status, verdict = mixed.verdict(status, verdict)
        notes += mixed.notes
    return DensityFit(
        target=target, notes=notes, status=status, verdict=verdict, elbo=fresh, family=found.family,
        evaluations=counted.evaluations, seconds=time.perf_counter() - began, draws=run.draws, starts=starts,
        trace=run.trace, check_evaluations=checked.evaluations, refused=counted.refused,
        modes=[] if mixed is None else mixed.modes,
    )  # fmt: skip


def _notes(target: Target, counted: Counted | None = None) -> list[str]:
    """Return why draws were evaluated one by one, that values are random, and how many points have no density."""
    notes = []
    if isinstance(target, LogDensity) and "cannot run" in (target.evaluation.reason or ""):
        notes.append(
            f"slow, for draws were evaluated one by one: {target.evaluation.reason} A check of torch.distributions' "
            "arguments may be why: give them validate_args=False"
        )
    if counted and counted.random:
        one, other = counted.random
        notes.append(
            f"the log density is random, {one:.6g} and {other:.6g} at the same point: make its random numbers once, "
            "before the fit, or give the data in batches, by a loader"
        )
    if counted and counted.refused:
        notes.append(f"the log density raised an error at {counted.refused} points, which count as zero density")
    return notes


def _fresh(family: Family, target: Target, seed: int) -> Estimate:
    """Return the ELBO on draws that the fit has not met, a chunk at once."""
    coupling, generator = fresh_draws(seed + 1, target.space.device)
    checked, estimator = Counted(target, checked=True), Estimator("log_q", CHUNK, coupling)
    try:
        with torch.no_grad():
            chunks = [elbo_terms(family, checked, None, estimator, generator) for _ in range(FRESH // CHUNK)]
    except (NonFiniteError, torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
        return not_finite(FRESH)
    values = torch.cat([chunk.objective() for chunk in chunks])
    return Estimate.of(values) if bool(values.isfinite().all()) else not_finite(FRESH)


def _bound(family: Family, target: Target) -> Family:
    """Return the recipe bound, of a mixture with any number of parts."""
    mixture = mixture_of(family)
    if mixture is None or mixture.components != "auto":
        return family.bind(target.space, torch.Generator())
    parts = [part.bind(target.space, torch.Generator()) for part in mixture.parts()]
    return type(mixture).weighted(parts, target.space.initial.new_zeros(len(parts)))


def _check_options(
    q: Family,
    family: Family,
    is_large: bool,
    draws: int | None,
    starts: int | None,
    limit: int | None,
    tolerance: float,
) -> None:
    P, density = q.bound_space().size, q()
    check_integer("draws", draws, 2, optional=True)
    check_integer("starts", starts, 1, optional=True)
    check_integer("max_evaluations", limit, FRESH + min(MAX_DRAWS, 16 * least_draws(P)), optional=True)
    if not is_positive(tolerance):
        raise ValueError(f"tolerance must be a positive number of nats, got {tolerance!r}")
    if family.is_bound and starts not in (None, 1):
        raise ValueError(
            f"a bound family goes on from where it is, got starts={starts}; give a recipe, such as "
            f"{type(family).__name__}(..), to start from several points"
        )
    if P > MAX_DENSE and not is_large:
        raise ValueError(
            f"fixed draws need more than 2P of them, and P = {P} is beyond {MAX_DENSE}: take a diagonal plus low rank "
            "without draws=, or maximise `elbo` with an optimizer of torch and fresh draws"
        )
    if not density.has_density:
        raise ValueError(f"{type(density).__name__} has no density, and so no ELBO; give a family that has one")
    n = density.noise_size
    if draws is not None and (draws % 2 or draws < 2 * n):
        raise ValueError(
            f"draws must be even and at least 2(P + K) = {2 * n}, got {draws}: with fewer the ELBO on them has no "
            "maximum"
        )


def _check_types(target: Target, family: Family) -> None:
    if isinstance(target, BayesianModel):
        raise TypeError(
            "fit_density is for log densities; a network with data is fitted so: variationalize(net, ..).fit(loader)"
        )
    if not isinstance(target, Target):
        raise TypeError(
            f"the target must have `space` and `log_joint`, got {type(target).__name__}; "
            "write LogDensity(fn, parameters)"
        )
    if not isinstance(family, Family):
        came = f"the class {family.__name__}" if isinstance(family, type) else type(family).__name__
        raise TypeError(f"fit_density expects a family, got {came}; write FullNormal(), for example")
