"""The network alone in bfloat16 or float16: what can run, and the scale of gradients inside a float16 network."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

PRECISIONS = (None, torch.bfloat16, torch.float16)


class GradientScale:
    """c, a power of two: gradients enter a float16 network times c and leave it, in float32, over c.

    float16 has no numbers above 65504 and none but zero below 6e-8. The gradient of −elbo/N at the output of one
    observation is of the order of 1/(S·B), and would vanish further down. A step whose gradient is not finite is
    left out and halves c; `GROWTH` finite steps in a row double it. bfloat16 has the range of float32 and needs none.

    Example:
        >>> scale = GradientScale()
        >>> scale.value, scale.halve(), scale.value
        (65536.0, True, 32768.0)
    """

    GROWTH = 2000
    LOWEST, HIGHEST = 2.0**-16, 2.0**32

    def __init__(self, value: float = 2.0**16, finite: int = 0):
        self.value, self.finite = value, finite
        self._factors: Tensor | None = None

    def factors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """c and 1/c: always the same tensors, so that a captured step sees the scale change."""
        if self._factors is None or self._factors.device != device:
            self._factors = torch.tensor([self.value, 1 / self.value], device=device)
        return self._factors[0], self._factors[1]

    def _set(self, value: float) -> None:
        self.value, self.finite = value, 0
        if self._factors is not None:
            self._factors.copy_(torch.tensor([value, 1 / value]))

    def halve(self) -> bool:
        """After a gradient that is not finite; False where the scale cannot be the reason."""
        if self.value <= self.LOWEST:
            return False
        self._set(self.value / 2)
        return True

    def count(self) -> None:
        """After a finite gradient."""
        self.finite += 1
        if self.finite == self.GROWTH:
            self._set(min(2 * self.value, self.HIGHEST))


class _TimesGradient(torch.autograd.Function):
    """x, whose gradient is multiplied by a number, []."""

    @staticmethod
    def forward(x: Tensor, factor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], x: Tensor, factor: Tensor) -> tuple[Any, int | None]:
        return _TimesGradient.apply(x, factor), in_dims[0]


def times_gradient(values: Any, factor: Tensor) -> Any:
    """The same values, in any nesting; gradients that flow back through them are multiplied by `factor`.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> times_gradient({"x": x}, torch.tensor(4.0))["x"].sum().backward()
        >>> x.grad
        tensor([4., 4.])
    """
    return tree_map(lambda x: _TimesGradient.apply(x, factor) if is_floating(x) else x, values)


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def check_precision(precision: Any, net: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what would not run, or would silently run in full precision."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be None, torch.bfloat16 or torch.float16, got {precision!r}")
    if precision is None:
        return
    if dtype != torch.float32:
        raise ValueError(f"precision={precision} is mixed with float32, and the weights are {dtype}: use net.float()")
    if not torch.amp.is_autocast_available(device.type):
        raise ValueError(f"torch has no mixed precision on {device.type!r}: fit with precision=None")
    if device.type == "cpu" and any(isinstance(module, nn.LSTM) for module in net.modules()):
        raise ValueError("torch runs LSTMs in half precision on few CPUs only: use precision=None")
