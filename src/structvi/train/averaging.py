"""Parameters as they were: snapshots to go back to, and the mean over the last iterates."""

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def assign(named: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in named.items():
        tensor.copy_(values[name])


def copied(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named.items()}


@torch.no_grad()
def averaged(mean: Mapping[str, Tensor], count: int, named: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The mean of `count` iterates with one more, in place where there is one already."""
    if count == 0:
        return copied(named)
    for name, tensor in named.items():
        mean[name].lerp_(tensor, 1 / (count + 1))
    return mean


class Snapshots:
    """Copies of the parameters in memory of the host, into two sets of tensors in turn.

    The optimizer's moments are not kept: no step is made with a gradient that is not finite, so they are.

    Args:
        named: the parameters.
        every: how many steps lie between two snapshots.
    """

    def __init__(self, named: Mapping[str, Tensor], every: int):
        self.named, self.every = named, every
        self._spare: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, last: Mapping[str, Tensor], last_step: int, step: int) -> dict[str, Tensor] | None:
        """Before a step, where the last snapshot is old: another one, to be kept once the loss was finite."""
        if last and step < last_step + self.every:
            return None
        for name, tensor in self.named.items():
            if name not in self._spare:
                self._spare[name] = torch.empty_like(tensor, device="cpu")
            self._spare[name].copy_(tensor)
        return self._spare

    def kept(self, last: Mapping[str, Tensor]) -> None:
        """What was taken last is kept, and what was kept before is free."""
        self._spare = dict(last)
