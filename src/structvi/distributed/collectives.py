"""Calls in which all ranks of a `torch.distributed` process group take part, with a clear error if one is lost."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class LostRankError(RuntimeError):
    """Another rank failed, ended or was killed; the fit cannot go on without it."""


def collective(call: Callable[[], T]) -> T:
    """Return the result of a call in which all ranks take part; raise `LostRankError` if one of them is gone."""
    try:
        return call()
    except RuntimeError as error:  # gloo's closed connections, NCCL's aborts, timeouts of both
        raise LostRankError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} has lost another rank: it was killed, ended or does "
            "not answer. Look at that rank's output, and start all of them again with resume= and the directory of "
            f"checkpoints. ({error})"
        ) from error


@torch.no_grad()
def from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors by the values of rank 0."""
    for tensor in tensors:
        common = tensor.contiguous()
        collective(lambda x=common: dist.broadcast(x, 0))
        tensor.copy_(common)


def all_reduce(x: Tensor) -> Tensor:
    """Return the sum over ranks; in place if x is contiguous."""
    x = x.contiguous()
    collective(lambda: dist.all_reduce(x))
    return x


def all_gather(x: Tensor) -> list[Tensor]:
    """Return x of every rank, all of one shape."""
    theirs = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    collective(lambda: dist.all_gather(theirs, x.contiguous()))
    return theirs


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Sum every `.grad` over ranks, in place and in the order it has in memory: fused optimizers rely on that."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.copy_(all_reduce(parameter.grad))
