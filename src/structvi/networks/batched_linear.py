"""Linear layers at S weights under vmap: batched products whose weight gradients lie in memory as the weights do.

vmap's own rule gives the gradient of W [S, out, in] as the transpose of a product [S, in, out], and all of it is copied
before it can be put beside the others: as much as the products themselves take in a small network on a GPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from ..families.numerics.fused import has_triton

#: Products of so many multiplications for each draw, or fewer, take as long as they are launched.
SMALL = 2**20


class BatchedLinear(TorchFunctionMode):
    """Inside, `torch.nn.functional.linear` under vmap is one batched product; elsewhere it is as it was.

    Inside autocast it is vmap's own.

    Example:
        >>> from torch.func import vmap
        >>> W = torch.ones(3, 2, 4)  # of three draws
        >>> with BatchedLinear():
        ...     vmap(lambda w: linear(torch.ones(5, 4), w))(W).shape
        torch.Size([3, 5, 2])
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is linear and not torch.is_autocast_enabled(args[0].device.type if args else "cpu"):
            return _of(*args, **kwargs)
        return func(*args, **kwargs)


def _of(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.ndim != 2 or input.ndim < 2 or weight.dtype != input.dtype:
        return linear(input, weight, bias)
    return _Linear.apply(input, weight, bias)  # pyright: ignore[reportReturnType]


class _Linear(torch.autograd.Function):
    """As it is where nothing is batched; under vmap `_Batched`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)
        ctx.biased = bias is not None

    @staticmethod
    def jvp(ctx, x_tangent, weight_tangent, bias_tangent):  # pyright: ignore[reportIncompatibleMethodOverride]
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
        return g @ weight, to_weight, rows.sum(0) if ctx.biased else None

    @staticmethod
    def vmap(info, in_dims, x, weight, bias):  # pyright: ignore[reportIncompatibleMethodOverride]
        given: Any = zip((x, weight, bias), in_dims, strict=True)
        x, weight, bias = (one if at is None else one.movedim(at, 0) for one, at in given)
        if in_dims[1] is None:  # a layer that all draws share
            out = linear(x, weight)
            out = out.unsqueeze(0) if in_dims[0] is None and bias is not None else out
        elif in_dims[0] is None:
            rows = x.reshape(-1, x.shape[-1])
            out = _Batched.apply(rows.expand(info.batch_size, *rows.shape), weight)
            out = out.unflatten(1, x.shape[:-1])  # pyright: ignore[reportAttributeAccessIssue]
        else:
            out = _Batched.apply(x.reshape(len(x), -1, x.shape[-1]), weight)
            out = out.unflatten(1, x.shape[1:-1])  # pyright: ignore[reportAttributeAccessIssue]
        if bias is None:
            return out, 0 if in_dims[0] is not None or in_dims[1] is not None else None
        if in_dims[2] is not None:
            bias = bias.reshape(len(bias), *[1] * (out.ndim - 2), -1) if out.ndim > 2 else bias
        return out + bias, 0


class _Batched(torch.autograd.Function):
    """x Wᵀ of each draw: [S, N, in], [S, out, in] → [S, N, out]; of many fits at once under a second vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return _product(x, weight.mT)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        to_x = _product(g, weight) if ctx.needs_input_grad[0] else None
        return to_x, _product(g.mT, x) if ctx.needs_input_grad[1] else None


def _product(x: Tensor, y: Tensor) -> Tensor:
    """[S, M, K], [S, K, N] → [S, M, N]: on tensor cores where those of this device are faster in float32 too."""
    if x[0].numel() * y.shape[-1] < SMALL or not _on_tensor_cores(x):
        return torch.bmm(x, y)
    from .triton_products import product  # Triton takes longer to import than all of the library

    return product(x, y)


def _on_tensor_cores(x: Tensor) -> bool:
    """A Hopper GPU, on which it was tried, and TF32 not asked for; and nobody looks on who needs torch's own."""
    plain = x.is_cuda and x.dtype == torch.float32 and has_triton() and not torch.compiler.is_compiling()
    if not plain or torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore
        return False
    try:
        exactly = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set by torch's newer names, for some kinds of operation
        return False
    return exactly and torch.cuda.get_device_capability(x.device) == (9, 0)
