"""How much of a diagnosis a budget of passes over the data allows."""

from math import inf
from typing import NamedTuple

from ..result import Result
from ..train.result import FitResult
from ..util.budget import STEP, batches_within, default_passes
from ..util.checks import check_positive
from .explained import DRAWS as EXPLAINED_DRAWS
from .gradients import couplings_of
from .problem import Problem

#: What is taken where nothing limits it: groups of two draws for the ELBO, draws for the weights, gradients.
GROUPS, NETWORK_DRAWS, DRAWS, REPEATS = 64, 1000, 10_000, 16
#: Draws of each of these gradients.
EVALUATIONS = 16
#: With fewer the ELBO has no standard error to speak of, the tail of the weights no shape, the gradients no noise.
FEWEST_GROUPS, FEWEST_DRAWS, FEWEST_REPEATS = 4, 100, 4


class Allowance(NamedTuple):
    """What a diagnosis may take.

    A quarter of the passes goes to the ELBO, an eighth to what predictions explain, three eighths to the importance
    weights and a quarter to the gradients' noise, each with as much as it can use. Weights and gradients that are too
    few to be of use are left out; the first two then read some of the batches.
    """

    passes: float
    #: where the number of passes is from, in words
    source: str
    groups: int
    #: batches that are read for the ELBO and for what is explained; None for all
    batches: tuple[int | None, int | None]
    draws: int
    repeats: int
    #: whether the draws are the user's own choice
    given: bool

    @classmethod
    def of(cls, problem: Problem, result: Result | None, passes: float | None, draws: int | None) -> "Allowance":
        """Of a network by its budget; a log density is cheap, and has none."""
        if passes is not None:
            check_positive(passes, "passes")
        posterior, batches = problem.posterior, problem.batches
        if posterior is None or batches is None:
            return cls(inf, "", GROUPS, (None, None), DRAWS if draws is None else draws, REPEATS, draws is not None)
        source = "as asked"
        if passes is None:
            passes, source = inf, "no fit is known"
            if isinstance(result, FitResult) and result.passes:
                passes = default_passes(result.passes, posterior.model.num_data, posterior.space.size)
                source = f"a tenth of the {result.passes:.3g} of the fit"
        gradient = STEP * EVALUATIONS * len(couplings_of(problem.family)) / (batches.length or 1)
        groups = int(min(GROUPS, max(FEWEST_GROUPS, passes / 4 // 2)))
        own = int(min(NETWORK_DRAWS, 3 * passes // 8))
        weights = (own if own >= FEWEST_DRAWS else 0) if draws is None else draws
        repeats = int(min(REPEATS, passes / 4 // gradient))
        read: tuple[int | None, int | None] = (None, None)
        if passes < inf and batches.length is not None:
            elbo = batches_within(passes / 4, 2 * groups, batches.length)
            read = elbo, batches_within(passes / 8, EXPLAINED_DRAWS, batches.length)
        return cls(passes, source, groups, read, weights, repeats, draws is not None)

    def too_few(self, what: str, least: int) -> str:
        return (
            f"a budget of {self.passes:.3g} passes over the data ({self.source}) allows fewer than {least} {what}: "
            "give passes= for more"
        )

    def note(self) -> str:
        """What is done with less than it could use, in words; empty where nothing is."""
        cut = [f"{self.groups} of {GROUPS} groups here"] if self.groups < GROUPS else []
        if cut and self.batches[0] is not None:
            cut[0] += f", on {self.batches[0]} batches"
        if not self.given and FEWEST_DRAWS <= self.draws < NETWORK_DRAWS:
            cut.append(f"{self.draws} of {NETWORK_DRAWS} draws for k̂")
        if FEWEST_REPEATS <= self.repeats < REPEATS:
            cut.append(f"{self.repeats} of {REPEATS} gradients")
        if not cut:
            return ""
        return f"; {self.passes:.3g} passes over the data, {self.source}: {', '.join(cut)}; passes= for more"
