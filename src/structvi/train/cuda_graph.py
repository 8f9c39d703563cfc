"""A training step captured as one CUDA graph: the launches of its kernels no longer wait for Python."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..util.garbage import uncollected
from .adam import Adam, Thin

#: (batches, weights, λ, generator) → ELBO and log likelihood of each group, [2, groups], the gradient's norm, and what
#: of it is not in `.grad`
Gradient = Callable[[Sequence[Any], Sequence[Any], Any, torch.Generator], tuple[Tensor, Tensor, Thin]]


class CapturedStep:
    """A step captured for batches of one shape: called, it copies the batch in, replays, and gives what the step tells.

    Args:
        gradient: the step without its optimizer.
        optimizer: moves the parameters.
        generator: the stream of the draws; it goes on where a replay ends.
        clip: the largest norm of the gradient.
        batch: of the shape to capture.
        temperature: λ.
    """

    def __init__(
        self,
        gradient: Gradient,
        optimizer: Adam,
        generator: torch.Generator,
        clip: float,
        batch: Any,
        temperature: float,
    ):
        self.optimizer, self.clip = optimizer, clip
        self.batch = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, batch)
        device = generator.device
        self.temperature = torch.tensor(float(temperature), dtype=torch.float64, device=device)
        self.weight = torch.ones((), dtype=torch.float64, device=device)
        self.rates = [torch.tensor(float(group["lr"]), device=device) for group in optimizer.param_groups]
        self.make = torch.zeros((), device=device)  # 0: everything is computed and nothing changed
        # a generator of its own: one whose capture failed is of no further use
        self.common, self.generator = generator, torch.Generator(device)
        self.generator.set_state(generator.get_state())
        # dropout draws from the global stream: the step itself finds it where an eager one does
        with torch.random.fork_rng(devices=[device]):
            self._capture(gradient)
        self.make.fill_(1.0)

    def _capture(self, gradient: Gradient) -> None:
        # a graph of gradients that waits in a cycle keeps its nodes on the stream where it was made
        gc.collect()
        # `gradient` is not kept: a step that holds its graphs, and is held by them, would stay, with their memory
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), self.optimizer.rates(self.rates):
            for _ in range(2):
                self._body(gradient)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(self.generator)  # pyright: ignore[reportAttributeAccessIssue]
        with uncollected(), torch.cuda.graph(self.graph), self.optimizer.rates(self.rates):
            self.told, self.norm = self._body(gradient)

    def _body(self, gradient: Gradient) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        told, norm, thin = gradient([self.batch], (self.weight,), self.temperature, self.generator)
        self.optimizer.step_clipped(told, norm, thin, self.clip, self.make)
        return told, norm

    def __call__(self, batch: Any, weight: float, temperature: float) -> tuple[Tensor, Tensor]:
        for own, new in zip(pytree.tree_leaves(self.batch), pytree.tree_leaves(batch), strict=True):
            if isinstance(own, Tensor):
                own.copy_(new, non_blocking=True)
        self.temperature.fill_(temperature)
        self.weight.fill_(weight)
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self.generator.set_state(self.common.get_state())
        self.graph.replay()
        self.common.set_state(self.generator.get_state())
        return self.told, self.norm
