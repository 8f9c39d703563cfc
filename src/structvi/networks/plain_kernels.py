"""Attention and recurrence from elementary operations, which every transform of functions can differentiate and batch.

A mode of one thread: torch's own switches of kernels hold for the whole process.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear, multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

RECURRENCES = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class PlainKernels(TorchFunctionMode):
    """Use no fused kernel for this thread's attention and recurrence inside the block; packed sequences keep theirs.

    Example:
        >>> x = torch.ones(1, 2, 3)
        >>> with PlainKernels():
        ...     scaled_dot_product_attention(x, x, x).shape
        torch.Size([1, 2, 3])
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is multi_head_attention_forward and kwargs.get("need_weights") is False:
            # with weights torch computes them, without it takes a fused kernel
            return func(*args, **{**kwargs, "need_weights": True})[0], None
        if func in RECURRENCES and isinstance(args[3], bool):
            return _recurrence(func, *args)
        return func(*args, **kwargs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **more: Any,
) -> Tensor:  # fmt: skip
    """As `scaled_dot_product_attention`, which makes numbers of a boolean mask before it chooses a kernel."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, **more
    )[0]


def _recurrence(
    kind: Any, x: Tensor, start: Any, weights: Sequence[Tensor], biased: bool, layers: int, p: float, train: bool,
    both_ways: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `torch.lstm` and its like: the output, and the last states of each layer and direction."""
    x = x.transpose(0, 1) if batch_first else x  # [T, B, n]
    states: list[Any] = list(zip(*start, strict=True)) if kind is torch.lstm else [(h,) for h in start]
    size = len(weights) // len(states)
    ways = 2 if both_ways else 1
    for layer in range(layers):
        outputs = []
        for way in range(ways):
            at = layer * ways + way
            w_ih, w_hh, *rest = weights[at * size : (at + 1) * size]
            b_ih, b_hh = rest[:2] if biased else (None, None)
            projection = rest[-1] if len(rest) % 2 else None
            state, rows = states[at], []
            for step in (x.flip(0) if way else x).unbind(0):
                state = _cell(kind, linear(step, w_ih, b_ih), linear(state[0], w_hh, b_hh), state)
                if projection is not None:
                    state = (linear(state[0], projection), *state[1:])
                rows.append(state[0])
            states[at] = state
            outputs.append(torch.stack(rows[::-1] if way else rows))
        x = torch.cat(outputs, -1)
        if train and layer < layers - 1:
            x = dropout(x, p)
    last = (torch.stack(each) for each in zip(*states, strict=True))
    return x.transpose(0, 1) if batch_first else x, *last


def _cell(kind: Any, a: Tensor, b: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The next state, from the parts of the gates that come from the input and from the state."""
    if kind is torch.lstm:
        i, f, g, o = (a + b).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if kind is torch.gru:
        (r, z, n), (own_r, own_z, own_n) = a.chunk(3, -1), b.chunk(3, -1)
        z = (z + own_z).sigmoid()
        n = (n + (r + own_r).sigmoid() * own_n).tanh()
        return ((1 - z) * n + z * state[0],)
    return ((a + b).tanh() if kind is torch.rnn_tanh else (a + b).relu(),)
