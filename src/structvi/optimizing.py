"""The parts of an optimisation step: optimizer, learning rate, undoing a step, averaging, and telling a trend."""

from collections.abc import Callable, Mapping
from math import cos, inf, pi
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

OptimizerLike = Optimizer | Callable[[list[Tensor]], Optimizer]
SchedulerLike = LRScheduler | Callable[[Optimizer], LRScheduler]

#: Log scales start about five below where many end, and move by at most the rate a step: smaller ones take long.
DEFAULT_LR = 0.02


def make_optimizer(parameters: list[Tensor], optimizer: OptimizerLike | None, lr: float | None) -> Optimizer:
    """Adam, or the user's own, which must hold these parameters and leave the posterior what it is."""
    if optimizer is None:
        return torch.optim.Adam(parameters, lr=DEFAULT_LR if lr is None else lr)
    if lr is not None:
        raise ValueError(f"lr={lr} belongs to the default optimizer; give it to the one you pass")
    made = optimizer(parameters) if callable(optimizer) and not isinstance(optimizer, Optimizer) else optimizer
    if not isinstance(made, Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer or a function of parameters to one, got {made!r}")
    if isinstance(made, torch.optim.LBFGS):
        raise TypeError("LBFGS searches along a line of a fixed function, and the ELBO is estimated anew at each call")
    for group in made.param_groups:
        if group.get("weight_decay", 0) != 0:
            raise ValueError(
                f"the optimizer has weight_decay={group['weight_decay']}: it would pull variational parameters (log "
                "scales too) to zero, and what is found would no longer be the posterior; the prior is what holds "
                "weights back. Set weight_decay=0"
            )
    known = {id(parameter) for parameter in parameters}
    if any(id(parameter) not in known for group in made.param_groups for parameter in group["params"]):
        raise ValueError("the optimizer holds tensors that are not posterior.parameters(); make it from those alone")
    return made


class Schedule:
    """Linear warm-up, then cosine decay to zero at the last step; or the user's scheduler, a call a step.

    Args:
        optimizer: its groups' learning rates are the highest.
        scheduler: the user's, or a function of the optimizer to one; None for the default.
        warmup: steps of the warm-up.
        total: steps in all.
    """

    def __init__(self, optimizer: Optimizer, scheduler: SchedulerLike | None, warmup: int, total: int):
        if callable(scheduler) and not isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
            scheduler = scheduler(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError("ReduceLROnPlateau waits for a metric that a noisy ELBO is not; use one that counts steps")
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            raise TypeError(f"scheduler must be a torch LRScheduler or a function to one, got {scheduler!r}")
        if scheduler is not None and scheduler.optimizer is not optimizer:
            raise ValueError("the scheduler belongs to another optimizer; make it from the one you pass to fit")
        self.optimizer, self.scheduler, self.warmup, self.total = optimizer, scheduler, warmup, total
        self.highest = [group["lr"] for group in optimizer.param_groups]
        #: from where the rate falls to zero at `end`, once the fit has been found converged
        self.cooling: int | None = None
        self.end = total

    def factor(self, step: int) -> float:
        """Of the highest learning rate, at this step."""
        if self.cooling is not None and step >= self.cooling:
            return self._default(self.cooling) * _cosine((step - self.cooling) / (self.end - self.cooling))
        return self._default(step)

    def _default(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        return _cosine((step - self.warmup) / max(1, self.total - self.warmup))

    def before(self, step: int) -> float:
        """Set the learning rates of this step; returns the first group's."""
        if self.scheduler is None:
            for group, highest in zip(self.optimizer.param_groups, self.highest, strict=True):
                group["lr"] = highest * self.factor(step)
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


def optimizer_state(optimizer: Optimizer, named: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the optimizer remembers of each parameter, flat: "name/key" → tensor or number, not copied."""
    return {
        f"{name}/{key}": value
        for name, parameter in named.items()
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
        if value is not None
    }


def set_optimizer_state(optimizer: Optimizer, named: Mapping[str, Tensor], flat: Mapping[str, Any]) -> None:
    """The inverse of `optimizer_state`; what `flat` does not name is forgotten."""
    optimizer.state.clear()
    for path, value in flat.items():
        name, key = path.rsplit("/", 1)
        optimizer.state[named[name]][key] = value.clone() if isinstance(value, Tensor) else value


class Undo:
    """Parameters and optimizer state as they were before the last step, which gave a finite loss.

    Args:
        named: the parameters.
        optimizer: theirs.
    """

    def __init__(self, named: Mapping[str, Tensor], optimizer: Optimizer):
        self.named, self.optimizer = named, optimizer
        self.parameters: dict[str, Tensor] = {}
        self.state: dict[str, Any] = {}

    def take(self) -> None:
        self.parameters = _copied(self.named, self.parameters)
        self.state = _copied(optimizer_state(self.optimizer, self.named), self.state)

    def restore(self) -> None:
        """Undo the last step; nothing where there is none to undo."""
        if self.parameters:
            assign(self.named, self.parameters)
            set_optimizer_state(self.optimizer, self.named, self.state)

    def clear(self) -> None:
        self.parameters, self.state = {}, {}


@torch.no_grad()
def _copied(values: Mapping[str, Any], into: dict[str, Any]) -> dict[str, Any]:
    """Copies of the values, in the memory of the last copies where they fit."""
    if values.keys() != into.keys():
        return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in values.items()}
    for key, value in values.items():
        if isinstance(value, Tensor):
            into[key].copy_(value)
        else:
            into[key] = value
    return into


@torch.no_grad()
def assign(named: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in named.items():
        tensor.copy_(values[name])


class RunningMean:
    """The mean of the parameters over steps."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, named: Mapping[str, Tensor]) -> None:
        self.count += 1
        if self.count == 1:
            self.mean = {name: tensor.detach().clone() for name, tensor in named.items()}
            return
        for name, tensor in named.items():
            self.mean[name].lerp_(tensor, 1 / self.count)


def trend(elbo: Tensor, epoch: Tensor, rate: Tensor) -> tuple[float, float]:
    """The slope of the ELBO, in nats a step at the full rate, and its standard error, by least squares over epochs.

    Time runs as the learning rate does: steps that could not move the posterior say nothing of what is left to gain.

    Means over whole epochs: which batch is whose turn is most of the noise of a step, and cancels over an epoch. Where
    there are fewer than five, the steps in eight parts of equal length.

    Args:
        elbo: of consecutive steps, [n]; nan where one was undone.
        epoch: of these steps, [n].
        rate: the learning rate of these steps as a part of the highest, [n].
    """
    position = rate.cumsum(0)
    finite = elbo.isfinite()
    elbo, epoch, position = elbo[finite], epoch[finite], position[finite]
    _, sizes = epoch.unique_consecutive(return_counts=True)
    sizes = sizes.tolist()
    whole = [size == max(sizes) for size in sizes] if sizes else []
    if sum(whole) < 5:
        whole, sizes = [True] * 8, [len(part) for part in elbo.tensor_split(8)]
    if len(elbo) < 8:
        return 0.0, inf
    x = torch.stack([p.mean() for p, keep in zip(position.split(sizes), whole, strict=True) if keep])
    y = torch.stack([p.mean() for p, keep in zip(elbo.split(sizes), whole, strict=True) if keep])
    x, y = x - x.mean(), y - y.mean()
    slope = (x @ y) / (x @ x)
    residual = (y - slope * x).square().sum() / (len(x) - 2)
    return float(slope), float((residual / (x @ x)).sqrt())
