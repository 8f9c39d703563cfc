"""A training step captured as one CUDA graph: the launches of its kernels no longer wait for Python."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from .step import Step


class CapturedStep:
    """A step captured for batches of one shape: a call copies the batch in, replays, and returns ELBO and norm.

    Args:
        step: to capture; its optimizer is fused and capturable.
        batch: of the shape to capture.
        kl_weight: λ.
    """

    def __init__(self, step: "Step", batch: Any, kl_weight: float):
        self.groups = step.optimizer.param_groups
        self.batch = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, batch)
        device = step.generator.device
        self.kl_weight = torch.tensor(float(kl_weight), dtype=torch.float64, device=device)
        self.weight = torch.ones((), dtype=torch.float64, device=device)
        self.rates = [torch.tensor(float(group["lr"]), device=device) for group in self.groups]
        self.skip = torch.ones((), device=device)  # 1: everything is computed and nothing changed
        # a generator of its own: one whose capture failed is of no further use
        self.common, self.generator = step.generator, torch.Generator(device)
        self.generator.set_state(step.generator.get_state())
        # dropout draws from the global stream: the step itself finds it where an eager one does
        with torch.random.fork_rng(devices=[device]):
            self._capture(step)
        self.skip.zero_()

    def _capture(self, step: "Step") -> None:
        # a graph of gradients that waits in a cycle keeps its nodes on the stream where it was made
        gc.collect()
        # `step` is not kept: a step that holds its graphs, and is held by them, would stay, with their memory
        side, own = torch.cuda.Stream(), [group["lr"] for group in self.groups]
        for group, rate in zip(self.groups, self.rates, strict=True):
            group["lr"] = rate  # read on the device at every replay
        try:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._body(step)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            self.graph.register_generator_state(self.generator)  # pyright: ignore[reportAttributeAccessIssue]
            with uncollected(), torch.cuda.graph(self.graph):
                self.values, self.norm = self._body(step)
        finally:
            for group, rate in zip(self.groups, own, strict=True):
                group["lr"] = rate

    def _body(self, step: "Step") -> tuple[Tensor, Tensor]:
        values, norm = step.gradients([self.batch], (self.weight,), self.kl_weight, self.generator)
        step.move(values, norm, self.skip)
        return values, norm

    def __call__(self, batch: Any, weight: float, kl_weight: float) -> tuple[Tensor, Tensor]:
        for own, new in zip(pytree.tree_leaves(self.batch), pytree.tree_leaves(batch), strict=True):
            if isinstance(own, Tensor):
                own.copy_(new, non_blocking=True)
        self.kl_weight.fill_(kl_weight)
        self.weight.fill_(weight)
        for rate, group in zip(self.rates, self.groups, strict=True):
            rate.fill_(group["lr"])
        self.generator.set_state(self.common.get_state())
        self.graph.replay()
        self.common.set_state(self.generator.get_state())
        return self.values, self.norm


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no garbage in cycles is collected: the end of an older graph makes a capture fail."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
