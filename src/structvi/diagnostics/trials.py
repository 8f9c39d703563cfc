"""Is a higher rank, more draws or an ensemble worth its cost? Each tried from the fitted posterior, with its gain."""

import copy
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..objective import Estimate
from ..result import Result
from ..train.batches import Batches
from ..train.comparing import elbo_over
from ..train.fit import fit
from ..train.grow import grow
from ..train.result import FitResult
from ..util.budget import SHARE, default_passes
from ..util.checks import check_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..posterior import Posterior

#: Groups of two draws on which ELBOs are compared, at most and at least.
MOST_GROUPS, FEWEST_GROUPS = 64, 8
#: A gain below this, in nats, changes no probability by 10 %.
NEGLIGIBLE = 0.1


class Trial(NamedTuple):
    """One way to spend more: what it gained over the posterior as it was, in nats, and what it took."""

    name: str
    gain: float
    standard_error: float
    seconds: float

    @property
    def per_second(self) -> float:
        return self.gain / self.seconds


@dataclass(frozen=True)
class Worth:
    """What more freedom or more draws gained at one budget, against that of fitting on as before. `print` tells it.

    Attributes:
        elbo: of the posterior as it was.
        trials: first "longer", the same fit going on, which every other is held against.
    """

    elbo: Estimate
    trials: list[Trial]

    def pays(self, trial: Trial) -> bool:
        """Whether it gains more than its noise, and more than fitting longer does."""
        longer = self.trials[0]
        if trial is longer:
            return trial.gain > max(NEGLIGIBLE, 2 * trial.standard_error)
        noise = 2 * (trial.standard_error**2 + longer.standard_error**2) ** 0.5
        return trial.gain > max(NEGLIGIBLE, 2 * trial.standard_error) and trial.gain > longer.gain + noise

    @property
    def answers(self) -> dict[str, str]:
        """Trial → whether it pays, in words."""
        longer = self.trials[0]
        answers = {}
        for trial in self.trials:
            if trial is longer:
                text = "the fit had not ended: fit longer first" if self.pays(trial) else "the fit had ended"
            elif self.pays(trial):
                text = f"worth it: {trial.gain - max(longer.gain, 0.0):.3g} nats that fitting longer does not give"
            elif trial.gain <= max(NEGLIGIBLE, 2 * trial.standard_error):
                text = "not worth it: no gain seen"
            else:
                text = "not worth it: fitting longer gains as much"
            answers[trial.name] = text
        return answers

    @property
    def best(self) -> str | None:
        """The trial that gains most of those that pay; None where none does."""
        paying = [trial for trial in self.trials[1:] if self.pays(trial)]
        return max(paying, key=lambda trial: trial.gain).name if paying else None

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Gain against seconds, with two standard errors."""
        from ..plots import BLUE, GREY, ORANGE, axes_of, finish

        ax = axes_of(ax)
        for index, trial in enumerate(self.trials):
            colour = GREY if index == 0 else ORANGE if self.pays(trial) else BLUE
            ax.errorbar(trial.seconds, trial.gain, 2 * trial.standard_error, fmt="o", color=colour, capsize=3)
            ax.annotate(trial.name, (trial.seconds, trial.gain), xytext=(5, 4), textcoords="offset points", fontsize=9)
        ax.axhline(max(self.trials[0].gain, 0.0), color=GREY, linestyle="--", linewidth=1, label="fitting longer")
        ax.set_xlabel("seconds")
        ax.set_ylabel("ELBO gained (nats)")
        return finish(ax, loc="best")

    def __str__(self) -> str:
        lines = [f"ELBO as it is: {self.elbo}", f"{'more':<16}{'gain (nats)':>20}{'seconds':>10}{'nats/s':>10}"]
        for trial in self.trials:
            gain = f"{trial.gain:.3g} ± {trial.standard_error:.2g}"
            lines.append(
                f"{trial.name:<16}{gain:>20}{trial.seconds:>10.2g}{trial.per_second:>10.3g}  {self.answers[trial.name]}"
            )
        return "\n".join(lines)


def worth(
    posterior: "Posterior",
    loader: Iterable[Any],
    *,
    ranks: Sequence[int] = (),
    groups: Sequence[int] = (),
    components: Sequence[int] = (),
    compared_on: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Worth:
    """Try higher ranks, more draws a step and mixtures from the fitted posterior, each for the same number of steps.

    The posterior is left as it is. Gains are differences of the ELBO over all data on common draws, with the standard
    error of the difference. Fitting on with nothing changed is tried too: what that gains is not the rank's doing.

    Args:
        posterior: fitted.
        loader: the data.
        ranks: above the present one, see `grow`.
        groups: groups of draws a step, see `fit`.
        components: parts of a mixture, see `grow`.
        compared_on: groups of draws the ELBOs are compared on; by default 64, or as many, at least 8, as a tenth of the
            passes of the posterior's last fit allow for all of them together.
        seed: of all randomness.
        options: of `fit`. Without epochs= and steps= each trial takes a tenth of the steps of the last fit; with
            progress=True a line says which it is at.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField())
        >>> _ = bayes.fit(loader, epochs=2, progress=False)
        >>> [trial.name for trial in worth(bayes, loader, ranks=[2], groups=[4], epochs=1).trials]
        ['longer', 'rank=2', 'groups=4']
    """
    check_seed(seed)
    if "staged" in options or "start" in options:
        raise ValueError("worth goes on from a fitted posterior: it takes neither staged= nor start=")
    last = posterior.last_fit
    if options.get("epochs") is None and not options.get("steps"):
        if not isinstance(last, FitResult) or not last.steps:
            raise ValueError("worth needs a budget for its fits, and no fit is known: give one of epochs= and steps=")
        options["steps"] = max(1, round(SHARE * last.steps))
    options = {"progress": False, "seed": seed, **options}
    device = posterior.device
    wanted = [("longer", {})]
    for kind, values in (("rank", ranks), ("groups", groups), ("components", components)):
        wanted += [(f"{kind}={value}", {kind: value}) for value in values]
    compared = _groups(posterior, last, 1 + len(wanted)) if compared_on is None else compared_on

    def measured(of: "Posterior") -> Estimate:
        generator = torch.Generator(device).manual_seed(seed + 1)
        return elbo_over(of, Batches(loader, device=device).everything(), groups=compared, generator=generator)

    before = measured(posterior)
    if not before.bound:
        raise ValueError("part of this posterior is a point mass: without a bound there are no gains to compare")
    trials = []
    for name, change in wanted:
        if options["progress"]:
            print(f"worth: {name}, {len(trials) + 1} of {len(wanted)}", file=sys.stderr)
        own = copy.deepcopy(posterior)
        start = time.perf_counter()
        if change and "groups" not in change:
            grow(own, loader, **change, **options)
        else:
            fit(own, loader, staged=False, **{**options, **change})
        seconds = time.perf_counter() - start
        gain = Estimate.of(measured(own).per_group - before.per_group)
        trials.append(Trial(name, gain.value, gain.standard_error, seconds))
    return Worth(before, trials)


def _groups(posterior: "Posterior", last: Result | None, evaluations: int) -> int:
    """So many groups that all ELBOs together take a tenth of the last fit's passes."""
    if not isinstance(last, FitResult) or not last.passes:
        return MOST_GROUPS
    passes = default_passes(last.passes, posterior.model.num_data, posterior.space.size)
    return int(min(MOST_GROUPS, max(FEWEST_GROUPS, passes // (2 * evaluations))))
