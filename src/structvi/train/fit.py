"""`fit`: train a posterior on minibatches."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from inspect import signature
from itertools import islice
from math import cos, inf, nan, pi, sqrt
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # pyright: ignore

from ..distributed.ranks import Ranks, Taken
from ..families.low_rank import factors, hold_factors, release_factors
from ..files import fit_checkpoint
from ..models.bayesian_model import rows
from ..objective import Estimate, Estimator, NonFiniteError
from ..optim.adam import OptimizerLike, make_optimizer
from ..optim.coordinates import CoordinateOptimizer
from ..result import Status
from ..util.checks import check_fraction, check_integer, check_positive, check_seed
from ..util.interrupts import Interrupts
from ..util.progress import Progress
from ..util.random_streams import borrowed_stream
from .checkpoint import Checkpoint, copied, problem, restore, save
from .checks import notes_on_data, remember_choice
from .compare import SHORTEST_PART, Trend, finish, held_out_log_density
from .data import Batches, warn_of_seen
from .result import FitResult, History, Skipped
from .step import Compute, OverflowingError, Step

if TYPE_CHECKING:
    from ..posterior import Posterior

#: part of the steps in which λ rises, of a posterior that was never fitted: measured on UCI networks
KL_WARMUP = 0.25
#: part of the steps after which the factor starts: measured on UCI networks
FIRST_STAGE = 0.4
#: part of the steps that is averaged, whose trend gives the verdict, and in which a converged fit ends
LAST_PART = 0.25
#: batches in a row without a finite loss that end the fit
FAILURES = 5


@dataclass(frozen=True)
class Schedule:
    """Options of `fit` for learning rate, λ and stages.

    Args:
        warmup: fraction of the steps in which the learning rate rises.
        hold: fraction of the steps after which the rate falls; 0.5 for deep networks from scratch with `Soap`.
        kl_warmup: fraction of the steps in which λ rises from zero. "auto" is a quarter for a posterior that was never
            fitted, and none otherwise. With λ = 1 from the start, units are switched off before they have learned.
        staged: of families with a low-rank factor fit mean and scales first, and the factor after 40 % of the steps.
            "auto" does so for a posterior that was never fitted, if a verdict on convergence is possible.
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


def fit(
    posterior: "Posterior",
    loader: Iterable[Any],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    lr: float | None = None,
    optimizer: OptimizerLike | None = None,
    schedule: Schedule = Schedule(),
    clip: float | None = 10.0,
    accumulate: int = 1,
    kl_weight: float = 1.0,
    estimator: Estimator = Estimator(),
    validation: Iterable[Any] | None = None,
    checkpoint: Checkpoint | None = None,
    compute: Compute = Compute(),
    progress: bool = True,
    seed: int = 0,
    callback: Callable[[History], None] | None = None,
) -> FitResult:
    """Maximise E log lik − λ KL[q‖prior] over minibatches, and return the result.

    A fit learns `posterior.parameters()`: the parameters of the family, of likelihood and prior. At the end it compares
    the last step with the average over the last quarter of the steps, on common draws, and keeps the better one. Ctrl-C
    ends the fit with the posterior of the last step. Another fit starts from a fitted posterior.

    Args:
        posterior: what to fit.
        loader: a `DataLoader`, or any re-iterable of batches. N is the length of its data set unless the model has it.
        epochs, steps: the length: one of them. A step takes `accumulate` batches. Around a network that is trained
            already use `laplace(loader, validation=held_out)`; `fit` can train the result further.
        lr: the highest learning rate of the default optimizer, Adam; 0.02 if not given.
        optimizer: a torch optimizer, or a function from parameters to one; without weight decay. `vi.optim.Soap(bayes)`
            preconditions the means of deep networks from scratch; at λ = 1 `vi.optim.NaturalGradient(bayes)`.
        schedule: `vi.Schedule(..)` for learning rate, λ and stages. With a torch scheduler write a loop: `stepper`.
        clip: the largest norm of the gradient of −elbo/N; None for no limit.
        accumulate: how many batches share one step.
        kl_weight: λ. For λ ≠ 1 the result is not the posterior; the reported ELBO is always at λ = 1.
        estimator: `vi.Estimator(kind, groups, coupling)` of the gradient.
        validation: held-out data, as `loader`: they take no part in the fit, and select what is kept. Their log density
            is in the history once an epoch.
        checkpoint: `vi.Checkpoint(directory)` to write the fit's state, and to resume.
        compute: `vi.Compute(..)` for mixed precision, compilation, CUDA graphs and several processes.
        progress: show one live line, in a terminal or a notebook; elsewhere ten plain ones.
        seed: of all randomness: draws, the order of the data, dropout.
        callback: called with the history after every step; it may raise KeyboardInterrupt to end the fit.

    Example:
        >>> import torch
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField())
        >>> result = bayes.fit(loader, epochs=2, progress=False)
        >>> result.steps, result.verdict
        (8, 'too few steps to tell whether it has converged')
    """
    options = Options(**dict(list(locals().items())[2:]))
    ranks = Ranks(compute.parallel, posterior.family)
    try:
        one = Fit(posterior, loader, options, ranks)
        with one.running():
            for taken in one.batches():
                began, rate = time.monotonic(), one.set_rates(one.rate_factor)
                try:
                    outcome = one.make_step(*one.weighted(taken), one.kl_weight)
                except (NonFiniteError, LinAlgError) as error:
                    one.leave_out(error)
                else:
                    elbo = Estimate.of(outcome.elbo)
                    one.record(elbo.value, elbo.standard_error, outcome.norm, rate, time.monotonic() - began)
                one.end_step(taken)
        if checkpoint is not None:
            save(one, checkpoint.directory)
        posterior.last_fit = result = finish(one)
    finally:
        ranks.close()
    return result


class Options(SimpleNamespace):
    """The arguments of `fit` after the first two, by name and checked."""

    def __init__(self, **given: Any):
        bound = signature(fit).bind(None, None, **given)
        bound.apply_defaults()
        super().__init__(**dict(list(bound.arguments.items())[2:]))
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"a fit needs a length, got epochs={self.epochs!r} and steps={self.steps!r}: fit(loader, epochs=20) "
                "trains the posterior; around a trained network use laplace(loader, validation=held_out)"
            )
        for name in ("epochs", "steps", "accumulate"):
            check_integer(name, getattr(self, name), optional=name != "accumulate")
        check_positive(self.kl_weight, "kl_weight")
        check_seed(self.seed)
        if isinstance(self.validation, int | float):
            raise TypeError(f"validation must be held-out data, as the loader, got {self.validation!r}: split the data")
        for name, kind in (
            ("estimator", Estimator), ("schedule", Schedule), ("checkpoint", Checkpoint | None), ("compute", Compute)
        ):  # fmt: skip
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} must be vi.{name.capitalize()}(..), got {getattr(self, name)!r}")


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


def _cosine(progress: float) -> float:
    return 0.5 * (1 + cos(pi * progress))


class Fit:
    """One fit. Numbers say where it is; a step changes them, and the tensors of the posterior in place.

    Args:
        posterior: what to fit.
        loader: its data.
        options: of the fit.
        ranks: the processes that share the work.
    """

    def __init__(self, posterior: "Posterior", loader: Iterable[Any], options: Options, ranks: Ranks):
        if not torch.is_grad_enabled():
            raise ValueError("a fit needs gradients: call it outside torch.no_grad() and torch.inference_mode()")
        found = None if options.checkpoint is None else options.checkpoint.found(ranks.rank)
        if options.validation is not None:
            warn_of_seen(loader, options.validation)
        remember_choice(posterior, options.validation, options.seed)
        self.posterior, self.options, self.ranks = posterior, options, ranks
        self.data = Batches(loader, options.seed, posterior.device, ranks.part)
        self.data.share(ranks)
        self.notes = notes_on_data(posterior, self.data, options.validation, options.estimator.kind != "log_q")
        self.optimizer = make_optimizer(posterior, options.optimizer, options.lr)
        self.generator = torch.Generator(posterior.device).manual_seed(options.seed)
        self.make_step = Step(
            posterior, self.optimizer, self.generator, options.estimator, options.clip, options.compute.capture, ranks
        )
        #: the learning rate of each group of the optimizer, where the course is at its height
        self.highest = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.settings = self._settings({} if found is None else found.description["settings"])
        self.named, self.learned = self.make_step.named, posterior.learned()
        self.history, self.skipped, self.held_out = History(), list[Skipped](), None
        self.show, self.bar = options.progress and ranks.rank == 0, None
        self.mean_rows = self.data.mean_rows(options.accumulate, ranks)
        #: steps made; the epoch, and the batch in it, at which the next one begins; observations of all steps
        self.step = self.epoch = self.index = self.rows = 0
        #: where the fit ends
        self.steps = self.end = int(self.settings["steps"])
        #: the step from which the rate falls to its end, once the fit has converged
        self.cooling: int | None = None
        self.failures = 0
        #: whether the user ended it early
        self.stopped = False
        #: the mean over the last iterates, and of how many
        self.average: dict[str, Tensor] = {}
        self.averaged = 0
        self.interrupts = Interrupts(waits=False)
        self.stage = 1 if self.settings["staged"] else 2
        self.problem = {} if options.checkpoint is None else problem(self)
        #: the state of the generator after the last step
        self.stream = self.generator.get_state()
        if found is not None:
            self.notes += restore(self, found)
        elif options.checkpoint is not None and options.checkpoint.resume:
            self.notes.append(f"nothing to resume in {options.checkpoint.directory}: started from the beginning")
        if self.stage == 1:
            hold_factors(posterior.family)

    def _settings(self, then: dict[str, Any]) -> dict[str, Any]:
        """Return what a resumed fit must share; "auto" is decided by whether the posterior was fitted before."""
        options, steps, length = self.options, self.options.steps, self.data.length
        if options.epochs is not None:
            if length is None:
                raise ValueError("the loader does not know how many batches it has: give steps= instead of epochs=")
            steps = options.epochs * -(-length // options.accumulate)
        staged, kl_warmup = options.schedule.staged, options.schedule.kl_warmup
        is_first = self.posterior.fit_status is None
        if staged == "auto":
            staged = then.get("staged", is_first and LAST_PART * (steps or 0) >= SHORTEST_PART)
        if kl_warmup == "auto":
            kl_warmup = then.get("kl_warmup", KL_WARMUP if is_first else 0.0)
        assert steps is not None
        estimator, own = options.estimator, {key: x for key, x in self.optimizer.defaults.items() if key != "lr"}
        return {
            **asdict(options.schedule), "kl_warmup": float(kl_warmup),
            "staged": bool(staged and factors(self.posterior.family)),
            "steps": steps, "accumulate": options.accumulate, "estimator": estimator.kind, "groups": estimator.groups,
            "coupling": getattr(estimator.coupling, "__qualname__", repr(estimator.coupling)), "clip": options.clip,
            "kl_weight": float(options.kl_weight), "precision": str(options.compute.precision), "seed": options.seed,
            "num_data": self.posterior.model.num_data, "learning rates": self.highest,
            "optimizer": f"{type(self.optimizer).__name__} with {own}", "device": self.posterior.device.type,
        }  # fmt: skip

    # ---------------------------------------------------------------------------------------------------- schedule

    @property
    def goes_on(self) -> bool:
        return self.step < self.end

    @property
    def last_part(self) -> int:
        return max(1, round(LAST_PART * self.steps))

    @property
    def steps_an_epoch(self) -> int | None:
        return -(-self.data.length // self.options.accumulate) if self.data.length else None

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
        """Set the learning rates; return the highest of all groups."""
        for group, highest in zip(self.optimizer.param_groups, self.highest, strict=True):
            group["lr"] = highest * factor
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    @property
    def stage_two_is_due(self) -> bool:
        return self.stage == 1 and self.step >= round(FIRST_STAGE * self.steps)

    def begin_stage_two(self) -> None:
        """Let the factor learn."""
        self.stage = 2
        release_factors(self.posterior.family, self.generator)

    def settle(self) -> None:
        """End the fit early if the trend of its ELBO has just been found to be none."""
        part, settings = self.last_part, self.settings
        check = max(1, part // 4)
        first = FIRST_STAGE if settings["staged"] else 0.0
        early = self.step < max(first, settings["kl_warmup"], settings["warmup"]) * self.steps + part + check
        late = self.cooling is not None or self.step >= self.end - part
        if not settings["stop"] or early or late or self.step % check or part < SHORTEST_PART:
            return
        # twice: now, and a quarter of the window ago
        if all(Trend.of(self.history, part, part, settings["num_data"], back).has_ended for back in (0, check)):
            self.cooling, self.end = self.step, self.step + part

    # ------------------------------------------------------------------------------------------------------- steps

    @contextmanager
    def running(self) -> Iterator[None]:
        """Steps are made inside. However they end, the posterior can be used again; a Ctrl-C sets `stopped`."""
        posterior, kept = self.posterior, self.options.checkpoint
        common = {**self.settings, "step resumed from": self.step, "family": repr(posterior.family)}
        self.ranks.start(common, self.learned, [*posterior.net.parameters(), *posterior.net.buffers()])
        self.bar = Progress(self.end, self.step) if self.show else None
        try:
            with self.ranks.interruptible(), self.options.compute.applied(posterior), self.interrupts:
                yield
        except KeyboardInterrupt:
            self.stopped = True
        except Exception as error:
            error.add_note(f"in batch {self.index} of epoch {self.epoch}, after step {self.step}")
            for newest in [] if kept is None else fit_checkpoint.files(kept.directory)[:1]:
                error.add_note(f"go on from {newest} with resume=True")
            raise
        finally:
            if self.bar is not None:
                self.bar.close()
            self.set_rates(1.0)  # the optimizer may be the user's
            release(posterior)

    def batches(self) -> Iterator[Taken]:
        """Give the batches of every step that is left, over all epochs."""
        while self.goes_on:
            iterator = self.data.epoch(self.epoch, self.index)
            while self.goes_on:
                with self.reading():
                    taken = self.take(iterator)
                if not taken.batches:
                    self.end_epoch()
                    break
                self.interrupts.waits = True  # no step is made in part
                if isinstance(self.optimizer, CoordinateOptimizer):
                    self.optimizer.settled = self.step >= self.end - self.last_part
                yield taken

    def reading(self) -> AbstractContextManager[None]:
        """Hold the global streams while data are read that may draw random numbers; each step has a seed of its own."""
        if not self.data.draws:
            return nullcontext()
        seed = (self.options.seed * 1_000_003 + self.step) % 2**63
        return borrowed_stream(torch.Generator().manual_seed(seed), self.ranks.rank)

    def take(self, iterator: Iterator[Any]) -> Taken:
        """Take the batches of the next step, with their observations; none at the end of an epoch."""
        if self.ranks.size > 1:
            return self.ranks.take(iterator, self.options.accumulate, self.data, self.index)
        batches, data = list(islice(iterator, self.options.accumulate)), self.data
        counts = [data.rows_of(self.index + i)[0] if data.splits else rows(x) for i, x in enumerate(batches)]
        return Taken(batches, [*map(float, counts)], sum(counts))

    def weighted(self, taken: Taken) -> tuple[list[Any], list[float], float]:
        """Return the batches of a step, their weights, and the sum of all weights: all observations count the same."""
        mean = self.mean_rows or (self.rows + taken.whole) / (self.step + 1)
        return taken.batches, [count / mean for count in taken.rows], taken.whole / mean

    def record(self, elbo: float, standard_error: float, norm: float, lr: float, seconds: float) -> None:
        """Write a finite step into the history; the iterates of the last steps are averaged."""
        self.failures = 0
        if self.posterior.fit_status is None:
            self.posterior.fit_status = Status.STOPPED  # it has moved
        if self.step >= self.end - self.last_part:
            self.averaged += 1
            if not self.average:
                self.average = copied(self.named)
            with torch.no_grad():
                means = [self.average[name] for name in self.named]
                torch._foreach_lerp_(means, list(self.named.values()), 1 / self.averaged)  # pyright: ignore
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

    def end_step(self, taken: Taken) -> None:
        """Count the step, and do what is due between two steps."""
        self.rows, self.step, self.index = self.rows + taken.whole, self.step + 1, self.index + len(taken.batches)
        if self.stage_two_is_due:
            self.begin_stage_two()
        self.settle()
        self.stream, self.interrupts.waits = self.generator.get_state(), False
        if self.interrupts.kept:
            self.interrupts.act()
        if self.ranks.stopping:
            raise KeyboardInterrupt
        if self.bar is not None:
            self.bar.update(*self.recent_elbo(), self.held_out, self.end)
        kept = self.options.checkpoint
        if kept is not None and kept.every is not None and self.step % kept.every == 0 and self.goes_on:
            save(self, kept.directory)
        if self.options.callback is not None:
            self.options.callback(self.history)

    def end_epoch(self) -> None:
        """Measure the held-out data, and begin the next epoch."""
        if self.options.validation is not None:
            self.held_out = held_out_log_density(self.posterior, self.data, self.options.validation)
            self.history.set_last("held_out", self.held_out)
        if self.index == 0:
            raise ValueError("the loader gave no batch in an epoch; can it be read more than once?")
        self.epoch, self.index = self.epoch + 1, 0
        if self.options.checkpoint is not None and self.options.checkpoint.every is None:
            save(self, self.options.checkpoint.directory)

    def recent_elbo(self) -> tuple[float, float]:
        """Return the ELBO over the last steps, at most an epoch and a hundred, and its standard error."""
        values = self.history.recent("elbo", min(100, self.steps_an_epoch or 100))
        values = values[values.isfinite()]
        if len(values) < 2:
            return (float(values[0]), self.history.recent("standard_error", 1).item()) if len(values) else (-inf, inf)
        return float(values.mean()), float(values.std()) / sqrt(len(values))


def release(posterior: "Posterior") -> None:
    """Let all low-rank factors learn again after a fit, however it ended."""
    for factor in factors(posterior.family):
        factor.requires_grad_(True)
