"""The end of a fit: the best of the posteriors that it went through is kept, and a verdict says how it ended."""

from math import inf, isfinite
from typing import TYPE_CHECKING

from torch.linalg import LinAlgError  # pyright: ignore

from ..objective import Estimate, NonFiniteError, not_finite
from ..result import Status
from ..util.budget import STEP, batches_within, default_passes
from ..util.progress import progress_bar
from .compare import Watched, Worth, held_out_log_density, notes_on_bound, worth_on_seed
from .loop import assign, copied
from .result import FitResult
from .verdict import SHORTEST_PART, Trend

if TYPE_CHECKING:
    from .loop import Fit

#: groups of draws on which posteriors are compared
GROUPS = 8
#: draws of the weights for held-out data
DRAWS = 32
#: names of candidates
LAST_STEP, WITHOUT_FACTOR = "last step", "rank 0 (mean field)"


def finish(fit: "Fit") -> FitResult:
    """Put the posterior into its best state; return the result.

    Compared are the last step, the average over the last steps and, of a staged fit, the posterior without its factor.
    Held-out data decide if there are some; else the objective that was fitted, E log lik − λ KL.
    """
    settings, data, bound = fit.settings, fit.data, fit.posterior.family().bound
    passes = STEP * fit.make_step.draws * fit.rows / settings["num_data"]
    kept, worths, held_out, constant, notes = LAST_STEP, dict[str, Worth](), dict[str, float](), None, list[str]()
    if fit.stopped:
        mean, error = fit.recent_elbo()
        elbo = Estimate(mean, error, fit.history.recent("elbo", 1), bound)
        comparison = "mean over the last steps: stopped before posteriors were compared"
        status, verdict = Status.STOPPED, "stopped by you"
    else:
        states = _candidates(fit)
        most = _batches_compared(fit, len(states), passes)
        for name, values in states.items():
            assign(fit.learned, values)
            worths[name], constant = _worth(fit, most, f"comparing {len(worths) + 1}/{len(states)}")
            if fit.validation is not None:
                held_out[name] = held_out_log_density(fit, DRAWS)
        by_held_out = any(map(isfinite, held_out.values()))
        if held_out and not by_held_out:
            notes.append("the held-out log density is not finite, and the ELBO has selected: is there NaN in it?")
        decide = held_out if by_held_out else {name: worth.objective.value for name, worth in worths.items()}
        # of equals the average is kept before the last step, and both before the posterior without a factor
        kept = max(states, key=lambda name: (decide[name], name != WITHOUT_FACTOR, name != LAST_STEP))
        assign(fit.learned, states[kept])
        elbo, every = worths[kept].elbo, (data.length or 0) * fit.ranks.part[1]
        read = "all data" if most is None or every <= most else f"{most} of {every} batches"
        comparison = f"{GROUPS} groups of draws, {read}"
        status, verdict = _verdict(fit, elbo)
        notes += _advice(status, elbo, constant if bound else None)
    return FitResult(
        status=status, verdict=verdict, elbo=elbo, kept=kept, comparison=comparison,
        candidates={name: one.elbo for name, one in worths.items()},
        objectives={name: one.objective for name, one in worths.items()} if settings["kl_weight"] != 1 else {},
        history=fit.history, steps=fit.step, epochs=fit.epoch + (fit.index / data.length if data.length else 0),
        passes=passes, kl_weight=settings["kl_weight"], bound=bound,
        exact=data.exact and fit.generator.device.type == "cpu", skipped=fit.skipped,
        notes=[*fit.notes, *notes, *_notes(fit, bound)], evaluation=str(fit.posterior.model.evaluation),
        constant=constant, held_out=held_out,
    )  # fmt: skip


def _candidates(fit: "Fit") -> dict[str, dict]:
    """Return the posteriors that are compared: values of all that the fit changes, by name."""
    states = {LAST_STEP: copied(fit.learned)}
    if fit.averaged > 1:
        states[f"average of the last {fit.averaged}"] = {**states[LAST_STEP], **fit.average}
    if fit.without_factor:
        states[WITHOUT_FACTOR] = fit.without_factor
    return states


def _batches_compared(fit: "Fit", candidates: int, passes: float) -> int | None:
    """Return how many batches are read to compare posteriors; None for all."""
    draws = candidates * GROUPS * max(1, fit.make_step.draws // fit.make_step.estimator.groups)
    budget = default_passes(passes, fit.settings["num_data"], fit.posterior.space.size)
    length = fit.data.length and fit.data.length * fit.ranks.part[1]  # batches of all ranks
    return batches_within(budget, draws, length, max(32, fit.steps // 40))


def _worth(fit: "Fit", most: int | None, label: str) -> tuple[Worth, float | None]:
    """Return what the present posterior is worth, and the log likelihood of the best constant output if known."""
    ranks, settings = fit.ranks, fit.settings
    read = Watched(fit.data.everything(most, (ranks.rank, ranks.size)), fit.posterior.model)
    batches = progress_bar(read, total=most, label=label, show=fit.show)
    try:
        worth = worth_on_seed(fit.posterior, batches, GROUPS, settings["seed"], settings["kl_weight"])
    except (NonFiniteError, LinAlgError):
        worth = Worth(not_finite(GROUPS), not_finite(GROUPS))
    constant = read.log_likelihood if ranks.size == 1 else None  # each rank has read its part alone
    return Worth(*(ranks.pool(one, read.rows) for one in worth)), constant


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
            f"worse than knowing nothing: an output that ignores the input has {constant:.4g} nats, this posterior "
            f"{elbo.value:.4g}; the KL of its weights costs more than the data say. Fewer random weights (select=, "
            "PerLayer), a narrower prior, another seed or more data help; λ < 1 (kl_weight=) predicts better and is "
            "not the posterior"
        ]
    if elbo.value == -inf:
        return ["the ELBO over the full data is not finite: some observation has none at some draw"]
    if status is Status.IMPROVING:
        return ["improving: at the highest learning rate, which falls to zero in a fit; call fit again to go on"]
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
    if reason is not None:
        notes.append(f"not exact: {reason}; a resumed run differs from one never stopped")
    elif kind != "cpu":
        notes.append(f"not exact: kernels on {kind} may add in another order each time")
    if fit.skipped:
        first = fit.skipped[0]
        notes.append(
            f"{len(fit.skipped)} steps left out, not finite; the first at batch {first.index} of epoch {first.epoch}: "
            f"{first.reason}"
        )
    return notes
