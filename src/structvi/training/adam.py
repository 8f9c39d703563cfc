"""The default optimizer: Adam, to which the gradient of a factor comes as two thin sides; and what any remembers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_float
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..families.forms import Factor
from ..families.numerics.fused import LowRankGradient, kernels_serve

#: The gradients of factors [P, K] as their two sides, of those whose `.grad` is not written.
Thin = Mapping[Tensor, LowRankGradient]

#: Log scales start about five below where many end, and move by at most the rate a step: smaller ones take long.
DEFAULT_LR = 0.02
#: A factor [P, K] learns at most at this rate over √P, relative to the others. Adam moves each entry by about the rate
#: at every step, signal or not, and a column, whose length matters when it is one, by √P times that: at the full rate
#: the noise of twenty columns costs more than they bring (docs/optimisation.md).
FACTOR_RATE = 2.5


class Adam(torch.optim.Adam):
    """torch's fused Adam; a factor [P, K] is moved by its gradient AᵀZ, which is never in memory as a whole.

    Args:
        parameters: what is moved.
        lr: the learning rate; that of factors is min(1, `FACTOR_RATE`/√P) times it.
        factors: those among the parameters that are low-rank factors.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, factors: Sequence[Factor] = ()):
        parameters = list(parameters)
        rates = {id(factor.parameter): min(1.0, FACTOR_RATE / factor.P**0.5) for factor in factors}
        groups = [{"params": [p for p in parameters if id(p) not in rates], "lr": lr}]
        groups += [{"params": [p], "lr": rates[id(p)] * lr} for p in parameters if id(p) in rates]
        super().__init__(groups, lr=lr, fused=True, capturable=any(p.is_cuda for p in parameters))
        #: the GPU that all parameters are on, if they are
        self.gpu = next((p.device for p in parameters if p.is_cuda), None)
        #: the factors that can be moved by a thin gradient
        self.thin = {f.parameter for f in factors if kernels_serve(f.parameter) or _by_columns(f.parameter)}
        served = [f for f in factors if kernels_serve(f.parameter)]
        # moved by the kernels, and what is beside them too
        self._by_kernel = {parameter for f in served for parameter in (f.parameter, *f.beside)}

    @contextmanager
    def rates(self, lr: Sequence[Tensor]) -> Iterator[None]:
        """Inside, learning rates are read from the device when a captured step is replayed."""
        before = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, lr, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(self.param_groups, before, strict=True):
                group["lr"] = rate

    #: whether the coordinates of families stay from now on: their iterates are averaged
    settled = False

    def after_step(self) -> None:
        """After every step that was made, captured or not: what must not be part of a captured one."""

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        thin: Thin = MappingProxyType({}),
        coefficient: Tensor | float = 1.0,
        make: Tensor | None = None,
    ) -> Any:
        """One step with the gradient times `coefficient`.

        Args:
            closure: as in torch: called first, with gradients.
            thin: the gradients of factors, of the set `thin`, that are not in their `.grad`.
            coefficient: in (0, 1], by which the gradient is clipped; of a captured step a tensor.
            make: of a captured step: 1, or 0 to leave everything as it is; read on the device.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.gpu is not None and make is None:  # the kernels of a captured step, and so its bits
            make = torch.ones((), device=self.gpu)
            coefficient = torch.full((), float(coefficient), device=self.gpu)
        # before anything is moved: where there is no memory for the moments, nothing has changed
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            if parameter.grad is not None or parameter in thin:
                self._moments(parameter)
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if not isinstance(coefficient, Tensor) and coefficient != 1 and with_gradient:
                torch._foreach_mul_([p.grad for p in with_gradient], coefficient)  # pyright: ignore[reportPrivateImportUsage]
            # a factor with a whole gradient (of a mixture's part, a block) is a parameter like others
            by_kernel = {p for p in with_gradient if p in self._by_kernel and p.ndim == 1}
            self._step_fused([p for p in with_gradient if p not in by_kernel], group, coefficient, make)
            dense = coefficient if isinstance(coefficient, Tensor) else 1.0
            for parameter in group["params"]:
                if parameter in by_kernel:
                    assert parameter.grad is not None
                    ones = parameter.new_ones(1, 1)
                    self._step_low_rank(parameter, parameter.grad.unsqueeze(0), ones, group, dense, make)
                elif (gradient := thin.get(parameter)) is not None:
                    if parameter in self._by_kernel:
                        self._step_low_rank(parameter, gradient.A, gradient.Z, group, coefficient, make)
                    else:
                        self._step_columns(parameter, gradient.A, gradient.Z * coefficient, group)
        return loss

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            # all three or none: there may be memory for the first alone
            first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {"step": step, "exp_avg": first, "exp_avg_sq": second}
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
                [_laid_out_as(parameter, parameter.grad) for parameter in parameters],
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
        scalars = [
            x.to(A.dtype) if isinstance(x, Tensor) else torch.full((), x, dtype=A.dtype, device=A.device)
            for x in (group["lr"], coefficient)
        ]
        matrices = [x if x.ndim == 2 else x.unsqueeze(-1) for x in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        value, first, second = matrices
        lr, clip = scalars
        from ..families.numerics import triton_kernels  # Triton takes long to import

        triton_kernels.adam(value, first, second, A, Z, state["step"], lr, clip, made, group["betas"], group["eps"])


def _fused(values: list, gradients: list, first: list, second: list, steps: list, group: dict, **scale: Any) -> None:
    lr = group["lr"]
    if values[0].is_cuda and not isinstance(lr, Tensor):
        lr = c_float(lr).value  # rounded as the tensor is that a captured step reads it from
    torch._fused_adam_(  # pyright: ignore[reportCallIssue, reportPrivateImportUsage]
        values, gradients, first, second, [], steps, lr=lr, beta1=group["betas"][0], beta2=group["betas"][1],
        weight_decay=0.0, eps=group["eps"], amsgrad=False, maximize=False, **scale,
    )  # fmt: skip


def _by_columns(factor: Tensor) -> bool:
    return factor.device.type == "cpu" and factor.shape[-1] > 0 and factor.mT.is_contiguous()


def _laid_out_as(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """The gradient in the parameter's order of memory: torch's kernel reads both as they lie there."""
    assert gradient is not None
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _in_order(x: Tensor, parameter: Tensor) -> Tensor:
    return x.mT if parameter.ndim == 2 and not parameter.is_contiguous() else x


def gradient_norm(parameters: Iterable[Tensor], thin: Thin = MappingProxyType({})) -> Tensor:
    """The norm of all gradients, the thin ones too, as a tensor."""
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])  # pyright: ignore[reportPrivateImportUsage]
    squares = [norm.double().square() for norm in norms]
    squares += [gradient.squared_norm() for gradient in thin.values()]
    return torch.stack(squares).sum().sqrt()


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
