"""Linear layers at S weights under vmap: batched products whose weight gradients lie in memory as the weights do.

vmap's own rule gives the gradient of W [S, out, in] as the transpose of a product [S, in, out], and all of it is copied
before it can be put beside the others: as much as the products themselves take in a small network on a GPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from .batched_products import Room, product, split


class BatchedLinear(TorchFunctionMode):
    """Inside, `torch.nn.functional.linear` under vmap is one batched product; elsewhere it is as it was.

    Inside autocast it is vmap's own. What is split off `row`, if it is set, has its gradients side by side in memory.

    Example:
        >>> from torch.func import vmap
        >>> W = torch.ones(3, 2, 4)  # of three draws
        >>> with BatchedLinear():
        ...     vmap(lambda w: linear(torch.ones(5, 4), w))(W).shape
        torch.Size([3, 5, 2])
    """

    def __init__(self):
        super().__init__()
        self.row: Tensor | None = None
        self.room = Room()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.split and args and args[0] is self.row and self.row is not None:
            return split(self.row, args[1], self.room)
        if func is linear and not torch.is_autocast_enabled(args[0].device.type if args else "cpu"):
            return _of(self.room, *args, **kwargs)
        return func(*args, **kwargs)


def _of(room: Room, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.ndim != 2 or input.ndim < 2 or weight.dtype != input.dtype:
        return linear(input, weight, bias)
    return _Linear.apply(input, weight, bias, room)  # pyright: ignore[reportReturnType]


class _Linear(torch.autograd.Function):
    """As it is where nothing is batched; under vmap `_Batched`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, room: Room) -> Tensor:
        return linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias, _ = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)
        ctx.biased = bias is not None

    @staticmethod
    def jvp(ctx, x_tangent, weight_tangent, bias_tangent, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        parts = [] if x_tangent is None else [x_tangent @ weight.mT]
        parts += [] if weight_tangent is None else [x @ weight_tangent.mT]
        total = sum(parts[1:], parts[0]) if parts else torch.zeros_like(x @ weight.mT)
        return total if bias_tangent is None else total + bias_tangent

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        rows = g.reshape(-1, g.shape[-1])
        to_weight = rows.mT @ x.reshape(-1, x.shape[-1])
        return g @ weight, to_weight, rows.sum(0) if ctx.biased else None, None

    @staticmethod
    def vmap(info, in_dims, x, weight, bias, room):  # pyright: ignore[reportIncompatibleMethodOverride]
        given: Any = zip((x, weight, bias), in_dims[:3], strict=True)
        x, weight, bias = (one if at is None else one.movedim(at, 0) for one, at in given)
        own = None  # of each draw, added with the product
        if bias is not None and in_dims[1] is not None and in_dims[2] is not None:
            own, bias = bias, None
        if in_dims[1] is None:  # a layer that all draws share
            out = linear(x, weight)
            out = out.unsqueeze(0) if in_dims[0] is None and bias is not None else out
        elif in_dims[0] is None:
            rows = x.reshape(-1, x.shape[-1])
            out = _Batched.apply(rows.expand(info.batch_size, *rows.shape), weight, own, room)
            out = out.unflatten(1, x.shape[:-1])  # pyright: ignore[reportAttributeAccessIssue]
        else:
            out = _Batched.apply(x.reshape(len(x), -1, x.shape[-1]), weight, own, room)
            out = out.unflatten(1, x.shape[1:-1])  # pyright: ignore[reportAttributeAccessIssue]
        if bias is None:
            return out, 0 if in_dims[0] is not None or in_dims[1] is not None else None
        if in_dims[2] is not None:
            bias = bias.reshape(len(bias), *[1] * (out.ndim - 2), -1) if out.ndim > 2 else bias
        return out + bias, 0


class _Batched(torch.autograd.Function):
    """x Wᵀ + b of each draw: [S, N, in], [S, out, in], [S, out] → [S, N, out]; of many fits under a second vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, room: Room) -> Tensor:
        return product(x, weight.mT, bias=bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias, ctx.room = inputs
        ctx.save_for_backward(x, weight, bias)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias = ctx.saved_tensors
        to_x, to_weight, to_bias, _ = ctx.needs_input_grad
        return (
            product(g, weight) if to_x else None,
            product(g.mT, x, ctx.room.of(weight)) if to_weight else None,
            torch.sum(g, 1, out=ctx.room.of(bias)) if to_bias else None,
            None,
        )
