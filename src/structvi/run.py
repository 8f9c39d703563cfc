"""One run of a fit: its state between two steps, the step itself, and what comes out in the end."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # pyright: ignore

from . import resuming
from .batches import Batches
from .couplings import Coupling
from .distributed import Counted, Ranks
from .elbo import Estimator, NonFiniteError
from .estimate import Estimate, full_elbo, not_finite
from .families.precision import StructuredPrecision
from .families.structured import StructuredNormal
from .history import FitResult, History, Skipped
from .likelihoods import Likelihood
from .optimizing import (
    OptimizerLike,
    RunningMean,
    Schedule,
    SchedulerLike,
    Snapshot,
    assign,
    make_optimizer,
    trend,
)
from .priors import PriorModule
from .progress import Progress
from .random import borrowed_stream
from .stepping import OverflowingError, Step
from .uninterrupted import uninterrupted

if TYPE_CHECKING:
    from .variationalize import Posterior

#: The factor starts after this part of the steps: 40 %, measured on UCI networks.
FIRST_STAGE = 0.4
#: The last part of the steps, whose iterates are averaged and whose trend gives the verdict.
LAST_PART = 0.25
#: Groups of draws on which posteriors are compared.
COMPARISON_GROUPS = 8
#: At most so many steps lie between the states that a fit can go back to.
MOST_LOST = 200
#: About so many iterates are averaged: those between them are much the same.
AVERAGED = 256
#: So many batches in a row without a finite loss end the fit.
FAILURES = 5
#: A gain below this over the last part of a fit is none, whatever the noise: it changes no probability by 10 %.
NEGLIGIBLE = 0.1


@dataclass
class Options:
    """What a run is defined by; a resumed one must have the same."""

    total: int
    accumulate: int
    groups: int
    coupling: str
    estimator: str
    temperature: float
    kl_warmup: float
    warmup: float
    clip: float | None
    staged: bool
    average: bool
    stop: bool
    precision: str
    seed: int
    num_data: int


class Run:
    """The state of a fit between two steps: all that a checkpoint keeps."""

    optimizer: torch.optim.Optimizer
    schedule: Schedule
    snapshot: Snapshot
    make_step: Step

    def __init__(
        self, posterior: "Posterior", batches: Batches, options: Options, coupling: Coupling, estimator: Estimator,
        ranks: Ranks,
    ):  # fmt: skip
        self.posterior, self.batches, self.options, self.ranks = posterior, batches, options, ranks
        self.coupling: Coupling = coupling
        self.estimator: Estimator = estimator
        self.named: dict[str, Tensor] = dict(posterior.named_parameters())
        self.generator = torch.Generator(next(iter(self.named.values())).device).manual_seed(options.seed)
        self.step, self.epoch, self.index, self.failures = 0, 0, 0, 0
        self.stage = 1 if options.staged else 2
        self.history, self.average = History(), RunningMean()
        self.without_factor: dict[str, Tensor] = {}
        self.skipped: list[Skipped] = []
        self.notes: list[str] = []
        self._stream = self.generator.get_state()

    def prepare(
        self, optimizer: OptimizerLike | None, scheduler: SchedulerLike | None, lr: float | None, capture: bool
    ) -> None:
        """Optimizer, schedule, and the factor off where it has to wait."""
        self.optimizer = make_optimizer(list(self.named.values()), optimizer, lr, factored(self.posterior))
        total = self.options.total
        self.schedule = Schedule(self.optimizer, scheduler, round(self.options.warmup * total), total)
        self.snapshot = Snapshot(self.named, every=max(1, min(MOST_LOST, total // 20)))
        options = self.options
        self.make_step = Step(
            self.posterior, self.optimizer, self.generator, groups=options.groups, coupling=self.coupling,
            estimator=self.estimator, clip=options.clip, capture=capture, ranks=self.ranks,
        )  # fmt: skip
        if self.stage == 1:
            for family in factored(self.posterior):
                family.factor_off()

    @property
    def last_part(self) -> int:
        return max(1, round(LAST_PART * self.options.total))

    @property
    def compared(self) -> int:
        """At most so many batches are read to compare posteriors at the end."""
        return max(32, self.options.total // 40)

    def learned(self) -> dict[str, Tensor]:
        """All that the fit changes, by name, not copied: the parameters, and the units of factors."""
        buffers = {f"family.{name}": buffer for name, buffer in self.posterior.family.named_buffers()}
        return {**self.named, **buffers}

    def loop(
        self,
        bar: Progress,
        checkpoint: str | os.PathLike | None,
        every: int,
        callback: Callable[[History], None] | None,
    ) -> None:
        while self.step < self.schedule.end:
            iterator = self.batches.epoch(self.epoch, self.index)
            while self.step < self.schedule.end:
                if self.stage == 1 and self.step >= round(FIRST_STAGE * self.options.total):
                    self._start_factor()
                self._stream = self.generator.get_state()
                started = time.monotonic()
                # data sets and networks that draw random numbers do so from the global stream
                with borrowed_stream(self.generator, self.ranks.rank):
                    batch, shares = self.ranks.take(iterator, self.options.accumulate, self.batches, self.index)
                    if not batch:
                        break
                    with uninterrupted():
                        self._advance(batch, shares, started)
                self.ranks.stop_together()
                bar.update(*self._window())
                if self._settled():
                    bar.shorten(self.schedule.end)
                if checkpoint is not None and self.step % every == 0 and self.step < self.schedule.end:
                    resuming.save(self, checkpoint)
                if callback is not None:
                    callback(self.history)
            else:
                return
            if self.index == 0:
                raise ValueError("the loader gave no batch in an epoch; can it be read more than once?")
            self.epoch, self.index = self.epoch + 1, 0

    def _advance(self, batch: list[Any], shares: list[float], started: float) -> None:
        """One step of the optimizer, or none where something is not finite."""
        lam = self.options.temperature
        if (rise := self.options.kl_warmup * self.options.total) > self.step:
            lam *= (self.step + 1) / (rise + 1)
        row = {"step": self.step, "epoch": self.epoch, "temperature": lam, "stage": self.stage}
        rate = self.schedule.before(self.step)
        taken = self.failures == 0 and self.snapshot.take(self.step)
        try:
            values, norm = self.make_step(batch, shares, lam)
        except OverflowingError as error:
            self.skipped.append(Skipped(self.epoch, self.index, str(error)))
            self.history.append(**row)
        except (NonFiniteError, LinAlgError) as error:
            self._left_out(str(error))
            self.history.append(**row)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            error.add_note(f"in batch {self.index + getattr(error, 'batch', 0)} of epoch {self.epoch}")
            raise
        else:
            self.failures = 0
            if taken:
                self.snapshot.keep(self.step)
            self.schedule.after()
            estimate = Estimate.of(values)
            self.history.append(
                **row, elbo=estimate.value, standard_error=estimate.standard_error, lr=rate, gradient_norm=norm,
                seconds=time.monotonic() - started,
            )  # fmt: skip
            stride = max(1, self.last_part // AVERAGED)
            if self.options.average and self.step >= self.schedule.end - self.last_part and self.step % stride == 0:
                self.average.update(self.named)
        self.step += 1
        self.index += len(batch)
        self._stream = self.generator.get_state()

    def _left_out(self, reason: str) -> None:
        """A batch without a finite loss changes nothing; from the second in a row on an older state is gone back to."""
        self.skipped.append(Skipped(self.epoch, self.index, reason))
        self.failures += 1
        if self.failures > 1:
            self.snapshot.restore()
        if self.failures == FAILURES:
            names = ", ".join(f"{one.index} of epoch {one.epoch}" for one in self.skipped[-FAILURES:])
            raise NonFiniteError(
                f"{FAILURES} batches in a row ({names}) gave no finite loss, the last because {reason}. "
                f"The posterior is in its last good state that was kept, before step {self.snapshot.step}"
            )

    def _start_factor(self) -> None:
        """The end of stage one: its state is kept, to be compared with what the factor brings."""
        self.without_factor = {name: tensor.detach().clone() for name, tensor in self.learned().items()}
        for family in factored(self.posterior):
            family.start_factor(self.generator)
        self.stage = 2
        self.snapshot.clear()  # a state of stage one is none of stage two's

    def _window(self) -> tuple[float, float]:
        """The ELBO over the last steps, at most an epoch and a hundred, and its standard error."""
        count = min(100, -(-(self.batches.length or 100) // self.options.accumulate))
        values = self.history.recent("elbo", count)
        values = values[values.isfinite()]
        if len(values) < 2:
            return (float(values[0]), self.history.recent("standard_error", 1).item()) if len(values) else (-inf, inf)
        return float(values.mean()), float(values.std()) / sqrt(len(values))

    def _settled(self) -> bool:
        """Whether the trend of the ELBO has just been found to be none: the learning rate then falls to its end."""
        part = self.last_part
        first = FIRST_STAGE * self.options.total if self.options.staged else 0
        check = max(1, part // 4)
        # stage one and both warm-ups begin with the fit
        begun = max(first, max(self.options.kl_warmup, self.options.warmup) * self.options.total)
        early = self.step < begun + part + check
        late = self.schedule.cooling is not None or self.step >= self.schedule.end - part
        if not self.options.stop or early or late or self.step % check or part < 16:
            return False
        # twice: now, and a quarter of the window ago
        for back in (0, check):
            slope, error = self._trend(part, back)
            if slope * part > NEGLIGIBLE or (slope + 2 * error) * part > self._tolerance():
                return False
        self.schedule.cooling, self.schedule.end = self.step, self.step + part
        return True

    def _trend(self, window: int, back: int = 0) -> tuple[float, float]:
        """Over `window` steps, up to `back` steps ago: nats a step at the full learning rate, and its error."""
        elbo, epoch, lr = (self.history.recent(c, window + back)[:window] for c in ("elbo", "epoch", "lr"))
        highest = self.history["lr"].nan_to_num(0.0).max()
        return trend(elbo, epoch, (lr / highest).nan_to_num(0.0))

    def _tolerance(self) -> float:
        """A gain in nats that is worth no further fit: a hundredth of a nat an observation, and one nat at least."""
        return max(1.0, 0.01 * self.options.num_data)

    def back_to_step(self) -> None:
        """After an interruption between two steps: the stream as the last one left it."""
        self.generator.set_state(self._stream)

    def verdict(self) -> str:
        part = self.last_part
        if self.schedule.cooling is not None:
            return "converged"
        if len(self.history) < part or part < 16:
            return "too few steps to tell whether it has converged"
        length = -(-self.batches.length // self.options.accumulate) if self.batches.length else 1
        unit = "epoch" if self.batches.length else "step"
        slope, error = self._trend(2 * part)
        if slope > 2 * error and slope * part > NEGLIGIBLE:
            gain = slope * length
            return f"still improving at {gain:.{0 if gain >= 10 else 2}f} nats per {unit}"
        if (slope + 2 * error) * part > self._tolerance():
            hidden = (slope + 2 * error) * length
            return f"not shown to have converged: {hidden:.2g} nats per {unit} could hide in the noise"
        return "converged"

    def finish(self, stopped: bool) -> FitResult:
        """Choose among the last step, the average and the posterior without its factor, and say what came out."""
        density, evaluation = self.posterior.family(), self.posterior.model.evaluation
        kept, candidates = "last step", {}
        if stopped:
            mean, error = self._window()
            elbo = Estimate(mean, error, self.history.recent("elbo", 1), density.bound)
            comparison = "mean over the last steps: stopped before posteriors were compared"
        else:
            most = self.compared
            states = {"last step": {name: tensor.detach().clone() for name, tensor in self.learned().items()}}
            if self.average.count > 1:
                states[f"average of the last {self.average.count}"] = {**states["last step"], **self.average.mean}
            if self.without_factor:
                states["without the factor"] = self.without_factor
            for name, state in states.items():
                assign(self.learned(), state)
                candidates[name] = self._evaluate(most)
                # the average is wanted where it costs nothing; the simpler posterior only where it is better
                if candidates[name].value > candidates[kept].value or (
                    name.startswith("average") and candidates[name].value == candidates[kept].value
                ):
                    kept = name
            assign(self.learned(), states[kept])
            elbo = candidates[kept]
            if elbo.value == -inf:
                self.notes.append("the ELBO over the full data is not finite: some observation has none at some draw")
            seen = self.batches.length if self.batches.length is not None else most
            data = "all data" if seen <= most else f"{most} of {seen} batches"
            comparison = f"{COMPARISON_GROUPS} groups of draws, {data}"
        done = self.epoch + (self.index / self.batches.length if self.batches.length else 0)
        verdict = "stopped by you" if stopped else self.verdict()
        if verdict.startswith("still improving"):
            self.notes.append(
                "improving: at the highest learning rate, which falls to zero in a fit; call fit again to go on"
            )
        if not stopped and elbo.value == -inf:
            verdict = "no finite ELBO: print(result) says which batch and why"
        return FitResult(
            verdict, elbo, kept, candidates, comparison, self.history,
            self.step, done, self.options.temperature, density.bound,
            self.batches.exact and self.generator.device.type == "cpu" and not evaluation.times(self.generator.device),
            self.skipped, self._notes(density.bound), str(evaluation),
        )  # fmt: skip

    def _evaluate(self, most: int) -> Estimate:
        generator = torch.Generator(self.generator.device).manual_seed(self.options.seed + 1)
        stream = torch.Generator().manual_seed(self.options.seed + 2)
        batches = Counted(self.batches.everything(most, (self.ranks.rank, self.ranks.size)))
        with self.posterior.network_mode(), borrowed_stream(stream):
            try:
                estimate = full_elbo(
                    self.posterior.family, self.posterior.model, batches, groups=COMPARISON_GROUPS, generator=generator
                )
            except (NonFiniteError, LinAlgError):
                estimate = not_finite(COMPARISON_GROUPS)
        return self.ranks.pool(estimate, batches.observations)

    def _notes(self, bound: bool) -> list[str]:
        notes = list(self.notes)
        model = self.posterior.model
        if self.options.temperature != 1:
            notes.append(
                f"λ = {self.options.temperature:g}: a tempered posterior is not the posterior; the ELBO is at λ = 1"
            )
        if self.generator.device.type == "cuda" and self.make_step.reason is not None:
            notes.append(f"the step was not captured as a CUDA graph: {self.make_step.reason}")
        if self.ranks.size > 1:
            what = "its part of every batch" if self.ranks.mode == "data" else "its own draws for every batch"
            notes.append(f"{self.ranks.size} ranks, each with {what}")
        if not bound:
            notes.append("point masses: no lower bound; their entropy is left out of the ELBO")
        if isinstance(model.likelihood, Likelihood) and not model.likelihood.exact:
            notes.append("the likelihood is weighted: its ELBO is no bound on the evidence")
        if isinstance(model.prior, PriorModule) and not model.prior.normalised:
            notes.append("the prior is not normalised: the ELBO is known up to a constant")
        if not self.batches.exact:
            notes.append(f"not exact: {self.batches.inexact}; a resumed run differs from one never stopped")
        elif model.evaluation.times(self.generator.device):
            notes.append("not exact: a clock decides between vmap and loop; deterministic=True lets a rule do so")
        elif self.generator.device.type != "cpu":
            notes.append(f"not exact: kernels on {self.generator.device.type} may add in another order each time")
        if self.skipped:
            first = self.skipped[0]
            notes.append(
                f"{len(self.skipped)} steps undone, not finite; the first at batch {first.index} of epoch "
                f"{first.epoch}: {first.reason}"
            )
        return notes


def factored(posterior: "Posterior") -> list[StructuredNormal | StructuredPrecision]:
    """The families with a low-rank factor: the posterior's own, or parts and blocks of it."""
    modules = posterior.family.modules()
    return [m for m in modules if isinstance(m, StructuredNormal | StructuredPrecision) and m.rank]
