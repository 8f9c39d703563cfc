"""Calls in which all ranks of a `torch.distributed` process group take part, with a clear error where one is gone."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class LostRankError(RuntimeError):
    """Another rank failed, ended or was killed: the fit cannot go on without it."""


def collective(call: Callable[[], T]) -> T:
    """A call in which all ranks take part; a clear error where one of them is gone."""
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
    """Overwrite tensors by those of rank 0."""
    for tensor in tensors:
        common = tensor.contiguous()
        collective(lambda x=common: dist.broadcast(x, 0))
        tensor.copy_(common)


def all_reduce(x: Tensor) -> Tensor:
    """Σ over ranks; in place where x is contiguous."""
    x = x.contiguous()
    collective(lambda: dist.all_reduce(x))
    return x


def reduce_scatter(parts: list[Tensor]) -> Tensor:
    """Σ over ranks of the part that has this rank's number; all parts have one shape."""
    own = torch.empty_like(parts[0])

    def summed() -> Tensor:
        try:
            dist.reduce_scatter(own, parts)
        except RuntimeError as error:  # gloo of torch 2.6 has none, and says so before anything is sent
            if "does not support reduce_scatter" not in str(error):
                raise
            whole = torch.stack(parts)
            dist.all_reduce(whole)
            return whole[dist.get_rank()]
        return own

    return collective(summed)


def all_gather(x: Tensor) -> list[Tensor]:
    """x of every rank, all of one shape."""
    theirs = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    collective(lambda: dist.all_gather(theirs, x.contiguous()))
    return theirs


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Σ over ranks of every `.grad`, in place and in the order it has in memory: fused optimizers rely on that."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    summed = [_in_order(gradient) for gradient in gradients]
    works = [collective(lambda x=x: dist.all_reduce(x, async_op=True)) for x in summed]
    for work, x, gradient in zip(works, summed, gradients, strict=True):
        collective(work.wait)  # pyright: ignore[reportOptionalMemberAccess]
        if x.data_ptr() != gradient.data_ptr():
            gradient.copy_(x)


def _in_order(x: Tensor) -> Tensor:
    """Row by row in memory: a view also of what lies there column by column, else a copy."""
    return x.mT if x.ndim == 2 and x.mT.is_contiguous() else x.contiguous()
