"""What `vi.fit` hands back, and how it judges what a search came to."""

from dataclasses import dataclass
from math import isinf
from typing import NamedTuple

from ..families.family import Family
from ..objective import Estimate
from ..result import Result, Status
from .improper import Runaway

#: iid draws of the ELBO that is reported
FRESH = 1024
#: a mean this far from zero, or an ELBO this high, is a fit that found no end
FAR = 1e12
#: share of searches that ended in other optima of which the verdict speaks
OTHER = 0.2
#: more draws must gain less than this many tolerances
ENOUGH = 10


class SearchStep(NamedTuple):
    """One evaluation of the objective that improved on all before it in the same search."""

    stage: str
    evaluations: int
    draws: int
    elbo: float


class Found(NamedTuple):
    """Where a search ended: ELBO on its draws, what it gained, and whether it is an optimum."""

    family: Family
    elbo: float
    gain: float
    converged: bool


@dataclass(repr=False, kw_only=True)
class DensityFit(Result):
    """What `fit` hands back. `print(result)` says what it came to.

    Attributes:
        status, verdict, converged, notes: as of every `Result`.
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
    """

    family: Family
    evaluations: int
    seconds: float
    draws: int
    starts: int
    trace: list[SearchStep]
    check_evaluations: int = 0
    verdict_evaluations: int = FRESH

    def __str__(self) -> str:
        lines = [
            self.verdict,
            f"ELBO: {self.elbo} ({FRESH} fresh draws)",
            f"evaluations of the log density: {self.evaluations}, starts: {self.starts}, seconds: {self.seconds:.3g}, "
            f"evaluations of the check: {self.check_evaluations}",
        ]
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__  # a notebook shows what print does


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
    if exhausted:
        stopped = f"stopped at the limit of evaluations, {evaluations} of them and in the stage '{stage}'"
        if isinf(fresh.value):
            return Status.STOPPED, (
                f"{stopped}, before an ELBO could be estimated: the log density is not finite at some draws; raise "
                "max_evaluations=, or write the log density in parameters that take every real value"
            )
        return Status.STOPPED, f"{stopped}: ELBO {fresh}; raise max_evaluations="
    if isinf(fresh.value):
        return Status.DIVERGED, (
            "not sound: the log density is not finite at some draws of the fitted posterior, which reaches where "
            "there is none; write the log density in parameters that take every real value"
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
            "another seed= may find a better one, by hundredths of a nat"
        )
    return Status.CONVERGED, words
