"""The end of a fit: posteriors are compared, the better one is kept, and a verdict says how it ended."""

from collections.abc import Iterable, Iterator
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # pyright: ignore
from torch.nn.functional import pad

from ..couplings import Coupling, paired
from ..models.bayesian_model import BayesianModel, rows
from ..models.likelihoods import Likelihood, split_mask
from ..models.priors import PriorModule
from ..objective import Estimate, Estimator, NonFiniteError, Terms, full_terms, not_finite
from ..predict.predict import WeightDraws
from ..predict.predictive import observed_target
from ..result import Status
from ..util.progress import progress_bar
from ..util.random_streams import borrowed_stream
from .checkpoint import assign, copied
from .data import Batches
from .result import FitResult, History

if TYPE_CHECKING:
    from ..posterior import Posterior
    from .fit import Fit

#: groups of draws on which posteriors are compared; held-out data have a pair of draws for each
GROUPS = 8
#: passes of the network for the comparison, as a share of those of the fit's draws, forward
SHARE = 0.3
#: products of a weight and an observation for it that are free all the same: milliseconds of dense layers
FREE = 1e7
#: nats gained over the last part of a fit that count as none: they change no probability by 10 %
NEGLIGIBLE = 0.1
#: steps of a last part that is too short for a trend
SHORTEST_PART = 16
#: nats an observation that are worth a further fit
WORTHWHILE = 0.01
LAST_STEP = "last step"


def finish(fit: "Fit") -> FitResult:
    """Put the posterior into its best state; return the result.

    The last step and the average over the last steps are compared. Held-out data decide if there are some; else the
    objective that was fitted, E log lik − λ KL.
    """
    posterior, settings, data = fit.posterior, fit.settings, fit.data
    bound, kept, constant, notes = posterior.family().bound, LAST_STEP, None, list[str]()
    elbos, objectives, held_out = dict[str, Estimate](), dict[str, Estimate](), dict[str, float]()
    if fit.stopped:
        elbo = Estimate(*fit.recent_elbo(), fit.history.recent("elbo", 1), bound)
        comparison = "mean over the last steps: stopped before posteriors were compared"
        status, verdict = Status.STOPPED, "stopped by you"
    else:
        states = {LAST_STEP: copied(fit.learned)}
        if fit.averaged > 1:
            states[f"average of the last {fit.averaged}"] = {**states[LAST_STEP], **fit.average}
        most = _batches_compared(fit, len(states))
        for name, values in states.items():
            assign(fit.learned, values)
            elbos[name], objectives[name], constant = _worth(fit, most, f"comparing {len(elbos) + 1}/{len(states)}")
            if fit.options.validation is not None:
                held_out[name] = held_out_log_density(posterior, data, fit.options.validation)
        by_held_out = any(map(isfinite, held_out.values()))
        if held_out and not by_held_out:
            notes.append("the held-out log density is not finite, and the ELBO has selected: is there NaN in it?")
        decide = held_out if by_held_out else {name: one.value for name, one in objectives.items()}
        kept = max(states, key=lambda name: (decide[name], name != LAST_STEP))
        assign(fit.learned, states[kept])
        elbo, every = elbos[kept], (data.length or 0) * fit.ranks.part[1]
        comparison = f"{GROUPS} groups of draws, {'all data' if every <= most else f'{most} of {every} batches'}"
        status, verdict = _verdict(fit, elbo)
        notes += _advice(status, elbo, constant if bound else None)
    return FitResult(
        status=status, verdict=verdict, elbo=elbo, kept=kept, comparison=comparison, candidates=elbos,
        objectives=objectives if settings["kl_weight"] != 1 else {}, history=fit.history, steps=fit.step,
        epochs=fit.epoch + (fit.index / data.length if data.length else 0), kl_weight=settings["kl_weight"],
        bound=bound, exact=data.inexact is None and fit.generator.device.type == "cpu", skipped=fit.skipped,
        notes=[*fit.notes, *notes, *_notes(fit, bound)], evaluation=str(posterior.model.evaluation),
        constant=constant, held_out=held_out,
    )  # fmt: skip


def _batches_compared(fit: "Fit", candidates: int) -> int:
    """Return how many batches are read to compare posteriors: they take a share of the fit's own passes."""
    draws, groups, steps = fit.make_step.draws, fit.make_step.estimator.groups, max(1, fit.step)
    products = fit.posterior.space.size * max(1, fit.rows / steps)  # of a weight and an observation, for one batch
    return max(1, int(max(SHARE * draws * steps, FREE / products) / (candidates * GROUPS * max(1, draws // groups))))


def _worth(fit: "Fit", most: int, label: str) -> tuple[Estimate, Estimate, float | None]:
    """Return ELBO and objective of the present posterior, and the log likelihood of the best constant if known."""
    ranks, settings = fit.ranks, fit.settings
    read = Watched(fit.data.everything(most, (ranks.rank, ranks.size)), fit.posterior.model)
    batches = progress_bar(read, total=most, label=label, show=fit.show)
    try:
        terms = terms_on_seed(fit.posterior, batches, settings["seed"])
        found = terms.estimate(), terms.estimate(settings["kl_weight"])
    except (NonFiniteError, LinAlgError):
        found = not_finite(GROUPS), not_finite(GROUPS)
    elbo, objective = (ranks.pool(one, read.rows) for one in found)
    return elbo, objective, read.log_likelihood if ranks.size == 1 else None  # each rank has read its part alone


def _verdict(fit: "Fit", elbo: Estimate) -> tuple[Status, str]:
    part, steps = fit.last_part, fit.steps_an_epoch
    if elbo.value == -inf:
        return Status.DIVERGED, "no finite ELBO: print(result.details) says which batch and why"
    if fit.cooling is not None:
        return Status.CONVERGED, "converged"
    if len(fit.history) < part or part < SHORTEST_PART:
        return Status.TOO_SHORT, "too few steps to tell whether it has converged"
    trend = Trend.of(fit.history, 2 * part, part, fit.settings["num_data"])
    return trend.judge(steps or 1, "epoch" if steps else "step")


def _advice(status: Status, elbo: Estimate, constant: float | None) -> list[str]:
    """Return a note if the fit has learned nothing, or should go on."""
    noise = 2 * elbo.standard_error if isfinite(elbo.standard_error) else 0.0
    if constant is not None and elbo.value + noise < constant and status is not Status.TOO_SHORT:
        return [
            f"worse than knowing nothing: an output that ignores the input has {constant:.4g} nats. Fewer random "
            "weights (select=, PerLayer), a narrower prior or more data help; λ < 1 predicts better"
        ]
    if elbo.value == -inf:
        return ["the ELBO over the full data is not finite: some observation has none at some draw"]
    return []


def _notes(fit: "Fit", bound: bool) -> list[str]:
    """Return what must be known to read the numbers."""
    kind, ranks, kl_weight, reason = fit.generator.device.type, fit.ranks, fit.settings["kl_weight"], fit.data.inexact
    notes = []
    if kl_weight != 1:
        notes.append(f"λ = {kl_weight:g}: a tempered posterior is not the posterior; the ELBO is at λ = 1")
    if kind == "cuda" and fit.make_step.reason is not None:
        notes.append(f"the step was not captured as a CUDA graph: {fit.make_step.reason}")
    if ranks.size > 1:
        notes.append(f"{ranks.size} ranks, each with its part of every batch")
    if not bound:
        notes.append("point masses: no lower bound; their entropy is left out of the ELBO")
    notes += notes_on_bound(fit.posterior.model)
    if reason is not None or kind != "cpu":
        why = reason or f"kernels on {kind} may add in another order each time"
        notes.append(f"not exact: {why}; a resumed run differs from one never stopped")
    if fit.skipped:
        first = fit.skipped[0]
        notes.append(
            f"{len(fit.skipped)} steps left out, not finite; the first at batch {first.index} of epoch {first.epoch}: "
            f"{first.reason}"
        )
    return notes


# --- the worth of a posterior


def elbo_over(
    posterior: "Posterior",
    batches: Iterable[Any],
    *,
    groups: int = 64,
    coupling: Coupling = paired,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Return the ELBO over batches that all see the same draws, in nats, with its standard error.

    Args:
        posterior: N must be known.
        batches: on the posterior's device.
        groups, coupling, generator: as in `elbo`.
    """
    estimator = Estimator(groups=groups, coupling=coupling)
    with posterior.network_mode():
        return full_terms(posterior.family, posterior.model, batches, estimator, generator).estimate()


def terms_on_seed(posterior: "Posterior", batches: Iterable[Any], seed: int) -> Terms:
    """Return E log lik and KL over the batches: posteriors over the same tensors see the same draws from a seed."""
    generator = torch.Generator(posterior.device).manual_seed(seed + 1)
    with borrowed_stream(torch.Generator().manual_seed(seed + 2)), posterior.network_mode():
        return full_terms(posterior.family, posterior.model, batches, Estimator(groups=GROUPS), generator)


def held_out_log_density(posterior: "Posterior", data: Batches, validation: Iterable[Any]) -> float:
    """Return the log density of held-out data, in nats for each observed number; −∞ if it is not finite.

    Args:
        posterior: predicts with a pair of weights for each group.
        data: of the fit: with batch_norm="reestimated" a batch of them is the reference.
        validation: held-out data.
    """
    reference = None
    if posterior.batch_norm == "reestimated":
        reference = posterior.model.split(next(iter(data.everything(1))))[0]
    generator, total, count = torch.Generator(posterior.device).manual_seed(data.seed), 0.0, 0
    predict = WeightDraws(posterior, 2 * GROUPS, reference=reference, generator=generator)
    known = isinstance(posterior.model.likelihood, Likelihood)
    for batch in Batches(validation, data.seed, posterior.device).everything():
        inputs, target = predict.split(batch)
        log_prob = predict(inputs).log_prob(target)
        observed = observed_target(posterior.model.likelihood, target)[1] if known else None
        total += float(log_prob.double().sum())
        count += log_prob.numel() if observed is None else int(observed.sum())
    return total / count if isfinite(total) else -inf


class Watched:
    """Batches that are read once, and the log likelihood of the best constant output for their targets.

    Args:
        batches: to read.
        model: its likelihood knows the best constant. A plain function does not, nor does `forward=`, whose targets are
            not known without a pass of the network.
    """

    def __init__(self, batches: Iterable[Any], model: BayesianModel):
        likelihood = model.likelihood
        self.batches, self.model, self.rows = batches, model, 0
        self._likelihood = likelihood if isinstance(likelihood, Likelihood) and model.user_forward is None else None
        self._sums: Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.rows += rows(batch)
            if self._likelihood is not None:
                target, mask = split_mask(self.model.split(batch)[1])
                sums = self._likelihood.sums(target, mask)
                self._sums = sums if sums is None or self._sums is None else _added(self._sums, sums)
            yield batch

    @property
    def log_likelihood(self) -> float | None:
        """The log likelihood of the best constant, in nats for the whole data set."""
        if self._likelihood is None or self._sums is None:
            return None
        return self._likelihood.best_constant(self._sums) * (self.model.num_data / self.rows)


def _added(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of two; the shorter has zeros at its end, for labels that a batch does not have."""
    longest = max(a.shape[-1], b.shape[-1])
    return pad(a, (0, longest - a.shape[-1])) + pad(b, (0, longest - b.shape[-1]))


def notes_on_bound(model: BayesianModel) -> list[str]:
    """Return what makes an ELBO no bound, of likelihood and prior."""
    notes = []
    if isinstance(model.likelihood, Likelihood) and not model.likelihood.exact:
        notes.append("the likelihood is weighted: its ELBO is no bound on the evidence")
    if isinstance(model.prior, PriorModule) and not model.prior.normalised:
        notes.append("the prior is not normalised: the ELBO is known up to a constant")
    return notes


# --- the trend of the ELBO


class Trend(NamedTuple):
    """The slope of the ELBO over some steps, in nats a step at the full learning rate, and its standard error."""

    slope: float
    error: float  # ∞ where nothing moved, or too few steps tell
    part: int  # steps of the last part of the fit
    num_data: int

    @classmethod
    def of(cls, history: History, window: int, part: int, num_data: int, back: int = 0) -> "Trend":
        """Return the trend over `window` steps, up to `back` steps ago."""
        elbo, epoch, lr = (history.recent(c, window + back)[:window] for c in ("elbo", "epoch", "lr"))
        highest = history["lr"].nan_to_num(0.0).max().clamp(min=torch.finfo(torch.float64).tiny)
        return cls(*trend(elbo, epoch, (lr / highest).nan_to_num(0.0)), part, num_data)

    @property
    def rises(self) -> bool:
        """By more than its noise, and by more than nothing."""
        return self.slope > 2 * self.error and self.slope * self.part > NEGLIGIBLE

    @property
    def may_hide_a_gain(self) -> bool:
        return (self.slope + 2 * self.error) * self.part > max(1.0, WORTHWHILE * self.num_data)

    @property
    def has_ended(self) -> bool:
        return self.slope * self.part <= NEGLIGIBLE and not self.may_hide_a_gain

    def judge(self, length: int, unit: str) -> tuple[Status, str]:
        """Return status and words; rates are stated for `length` steps, an epoch."""
        if self.error == inf:
            return Status.UNCLEAR, "not shown to have converged: the learning rate was zero, and nothing moved"
        if self.rises:
            return Status.IMPROVING, f"still improving at {self.slope * length:.2g} nats per {unit}"
        if self.may_hide_a_gain:
            hidden = (self.slope + 2 * self.error) * length
            return Status.UNCLEAR, f"not shown to have converged: {hidden:.2g} nats per {unit} could hide in the noise"
        return Status.CONVERGED, "converged"


def trend(elbo: Tensor, epoch: Tensor, rate: Tensor) -> tuple[float, float]:
    """Return the slope of the ELBO, in nats a step at the full rate, and its standard error, by least squares.

    Time is measured in learning rate: steps that could not move the posterior say nothing about further gain.
    Points are means over whole epochs: most noise of a step is which batch it has, and cancels over an epoch. With
    fewer than five epochs, points are eight parts of equal length.

    Args:
        elbo: of consecutive steps, [n]; nan where one was undone.
        epoch: of these steps, [n].
        rate: the learning rate of these steps relative to the highest, [n].
    """
    finite = elbo.isfinite()
    elbo, epoch, position = elbo[finite], epoch[finite], rate.cumsum(0)[finite]
    if len(elbo) < 8:
        return 0.0, inf
    sizes: list[int] = epoch.unique_consecutive(return_counts=True)[1].tolist()
    whole = [size == max(sizes) for size in sizes]
    if sum(whole) < 5:
        whole, sizes = [True] * 8, [len(part) for part in elbo.tensor_split(8)]
    x, y = (
        torch.stack([part.mean() for part, keep in zip(values.split(sizes), whole, strict=True) if keep])
        for values in (position, elbo)
    )
    x, y = x - x.mean(), y - y.mean()
    if not float(x @ x) > 0:
        return 0.0, inf
    slope = (x @ y) / (x @ x)
    residual = (y - slope * x).square().sum() / (len(x) - 2)
    return float(slope), float((residual / (x @ x)).sqrt())
