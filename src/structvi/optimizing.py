"""The parts of an optimisation step: optimizer, learning rate, undoing a step, averaging, and telling a trend."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import cos, inf, pi
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .families import kernels
from .families.fused import LowRankGradient
from .families.low_rank import LowRankFamily

OptimizerLike = Optimizer | Callable[[list[Tensor]], Optimizer]
SchedulerLike = LRScheduler | Callable[[Optimizer], LRScheduler]

#: Log scales start about five below where many end, and move by at most the rate a step: smaller ones take long.
DEFAULT_LR = 0.02
#: A factor [P, K] learns at most at this rate over √P, relative to the others. Adam moves each entry by about the rate
#: at every step, signal or not, and a column, whose length matters when it is one, by √P times that: at the full rate
#: the noise of twenty columns costs more than they bring (docs/optimisation.md).
FACTOR_RATE = 2.5


def make_optimizer(
    parameters: list[Tensor], optimizer: OptimizerLike | None, lr: float | None, families: Sequence[LowRankFamily] = ()
) -> Optimizer:
    """Adam, or the user's own, which must hold these parameters and leave the posterior what it is."""
    if optimizer is None:
        return Adam(parameters, lr=DEFAULT_LR if lr is None else lr, families=families)
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


class Adam(torch.optim.Adam):
    """torch's fused Adam; a factor [P, K] is moved by its gradient AᵀZ, which is never in memory as a whole.

    Args:
        parameters: what is moved.
        lr: the learning rate; that of factors is min(1, `FACTOR_RATE`/√P) times it.
        families: the low-rank families among whose parameters the factors are.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, families: Sequence[LowRankFamily] = ()):
        parameters = list(parameters)
        sizes = {
            id(f.factor): len(f.factor) if f.space is None else f.space.size for f in families
        }  # P, sharded or not
        rates = {factor: min(1.0, FACTOR_RATE / size**0.5) for factor, size in sizes.items()}
        groups = [{"params": [p for p in parameters if id(p) not in rates], "lr": lr}]
        groups += [{"params": [p], "lr": rates[id(p)] * lr} for p in parameters if id(p) in rates]
        super().__init__(groups, lr=lr, fused=True, capturable=any(p.is_cuda for p in parameters))
        #: whose factors are moved here, and not by their `.grad`
        self.families = [f for f in families if kernels.serve(f.factor) or _by_columns(f.factor)]

    def defer(self) -> None:
        """Before a backward pass: leave the factors' gradients as the two sides of their products."""
        for family in self.families:
            family.pending = []

    def pending(self, family: LowRankFamily) -> LowRankGradient | None:
        """The gradient of a family's factor since `defer`; None where it did not learn."""
        if not family.pending:
            return None
        if len(family.pending) == 1:
            return family.pending[0]
        every = family.pending
        return LowRankGradient(torch.cat([one.A for one in every]), torch.cat([one.Z for one in every]))

    @contextmanager
    def rates(self, lr: Sequence[Tensor]) -> Iterator[None]:
        """Inside, learning rates are read from the device when a captured step is replayed."""
        before = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, lr, strict=True):
            group["lr"] = rate
        yield
        for group, rate in zip(self.param_groups, before, strict=True):
            group["lr"] = rate

    @torch.no_grad()
    def step(self, closure=None, *, coefficient: Tensor | float = 1.0, make: Tensor | None = None):
        """One step with the gradient times `coefficient`.

        Args:
            closure: as in torch: called first, with gradients.
            coefficient: in (0, 1], by which the gradient is clipped; of a captured step a tensor.
            make: of a captured step: 1, or 0 to leave everything as it is; read on the device.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        low_rank = {family.factor: self.pending(family) for family in self.families}
        served = [family for family in self.families if kernels.serve(family.factor)]
        own = {parameter for family in served for parameter in (family.mean, family.log_scale, family.factor)}
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if not isinstance(coefficient, Tensor) and coefficient != 1 and with_gradient:
                torch._foreach_mul_([p.grad for p in with_gradient], coefficient)  # pyright: ignore[reportPrivateImportUsage]
            self._step_fused([p for p in with_gradient if p not in own], group, coefficient, make)
            dense = coefficient if isinstance(coefficient, Tensor) else 1.0
            for parameter in group["params"]:
                if parameter in own and parameter.grad is not None:
                    ones = parameter.new_ones(1, 1)
                    self._step_low_rank(parameter, parameter.grad.unsqueeze(0), ones, group, dense, make)
                elif (gradient := low_rank.get(parameter)) is not None:
                    if parameter in own:
                        self._step_low_rank(parameter, gradient.A, gradient.Z, group, coefficient, make)
                    else:
                        self._step_columns(parameter, gradient.A, gradient.Z * coefficient, group)
        for family in self.families:
            family.pending = None
        return loss

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state

    def _step_fused(self, parameters: list[Tensor], group: dict, coefficient: Any, make: Tensor | None) -> None:
        """torch's kernel; it wants memory in the order of the indices, so factors by columns are given transposed."""
        if not parameters:
            return
        states = [self._moments(parameter) for parameter in parameters]
        values, gradients, first, second = (
            [_in_order(x, parameter) for parameter, x in zip(parameters, every, strict=True)]
            for every in (
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
            )
        )
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1 if make is None else [make] * len(steps))  # pyright: ignore[reportPrivateImportUsage]
        # the kernel divides gradients by the one and does nothing where the other is 1
        scale = {} if make is None else {"grad_scale": coefficient.reciprocal(), "found_inf": 1 - make}
        _fused(values, gradients, first, second, steps, group, **scale)

    def _step_columns(self, parameter: Tensor, A: Tensor, Z: Tensor, group: dict) -> None:
        """A factor [P, K] that lies column by column, with the gradient AᵀZ: made a column at a time."""
        state = self._moments(parameter)
        state["step"] += 1
        column = A.new_empty(1, len(parameter))
        for k, z in enumerate(Z.mT.contiguous().unsqueeze(1)):  # [1, R]
            torch.mul(A, z, out=column) if len(A) == 1 else torch.mm(z, A, out=column)
            value, first, second = (x[:, k] for x in (parameter, state["exp_avg"], state["exp_avg_sq"]))
            _fused([value], [column[0]], [first], [second], [state["step"]], group)

    def _step_low_rank(
        self, parameter: Tensor, A: Tensor, Z: Tensor, group: dict, coefficient: Any, make: Tensor | None
    ) -> None:
        """A parameter [P, K], or [P], with the gradient AᵀZ."""
        state = self._moments(parameter)
        made = parameter.new_ones(()) if make is None else make.to(parameter.dtype)
        state["step"] += made
        scalars = [torch.as_tensor(x, dtype=A.dtype, device=A.device) for x in (group["lr"], coefficient)]
        matrices = [x if x.ndim == 2 else x.unsqueeze(-1) for x in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        value, first, second = matrices
        lr, clip = scalars
        kernels.adam(value, first, second, A, Z, state["step"], lr, clip, made, group["betas"], group["eps"])


def _fused(values: list, gradients: list, first: list, second: list, steps: list, group: dict, **scale: Any) -> None:
    torch._fused_adam_(  # pyright: ignore[reportCallIssue, reportPrivateImportUsage]
        values, gradients, first, second, [], steps, lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
        weight_decay=0.0, eps=group["eps"], amsgrad=False, maximize=False, **scale,
    )  # fmt: skip


def _by_columns(factor: Tensor) -> bool:
    return factor.device.type == "cpu" and factor.shape[-1] > 0 and factor.mT.is_contiguous()


def _in_order(x: Tensor | None, parameter: Tensor) -> Tensor:
    assert x is not None
    return x.mT if parameter.ndim == 2 and not parameter.is_contiguous() else x


def gradient_norm(parameters: Iterable[Tensor], optimizer: Optimizer) -> Tensor:
    """The norm of all gradients, those that are pending too, as a tensor."""
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])  # pyright: ignore[reportPrivateImportUsage]
    squares = [norm.double().square() for norm in norms]
    if isinstance(optimizer, Adam):
        pending = [optimizer.pending(family) for family in optimizer.families]
        squares += [gradient.squared_norm() for gradient in pending if gradient is not None]
    return torch.stack(squares).sum().sqrt()


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
        parameter = named[name]
        if isinstance(value, Tensor):  # moments are laid out in memory as their parameter is
            like = value if value.shape != parameter.shape else parameter
            value = torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)
        optimizer.state[parameter][key] = value


class Snapshot:
    """The parameters as they were some steps ago, to go back to where all that follows is not finite.

    The optimizer's moments are not kept: no step is made with a gradient that is not finite, so they are.

    Args:
        named: the parameters.
        every: how many steps lie between two snapshots.
    """

    def __init__(self, named: Mapping[str, Tensor], every: int):
        self.named, self.every = named, every
        #: the step before which it was taken
        self.step = 0
        self.parameters: dict[str, Tensor] = {}
        self._next: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, step: int) -> bool:
        """Before a step, where the last snapshot is old: copy the state; `keep` it once its loss was finite."""
        if self.parameters and step < self.step + self.every:
            return False
        for name, tensor in self.named.items():
            if name not in self._next:
                self._next[name] = torch.empty_like(tensor, device="cpu")
            self._next[name].copy_(tensor)
        return True

    def keep(self, step: int) -> None:
        self.step, self.parameters, self._next = step, self._next, self.parameters

    def restore(self) -> None:
        """Go back; nothing where no loss was ever finite."""
        if self.parameters:
            assign(self.named, self.parameters)

    def clear(self) -> None:
        self.parameters, self._next = {}, {}


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
