"""The result of every fit, of a network or of a log density: a status, its words, and the ELBO."""

from dataclasses import dataclass, field
from enum import StrEnum

from .objective import Estimate


class Status(StrEnum):
    """The end of a fit; `verdict` says it in words.

    Attributes:
        CONVERGED: more steps would gain next to nothing.
        IMPROVING: the ELBO still rises by more than its noise.
        UNCLEAR: noise could hide a gain that matters.
        TOO_SHORT: too few steps to tell a trend.
        STOPPED: by the user, or at a limit of evaluations.
        NO_OPTIMUM: a search ended without an optimum.
        OVER_FITTED: fixed draws are fitted better than fresh ones.
        MISSED_MODES: a mixture has no part at modes of the log density that were seen and have mass.
        PLACED: around a trained network, in closed form, without a step.
        DIVERGED: the ELBO grows without bound, or is not finite.
    """

    CONVERGED = "converged"
    IMPROVING = "improving"
    UNCLEAR = "unclear"
    TOO_SHORT = "too short"
    STOPPED = "stopped"
    NO_OPTIMUM = "no optimum"
    OVER_FITTED = "over-fitted"
    MISSED_MODES = "missed modes"
    PLACED = "placed"
    DIVERGED = "diverged"


@dataclass(repr=False, kw_only=True)
class Result:
    """The common part of the results of `posterior.fit` and `vi.fit_density`; `print(result)` has four lines.

    Attributes:
        status: how the fit ended.
        verdict: the same in words.
        elbo: of the posterior that was kept, in nats at λ = 1, with its standard error.
        notes: what must be known to read the numbers.
    """

    status: Status
    verdict: str
    elbo: Estimate
    notes: list[str] = field(default_factory=list)

    @property
    def converged(self) -> bool:
        return self.status is Status.CONVERGED

    @property
    def next_step(self) -> str:
        """The next thing to do, in a line."""
        return ""

    def headlines(self) -> list[str]:
        """Return the lines of `print(result)` above the next step."""
        return [self.verdict, f"ELBO: {self.elbo}"]

    @property
    def details(self) -> str:
        """All lines: `print(result.details)`."""
        return "\n".join([*self.headlines(), *self.notes])

    def __str__(self) -> str:
        more = {0: "", 1: " (a note: print(result.details))"}
        said = more.get(len(self.notes), f" ({len(self.notes)} notes: print(result.details))")
        return "\n".join([*self.headlines(), f"next: {self.next_step}{said}"])

    def __repr__(self) -> str:  # a notebook shows what print does
        return str(self)
