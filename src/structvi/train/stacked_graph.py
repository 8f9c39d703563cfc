"""A step of many fits captured as one CUDA graph."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..util.garbage import uncollected


class StackedGraph:
    """A function of tensors captured for their shapes: called, it copies them in, replays and gives what came out.

    Args:
        body: what is captured; it must not change anything while `still` says so of its arguments.
        still: arguments of the shapes to capture, with which the body changes nothing.
    """

    def __init__(self, body: Callable[..., Tensor], still: tuple[Any, ...]):
        self.given = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, still)
        gc.collect()  # a graph of gradients that waits in a cycle keeps its nodes on the stream where it was made
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                body(*self.given)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with uncollected(), torch.cuda.graph(self.graph):
            self.told = body(*self.given)

    def __call__(self, *given: Any) -> Tensor:
        for own, new in zip(pytree.tree_leaves(self.given), pytree.tree_leaves(given), strict=True):
            if isinstance(own, Tensor):
                own.copy_(new, non_blocking=True)
        self.graph.replay()
        return self.told


def key_of(given: Any) -> tuple[Any, ...]:
    """What a graph is captured for: the form, and the shapes of its tensors."""
    leaves, form = pytree.tree_flatten(given)
    return str(form), *((x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
