"""The learning rate over the steps of a fit."""

from collections.abc import Callable
from math import cos, pi

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


class LearningRate:
    """Linear warm-up, the highest rate for a while, then cosine decay to zero at the last step; or the user's
    scheduler, a call a step.

    Args:
        optimizer: its groups' learning rates are the highest.
        scheduler: the user's, a function from the optimizer to one; None for the default.
        warmup: the fraction of the steps in which the rate rises.
        total: steps in all.
        hold: the fraction of the steps after which the rate falls; none before the end of the warm-up.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: Callable[[Optimizer], LRScheduler] | None,
        warmup: float,
        total: int,
        hold: float = 0.0,
    ):
        made = None if scheduler is None else scheduler(optimizer)
        if isinstance(made, ReduceLROnPlateau):
            raise TypeError("ReduceLROnPlateau waits for a metric that a noisy ELBO is not; use one that counts steps")
        if made is not None and (not isinstance(made, LRScheduler) or made.optimizer is not optimizer):
            raise TypeError(f"schedule must be a function from this optimizer to a scheduler of it, got {made!r}")
        self.optimizer, self.scheduler, self.warmup, self.total = optimizer, made, warmup, total
        self.hold = hold
        self.highest = [group["lr"] for group in optimizer.param_groups]

    def factor(self, step: int, total: int | None = None, cooling: int | None = None, end: int = 0) -> float:
        """Of the highest learning rate, at this step.

        Args:
            step: from 0.
            total: steps in all, where they are others than at first.
            cooling: the step from which the rate falls to zero at `end`, once the fit has been found converged.
            end: see `cooling`.
        """
        total = self.total if total is None else total
        if cooling is not None and step >= cooling:
            return self._default(cooling, total) * _cosine((step - cooling) / (end - cooling))
        return self._default(step, total)

    def _default(self, step: int, total: int) -> float:
        warmup = round(self.warmup * total)
        if step < warmup:
            return (step + 1) / warmup
        held = max(warmup, round(self.hold * total))
        return _cosine(max(0, step - held) / max(1, total - held))

    def before(self, step: int, total: int | None = None, cooling: int | None = None, end: int = 0) -> float:
        """Set the learning rates of this step; returns the first group's. Arguments as of `factor`."""
        if self.scheduler is None:
            for group, highest in zip(self.optimizer.param_groups, self.highest, strict=True):
                group["lr"] = highest * self.factor(step, total, cooling, end)
        return float(self.optimizer.param_groups[0]["lr"])

    def after(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def reset(self) -> None:
        """Give the optimizer back as it came: it may be the user's."""
        if self.scheduler is None:
            for group, highest in zip(self.optimizer.param_groups, self.highest, strict=True):
                group["lr"] = highest


def _cosine(progress: float) -> float:
    return 0.5 * (1 + cos(pi * progress))
