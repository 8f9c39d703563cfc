"""Loops of your own over several processes.

`LossModule` is to be wrapped in `DistributedDataParallel` or by Lightning Fabric; `average_gradients` does without.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .collectives import all_reduce, sum_gradients

if TYPE_CHECKING:
    from ..posterior import Posterior


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
