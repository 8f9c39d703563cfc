"""One run of a fit: what stays the same through it, the loop over steps, and what comes out in the end."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf, sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # pyright: ignore

from ..distributed.ranks import Counted, Ranks, Taken
from ..families.low_rank import hold_factors, release_factors
from ..objective import Estimate, Estimator, NonFiniteError, not_finite
from ..optim.coordinates import CoordinateOptimizer
from ..result import Status
from ..util.budget import STEP, batches_within, default_passes
from ..util.interrupts import uninterrupted
from ..util.progress import progress_bar
from ..util.random_streams import borrowed_stream
from . import verdict as words
from .averaging import Snapshots, assign, averaged, copied
from .batches import Batches, mean_rows
from .checkpoints import save
from .comparing import LAST_STEP, WITHOUT_FACTOR, Worth, average_of, worth_on_seed
from .constant_predictor import Watched, explain, worse_than_nothing
from .notes import notes_of
from .optimizers import OptimizerLike, described, make_optimizer
from .options import MakeScheduler, Settings
from .progress import Progress
from .result import FitResult, History, Skipped
from .schedule import LearningRate
from .state import FitState
from .step import OverflowingError, Step
from .validation import FEW_DRAWS, Choice, Watch
from .verdict import LAST_PART, SHORTEST_PART, Trend

if TYPE_CHECKING:
    from ..posterior import Posterior

#: The factor starts after this part of the steps: 40 %, measured on UCI networks.
FIRST_STAGE = 0.4
#: Groups of draws on which posteriors are compared.
COMPARISON_GROUPS = 8
#: At most so many steps lie between the states that a fit can go back to.
MOST_LOST = 200
#: About so many iterates are averaged: those between them are much the same.
AVERAGED = 256
#: So many batches in a row without a finite loss end the fit.
FAILURES = 5


class Run:
    """One run: `run.state` is all of it that changes, and a step gives it a new one.

    Args:
        posterior: N must be known.
        batches: what it is fitted to.
        settings: what the run is defined by.
        estimator: of the ELBO and its gradient.
        ranks: the processes that share the work.
        optimizer, scheduler, lr, capture: as in `fit`.
        watch: held-out data.
    """

    def __init__(
        self,
        posterior: "Posterior",
        batches: Batches,
        settings: Settings,
        estimator: Estimator,
        ranks: Ranks,
        optimizer: OptimizerLike | None,
        scheduler: MakeScheduler | None,
        lr: float | None,
        capture: bool,
        watch: Watch | None = None,
    ):
        self.posterior, self.batches, self.settings, self.ranks = posterior, batches, settings, ranks
        self.named: dict[str, Tensor] = dict(posterior.named_parameters())
        self.generator = torch.Generator(posterior.device).manual_seed(settings.seed)
        self.notes: list[str] = []
        self.watch = watch
        #: whether a bar shows how far the comparison is
        self.show = False
        #: the posterior as it begins and the network, where that is trained: candidates of a fit with held-out data
        self.begun: dict[str, Tensor] = {}
        self.trained: Tensor | None = None
        self.choice = Choice()
        #: log likelihood of the best output that ignores the input, once posteriors were compared
        self.constant: float | None = None
        self.known: dict[str, Worth] = {}  # candidates that were compared with those of other runs, at once
        #: observations a step over an epoch, where that is known before one was read
        self.mean_rows = mean_rows(batches, settings.accumulate, ranks)
        total = settings.total
        self.optimizer = make_optimizer(posterior, optimizer, lr)
        self.schedule = LearningRate(self.optimizer, scheduler, settings.warmup, total, settings.hold)
        self.snapshots = Snapshots(posterior.learned(), every=max(1, min(MOST_LOST, total // 20)))
        self.make_step = Step(
            posterior, self.optimizer, self.generator, estimator=estimator, clip=settings.clip, capture=capture,
            ranks=ranks,
        )  # fmt: skip
        self.state: FitState = FitState(
            settings, described(self.optimizer), tuple(self.schedule.highest), posterior.learned(),
            self.generator.get_state(), History(), end=total, stage=1 if settings.staged else 2,
        )  # fmt: skip
        if settings.staged:
            hold_factors(posterior.family)

    @property
    def cycle(self) -> int:
        """Steps of the present cycle of the learning rate: all, but for a fit that was extended."""
        return self.settings.total - self.state.begun

    @property
    def last_part(self) -> int:
        return max(1, round(LAST_PART * self.cycle))

    @property
    def passes(self) -> float:
        """Over the data, of all steps: see `budget`."""
        return STEP * self.make_step.draws * self.state.rows / self.settings.num_data

    @property
    def compared(self) -> int | None:
        """At most so many batches are read to compare posteriors at the end; None for all."""
        candidates = 1 + sum(map(bool, (self.state.averaged > 1, self.state.without_factor, self.begun)))
        draws = candidates * COMPARISON_GROUPS * max(1, self.make_step.draws // self.settings.groups)
        default = default_passes(self.passes, self.settings.num_data, self.posterior.space.size)
        length = self.batches.length and self.batches.length * self.ranks.part[1]  # batches of all ranks
        most = max(32, self.settings.total // 40)  # a stream may have no end
        return batches_within(default, draws, length, most)

    @property
    def steps_an_epoch(self) -> int | None:
        return -(-self.batches.length // self.settings.accumulate) if self.batches.length else None

    def loop(
        self,
        bar: Progress,
        checkpoint: str | os.PathLike[str] | None,
        every: int,
        callback: Callable[[History], None] | None,
    ) -> None:
        while self.state.step < self.state.end:
            iterator = self.batches.epoch(self.state.epoch, self.state.index)
            while self.state.step < self.state.end:
                if self.state.stage == 1 and self.state.step >= round(FIRST_STAGE * self.settings.total):
                    self.state = self.second_stage(self.state)
                self.state = replace(self.state, stream=self.generator.get_state())
                started = time.monotonic()
                # data sets and networks that draw random numbers do so from the global stream
                with borrowed_stream(self.generator, self.ranks.rank):
                    accumulate, index = self.settings.accumulate, self.state.index
                    taken = self.ranks.take(iterator, accumulate, self.batches, index)
                    if not taken.batches:
                        break
                    with uninterrupted():
                        self.state = self._advanced(self.state, taken, started)
                self.ranks.stop_together()
                bar.update(*self._window(), self.choice.last)
                if self.settled(self.state):
                    step = self.state.step
                    self.state = replace(self.state, cooling=step, end=step + self.last_part)
                    bar.shorten(self.state.end)
                if checkpoint is not None and self.state.step % every == 0 and self.state.step < self.state.end:
                    save(self, checkpoint)
                if callback is not None:
                    callback(self.state.history)
            else:
                return
            if self.watch is not None:
                self.choice.last = self.watch.of(self.posterior, FEW_DRAWS).mean
                self.state.history.set_last("held_out", self.choice.last)
            if self.state.index == 0:
                raise ValueError("the loader gave no batch in an epoch; can it be read more than once?")
            self.state = replace(self.state, epoch=self.state.epoch + 1, index=0)

    def _advanced(self, state: FitState, taken: Taken, started: float) -> FitState:
        """The state after one step of the optimizer, or after none where something is not finite."""
        settings = self.settings
        lam = settings.kl_weight if state.begun else settings.kl_weight_at(state.step)
        row = {"step": state.step, "epoch": state.epoch, "kl_weight": lam, "stage": state.stage}
        begun, cooling = state.begun, state.cooling
        rate = self.schedule.before(
            state.step - begun, self.cycle, None if cooling is None else cooling - begun, state.end - begun
        )
        snapshot = None
        if state.failures == 0:
            snapshot = self.snapshots.take(state.snapshot, state.snapshot_step, state.step)
        state = replace(state, rows=state.rows + taken.whole)
        # observations a step, or as far as is known yet
        mean = self.mean_rows or state.rows / (state.step + 1)
        if isinstance(self.optimizer, CoordinateOptimizer) and state.step >= state.end - self.last_part:
            self.optimizer.settled = True
        try:
            values, norm = self.make_step(taken.batches, [rows / mean for rows in taken.rows], lam, taken.whole / mean)
        except OverflowingError as error:
            skipped = Skipped(state.epoch, state.index, str(error))
            state = replace(state, skipped=(*state.skipped, skipped))
            state.history.append(**row)
        except (NonFiniteError, LinAlgError) as error:
            state = self._left_out(state, str(error))
            state.history.append(**row)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            error.add_note(f"in batch {state.index + getattr(error, 'batch', 0)} of epoch {state.epoch}")
            raise
        else:
            if snapshot is not None:
                self.snapshots.kept(state.snapshot)
                state = replace(state, snapshot=snapshot, snapshot_step=state.step)
            self.schedule.after()
            estimate = Estimate.of(values)
            state.history.append(
                **row, elbo=estimate.value, standard_error=estimate.standard_error, lr=rate, gradient_norm=norm,
                seconds=time.monotonic() - started,
            )  # fmt: skip
            stride = max(1, self.last_part // AVERAGED)
            if state.step >= state.end - self.last_part and state.step % stride == 0:
                iterates = averaged(state.average, state.averaged, self.named)
                state = replace(state, average=iterates, averaged=state.averaged + 1)
            state = replace(state, failures=0)
        return replace(
            state, step=state.step + 1, index=state.index + len(taken.batches), stream=self.generator.get_state()
        )

    def _left_out(self, state: FitState, reason: str) -> FitState:
        """A batch without a finite loss changes nothing; from the second in a row on an older state is gone back to."""
        skipped = (*state.skipped, Skipped(state.epoch, state.index, reason))
        state = self.state = replace(state, skipped=skipped, failures=state.failures + 1)
        if state.failures > 1 and state.snapshot:
            assign({name: state.learned[name] for name in state.snapshot}, state.snapshot)
        if state.failures == FAILURES:
            names = ", ".join(f"{one.index} of epoch {one.epoch}" for one in state.skipped[-FAILURES:])
            raise NonFiniteError(
                f"{FAILURES} batches in a row ({names}) gave no finite loss, the last because {reason}. "
                f"The posterior is in its last good state that was kept, before step {state.snapshot_step}"
            )
        return state

    def second_stage(self, state: FitState) -> FitState:
        """What stage one ended with is kept, to be compared with what the second brings."""
        without_factor = copied(state.learned)
        release_factors(self.posterior.family, self.generator)
        # a snapshot of stage one is none of stage two's
        return replace(state, without_factor=without_factor, stage=2, snapshot={})

    def _window(self) -> tuple[float, float]:
        """The ELBO over the last steps, at most an epoch and a hundred, and its standard error."""
        history = self.state.history
        values = history.recent("elbo", min(100, self.steps_an_epoch or 100))
        values = values[values.isfinite()]
        if len(values) < 2:
            return (float(values[0]), history.recent("standard_error", 1).item()) if len(values) else (-inf, inf)
        return float(values.mean()), float(values.std()) / sqrt(len(values))

    def settled(self, state: FitState) -> bool:
        """Whether the trend of the ELBO has just been found to be none: the learning rate then falls to its end."""
        part, settings = self.last_part, self.settings
        first = FIRST_STAGE * settings.total if settings.staged and not state.begun else 0
        check = max(1, part // 4)
        # stage one and both warm-ups begin with the fit
        rising = settings.warmup if state.begun else max(settings.kl_warmup, settings.warmup)
        early = state.step - state.begun < max(first, rising * self.cycle) + part + check
        late = state.cooling is not None or state.step >= state.end - part
        if not settings.stop or early or late or state.step % check or part < SHORTEST_PART:
            return False
        # twice: now, and a quarter of the window ago
        return all(Trend.of(state.history, part, part, settings.num_data, back).has_ended for back in (0, check))

    def back_to_step(self) -> None:
        """After an interruption between two steps: the stream as the last one left it."""
        self.generator.set_state(self.state.stream)

    # -------------------------------------------------------------------------------------------------- the result

    def verdict(self) -> tuple[Status, str]:
        part, state = self.last_part, self.state
        if state.cooling is not None:
            return Status.CONVERGED, "converged"
        if len(state.history) < part or part < SHORTEST_PART:
            return Status.TOO_SHORT, words.TOO_SHORT
        trend = Trend.of(state.history, 2 * part, part, self.settings.num_data)
        steps = self.steps_an_epoch
        return trend.judge() if steps is None else trend.judge(steps, "epoch")

    def finish(self, stopped: bool) -> FitResult:
        """Choose among the last step, the average and the posterior without its factor, and say what came out."""
        state, bound = self.state, self.posterior.family().bound
        kept, worths = LAST_STEP, dict[str, Worth]()
        if stopped:
            mean, error = self._window()
            elbo = Estimate(mean, error, state.history.recent("elbo", 1), bound)
            comparison = "mean over the last steps: stopped before posteriors were compared"
            status, verdict = Status.STOPPED, words.STOPPED
        else:
            kept, worths = self._best()
            elbo = worths[kept].elbo
            most, seen = self.compared, (self.batches.length or 0) * self.ranks.part[1]
            data = "all data" if most is None or seen <= most else f"{most} of {seen} batches"
            comparison = f"{COMPARISON_GROUPS} groups of draws, {data}"
            status, verdict = self.verdict()
            worse = worse_than_nothing(elbo.value, elbo.standard_error, self.constant)
            if worse and bound and status is not Status.TOO_SHORT:
                assert self.constant is not None
                self.notes.append(explain(elbo.value, self.constant, status is Status.IMPROVING))
            elif status is Status.IMPROVING:
                self.notes.append(
                    "improving: at the highest learning rate, which falls to zero in a fit; call fit again to go on"
                )
            if elbo.value == -inf:
                self.notes.append("the ELBO over the full data is not finite: some observation has none at some draw")
                status, verdict = Status.DIVERGED, words.NOT_FINITE
        evaluation = self.posterior.model.evaluation
        tempered = self.settings.kl_weight != 1.0
        on_cpu = self.generator.device.type == "cpu"
        return FitResult(
            status=status, verdict=verdict, elbo=elbo, kept=kept, comparison=comparison,
            candidates={name: one.elbo for name, one in worths.items()},
            objectives={name: one.objective for name, one in worths.items()} if tempered else {},
            history=state.history, steps=state.step, passes=self.passes,
            epochs=state.epoch + (state.index / self.batches.length if self.batches.length else 0),
            kl_weight=self.settings.kl_weight, bound=bound, exact=self.batches.exact and on_cpu,
            skipped=list(state.skipped), notes=notes_of(self, bound), evaluation=str(evaluation),
            constant=self.constant,
            held_out={name: one.mean for name, one in self.choice.held_out.items()},
            network=None if self.choice.network is None else self.choice.network.mean,
            against_network=self.choice.against_network(kept),
        )  # fmt: skip

    def _best(self) -> tuple[str, dict[str, Worth]]:
        """Which of the posteriors is kept, and what they came to on common draws; the posterior is then that one.

        The objective that was fitted decides, E log lik − λ KL: at λ = 1 the ELBO.
        """
        state, kept = self.state, LAST_STEP
        states = {kept: copied(state.learned)}
        if state.averaged > 1:
            states[average_of(state.averaged)] = {**states[kept], **state.average}
        if state.without_factor:
            states[WITHOUT_FACTOR] = {**state.without_factor}
        if self.begun:
            states["the start"] = self.begun
        simpler = {WITHOUT_FACTOR}
        found: dict[str, Worth] = {}
        for name, values in states.items():
            assign(state.learned, values)
            found[name] = self.known.get(name) or self._evaluate(f"comparing {len(found) + 1}/{len(states)}")
            # the average is wanted where it costs nothing; the simpler posterior only where it is better
            own, best = found[name].objective.value, found[kept].objective.value
            if own - best > 0 or (own == best and name not in simpler):
                kept = name
        if self.watch is not None:
            kept = self.choice.make(self.posterior, self.watch, states, state.learned, self.trained, kept)
            self.notes += self.choice.notes
        if kept in states:
            assign(state.learned, states[kept])
        else:
            found[kept] = self._evaluate("comparing")
        return kept, found

    def _evaluate(self, label: str) -> Worth:
        every = self.batches.everything(self.compared, (self.ranks.rank, self.ranks.size))
        read = Watched(every, self.posterior.model)
        batches = Counted(progress_bar(read, total=self.compared, label=label, show=self.show))
        try:
            settings = self.settings
            worth = worth_on_seed(self.posterior, batches, COMPARISON_GROUPS, settings.seed, settings.kl_weight)
        except (NonFiniteError, LinAlgError):
            worth = Worth(not_finite(COMPARISON_GROUPS), not_finite(COMPARISON_GROUPS))
        else:
            self.constant = read.log_likelihood if self.ranks.size == 1 else None  # each rank has read its part alone
        return Worth(*(self.ranks.pool(one, batches.observations) for one in worth))
