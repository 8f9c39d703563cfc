"""The course of learning rate, λ and stages over the steps of a fit."""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..util.checks import check_fraction

#: part of the steps in which λ rises, of a posterior that was never fitted: measured on UCI networks
KL_WARMUP = 0.25
#: part of the steps after which the factor starts: measured on UCI networks
FIRST_STAGE = 0.4
#: part of the steps that is averaged, whose trend gives the verdict, and in which a converged fit ends
LAST_PART = 0.25

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


class LearningRate:
    """The learning rates of an optimizer over a fit: the default course, or the user's scheduler.

    Args:
        optimizer: its groups' learning rates are the highest.
        scheduler: the user's, a function from the optimizer to one; None for the default.
        warmup, hold: as in `Schedule`.
    """

    def __init__(self, optimizer: Optimizer, scheduler: MakeScheduler | None, warmup: float, hold: float = 0.0):
        made = None if scheduler is None else scheduler(optimizer)
        if isinstance(made, ReduceLROnPlateau):
            raise TypeError("ReduceLROnPlateau waits for a metric that a noisy ELBO is not; use one that counts steps")
        if made is not None and (not isinstance(made, LRScheduler) or made.optimizer is not optimizer):
            raise TypeError(f"schedule must be a function from this optimizer to a scheduler of it, got {made!r}")
        self.optimizer, self.scheduler, self.warmup, self.hold = optimizer, made, warmup, hold
        self.highest = [float(group["lr"]) for group in optimizer.param_groups]

    def factor(self, step: int, total: int, cooling: int | None = None, end: int = 0) -> float:
        """Return the default rate relative to the highest.

        Args:
            step, total: as in `rate_factor`.
            cooling: the step from which the rate falls to zero at `end`, once the fit has converged.
            end: see `cooling`.
        """
        if cooling is not None and step >= cooling:
            falling = _cosine((step - cooling) / (end - cooling))
            return rate_factor(cooling, total, self.warmup, self.hold) * falling
        return rate_factor(step, total, self.warmup, self.hold)

    def set(self, factor: float) -> float:
        """Set the learning rates of a step, but for a scheduler's; return the highest of all groups."""
        if self.scheduler is None:
            for group, highest in zip(self.optimizer.param_groups, self.highest, strict=True):
                group["lr"] = highest * factor
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def after_step(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()


def _cosine(progress: float) -> float:
    return 0.5 * (1 + cos(pi * progress))
