"""A fit between its first step and its last: the schedule, where the fit is, and the loop over its steps."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from math import cos, inf, nan, pi, sqrt
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # pyright: ignore
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..distributed.ranks import Taken
from ..families.low_rank import hold_factors, release_factors
from ..models.bayesian_model import rows
from ..objective import Estimate, NonFiniteError
from ..optim.coordinates import CoordinateOptimizer
from ..result import Status
from ..util.checks import check_fraction
from ..util.interrupts import Interrupts
from ..util.progress import Progress
from ..util.random_streams import borrowed_stream
from .checkpoint import save
from .compare import held_out_log_density
from .data import Batches, mean_rows
from .result import History, Skipped
from .step import OverflowingError, Step
from .verdict import SHORTEST_PART, Trend

if TYPE_CHECKING:
    from ..posterior import Posterior

#: part of the steps in which λ rises, of a posterior that was never fitted: measured on UCI networks
KL_WARMUP = 0.25
#: part of the steps after which the factor starts: measured on UCI networks
FIRST_STAGE = 0.4
#: part of the steps that is averaged, whose trend gives the verdict, and in which a converged fit ends
LAST_PART = 0.25

#: the number of iterates that are averaged, about: neighbours are nearly equal
AVERAGED = 256
#: batches in a row without a finite loss that end the fit
FAILURES = 5
#: what a batch that does not suit the network raises
OF_A_BATCH = (ValueError, TypeError, RuntimeError, IndexError)
#: draws of the weights for held-out data, after each epoch
FEW_DRAWS = 8

#: a function from the optimizer to a torch scheduler, which is called after every step
MakeScheduler = Callable[[Optimizer], LRScheduler]


@dataclass(frozen=True)
class Schedule:
    """Options of `fit` for learning rate, λ and stages.

    Args:
        warmup: fraction of the steps in which the learning rate rises.
        hold: fraction of the steps after which the rate falls; 0.5 for deep networks from scratch with `Soap`.
        kl_warmup: fraction of the steps in which λ rises from zero. "auto" is a quarter for a posterior that was never
            fitted, and none otherwise. With λ = 1 from the start, units are switched off before they have learned.
        staged: of families with a low-rank factor fit mean and scales first, and the factor after 40 % of the steps.
            "auto" does so for a posterior that was never fitted.
        stop: end the fit early if the ELBO no longer rises.
    """

    warmup: float = 0.05
    hold: float = 0.0
    kl_warmup: float | Literal["auto"] = "auto"
    staged: bool | Literal["auto"] = "auto"
    stop: bool = True

    def __post_init__(self) -> None:
        check_fraction("warmup", self.warmup)
        check_fraction("hold", self.hold)
        if self.kl_warmup != "auto":
            check_fraction("kl_warmup", self.kl_warmup)
        if self.staged not in (True, False, "auto"):
            raise ValueError(f'staged must be True, False or "auto", got {self.staged!r}')


def rate_factor(step: int, total: int, warmup: float, hold: float = 0.0) -> float:
    """Return the learning rate relative to the highest: linear warm-up, then a cosine to zero at the last step.

    Args:
        step: from 0.
        total: steps in all.
        warmup: the fraction of the steps in which the rate rises.
        hold: the fraction after which it falls; not before the end of the warm-up.
    """
    rising = round(warmup * total)
    if step < rising:
        return (step + 1) / rising
    held = max(rising, round(hold * total))
    return _cosine(max(0, step - held) / max(1, total - held))


def make_scheduler(optimizer: Optimizer, make: MakeScheduler | None) -> LRScheduler | None:
    """Return the user's scheduler of this optimizer; None for the default course."""
    made = None if make is None else make(optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise TypeError("ReduceLROnPlateau waits for a metric that a noisy ELBO is not; use one that counts steps")
    if made is not None and (not isinstance(made, LRScheduler) or made.optimizer is not optimizer):
        raise TypeError(f"schedule must be a function from this optimizer to a scheduler of it, got {made!r}")
    return made


def _cosine(progress: float) -> float:
    return 0.5 * (1 + cos(pi * progress))


class Fit:
    """One fit. Numbers say where it is; a step changes them, and the tensors of the posterior in place.

    Args:
        posterior: N must be known.
        data: of the fit.
        settings: equal in a resumed fit: "steps", "kl_weight", "kl_warmup", "staged", "stop", "accumulate", ..
        make_step: the step, with optimizer, generator and ranks.
        scheduler: the user's, in place of the default course of the learning rate.
        validation: held-out data.
        show: show how far the comparison at the end is.
    """

    def __init__(
        self,
        posterior: "Posterior",
        data: Batches,
        settings: dict[str, Any],
        make_step: Step,
        scheduler: LRScheduler | None = None,
        validation: Iterable[Any] | None = None,
        show: bool = False,
    ):
        self.posterior, self.data, self.settings, self.make_step = posterior, data, settings, make_step
        self.optimizer, self.generator, self.ranks = make_step.optimizer, make_step.generator, make_step.ranks
        self.scheduler, self.show = scheduler, show
        #: the learning rate of each group of the optimizer, where the course is at its height
        self.highest: list[float] = settings["learning rates"]
        self.named, self.learned = make_step.named, posterior.learned()
        self.validation, self.held_out = validation, None
        self.history, self.notes, self.skipped = History(), list[str](), list[Skipped]()
        self.problem: Mapping[str, str] = {}
        #: observations a step over an epoch, if known before one was read
        self.mean_rows = mean_rows(data, settings["accumulate"], self.ranks)
        #: steps made; the epoch, and the batch in it, at which the next one begins; observations of all steps
        self.step = self.epoch = self.index = self.rows = 0
        #: where the fit ends
        self.steps = self.end = int(settings["steps"])
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
        self.stage = 1 if settings["staged"] else 2
        if self.stage == 1:
            hold_factors(posterior.family)

    @property
    def goes_on(self) -> bool:
        return self.step < self.end

    @property
    def last_part(self) -> int:
        return max(1, round(LAST_PART * self.steps))

    @property
    def steps_an_epoch(self) -> int | None:
        return -(-self.data.length // self.settings["accumulate"]) if self.data.length else None

    @property
    def kl_weight(self) -> float:
        """λ of the next step."""
        rise = self.settings["kl_warmup"] * self.steps
        return self.settings["kl_weight"] * min(1.0, (self.step + 1) / (rise + 1))

    @property
    def rate_factor(self) -> float:
        """The learning rate of the next step relative to the highest: a fit that has converged cools down."""
        step = self.step if self.cooling is None else min(self.step, self.cooling)
        falling = _cosine((self.step - step) / max(1, self.end - step))
        return falling * rate_factor(step, self.steps, self.settings["warmup"], self.settings["hold"])

    def set_rates(self, factor: float) -> float:
        """Set the learning rates, unless a scheduler does; return the highest of all groups."""
        if self.scheduler is None:
            for group, highest in zip(self.optimizer.param_groups, self.highest, strict=True):
                group["lr"] = highest * factor
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def after_step(self) -> None:
        """Let a scheduler of the user's count the step."""
        if self.scheduler is not None:
            self.scheduler.step()

    @property
    def stage_two_is_due(self) -> bool:
        return self.stage == 1 and self.step >= round(FIRST_STAGE * self.steps)

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
                    lr, whole = self.set_rates(self.rate_factor), taken.whole
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
                        self.after_step()
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
                        bar.update(*self.recent_elbo(), self.held_out)
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
        """True if the iterate of this step counts in the average."""
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
        first = FIRST_STAGE if settings["staged"] else 0.0
        early = self.step < max(first, settings["kl_warmup"], settings["warmup"]) * self.steps + part + check
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
            self.held_out = held_out_log_density(self, FEW_DRAWS)
            self.history.set_last("held_out", self.held_out)
        if self.index == 0:
            raise ValueError("the loader gave no batch in an epoch; can it be read more than once?")
        self.epoch, self.index = self.epoch + 1, 0

    def back_to_step(self) -> None:
        """Put the generator back to where the last step left it, after an interruption between two steps."""
        self.generator.set_state(self.stream)

    def recent_elbo(self) -> tuple[float, float]:
        """Return the ELBO over the last steps, at most an epoch and a hundred, and its standard error."""
        values = self.history.recent("elbo", min(100, self.steps_an_epoch or 100))
        values = values[values.isfinite()]
        if len(values) < 2:
            return (float(values[0]), self.history.recent("standard_error", 1).item()) if len(values) else (-inf, inf)
        return float(values.mean()), float(values.std()) / sqrt(len(values))


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
