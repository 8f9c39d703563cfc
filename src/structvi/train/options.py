"""The options of `fit`, checked, and the settings that a resumed fit must share."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..distributed.ranks import Parallel
from ..objective import Estimator
from ..util.checks import check_fraction, check_integer, check_positive, check_seed
from .optimizers import OptimizerLike
from .result import History

#: part of the steps in which λ rises to its value, where nothing has been learned yet: measured on UCI networks
KL_WARMUP = 0.25
#: steps below which a fit is not cut into stages
FEWEST_STAGED = 10


@dataclass(frozen=True)
class Schedule:
    """The course of learning rate, λ and stages over the steps of a fit.

    Args:
        warmup: fraction of the steps in which the learning rate rises.
        hold: fraction of the steps after which the rate falls; 0.5 for deep networks from scratch with `Soap`.
        kl_warmup: fraction of the steps in which λ rises from zero. "auto" is a quarter for a posterior that was never
            fitted, and none otherwise. With λ = 1 from the start, units are switched off before they have learned.
        staged: of families with a low-rank factor fit mean and scales first, and the factor after 40 % of the steps.
            "auto" does so for a posterior that was never fitted.
        stop: end the fit early where the ELBO no longer rises.
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


@dataclass(frozen=True)
class Checkpoint:
    """A directory to which a fit writes its whole state, atomically, and from which it resumes.

    Args:
        directory: belongs to one fit; one that holds checkpoints is refused unless you resume.
        every: steps between checkpoints; an epoch by default. The end of the fit is always written.
        resume: go on from the newest checkpoint in the directory, with the same posterior, data and options; without
            one the fit begins. A finished fit goes on if more epochs or steps are asked for.
    """

    directory: str | os.PathLike[str]
    every: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        os.fspath(self.directory)
        if self.every is not None:
            check_integer("every", self.every)


@dataclass(frozen=True)
class Compute:
    """How a step is computed.

    Args:
        precision: `torch.bfloat16` or `torch.float16` runs the network, and nothing else, in mixed precision.
        compile: run the network through `torch.compile`, one draw at a time: for many large steps.
        capture: on a GPU, with the default optimizer, run the whole step as one CUDA graph where the network allows.
        parallel: over the ranks of a `torch.distributed` process group. "data": each takes its part of every batch, of
            w times the loader's batch size. "draws": each draws its own weights for the same batch. None: they do not
            share the work. "auto" is "data" where there is a group.
    """

    precision: torch.dtype | None = None
    compile: bool = False
    capture: bool = True
    parallel: Parallel = "auto"


#: a function from the optimizer to a torch scheduler, which is called after every step
MakeScheduler = Callable[[Optimizer], LRScheduler]


@dataclass(frozen=True)
class FitOptions:
    """The arguments of `fit`, by the same names; see there."""

    epochs: int | None
    steps: int | None
    lr: float | None
    optimizer: OptimizerLike | None
    schedule: Schedule | MakeScheduler | None
    clip: float | None
    accumulate: int
    kl_weight: float
    estimator: Estimator
    validation: Iterable[Any] | None
    checkpoint: Checkpoint | None
    compute: Compute | None
    progress: bool
    seed: int
    callback: Callable[[History], None] | None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"a fit needs a length, got epochs={self.epochs!r} and steps={self.steps!r}: "
                "fit(loader, epochs=20) trains the posterior; around a network that is trained already use "
                "laplace(loader, validation=held_out)"
            )
        for name in ("epochs", "steps", "accumulate"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))
        for name in ("clip", "kl_weight"):
            if getattr(self, name) is not None:
                check_positive(getattr(self, name), name)
        check_seed(self.seed)
        if isinstance(self.validation, int | float):
            raise TypeError(f"validation must be held-out data, as the loader, got {self.validation!r}: split the data")
        for name, kind in (("estimator", Estimator), ("checkpoint", Checkpoint), ("compute", Compute)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be vi.{kind.__name__}(..), got {value!r}")
        if not isinstance(self.schedule, Schedule | None) and not callable(self.schedule):
            raise TypeError(
                f"schedule must be vi.Schedule(..) or a function from the optimizer to a torch scheduler, "
                f"got {self.schedule!r}"
            )

    @property
    def times(self) -> Schedule:
        """The schedule; of a scheduler of the user's the rest of it: the whole length is its own."""
        if self.schedule is None:
            return Schedule()
        return self.schedule if isinstance(self.schedule, Schedule) else Schedule(stop=False)

    @property
    def scheduler(self) -> MakeScheduler | None:
        return None if isinstance(self.schedule, Schedule | None) else self.schedule

    @property
    def computing(self) -> Compute:
        return self.compute or Compute()

    def settings(self, total: int, kl_warmup: float, staged: bool, num_data: int) -> "Settings":
        times, estimator = self.times, self.estimator
        return Settings(
            total, self.accumulate, estimator.groups, name_of(estimator.coupling), estimator.kind,
            float(self.kl_weight), kl_warmup, times.warmup, self.clip, staged, times.stop,
            str(self.computing.precision), self.seed, num_data, times.hold,
        )  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What a run is defined by; a resumed one must have the same."""

    total: int
    accumulate: int
    groups: int
    coupling: str
    estimator: str
    kl_weight: float
    kl_warmup: float
    warmup: float
    clip: float | None
    staged: bool
    stop: bool
    precision: str
    seed: int
    num_data: int
    hold: float = 0.0

    def kl_weight_at(self, step: int) -> float:
        """λ at this step: it rises to its value."""
        rise = self.kl_warmup * self.total
        return self.kl_weight * ((step + 1) / (rise + 1)) if rise > step else self.kl_weight


def name_of(function: Any) -> str:
    """Name a function by its name, an object by what it prints: equal for equal settings."""
    return getattr(function, "__qualname__", repr(function))
