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
from ..families.numerics.algebra import square_on_host
from ..families.numerics.fused import LowRankGradient, kernels_serve
from ..optim.adam import FACTOR_RATE

#: The gradients of factors [P, K] as their two sides, of those whose `.grad` is not written.
Thin = Mapping[Tensor, LowRankGradient]

#: Numbers of a factor's gradient that are made at once on a CPU.
_COLUMNS = 2**18
#: Rows of such a gradient's sides that are added one by one.
_FEW = 3


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
        self._families = [(f.parameter, *f.beside) for f in served if len(f.beside) == 2]
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
        self._step(thin, coefficient, make)
        return loss

    @torch.no_grad()
    def unheard_step(self, thin: Thin, coefficient: float) -> None:
        """`step`, past the wrapper that torch puts around it for hooks and profilers, where there are none."""
        heard = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or "step" in vars(self)
        if heard:
            self.step(thin=thin, coefficient=coefficient)
        else:
            self._step(thin, coefficient, None)

    def _step(self, thin: Thin, coefficient: Tensor | float, make: Tensor | None) -> None:
        """What `step` does."""
        if self.gpu is not None and make is None:  # the kernels of a captured step, and so its bits
            make = torch.ones((), device=self.gpu)
            coefficient = torch.full((), float(coefficient), device=self.gpu)
        # before anything is moved: where there is no memory for the moments, nothing has changed
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            if parameter.grad is not None or parameter in thin:
                self._moments(parameter)
        done = self._step_families(thin, coefficient, make) if make is not None else set()
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None and not (done and p in done)]
            if not isinstance(coefficient, Tensor) and coefficient != 1 and with_gradient:
                torch._foreach_mul_([p.grad for p in with_gradient], coefficient)  # pyright: ignore[reportPrivateImportUsage]
            # a factor with a whole gradient (of a mixture's part, a block) is a parameter like others
            by_kernel = {p for p in with_gradient if p.ndim == 1} & self._by_kernel if self._by_kernel else set()
            others = [p for p in with_gradient if p not in by_kernel] if by_kernel else with_gradient
            self._step_fused(others, group, coefficient, make)
            dense = coefficient if isinstance(coefficient, Tensor) else 1.0
            for parameter in group["params"] if thin or by_kernel else ():
                if parameter in by_kernel:
                    assert parameter.grad is not None
                    ones = parameter.new_ones(1, 1)
                    self._step_low_rank(parameter, parameter.grad.unsqueeze(0), ones, group, dense, make)
                elif parameter not in done and (gradient := thin.get(parameter)) is not None:
                    if parameter in self._by_kernel:
                        self._step_low_rank(parameter, gradient.A, gradient.Z, group, coefficient, make)
                    else:
                        self._step_columns(parameter, gradient.A, gradient.Z * coefficient, group)

    def step_clipped(self, told: Tensor, norm: Tensor, thin: Thin, clip: float, make: Tensor | None = None) -> None:
        """One step of which the host reads nothing: clipped on the device, and left out there where it is not finite.

        Args:
            told, norm: ELBO and log likelihood of the step's groups, and the gradient's norm [], in float64.
            thin: as in `step`.
            clip: the largest norm of the gradient.
            make: 0 to leave everything as it is.
        """
        if self._by_kernel and told.is_contiguous() and told.dtype == norm.dtype == torch.float64:
            from ..families.numerics import triton_adam  # Triton takes long to import

            coefficient, make = triton_adam.clipped(told, norm, clip, make)
            self.step(thin=thin, coefficient=coefficient, make=make)
            return
        finite = torch.isfinite(told.sum() + norm).float()
        coefficient = (clip / norm.clamp_min(1e-30)).clamp_max(1.0).nan_to_num(1.0).float()
        self.step(thin=thin, coefficient=coefficient, make=finite if make is None else make * finite)

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
        if make is None:
            for step in steps:
                step += 1
        else:
            torch._foreach_add_(steps, [make] * len(steps))  # pyright: ignore[reportPrivateImportUsage]
        # the kernel divides gradients by the one and does nothing where the other is 1
        scale = {} if make is None else {"grad_scale": coefficient.reciprocal(), "found_inf": 1 - make}
        _fused(values, gradients, first, second, steps, group, **scale)

    def _step_columns(self, parameter: Tensor, A: Tensor, Z: Tensor, group: dict) -> None:
        """A factor [P, K] that lies column by column, with the gradient AᵀZ: made some columns at a time."""
        state = self._moments(parameter)
        state["step"] += 1
        P, K = parameter.shape
        most = max(1, _COLUMNS // P)
        columns = A.new_empty(min(most, K), P)
        moved = [x.mT for x in (parameter, state["exp_avg"], state["exp_avg_sq"])]  # [K, P]
        for start in range(0, K, most):
            some = slice(start, min(start + most, K))
            z, gradient = Z[:, some].mT, columns[: some.stop - start]  # [k, R], [k, P]
            if len(A) <= _FEW:  # row by row: a matrix product of so few takes longer
                torch.mul(z[:, :1], A[0], out=gradient)
                for row in range(1, len(A)):
                    gradient.addcmul_(A[row], z[:, row : row + 1])
            else:
                torch.mm(z, A, out=gradient)
            value, first, second = (x[some] for x in moved)
            _fused([value], [gradient], [first], [second], [state["step"]], group)

    def _step_families(self, thin: Thin, coefficient: Any, make: Tensor) -> set[Tensor]:
        """Factors with mean and scale beside them in one launch each, where all three have gradients; and which."""
        done: set[Tensor] = set()
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        for family in self._families:
            factor, *vectors = family
            group = groups[factor]
            alike = all(groups[x]["betas"] == group["betas"] and groups[x]["eps"] == group["eps"] for x in vectors)
            gradients = [x.grad for x in vectors if x.grad is not None]
            if factor not in thin or len(gradients) < len(vectors) or not alike:
                continue
            from ..families.numerics import triton_adam  # Triton takes long to import

            states = [self._moments(x) for x in family]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, [make] * 3)  # pyright: ignore[reportPrivateImportUsage]
            parts = [
                triton_adam.Moved(x, state["exp_avg"], state["exp_avg_sq"], state["step"], groups[x]["lr"])
                for x, state in zip(family, states, strict=True)
            ]
            gradient, pairs = thin[factor], list(zip(parts[1:], gradients, strict=True))
            triton_adam.adam_family(
                parts[0], gradient.A, gradient.Z, pairs, coefficient, make, group["betas"], group["eps"]
            )
            done.update(family)
        return done

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
        from ..families.numerics import triton_adam  # Triton takes long to import

        triton_adam.adam(value, first, second, A, Z, state["step"], lr, clip, made, group["betas"], group["eps"])


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
    squares, counted = [], set()
    for gradient in thin.values():
        vectors = gradient.vectors
        together = vectors and all(x.is_leaf and x.requires_grad for x in vectors)
        if together and (whole := gradient.with_vectors) is not None:
            squares.append(whole)
            counted.update(vectors)
        else:
            squares.append(gradient.squared_norm())
    others = [p.grad for p in parameters if p.grad is not None and not (counted and p in counted)]
    if others and others[0].device.type == "cpu":  # numbers in Python take less time
        whole = sum(square.item() for square in squares) + sum(map(square_on_host, others))
        return torch.full((), whole**0.5, dtype=torch.float64)
    if others:
        norms = torch._foreach_norm(others)  # pyright: ignore[reportPrivateImportUsage]
        squares.append(torch.stack(norms).double().square().sum())
    return sum(squares[1:], squares[0]).sqrt()


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
