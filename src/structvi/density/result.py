"""What `vi.fit_density` hands back, and how it judges what a search came to."""

import os
from dataclasses import dataclass, field
from math import isinf
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..density.weighted_draws import Unavailable
from ..families.family import Family
from ..models.target import Target
from ..objective import Estimate
from ..parameters import Select
from ..predict.inference_data import inference_data
from ..result import Result, Status
from ..util.checks import check_seed
from .drawing import DRAWS, Corrected, sample
from .improper import Runaway
from .low_rank_matrix import LowRankMatrix
from .modes import Mode
from .saving import save_fit
from .summary import Summary, summarise
from .units import NARROW

if TYPE_CHECKING:
    from arviz import InferenceData

#: iid draws of the ELBO that is reported
FRESH = 1024
#: a mean this far from zero, or an ELBO this high, is a fit that found no end
FAR = 1e12
#: share of searches that ended in other optima of which the verdict speaks
OTHER = 0.1
#: more draws must gain less than this many tolerances
ENOUGH = 10

#: What to do after a fit that ended so.
NEXT = {
    Status.CONVERGED: "print(result.summary()): the values, and k̂, which says whether to trust them",
    Status.OVER_FITTED: "fit again with more draws=",
    Status.STOPPED: "vi.fit_density(target, result.family, max_evaluations=..) goes on from here",
    Status.NO_OPTIMUM: "vi.fit_density(target, result.family) goes on from here; other parameters may be easier to fit",
    Status.MISSED_MODES: "fit again with more components=",
    Status.DIVERGED: "give the parameter that the verdict names a prior or a constraint, and fit again",
    Status.IMPROVING: "fit again with more steps=; vi.fit_density(target, result.family, loader, steps=..) goes on",
    Status.UNCLEAR: "fit again with more steps=; vi.fit_density(target, result.family, loader, steps=..) goes on",
    Status.TOO_SHORT: "fit again with more steps=; vi.fit_density(target, result.family, loader, steps=..) goes on",
}


class SearchStep(NamedTuple):
    """One evaluation of the objective that improved on all before it in the same search."""

    stage: str
    evaluations: int
    draws: int
    elbo: float


class Found(NamedTuple):
    """Where a search ended: ELBO on its draws, what it gained, and whether it is an optimum.

    Of many numbers, the mean curvature of the log density there, as far as it was learned.
    """

    family: Family
    elbo: float
    gain: float
    converged: bool
    curvature: LowRankMatrix | None = None


@dataclass(repr=False, kw_only=True)
class DensityFit(Result):
    """What `fit` hands back. `print(result)` says what it came to, `print(result.summary())` what the parameters are.

    `family` is a distribution of θ, which holds free numbers where parameters are constrained; `sample`, `summary` and
    `to_arviz` give the values themselves.

    Attributes:
        status, verdict, converged, notes: as of every `Result`.
        target: what was fitted.
        elbo: on fresh independent draws, with its standard error.
        family: bound, at the optimum that was found.
        evaluations: points at which the log density was computed by the fit, nearly all with its gradient.
        verdict_evaluations: the fresh ones, without gradient, for `elbo` and the verdict; not among `evaluations`.
        seconds: all in all.
        draws: fixed draws of the last search.
        starts: points to start from; a limit of evaluations may have left some out.
        trace: the steps of all searches.
        check_evaluations: points at which the log density was computed after the fit, to see whether it can be
            normalised; not among `evaluations`.
        modes: of a mixture those that were seen, the heaviest first, and how many searches ended at each.
    """

    family: Family
    target: Target
    evaluations: int
    seconds: float
    draws: int
    starts: int
    trace: list[SearchStep]
    check_evaluations: int = 0
    verdict_evaluations: int = FRESH
    modes: list[Mode] = field(default_factory=list)

    @property
    def reached(self) -> list[int]:
        return [mode.reached for mode in self.modes]

    def headlines(self) -> list[str]:
        return [
            self.verdict,
            f"ELBO: {self.elbo} ({FRESH} fresh draws)",
            f"evaluations of the log density: {self.evaluations}, starts: {self.starts}, seconds: {self.seconds:.3g}, "
            f"evaluations of the check: {self.check_evaluations}",
        ]

    @property
    def next_step(self) -> str:
        return NEXT.get(self.status, "vi.fit_density(target, result.family, ..) goes on; look at the verdict first")

    def sample(
        self, n: int = 1000, *, corrected: Corrected = False, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """n draws of the parameters' values by name, [n, *shape] each: of q or, corrected, of the posterior itself.

        Corrected ones are draws of q, and of normals with longer tails around it, resampled with Pareto-smoothed
        importance weights. Where k̂ is 0.7 or more there are none, and the error says what to do. Where fewer
        than n are effective some are the same.

        Where weights cannot bridge what is between them, `corrected="annealed"` leads q to the posterior step by step,
        by Hamiltonian Monte Carlo (`density/annealing.py`), and warns where that may have missed some of it.

        Args:
            n: how many.
            corrected: whether to correct q's draws towards the posterior; it needs arviz, and evaluates the log
                density at 10 max(4000, n) points, and four times as many where few of them are effective. "annealed"
                takes ten to three hundred thousand, and 30 for each draw beyond 2000 or more.
            generator: the source of all randomness; the global stream if None.

        Example:
            >>> from structvi import FullNormal, LogDensity, Parameters, fit_density
            >>> from structvi.constraints import positive
            >>> target = LogDensity(lambda p: 2 * p["s"].log() - p["s"], Parameters({"s": positive(1.0)}))  # Γ(3, 1)
            >>> result = fit_density(target, FullNormal(), progress=False)
            >>> draws = result.sample(20000, corrected=True, generator=torch.Generator().manual_seed(0))
            >>> draws["s"].mean().round(decimals=1)
            tensor(3., dtype=torch.float64)
        """
        if corrected:
            self._refuse_diverged("draws")
        return sample(self.family, self.target, n, corrected, generator)

    def summary(
        self, *, corrected: bool | None = None, select: Select = "*", draws: int = DRAWS, seed: int = 0
    ) -> Summary:
        """A table of the parameters' values: mean, sd, quantiles, Monte Carlo error, and k̂ below it.

        Args:
            corrected: True for the posterior itself, by importance weights, as in `sample`; False for q; None for the
                posterior where k̂ allows it and q where not: the line below the table says which.
            select: which parameters, by glob pattern, several, or a predicate.
            draws: of q, in each of two runs; corrected ones are up to five times as many.
            seed: of the draws.
        """
        if corrected:
            self._refuse_diverged("table")
        if self.status is Status.DIVERGED:
            corrected = False
        summary = summarise(self.family, self.target, corrected=corrected, select=select, draws=draws, seed=seed)
        return summary if self.converged else summary.noting(f"The fit: {self.verdict}")

    def _refuse_diverged(self, what: str) -> None:
        if self.status is Status.DIVERGED:
            raise Unavailable(f"no corrected {what}: {self.verdict}")

    def to_arviz(
        self, draws: int = 1000, *, corrected: Corrected = False, select: Select = "*", seed: int = 0
    ) -> "InferenceData":
        """Draws as arviz `InferenceData`, for its summaries and plots: those of `sample`, as one chain."""
        check_seed(seed)
        space = self.target.space
        names, generator = space.matching(select), torch.Generator(space.device).manual_seed(seed)
        drawn = self.sample(draws, corrected=corrected, generator=generator)
        return inference_data({name: drawn[name] for name in names})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fit to one safetensors file without code: the family, ELBO, verdict, counts, trace and modes.

        The log density is a function and is not in it: `vi.load_fit(path, target)` is given it again. The file is
        written whole or not at all.

        Example:
            >>> import tempfile
            >>> from structvi import FullNormal, LogDensity, Parameters, fit_density, load_fit
            >>> path = os.path.join(tempfile.mkdtemp(), "fit.safetensors")
            >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), Parameters({"z": torch.zeros(2)}))
            >>> fit_density(target, FullNormal(), progress=False).save(path)
            >>> print(load_fit(path, target).status)
            converged
        """
        save_fit(self, path)


def judge(
    found: Found,
    fresh: Estimate,
    runaway: Runaway | None,
    *,
    draws: int,
    tolerance: float,
    exhausted: bool,
    evaluations: int,
    stage: str,
    elsewhere: float = 0.0,
) -> tuple[Status, str]:
    """Status and words, from where the last search ended, the ELBO on draws it has not seen, and the check."""
    if runaway is not None:
        return Status.DIVERGED, runaway.words()
    if max(found.family().mean.abs().max().item(), fresh.value) > FAR:
        words = "not sound: the ELBO grows without bound: is the log density one that can be normalised?"
        return Status.DIVERGED, words
    if not found.converged and _is_on_an_edge(found.family):
        return Status.DIVERGED, (
            "not sound: the fit has shrunk onto an edge, beside which the log density is −∞ or no number: give what "
            "cannot take every value as positive(..) or its like"
        )
    if exhausted:
        stopped = f"stopped at the limit of evaluations, {evaluations} of them and in the stage '{stage}'"
        if isinf(fresh.value):
            return Status.STOPPED, (
                f"{stopped}, before an ELBO could be estimated: the log density is not finite at some draws; raise "
                "max_evaluations=, or give what cannot take every value as positive(..) or its like"
            )
        return Status.STOPPED, f"{stopped}: ELBO {fresh}; raise max_evaluations="
    if isinf(fresh.value):
        return Status.DIVERGED, (
            "not sound: the log density is not finite at some draws of the fitted posterior, which reaches where "
            "there is none: a prior may be missing, or what cannot take every value is not given as positive(..) or "
            "its like"
        )
    if not found.converged:
        words = f"not converged: the search on {draws} draws ended without an optimum; ELBO {fresh}"
        return Status.NO_OPTIMUM, words
    if found.elbo - fresh.value > 3 * fresh.standard_error + ENOUGH * tolerance:
        return Status.OVER_FITTED, (
            f"the draws are over-fitted: ELBO {found.elbo:.2f} on the {draws} draws fitted, {fresh} on fresh "
            f"ones; raise draws="
        )
    words = f"converged: ELBO {fresh}, {draws} draws"
    if elsewhere > OTHER:
        words += (
            f"; the best of many optima: {100 * elsewhere:.0f} % of the searches near it ended in worse ones, and "
            "another seed= may find a better one, by up to 0.2 nats where that was tried"
        )
    return Status.CONVERGED, words


@torch.no_grad()
def _is_on_an_edge(family: Family) -> bool:
    """Whether it is narrower than any posterior: a normal that no draw of leaves the support is a point."""
    sd, scale = family().variance.sqrt(), family.bound_space().scale
    return len(sd) == len(scale) and bool((sd < NARROW * scale).any())
