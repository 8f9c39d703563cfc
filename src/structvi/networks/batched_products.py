"""Products of all draws at once, and where the gradients of their weights are put."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..families.numerics.fused import has_triton

#: Products of so many multiplications for each draw, or fewer, take as long as they are launched.
SMALL = 2**20


class Room:
    """The gradient of θ [S, P], into which those of weights are written where they belong.

    `torch.split` would copy them side by side at its end, which is as much as to read and write all of them. Of weights
    that are used twice the second gradient has a place of its own, and what is in no place here is copied.
    """

    def __init__(self):
        self.theta: Tensor | None = None
        self.whole: Tensor | None = None
        self.taken: set[int] = set()

    def of(self, weight: Tensor) -> Tensor | None:
        """The place for the gradient of `weight` [S, ..], or None where it has none."""
        theta = self.theta
        if theta is None or not _plain() or not _part(weight, theta):
            return None
        at = int(weight.storage_offset() - theta.storage_offset())
        if at in self.taken:
            return None
        self.taken.add(at)
        if self.whole is None:
            self.whole = weight.new_empty(theta.shape)
        return self.whole.as_strided(weight.shape, (self.whole.stride(0), *weight.stride()[1:]), at)

    def filled(self, parts: Sequence[Tensor]) -> Tensor:
        """The gradient of θ: those of its parts side by side, of which some are where they belong."""
        whole, self.whole = self.whole, None  # the next backward pass has another
        self.taken.clear()
        if whole is None:
            return torch.cat(list(parts), -1)
        for place, part in zip(whole.split([part.shape[-1] for part in parts], -1), parts, strict=True):
            if part.data_ptr() != place.data_ptr() or part.stride() != place.stride():
                place.copy_(part)
        return whole


def _part(weight: Tensor, theta: Tensor) -> bool:
    """Whether weights [S, ..] are the same columns of every row of θ [S, P]."""
    same = weight.untyped_storage().data_ptr() == theta.untyped_storage().data_ptr()
    return same and len(weight) == len(theta) and weight.stride(0) == theta.stride(0) and weight[0].is_contiguous()


def _plain() -> bool:
    """Not inside a transform of functions, nor where the backward pass itself is to be differentiated."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
    return not inside and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def split(row: Tensor, sizes: Sequence[int], room: Room) -> tuple[Tensor, ...]:
    """`torch.split` of a row of θ."""
    return _Split.apply(row, list(sizes), room)  # pyright: ignore[reportReturnType]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(theta: Tensor, sizes: list[int], room: Room) -> tuple[Tensor, ...]:
        return torch.split(theta, sizes, -1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, ctx.room = inputs

    @staticmethod
    def backward(ctx, *parts):
        whole = ctx.room.filled(parts) if _plain() else torch.cat(parts, -1)
        return whole, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError("forward-mode derivatives go through torch.split")

    @staticmethod
    def vmap(info: Any, in_dims: Any, theta: Tensor, sizes: list[int], room: Room):  # pyright: ignore[reportIncompatibleMethodOverride]
        theta = theta.movedim(in_dims[0], 0)
        if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore
            return torch.split(theta, sizes, -1), (0,) * len(sizes)
        room.theta = theta.detach()
        return _Split.apply(theta, sizes, room), (0,) * len(sizes)


def product(x: Tensor, y: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """[S, M, K], [S, K, N] → [S, M, N]: on tensor cores where those of this device are faster in float32 too.

    Args:
        x, y: the sides.
        out: where it is written.
        bias: [S, N], that is added to each row.
    """
    if x[0].numel() * y.shape[-1] < SMALL or not _on_tensor_cores(x):
        found = torch.bmm(x, y) if out is None else torch.bmm(x, y, out=out)
        return found if bias is None else found + bias.unsqueeze(1)
    from . import triton_products  # Triton takes longer to import than all of the library

    return triton_products.product(x, y, out=out, bias=bias)


def _on_tensor_cores(x: Tensor) -> bool:
    """A Hopper GPU, on which it was tried, and TF32 not asked for; and nobody looks on who needs torch's own."""
    if not (x.is_cuda and x.dtype == torch.float32 and has_triton() and _plain()):
        return False
    try:
        exactly = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set by torch's newer names, for some kinds of operation
        return False
    return exactly and torch.cuda.get_device_capability(x.device) == (9, 0)
