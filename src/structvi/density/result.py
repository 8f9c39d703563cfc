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
from .fit_file import save_fit
from .gaussian import SINGULAR
from .importance import K_LIMIT, Importance, Unavailable, correct
from .mixture import Mode
from .properness import HIGH, Runaway
from .schedule import ENOUGH, Found, SearchStep
from .smc import Annealing
from .summary import Summary, doubtful
from .targets import Counted

if TYPE_CHECKING:
    from xarray import DataTree

#: of q; by importance weights; or led to the posterior step by step
Corrected = bool | Literal["annealed"]

#: iid draws of the ELBO that is reported
FRESH = 1024
#: evaluations that a correction may spend relative to the fit's, at least, and at most, unless you allow another number
TIMES, LEAST, MOST = 10, 1000, 40_000

GO_ON = "vi.fit_density(target, result.family, ..) goes on"
#: the next step after each status
NEXT = {
    Status.CONVERGED: "print(result.summary()): the values, and k̂, which says whether to trust them",
    Status.OVER_FITTED: "fit again with more draws=",
    Status.STOPPED: f"{GO_ON}, with more max_evaluations=",
    Status.NO_OPTIMUM: f"{GO_ON}; other parameters may be easier to fit",
    Status.MISSED_MODES: "fit again with more components=",
    Status.DIVERGED: "give the parameter that the verdict names a prior or a constraint, and fit again",
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
        modes: of a mixture those that were seen, the heaviest first.
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

    def __post_init__(self) -> None:
        #: what `correction` has made, and how many evaluations it was allowed
        self._corrected: tuple[int, Importance] | None = None

    def headlines(self) -> list[str]:
        return [
            self.verdict,
            f"ELBO: {self.elbo} ({FRESH} fresh draws)",
            f"evaluations of the log density: {self.evaluations}, starts: {self.starts}, seconds: {self.seconds:.3g}, "
            f"evaluations of the check: {self.check_evaluations}",
        ]

    @property
    def next_step(self) -> str:
        return NEXT.get(self.status, "fit again with more steps=")

    def correction(self, evaluations: int | None = None) -> Importance:
        """Return the fit's one correction towards the posterior: importance-weighted draws, see `correct`.

        It is made at the first call and kept. It spends ten times the fit's evaluations, at least 1,000 and at most
        40,000, or as many as you allow: another number makes it anew.
        """
        check_integer("evaluations", evaluations, LEAST // 2, optional=True)
        self._check_proper()
        if self._corrected is None or (evaluations and self._corrected[0] != evaluations):
            allowed = evaluations or min(MOST, max(LEAST, TIMES * self.evaluations))
            generator = torch.Generator(self.target.space.device).manual_seed(1)
            self._corrected = allowed, correct(self.family(), self.target, allowed, generator)
        return self._corrected[1]

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
        if corrected not in (False, True, "annealed"):
            raise ValueError(f'corrected must be True, False or "annealed", got {corrected!r}')
        constrain = self.target.space.constrain
        if not corrected:
            return constrain(self._of_q(n, generator))
        if corrected == "annealed":
            theta = self._annealed(n, generator)
            weights = theta.new_full((len(theta),), 1 / len(theta))
        else:
            weighted = self.correction(evaluations)
            weighted.refuse("draws")
            theta, weights = weighted.theta, weighted.weights
        return constrain(theta[resampled(weights, n, generator)])

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
        space, why, weighted = self.target.space, "", None
        names = space.matching(select)
        if corrected is not False:
            try:
                weighted = self.correction(evaluations)
                if corrected:
                    weighted.refuse("table")
            except (Unavailable, ImportError, NonFiniteError) as reason:
                if corrected:
                    raise
                why = f" No k̂: {reason}."
        if weighted is not None and weighted.trusted:
            theta, weights = weighted.theta, weighted.weights
            note = (
                f"Of the posterior: {len(theta)} weighted draws, {weighted.effective:.0f} effective, "
                f"{weighted.evaluations:,} evaluations. k̂ = {weighted.k_weights:.2f}."
            )
        else:
            theta, weights = self._of_q(draws, torch.Generator(space.device).manual_seed(seed)), None
            if weighted is not None:
                why = (
                    f" k̂ = {weighted.k_weights:.2f}, {K_LIMIT} or more: q misses part of the posterior, do not rely on "
                    "this table."
                )
            note = f"Of q: {draws} draws.{why}"
        values = space.constrain(theta)
        k = None if weighted is None else weighted.k_weights
        table = Summary({name: values[name] for name in names}, weights, k)
        notes = [note]
        if weights is not None and (off := doubtful(table)):
            few = f"{', '.join(off[:8])}{', ..' if len(off) > 8 else ''}"
            notes.append(f"Mean, sd and quantiles may be off, too few draws are in the tails: {few}.")
        if not self.converged:
            notes.append(f"The fit: {self.verdict}")
        return replace(table, notes=tuple(notes))

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

    def _check_proper(self) -> None:
        if self.status is Status.DIVERGED:
            raise Unavailable(f"no correction: {self.verdict}")

    @torch.no_grad()
    def _of_q(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Return independent draws of θ: [n, P]."""
        own = IndependentDraws(self.family(), n, generator)
        return torch.cat([self.target.space.join(draws.theta, draws.fixed) for draws in own])

    def _annealed(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Return at least n draws of θ that q was led to the posterior by; warn of what speaks against them."""
        self._check_proper()
        generator = generator or torch.Generator(self.target.space.device).manual_seed(int(torch.randint(2**62, ())))
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
    if max(found.family().mean.abs().max().item(), fresh.value) > HIGH:
        words = "not sound: the ELBO grows without bound: is the log density one that can be normalised?"
        return Status.DIVERGED, words
    constrain = "give what cannot take every value as positive(..) or its like"
    if not found.converged and _is_on_an_edge(found.family):
        words = "not sound: the fit has shrunk onto an edge, beside which the log density is −∞ or no number"
        return Status.DIVERGED, f"{words}: {constrain}"
    if exhausted:
        words = f"stopped at the limit of evaluations, {evaluations} of them and in the stage '{stage}'"
        if isinf(fresh.value):
            words = f"{words}, before an ELBO could be estimated: the log density is not finite at some draws"
            return Status.STOPPED, f"{words}; raise max_evaluations=, or {constrain}"
        return Status.STOPPED, f"{words}: ELBO {fresh}; raise max_evaluations="
    if isinf(fresh.value):
        return Status.DIVERGED, (
            "not sound: the log density is not finite at some draws of the fitted posterior: a prior may be missing, "
            "or what cannot take every value is not given as positive(..) or its like"
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
