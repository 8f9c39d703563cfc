"""What `fit` is asked for, checked; and the settings by which a run is defined, which a resumed one must share."""

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..couplings import Coupling, paired
from ..distributed.ranks import Parallel
from ..objective import Kind
from ..util.checks import check_fraction, check_integer, check_one_of, check_positive, check_seed
from .optimizers import OptimizerLike
from .result import History
from .schedule import SchedulerLike

#: The part of the steps in which λ rises to one, measured on UCI networks: see docs/optimisation.md.
KL_WARMUP = 0.25
#: Fewer steps are not cut into stages.
FEWEST_STAGED = 10
#: Options that only steps use: the default, and values that ask for nothing.
OF_STEPS: dict[str, tuple[Any, ...]] = {
    "lr": (None,), "optimizer": (None,), "scheduler": (None,), "precision": (None,), "callback": (None,),
    "warmup": (0.05, 0.0), "hold": (0.0,), "clip": (10.0, None), "accumulate": (1,), "kl_warmup": ("auto", 0.0),
    "groups": (1,), "coupling": (paired,), "estimator": ("path",), "staged": ("auto", False), "compile": (False,),
    "restarts": (1, 0), "compare": (None,), "every": (None,),
}  # fmt: skip


@dataclass(frozen=True)
class FitOptions:
    """The arguments of `fit`, by the same names; see there."""

    epochs: int | None
    steps: int | None
    lr: float | None
    optimizer: OptimizerLike | None
    scheduler: SchedulerLike | None
    warmup: float
    hold: float
    clip: float | None
    accumulate: int
    kl_warmup: float | Literal["auto", "paced"]
    temperature: float | Literal["validated"]
    groups: int
    coupling: Coupling
    estimator: Kind
    staged: bool | Literal["auto"]
    average: bool
    precision: torch.dtype | None
    parallel: Parallel
    capture: bool
    compile: bool
    stop: bool
    restarts: int
    start: Literal["trained"] | None
    mean: Literal["learned", "held"]
    validation: Iterable[Any] | float | None
    validation_groups: Sequence[Hashable] | None
    keep: Literal["widest", "best"]
    compare: float | None
    checkpoint: str | os.PathLike[str] | None
    every: int | None
    resume: str | os.PathLike[str] | None
    resume_anyway: bool
    data_id: str | None
    progress: bool
    seed: int
    callback: Callable[[History], None] | None

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"give one of epochs= and steps=, got epochs={self.epochs!r} and steps={self.steps!r}")
        for name in ("epochs", "steps", "accumulate", "every"):
            value: Any = getattr(self, name)
            if value is not None:
                check_integer(name, value, least=0 if name == "steps" and self.start == "trained" else 1)
        if isinstance(self.validation, int | float):
            if not 0 < self.validation < 1:
                raise ValueError(f"validation must be held-out data or a fraction inside (0, 1), got {self.validation}")
            if self.start == "trained" or self.is_around:
                raise ValueError(
                    "validation= as a fraction is for fits that start untrained: a trained network has seen these "
                    "data. Give it data that were held out of its training"
                )
        elif self.validation_groups is not None:
            raise ValueError("validation_groups= is for validation= as a fraction")
        check_one_of("mean", self.mean, ("learned", "held"))
        check_one_of("keep", self.keep, ("widest", "best"))
        check_integer("restarts", self.restarts, least=0)
        check_seed(self.seed)
        check_fraction("warmup", self.warmup)
        check_fraction("hold", self.hold)
        if isinstance(self.kl_warmup, str):
            check_one_of("kl_warmup", self.kl_warmup, ("auto", "paced"))
        else:
            check_fraction("kl_warmup", self.kl_warmup)
        if self.temperature == "validated":
            if self.validation is None:
                raise ValueError('temperature="validated" is chosen on held-out data: give validation=')
            if self.checkpoint is not None or self.resume is not None:
                raise ValueError('temperature="validated" is a path of fits: checkpoint= and resume= are for one')
        else:
            check_positive(self.temperature, "temperature", 'or "validated"')
        if self.compare is not None:
            check_positive(self.compare, "compare")
        if self.clip is not None:
            check_positive(self.clip, "clip")
        if self.staged not in (True, False, "auto"):
            raise ValueError(f'staged must be True, False or "auto", got {self.staged!r}')
        if self.start not in (None, "trained"):
            raise ValueError(f'start must be None or "trained", got {self.start!r}')

    @property
    def is_around(self) -> bool:
        """Whether the posterior is placed around a trained network, without a step."""
        return self.epochs is None and not self.steps

    def number(self) -> float:
        """λ of one fit."""
        assert self.temperature != "validated"
        return float(self.temperature)

    def settings(self, total: int, kl_warmup: float, staged: bool, num_data: int) -> "Settings":
        return Settings(
            total, self.accumulate, self.groups, name_of(self.coupling), self.estimator, self.number(),
            kl_warmup, self.warmup, self.clip, staged, self.average, self.stop, str(self.precision), self.seed,
            num_data, self.mean, self.kl_warmup == "paced", self.hold,
        )  # fmt: skip


@dataclass(frozen=True)
class Settings:
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
    mean: str = "learned"
    #: whether λ waits for the likelihood: its rise then takes at most `kl_warmup` of the steps
    paced: bool = False
    hold: float = 0.0

    def temperature_at(self, step: int) -> float:
        """λ at this step: it rises to its value."""
        rise = self.kl_warmup * self.total
        return self.temperature * ((step + 1) / (rise + 1)) if rise > step else self.temperature


def name_of(function: Any) -> str:
    """A function by its name, an object by what it prints: equal for equal settings."""
    return getattr(function, "__qualname__", repr(function))
