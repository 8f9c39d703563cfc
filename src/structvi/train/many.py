"""Many fits as one computation: the loop over their steps, each with its own schedule, stage, stop and end."""

import time
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite, nan
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ..result import Status
from ..util.interrupts import uninterrupted
from .comparing import LAST_STEP, WITHOUT_FACTOR, average_of
from .constant_predictor import Watched
from .loop import AVERAGED, COMPARISON_GROUPS, FAILURES, FIRST_STAGE, Run
from .progress import Progress
from .result import COLUMNS, FitResult, Skipped
from .stacked_batches import Feed, Read, with_masked_row
from .stacked_elbo import StackedElbo, serves
from .stacked_step import Outcomes, Plan, StackedStep
from .step import AS_ASKED
from .validation import FEW_DRAWS

#: points of a member's curve of held-out densities, about, where it has more epochs
CURVE = 32
NOT_FINITE = "the loss or its gradient is not finite"
HELD_OUT = COLUMNS.index("held_out")


class Member:
    """One fit of many: what its `Run` would know between two steps."""

    def __init__(self, run: Run):
        self.run = run
        self.end, self.cooling = run.state.end, run.state.cooling
        self.rows, self.failures, self.averaged, self.snapshot_step = 0, 0, 0, -1
        self.skipped: list[Skipped] = []
        self.failed = False
        self.watched = 0  # the step of the last point of its curve
        self.told: list[list[float]] = []  # rows of the history that it does not have yet
        self.every, self.last_part = run.snapshots.every, run.last_part
        self.stride, self.check = max(1, self.last_part // AVERAGED), max(1, self.last_part // 4)
        self.stop = run.settings.stop
        self.num_data, self.mean_rows = run.settings.num_data, run.mean_rows
        #: members for which this is the same have the same learning rate and λ at every step
        self.pace = self._pace()

    def _pace(self) -> tuple[Any, ...]:
        settings = self.run.settings
        times = settings.total, self.cooling, self.end, settings.warmup, settings.hold, settings.kl_warmup
        return *times, settings.kl_weight, self.run.schedule.highest[0]

    def at(self, step: int) -> tuple[float, float]:
        """λ, and the learning rate."""
        schedule = self.run.schedule
        rate = schedule.highest[0] * schedule.factor(step, self.run.cycle, self.cooling, self.end)
        return self.run.settings.kl_weight_at(step), rate

    def averages(self, step: int) -> bool:
        return step >= self.end - self.last_part and step % self.stride == 0

    def settle(self, step: int) -> bool:
        """After a step: whether the fit has just been found converged, and now ends earlier."""
        if step % self.check or not self.stop or self.cooling is not None:
            return False
        self.flush(step)
        if not self.run.settled(self.run.state):
            return False
        self.cooling, self.end = step, step + self.last_part
        self.pace = self._pace()
        return True

    def watch(self, step: int) -> None:
        """The held-out density after the last step of an epoch, into the history, as of a fit alone."""
        run = self.run
        if run.watch is None or step < self.watched + self.end // CURVE:
            return
        run.choice.last, self.watched = run.watch.of(run.posterior, FEW_DRAWS).mean, step
        if self.told:
            self.told[-1][HELD_OUT] = run.choice.last
        else:
            run.state.history.set_last("held_out", run.choice.last)

    def flush(self, step: int) -> None:
        """The run's state after this step, as far as all is known of it between two steps."""
        state = self.run.state
        state.history.extend(self.told)
        self.told = []
        self.run.state = replace(
            state, step=step, rows=self.rows, failures=self.failures, cooling=self.cooling, end=self.end,
            skipped=tuple(self.skipped),
        )  # fmt: skip


class Together:
    """M runs, step by step at once.

    Args:
        runs: of one form, each at its first step.
    """

    def __init__(self, runs: Sequence[Run]):
        first = runs[0].make_step
        self.members = [Member(run) for run in runs]
        self.generators = [run.generator for run in runs]
        self.feed = Feed([run.batches for run in runs], self.generators)
        self.device = runs[0].posterior.device
        self.step = StackedStep(
            [run.posterior for run in runs], relative_rates(runs[0]), self.generators, groups=first.groups,
            coupling=first.coupling, estimator=first.estimator.kind, clip=first.clip,
            capture=first.reason != AS_ASKED,
        )  # fmt: skip
        like = self.step.stack.rows
        self.average = {kind: torch.zeros_like(rows, requires_grad=False) for kind, rows in like.items()}
        self.snapshot = {kind: rows.detach().clone() for kind, rows in like.items()}
        self.made = 0

    def why_not(self) -> str | None:
        """What speaks against it, found at a first batch, which is given back; None where nothing does."""
        streams = [generator.get_state() for generator in self.generators]
        feed = Feed(self.feed.batches, self.generators)
        everyone = [True] * len(self.members)
        if self.feed.uneven and self.step.posteriors[0].model.user_forward is not None:
            return "batches are of unequal sizes, and forward= alone knows what of them is the target"
        try:
            read = feed.read(everyone)
            if self.feed.uneven and read.padded < self.step.num_data:
                read = with_masked_row(read)
            return self.step.why_not(read.batch, self._plan(read, everyone)[0], read.rows)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            return f"their batches do not go together: {str(error).splitlines()[0][:200]}"
        finally:
            for one, generator, stream in zip(self.members, self.generators, streams, strict=True):
                one.rows = 0
                generator.set_state(stream)

    def loop(self, bar: Progress) -> bool:
        """All steps; whether the user ended them before their end."""
        try:
            while any(active := [self.made < one.end and not one.failed for one in self.members]):
                with uninterrupted():
                    outcomes = self._one(active)
                shown = [value for value, on in zip(outcomes.elbo, active, strict=True) if on and isfinite(value)]
                mean = fmean(shown) if shown else nan
                bar.update(mean, sum((value - mean) ** 2 for value in shown) ** 0.5 / max(1, len(shown)))
                settled = [one.settle(self.made) for one, goes_on in zip(self.members, active, strict=True) if goes_on]
                if any(settled):
                    bar.shorten(max(one.end for one in self.members))
            return False
        except KeyboardInterrupt:
            return True

    def _one(self, active: list[bool]) -> Outcomes:
        started, step = time.monotonic(), self.made
        self._stages(active)
        due, before = self._due(active)
        epochs = list(self.feed.epochs)
        read = self.feed.read(active)
        for m, one in enumerate(self.members):
            if active[m] and self.feed.epochs[m] > epochs[m]:
                one.watch(step)
        plan, paces = self._plan(read, active)
        outcomes = self.step(read.batch, plan)
        self.made += 1
        seconds, epochs = time.monotonic() - started, self.feed.epochs
        for m, one in enumerate(self.members):
            if not active[m]:
                continue
            temperature, rate = paces[m]
            stage = one.run.state.stage
            if outcomes.finite[m]:
                values = outcomes.elbo[m], outcomes.error[m], rate, outcomes.norm[m]
                one.told.append([step, epochs[m], *values, temperature, stage, nan, seconds])
                one.failures = 0
            else:
                # a fit alone makes the draws of a loss that is not finite again, to see why: the stream is then here
                one.told.append([step, epochs[m], nan, nan, nan, nan, temperature, stage, nan, nan])
                self._left_out(m, step)
        self._keep(due, before, outcomes, step)
        self._average(active, outcomes, step)
        return outcomes

    def _plan(self, read: Read, active: Sequence[bool]) -> tuple[Plan, list[tuple[float, float]]]:
        """What the step has to know, and λ and the learning rate of each member."""
        padded, step, N = read.padded, self.made, self.step.num_data
        known: dict[tuple[Any, ...], tuple[float, float]] = {}
        table, paces = [], []
        for one, rows, goes_on in zip(self.members, read.rows, active, strict=True):
            if (pace := known.get(one.pace)) is None:
                pace = known[one.pace] = one.at(step)
            paces.append(pace)
            ratio = (one.num_data / rows) * (padded / N)
            if goes_on:
                one.rows += rows
                mean = one.mean_rows or one.rows / (step + 1)
                table.append((ratio, rows / mean / one.num_data, *pace, 1.0))
            else:
                table.append((ratio, 0.0, pace[0], 0.0, 0.0))
        return Plan(*torch.tensor(table, dtype=torch.float64).T.contiguous().to(self.device)), paces

    def _stages(self, active: Sequence[bool]) -> None:
        changed = False
        for one, goes_on in zip(self.members, active, strict=True):
            run = one.run
            if goes_on and run.state.stage == 1 and self.made >= round(FIRST_STAGE * run.settings.total):
                run.state, changed = run.second_stage(run.state), True
                one.snapshot_step = -1
        if changed:
            self.step.adam.look()

    # -------------------------------------------------------------------------------- steps that are not finite

    def _due(self, active: Sequence[bool]) -> tuple[list[int], dict[torch.dtype, Tensor]]:
        """Whose last snapshot is old, and all parameters before this step."""
        due = [m for m, one in enumerate(self.members) if active[m] and one.failures == 0 and self._is_old(one)]
        return due, {kind: rows.detach().clone() for kind, rows in self.step.stack.rows.items()} if due else {}

    def _is_old(self, one: Member) -> bool:
        return one.snapshot_step < 0 or self.made >= one.snapshot_step + one.every

    def _keep(self, due: list[int], before: dict[torch.dtype, Tensor], outcomes: Outcomes, step: int) -> None:
        """What was taken is kept where the step was finite."""
        good = [m for m in due if outcomes.finite[m]]
        for m in good:
            self.members[m].snapshot_step = step
        for kind, rows in before.items():
            self.snapshot[kind][good] = rows[good]

    @torch.no_grad()
    def _left_out(self, m: int, step: int) -> None:
        """As of a fit alone, but that the fifth in a row ends this fit and no other."""
        one = self.members[m]
        one.skipped.append(Skipped(self.feed.epochs[m], self.feed.indices[m] - 1, NOT_FINITE))
        one.failures += 1
        if one.failures > 1 and one.snapshot_step >= 0:
            for kind, rows in self.step.stack.rows.items():
                rows[m] = self.snapshot[kind][m]
        one.failed = one.failures == FAILURES

    # --------------------------------------------------------------------------------------- averages and the end

    @torch.no_grad()
    def _average(self, active: Sequence[bool], outcomes: Outcomes, step: int) -> None:
        weights = [0.0] * len(self.members)
        for m, one in enumerate(self.members):
            if active[m] and outcomes.finite[m] and one.averages(step):
                one.averaged += 1
                weights[m] = 1 / one.averaged
        if not any(weights):
            return
        for kind, rows in self.step.stack.rows.items():
            weight = torch.tensor(weights, dtype=kind, device=rows.device).unsqueeze(-1)
            self.average[kind].lerp_(rows, weight)

    def close(self, stopped: bool) -> None:
        """Every run's state after its last step, and what its candidates are worth; then tensors are its own again."""
        stack = self.step.stack
        for m, one in enumerate(self.members):
            one.flush(min(self.made, one.end))
            one.run.make_step.draws = self.step.size
            one.run.state = replace(
                one.run.state, epoch=self.feed.epochs[m], index=self.feed.indices[m], averaged=one.averaged,
                average=stack.values(self.average, m) if one.averaged else {}, stream=self.generators[m].get_state(),
            )  # fmt: skip
        if not stopped:
            self._compare()
        stack.release()

    def _compare(self) -> None:
        """What every member's candidates are worth, at once, where data and family allow; elsewhere each run asks."""
        posterior, table = self.step.objective.posterior, self.feed.table
        if table is None or not serves(posterior.family()):
            return
        runs, rows = [one.run for one in self.members], []
        for run, begins in zip(runs, table[1], strict=True):
            rows.append(begins + torch.tensor([i for own in run.batches.spread(run.compared) for i in own]))
            target = table[0][1][rows[-1].to(self.device)]
            read = Watched([(target, target)], run.posterior.model)
            list(read)
            run.constant = read.log_likelihood
        settings = [run.settings for run in runs]
        worth = StackedElbo(
            posterior, table[0], rows, [own.num_data for own in settings], [own.seed for own in settings],
            COMPARISON_GROUPS, [own.kl_weight for own in settings],
        )  # fmt: skip
        states = [run.state for run in runs]
        for run, found in zip(runs, worth(self.step.stack.views()), strict=True):
            run.known[LAST_STEP] = found
        if any(state.averaged > 1 for state in states):
            for run, found in zip(runs, worth(self.step.stack.views(self.average)), strict=True):
                run.known[average_of(run.state.averaged)] = found
        if all(state.without_factor for state in states):
            names = states[0].without_factor
            before = {name: torch.stack([state.without_factor[name] for state in states]) for name in names}
            for run, found in zip(runs, worth(before), strict=True):
                run.known[WITHOUT_FACTOR] = found

    def finish(self, stopped: bool) -> list[FitResult]:
        """What came out of each run."""
        results = []
        for one in self.members:
            run = one.run
            result = run.finish(stopped or one.failed)
            if one.failed:
                why = f"{FAILURES} batches in a row gave no finite loss: the posterior is as it was some steps before"
                result = replace(result, status=Status.DIVERGED, verdict=why)
            result.notes.append(f"one of {len(self.members)} fits made at once")
            if self.device.type == "cuda" and self.step.reason is not None:
                result.notes.append(f"the step was not captured as a CUDA graph: {self.step.reason}")
            run.posterior.last_fit = result
            results.append(result)
        return results


def relative_rates(run: Run) -> dict[str, float]:
    """Of every tensor by name, relative to the first group's."""
    rates = {
        id(parameter): highest / run.schedule.highest[0]
        for group, highest in zip(run.optimizer.param_groups, run.schedule.highest, strict=True)
        for parameter in group["params"]
    }
    return {name: rates[id(parameter)] for name, parameter in run.named.items()}
