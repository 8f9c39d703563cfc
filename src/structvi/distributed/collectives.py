"""Calls in which all ranks of a `torch.distributed` process group take part, with a clear error if one is lost.

Loops of your own use `LossModule` or `average_gradients`.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..posterior import Posterior

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


class LossModule(nn.Module):
    """`posterior.loss` as the forward of a module, for `DistributedDataParallel` and `Fabric.setup`.

    The module has the parameters that are learned. It lacks the network's own: they get no gradient, and DDP would wait
    for one. Give all ranks generators of one seed for the same weights, or of different seeds for more draws.

    Args:
        posterior: its `loss` gets the arguments of the module.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField(), num_data=10)
        >>> module = LossModule(bayes)
        >>> module((torch.zeros(5, 3), torch.zeros(5, 1))).shape, len(list(module.parameters()))
        (torch.Size([]), 2)
    """

    def __init__(self, posterior: "Posterior"):
        super().__init__()
        self._posterior = (posterior,)  # not a child
        self.family = posterior.family
        for name in ("likelihood", "prior"):
            part = getattr(posterior.model, name)
            if isinstance(part, nn.Module):
                self.add_module(name, part)

    def forward(self, batch: Any, **options: Any) -> Tensor:
        return self._posterior[0].loss(batch, **options)


def average_gradients(posterior: nn.Module, count: int) -> None:
    """Give every rank the gradient of the union of the ranks' batches, after `posterior.loss(..).backward()`.

        posterior.loss(batch, generator=generator).backward()
        average_gradients(posterior, len(target))
        optimizer.step()

    Args:
        posterior: its parameters' `.grad` are changed.
        count: B_r, the observations in this rank's batch; ranks may have different numbers.
    """
    parameters = [parameter for parameter in posterior.parameters() if parameter.grad is not None]
    total = all_reduce(torch.tensor(float(count), dtype=torch.float64, device=parameters[0].device))
    for parameter in parameters:
        cast(Tensor, parameter.grad).mul_(count / float(total))
    sum_gradients(parameters)
