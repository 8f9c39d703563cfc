"""One fit: where it is between two steps, the loop over its steps, and its result."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from math import inf, isfinite, nan, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # pyright: ignore

from ..distributed.ranks import Taken
from ..families.low_rank import hold_factors, release_factors
from ..models.bayesian_model import rows
from ..models.likelihoods import Likelihood
from ..objective import Estimate, NonFiniteError, not_finite
from ..optim.coordinates import CoordinateOptimizer
from ..predict.predict import WeightDraws
from ..predict.predictive import observed_target
from ..result import Status
from ..util.budget import STEP, batches_within, default_passes
from ..util.interrupts import Interrupts
from ..util.progress import progress_bar
from ..util.random_streams import borrowed_stream
from .checkpoint import save
from .compare import Watched, Worth, notes_on_bound, worth_on_seed
from .data import Batches, mean_rows
from .progress import Progress
from .result import FitResult, History, Skipped
from .schedule import FIRST_STAGE, LAST_PART, LearningRate
from .step import OverflowingError, Step
from .verdict import SHORTEST_PART, Trend

if TYPE_CHECKING:
    from ..posterior import Posterior

#: groups of draws on which posteriors are compared at the end
COMPARISON_GROUPS = 8
#: iterates that are averaged, about: those between them are much the same
AVERAGED = 256
#: batches in a row without a finite loss that end the fit
FAILURES = 5
#: what a batch that does not suit the network raises
OF_A_BATCH = (ValueError, TypeError, RuntimeError, IndexError)
#: draws of the weights for held-out data, while the fit runs and at its end
FEW_DRAWS, DRAWS = 8, 32
#: names of candidates
LAST_STEP, WITHOUT_FACTOR = "last step", "rank 0 (mean field)"


class Fit:
    """One fit. Numbers say where it is; a step changes them, and the tensors of the posterior in place.

    Args:
        posterior: N must be known.
        data: what it is fitted to.
        settings: what a resumed fit must share: "steps", "kl_weight", "kl_warmup", "staged", "stop", "accumulate", ..
        rate: the learning rates.
        make_step: the step, with optimizer, generator and ranks.
        validation: held-out data.
    """

    def __init__(
        self,
        posterior: "Posterior",
        data: Batches,
        settings: dict[str, Any],
        rate: LearningRate,
        make_step: Step,
        validation: Iterable[Any] | None = None,
    ):
        self.posterior, self.data, self.settings, self.rate, self.make_step = posterior, data, settings, rate, make_step
        self.optimizer, self.generator, self.ranks = make_step.optimizer, make_step.generator, make_step.ranks
        self.named, self.learned = make_step.named, posterior.learned()
        self.validation, self.held_out = validation, None
        self.history, self.notes, self.skipped = History(), list[str](), list[Skipped]()
        self.problem: Mapping[str, str] = {}
        #: observations a step over an epoch, if known before one was read
        self.mean_rows = mean_rows(data, settings["accumulate"], self.ranks)
        #: steps made; the epoch, and the batch in it, at which the next one begins; observations of all steps
        self.step = self.epoch = self.index = self.rows = 0
        #: where the present cycle of the learning rate began, and where the fit ends
        self.begun, self.end = 0, int(settings["steps"])
        #: the step from which the rate falls to its end, once the fit has converged
        self.cooling: int | None = None
        self.failures = 0
        #: whether the user ended it early
        self.stopped = False
        #: the mean over the last iterates, and of how many; the posterior at the end of stage one
        self.average: dict[str, Tensor] = {}
        self.averaged = 0
        self.without_factor: dict[str, Tensor] = {}
        #: the state of the generator after the last step
        self.stream = self.generator.get_state()
        #: log likelihood of the best output that ignores the input
        self.constant: float | None = None
        self.stage = 1 if settings["staged"] else 2
        if self.stage == 1:
            hold_factors(posterior.family)

    @property
    def goes_on(self) -> bool:
        return self.step < self.end

    @property
    def cycle(self) -> int:
        """Steps of the present cycle of the learning rate: all, but for a fit that was extended."""
        return int(self.settings["steps"]) - self.begun

    @property
    def last_part(self) -> int:
        return max(1, round(LAST_PART * self.cycle))

    @property
    def steps_an_epoch(self) -> int | None:
        return -(-self.data.length // self.settings["accumulate"]) if self.data.length else None

    @property
    def passes(self) -> float:
        """Over the data, of all steps: see `util.budget`."""
        return STEP * self.make_step.draws * self.rows / self.settings["num_data"]

    @property
    def kl_weight(self) -> float:
        """λ of the next step."""
        rise = 0.0 if self.begun else self.settings["kl_warmup"] * self.settings["steps"]
        return self.settings["kl_weight"] * min(1.0, (self.step + 1) / (rise + 1))

    @property
    def rate_factor(self) -> float:
        """The learning rate of the next step relative to the highest."""
        cooling = None if self.cooling is None else self.cooling - self.begun
        return self.rate.factor(self.step - self.begun, self.cycle, cooling, self.end - self.begun)

    @property
    def stage_two_is_due(self) -> bool:
        return self.stage == 1 and self.step >= round(FIRST_STAGE * self.settings["steps"])

    def begin_stage_two(self) -> None:
        """Keep the posterior without its factor, to be compared at the end, and let the factor learn."""
        self.without_factor, self.stage = copied(self.learned), 2
        release_factors(self.posterior.family, self.generator)

    def loop(
        self,
        bar: Progress | None,
        checkpoint: str | os.PathLike[str] | None,
        every: int,
        callback: Callable[[History], None] | None,
    ) -> None:
        """Make all steps: of each batch one of the optimizer, or none if something is not finite."""
        with Interrupts(waits=False) as interrupts:
            while self.goes_on:
                iterator = self.data.epoch(self.epoch, self.index)
                while self.goes_on:
                    if self.stage_two_is_due:
                        self.begin_stage_two()
                    self.stream, started = self.generator.get_state(), time.monotonic()
                    with self.reading():
                        taken = self.take(iterator)
                    if not taken.batches:
                        break
                    interrupts.waits = True  # no step is made in part
                    lr, whole = self.rate.set(self.rate_factor), taken.whole
                    mean = self.mean_rows or (self.rows + whole) / (self.step + 1)
                    if isinstance(self.optimizer, CoordinateOptimizer):
                        self.optimizer.settled = self.step >= self.end - self.last_part
                    try:
                        weights = [count / mean for count in taken.rows]
                        values, norm = self.make_step(taken.batches, weights, self.kl_weight, whole / mean)
                    except (NonFiniteError, LinAlgError) as error:
                        self.leave_out(error)
                    except OF_A_BATCH as error:
                        more = len(taken.batches) - 1
                        some = f"{self.index} or the {more} after" if more else f"{self.index}"
                        error.add_note(f"in batch {some} of epoch {self.epoch}")
                        raise
                    else:
                        self.rate.after_step()
                        estimate = Estimate.of(values)
                        self.record(estimate.value, estimate.standard_error, norm, lr, time.monotonic() - started)
                    self.rows += whole
                    self.step, self.index = self.step + 1, self.index + len(taken.batches)
                    self.stream = self.generator.get_state()
                    interrupts.waits = False
                    if interrupts.kept:
                        interrupts.act()
                    if self.ranks.stopping:
                        raise KeyboardInterrupt
                    if bar is not None:
                        bar.update(*self._window(), self.held_out)
                    if self.settle() and bar is not None:
                        bar.shorten(self.end)
                    if checkpoint is not None and self.step % every == 0 and self.goes_on:
                        save(self, checkpoint)
                    if callback is not None:
                        callback(self.history)
                else:
                    return
                self.end_epoch()

    def reading(self) -> AbstractContextManager[None]:
        """Hold the global streams while data are read that may draw random numbers; each step has a seed of its own."""
        if not self.data.draws:
            return nullcontext()
        seed = (self.settings["seed"] * 1_000_003 + self.step) % 2**63
        return borrowed_stream(torch.Generator().manual_seed(seed), self.ranks.rank)

    def take(self, iterator: Iterator[Any]) -> Taken:
        """Take the batches of the next step, with their observations; none at the end of an epoch."""
        accumulate = self.settings["accumulate"]
        if self.ranks.size > 1:
            return self.ranks.take(iterator, accumulate, self.data, self.index)
        batches, data = list(islice(iterator, accumulate)), self.data
        counts = [data.rows_of(self.index + i)[0] if data.splits else rows(x) for i, x in enumerate(batches)]
        return Taken(batches, [*map(float, counts)], sum(counts))

    @property
    def averages(self) -> bool:
        """Whether the iterate of this step counts in the average."""
        return self.step >= self.end - self.last_part and self.step % max(1, self.last_part // AVERAGED) == 0

    def record(self, elbo: float, standard_error: float, norm: float, lr: float, seconds: float) -> None:
        """Write a finite step into the history; the iterates of the last steps are averaged."""
        self.failures = 0
        if self.posterior.fit_status is None:
            self.posterior.fit_status = Status.STOPPED  # it has moved
        if self.averages:
            self.averaged += 1
            average(self.average, self.named, 1 / self.averaged)
        step = self.step, self.epoch, elbo, standard_error, lr, norm, self.kl_weight, self.stage, nan, seconds
        self.history.rows.append([float(value) for value in step])

    def leave_out(self, reason: Exception) -> None:
        """Write a step that was left out into the history; too many in a row end the fit."""
        self.skipped.append(Skipped(self.epoch, self.index, str(reason)))
        self.failures = 0 if isinstance(reason, OverflowingError) else self.failures + 1
        if self.failures == FAILURES:
            names = ", ".join(f"{one.index} of epoch {one.epoch}" for one in self.skipped[-FAILURES:])
            raise NonFiniteError(
                f"{FAILURES} batches in a row ({names}) gave no finite loss, the last because {reason}. The posterior "
                f"is as it was after the last step that was finite; a smaller lr= helps where it is not the data"
            )
        self.history.append(step=self.step, epoch=self.epoch, kl_weight=self.kl_weight, stage=self.stage)

    def settle(self) -> bool:
        """End the fit early if the trend of its ELBO has just been found to be none; return whether it was."""
        part, settings = self.last_part, self.settings
        check = max(1, part // 4)
        # stage one and both warm-ups begin with the fit
        first = FIRST_STAGE * settings["steps"] if settings["staged"] and not self.begun else 0
        rising = settings["warmup"] if self.begun else max(settings["kl_warmup"], settings["warmup"])
        early = self.step - self.begun < max(first, rising * self.cycle) + part + check
        late = self.cooling is not None or self.step >= self.end - part
        if not settings["stop"] or early or late or self.step % check or part < SHORTEST_PART:
            return False
        # twice: now, and a quarter of the window ago
        if not all(Trend.of(self.history, part, part, settings["num_data"], back).has_ended for back in (0, check)):
            return False
        self.cooling, self.end = self.step, self.step + part
        return True

    def end_epoch(self) -> None:
        """Measure the held-out data, and begin the next epoch."""
        if self.validation is not None:
            self.held_out = self.measure_held_out(FEW_DRAWS)
            self.history.set_last("held_out", self.held_out)
        if self.index == 0:
            raise ValueError("the loader gave no batch in an epoch; can it be read more than once?")
        self.epoch, self.index = self.epoch + 1, 0

    def measure_held_out(self, draws: int) -> float:
        """Return the log density of the held-out data, in nats for each observed number."""
        assert self.validation is not None
        posterior, reference = self.posterior, None
        if posterior.batch_norm == "reestimated":
            reference = posterior.model.split(next(iter(self.data.everything(1))))[0]
        generator, total, count = torch.Generator(posterior.device).manual_seed(self.settings["seed"]), 0.0, 0
        predict = WeightDraws(posterior, draws, reference=reference, generator=generator)
        for batch in Batches(self.validation, self.settings["seed"], posterior.device).everything():
            inputs, target = predict.split(batch)
            log_prob = predict(inputs).log_prob(target)
            known = isinstance(posterior.model.likelihood, Likelihood)
            observed = observed_target(posterior.model.likelihood, target)[1] if known else None
            total += float(log_prob.double().sum())
            count += log_prob.numel() if observed is None else int(observed.sum())
        return total / count if isfinite(total) else -inf

    def back_to_step(self) -> None:
        """Put the generator back to where the last step left it, after an interruption between two steps."""
        self.generator.set_state(self.stream)

    def _window(self) -> tuple[float, float]:
        """Return the ELBO over the last steps, at most an epoch and a hundred, and its standard error."""
        values = self.history.recent("elbo", min(100, self.steps_an_epoch or 100))
        values = values[values.isfinite()]
        if len(values) < 2:
            return (float(values[0]), self.history.recent("standard_error", 1).item()) if len(values) else (-inf, inf)
        return float(values.mean()), float(values.std()) / sqrt(len(values))

    # -------------------------------------------------------------------------------------------------- the result

    def finish(self) -> FitResult:
        """Keep the best of the last step, the average and the posterior without its factor; return the result."""
        settings, bound = self.settings, self.posterior.family().bound
        kept, worths, held_out = LAST_STEP, dict[str, Worth](), dict[str, float]()
        if self.stopped:
            mean, error = self._window()
            elbo = Estimate(mean, error, self.history.recent("elbo", 1), bound)
            comparison = "mean over the last steps: stopped before posteriors were compared"
            status, verdict = Status.STOPPED, "stopped by you"
        else:
            kept, worths, held_out, most = self._best()
            elbo, seen = worths[kept].elbo, (self.data.length or 0) * self.ranks.part[1]
            data = "all data" if most is None or seen <= most else f"{most} of {seen} batches"
            comparison = f"{COMPARISON_GROUPS} groups of draws, {data}"
            status, verdict = self._verdict(elbo)
            self.notes += self._advice(status, elbo, bound)
        return FitResult(
            status=status, verdict=verdict, elbo=elbo, kept=kept, comparison=comparison,
            candidates={name: one.elbo for name, one in worths.items()},
            objectives={name: one.objective for name, one in worths.items()} if settings["kl_weight"] != 1 else {},
            history=self.history, steps=self.step, passes=self.passes,
            epochs=self.epoch + (self.index / self.data.length if self.data.length else 0),
            kl_weight=settings["kl_weight"], bound=bound, exact=self.data.exact and self.generator.device.type == "cpu",
            skipped=self.skipped, notes=[*self.notes, *self._notes(bound)],
            evaluation=str(self.posterior.model.evaluation), constant=self.constant, held_out=held_out,
        )  # fmt: skip

    def _verdict(self, elbo: Estimate) -> tuple[Status, str]:
        part, steps = self.last_part, self.steps_an_epoch
        if elbo.value == -inf:
            return Status.DIVERGED, "no finite ELBO: print(result.details) says which batch and why"
        if self.cooling is not None:
            return Status.CONVERGED, "converged"
        if len(self.history) < part or part < SHORTEST_PART:
            return Status.TOO_SHORT, "too few steps to tell whether it has converged"
        trend = Trend.of(self.history, 2 * part, part, self.settings["num_data"])
        return trend.judge(steps or 1, "epoch" if steps else "step")

    def _advice(self, status: Status, elbo: Estimate, bound: bool) -> list[str]:
        """Return a note if the fit has learned nothing, or should go on."""
        noise = 2 * elbo.standard_error if isfinite(elbo.standard_error) else 0.0
        below = self.constant is not None and elbo.value + noise < self.constant
        if below and bound and status is not Status.TOO_SHORT:
            return [
                f"worse than knowing nothing: an output that ignores the input has {self.constant:.4g} nats, this "
                f"posterior {elbo.value:.4g}; the KL of its weights costs more than the data say. Fewer random weights "
                "(select=, PerLayer), a narrower prior, another seed or more data help; λ < 1 (kl_weight=) predicts "
                "better and is not the posterior"
            ]
        if elbo.value == -inf:
            return ["the ELBO over the full data is not finite: some observation has none at some draw"]
        if status is Status.IMPROVING:
            return ["improving: at the highest learning rate, which falls to zero in a fit; call fit again to go on"]
        return []

    def _notes(self, bound: bool) -> list[str]:
        notes, model, kind = list[str](), self.posterior.model, self.generator.device.type
        if (kl_weight := self.settings["kl_weight"]) != 1:
            notes.append(f"λ = {kl_weight:g}: a tempered posterior is not the posterior; the ELBO is at λ = 1")
        if kind == "cuda" and self.make_step.reason is not None:
            notes.append(f"the step was not captured as a CUDA graph: {self.make_step.reason}")
        if self.ranks.size > 1:
            what = "its part of every batch" if self.ranks.mode == "data" else "its own draws for every batch"
            notes.append(f"{self.ranks.size} ranks, each with {what}")
        if not bound:
            notes.append("point masses: no lower bound; their entropy is left out of the ELBO")
        notes += notes_on_bound(model)
        if not self.data.exact:
            notes.append(f"not exact: {self.data.inexact}; a resumed run differs from one never stopped")
        elif kind != "cpu":
            notes.append(f"not exact: kernels on {kind} may add in another order each time")
        if self.skipped:
            first = self.skipped[0]
            notes.append(
                f"{len(self.skipped)} steps left out, not finite; the first at batch {first.index} of epoch "
                f"{first.epoch}: {first.reason}"
            )
        return notes

    def _best(self) -> tuple[str, dict[str, Worth], dict[str, float], int | None]:
        """Put the posterior into its best state; return its name, what all are worth, and how many batches were read.

        Held-out data decide if there are some; else the objective that was fitted, E log lik − λ KL.
        """
        states = {LAST_STEP: copied(self.learned)}
        if self.averaged > 1:
            states[f"average of the last {self.averaged}"] = {**states[LAST_STEP], **self.average}
        if self.without_factor:
            states[WITHOUT_FACTOR] = self.without_factor
        worths, held_out, most = dict[str, Worth](), dict[str, float](), self._batches_compared(len(states))
        for name, values in states.items():
            assign(self.learned, values)
            worths[name] = self._worth(most, f"comparing {len(worths) + 1}/{len(states)}")
            if self.validation is not None:
                held_out[name] = self.measure_held_out(DRAWS)
        kept = LAST_STEP
        decide = (
            held_out if any(map(isfinite, held_out.values())) else {n: w.objective.value for n, w in worths.items()}
        )
        if held_out and decide is not held_out:
            self.notes.append("the held-out log density is not finite, and the ELBO has selected: is there NaN in it?")
        for name, value in decide.items():
            # the average is wanted where it costs nothing; the simpler posterior only where it is better
            if value > decide[kept] or (value == decide[kept] and name != WITHOUT_FACTOR):
                kept = name
        assign(self.learned, states[kept])
        return kept, worths, held_out, most

    def _batches_compared(self, candidates: int) -> int | None:
        """Return how many batches are read to compare posteriors; None for all."""
        draws = candidates * COMPARISON_GROUPS * max(1, self.make_step.draws // self.make_step.estimator.groups)
        default = default_passes(self.passes, self.settings["num_data"], self.posterior.space.size)
        length = self.data.length and self.data.length * self.ranks.part[1]  # batches of all ranks
        return batches_within(default, draws, length, max(32, self.settings["steps"] // 40))

    def _worth(self, most: int | None, label: str) -> Worth:
        ranks, model = self.ranks, self.posterior.model
        read = Watched(self.data.everything(most, (ranks.rank, ranks.size)), model)
        batches = progress_bar(read, total=most, label=label, show=self.show)
        try:
            settings = self.settings
            worth = worth_on_seed(self.posterior, batches, COMPARISON_GROUPS, settings["seed"], settings["kl_weight"])
        except (NonFiniteError, LinAlgError):
            worth = Worth(not_finite(COMPARISON_GROUPS), not_finite(COMPARISON_GROUPS))
        else:
            self.constant = read.log_likelihood if ranks.size == 1 else None  # each rank has read its part alone
        return Worth(*(ranks.pool(one, read.rows) for one in worth))

    #: whether a bar shows how far the comparison is
    show = False


def copied(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors."""
    return {name: tensor.detach().clone() for name, tensor in named.items()}


@torch.no_grad()
def assign(named: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into the tensors of these names."""
    for name, tensor in named.items():
        tensor.copy_(values[name])


@torch.no_grad()
def average(mean: dict[str, Tensor], named: Mapping[str, Tensor], share: float) -> None:
    """Move the mean towards the tensors by this share, in place; it begins as a copy of them."""
    for name, tensor in named.items():
        if name in mean:
            mean[name].lerp_(tensor, share)
        else:
            mean[name] = tensor.detach().clone()
