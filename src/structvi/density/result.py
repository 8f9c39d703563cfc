"""The result of `vi.fit_density`, and the verdict on a search."""

import os
import warnings
from dataclasses import dataclass, field, replace
from math import isinf
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..families.family import Family
from ..models.target import Target
from ..objective import Estimate, NonFiniteError
from ..parameters import Select
from ..predict.sample import IndependentDraws, data_tree
from ..result import Result, Status
from ..util.checks import check_integer, check_seed
from .correction import LEAST, MOST, TIMES, Correction, correct
from .fit_file import save_fit
from .gaussian import SINGULAR
from .importance import K_LIMIT, Unavailable
from .mixture import Mode
from .properness import Runaway
from .schedule import ENOUGH, Found, SearchStep
from .smc import Annealing
from .summary import Summary, doubtful, summarise
from .targets import Counted

if TYPE_CHECKING:
    from xarray import DataTree

#: of q; by importance weights; or led to the posterior step by step
Corrected = bool | Literal["annealed"]

#: iid draws of the ELBO that is reported
FRESH = 1024
#: a mean this far from zero, or an ELBO this high, is a fit that found no end
FAR = 1e12

#: the next step after each status
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


@dataclass(repr=False, kw_only=True)
class DensityFit(Result):
    """The result of `fit_density`. `print(result)` shows the verdict, `print(result.summary())` the parameters.

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
        refused: points at which the log density raised an error of its arithmetic, and counted as zero density.
        corrected_draws: what `correction` has made.
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
    refused: int = 0
    modes: list[Mode] = field(default_factory=list)
    corrected_draws: Correction | None = None

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

    def correction(self, evaluations: int | None = None) -> Correction:
        """Return the fit's one correction towards the posterior: importance-weighted draws, see `correct`.

        It is made at the first call and kept. It spends ten times the fit's evaluations, at least 1,000 and at most
        40,000, or as many as you allow: another number makes it anew.
        """
        check_integer("evaluations", evaluations, 500, optional=True)
        if self.status is Status.DIVERGED:
            raise Unavailable(f"no correction: {self.verdict}")
        allowed = evaluations or min(MOST, max(LEAST, TIMES * self.evaluations))
        if self.corrected_draws is None or (evaluations and self.corrected_draws.allowed != evaluations):
            generator = torch.Generator(self.target.space.device).manual_seed(0)
            self.corrected_draws = correct(self.family, self.target, allowed, generator)
        return self.corrected_draws

    def sample(
        self,
        n: int = 1000,
        *,
        corrected: Corrected = False,
        evaluations: int | None = None,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """Return n draws of the parameters' values by name, [n, *shape] each: of q or, corrected, of the posterior.

        Corrected ones are weighted draws of `correction`, resampled. If k̂ is 0.7 or more there are none, and the error
        says what to do. If fewer than n are effective some are the same.

        If q is too far from the posterior for weights, `corrected="annealed"` leads q to the posterior step by step, by
        Hamiltonian Monte Carlo (`density/smc.py`). It warns if it may have missed some mass.

        Args:
            n: how many.
            corrected: whether to correct q's draws towards the posterior; it needs arviz. "annealed" takes ten to
                three hundred thousand evaluations, and 30 for each draw beyond 2000 or more.
            evaluations: of the log density, that a correction may spend, see `correction`.
            generator: the source of all randomness; the global stream if None.

        Example:
            >>> from structvi import FullNormal, LogDensity, Parameters, fit_density
            >>> from structvi.constraints import positive
            >>> target = LogDensity(lambda p: 2 * p["s"].log() - p["s"], Parameters({"s": positive(1.0)}))  # Γ(3, 1)
            >>> result = fit_density(target, FullNormal(), progress=False)
            >>> draws = result.sample(20000, corrected=True, generator=torch.Generator().manual_seed(0))
            >>> (draws["s"].mean() - 3).abs() < 0.1
            tensor(True)
        """
        check_integer("n", n)
        space = self.target.space
        if corrected == "annealed":
            if self.status is Status.DIVERGED:
                raise Unavailable(f"no corrected draws: {self.verdict}")
            theta = self._annealed(n, generator)
            return space.constrain(theta[resampled(theta.new_full((len(theta),), 1 / len(theta)), n, generator)])
        if not isinstance(corrected, bool):
            raise ValueError(f'corrected must be True, False or "annealed", got {corrected!r}')
        if not corrected:
            return space.constrain(self._of_q(n, generator))
        weighted = self.correction(evaluations)
        weighted.refuse("draws")
        return space.constrain(weighted.theta[resampled(weighted.weights, n, generator)])

    def summary(
        self,
        *,
        corrected: bool | None = None,
        select: Select = "*",
        evaluations: int | None = None,
        draws: int = 4000,
        seed: int = 0,
    ) -> Summary:
        """Return a table of the parameters' values: mean, sd, quantiles, Monte Carlo error, and k̂ below it.

        Args:
            corrected: True for the posterior itself, by the weighted draws of `correction`; False for q, without an
                evaluation; None for the posterior if k̂ allows it and q if not: the line below the table says which.
            select: which parameters, by glob pattern, several, or a predicate.
            evaluations: of the log density, that a correction may spend.
            draws: of q, for a table of q.
            seed: of these.
        """
        check_seed(seed)
        check_integer("draws", draws, 100)
        space, k, why = self.target.space, None, ""
        if corrected is not False:
            try:
                weighted = self.correction(evaluations)
            except (Unavailable, ImportError, NonFiniteError) as reason:
                if corrected:
                    raise
                why = f" No k̂: {reason}."
            else:
                k, spent = weighted.k, f"{weighted.evaluations:,} evaluations"
                if corrected:
                    weighted.refuse("table")
                if weighted.trusted:
                    S, effective = len(weighted.theta), weighted.effective
                    note = f"Of the posterior: {S} weighted draws, {effective:.0f} effective, {spent}. k̂ = {k:.2f}."
                    table = summarise(weighted.theta, space, select, weighted.weights, k, note)
                    if names := doubtful(table):
                        what = f"{', '.join(names[:8])}{', ..' if len(names) > 8 else ''}"
                        table = replace(
                            table,
                            notes=(note, f"Mean, sd and quantiles may be off, too few draws are in the tails: {what}."),
                        )
                    return self._noted(table)
                why = f" k̂ = {k:.2f}, {K_LIMIT} or more: q misses part of the posterior, do not rely on this table."
        theta = self._of_q(draws, torch.Generator(space.device).manual_seed(seed))
        return self._noted(summarise(theta, space, select, None, k, f"Of q: {draws} draws.{why}"))

    def to_arviz(
        self,
        draws: int = 1000,
        *,
        corrected: Corrected = False,
        select: Select = "*",
        evaluations: int | None = None,
        seed: int = 0,
    ) -> "DataTree":
        """Return draws as an xarray `DataTree`, for arviz's summaries and plots: those of `sample`, as one chain."""
        check_seed(seed)
        space = self.target.space
        names, generator = space.matching(select), torch.Generator(space.device).manual_seed(seed)
        drawn = self.sample(draws, corrected=corrected, evaluations=evaluations, generator=generator)
        return data_tree({name: drawn[name] for name in names})

    def _noted(self, summary: Summary) -> Summary:
        return summary if self.converged else replace(summary, notes=(*summary.notes, f"The fit: {self.verdict}"))

    @torch.no_grad()
    def _of_q(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Return independent draws of θ: [n, P]."""
        own = IndependentDraws(self.family(), n, generator)
        return torch.cat([self.target.space.join(draws.theta, draws.fixed) for draws in own])

    def _annealed(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Return at least n draws of θ that q was led to the posterior by; warn of what speaks against them."""
        if generator is None:
            generator = torch.Generator(self.target.space.device).manual_seed(int(torch.randint(2**62, ())))
        annealed = Annealing(self.family(), Counted(self.target, checked=True).log_joint, generator).run(n)
        if doubts := annealed.doubts(self.target.space):
            warnings.warn(f"annealed draws: {doubts}", stacklevel=3)
        return annealed.theta

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fit to one safetensors file without code: the family, ELBO, verdict, counts, trace and modes.

        The log density is a function and is not in it: `vi.load(path, target)` is given it again. The file is
        written whole or not at all.

        Example:
            >>> import tempfile
            >>> from structvi import FullNormal, LogDensity, Parameters, fit_density, load
            >>> path = os.path.join(tempfile.mkdtemp(), "fit.safetensors")
            >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), Parameters({"z": torch.zeros(2)}))
            >>> fit_density(target, FullNormal(), progress=False).save(path)
            >>> print(load(path, target).status)
            converged
        """
        save_fit(self, path)


def resampled(weights: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """Return n indices, each as often as n times its weight says, by less than one more or less, in random order.

    Example:
        >>> resampled(torch.tensor([0.5, 0.0, 0.5]), 6, None).sort().values
        tensor([0, 0, 0, 2, 2, 2])
    """
    device = weights.device
    drawn_on = device if generator is None else generator.device
    offset = torch.rand((), generator=generator, device=drawn_on).to(device)
    points = (torch.arange(n, device=device) + offset) / n
    index = torch.searchsorted(weights.cumsum(0), points.to(weights.dtype)).clamp_max(len(weights) - 1)
    return index[torch.randperm(n, generator=generator, device=drawn_on).to(device)]


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
    is_normal: bool,
) -> tuple[Status, str]:
    """Return status and words: from the end of the last search, the ELBO on fresh draws, and the check."""
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
        if is_normal:
            words = (
                f"not converged: a normal does not fit this log density, {evaluations:,} evaluations found no "
                f"optimum on {draws} draws; ELBO {fresh}. Sample it, by "
                'result.sample(corrected="annealed") or MCMC, or write it in other parameters (theta = mu + tau * z of '
                "a hierarchy)"
            )
        return Status.NO_OPTIMUM, words
    if found.elbo - fresh.value > 3 * fresh.standard_error + ENOUGH * tolerance:
        return Status.OVER_FITTED, (
            f"the draws are over-fitted: ELBO {found.elbo:.2f} on the {draws} draws fitted, {fresh} on fresh "
            f"ones; raise draws="
        )
    return Status.CONVERGED, f"converged: ELBO {fresh}, {draws} draws"


@torch.no_grad()
def _is_on_an_edge(family: Family) -> bool:
    """Return whether the fit is narrower than any posterior: it has shrunk to a point inside the support."""
    sd, scale = family().variance.sqrt(), family.bound_space().scale
    return len(sd) == len(scale) and bool((sd < SINGULAR * scale).any())
