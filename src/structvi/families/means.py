"""Which parameters of a family are means of weights, and how the weights lie in them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from .basis import Tensors, layout
from .family import Family
from .rotated import Rotated


class Mean(NamedTuple):
    """A parameter [P] with a number for each weight, and the tensors that it is made of."""

    parameter: Tensor
    tensors: list[Tensors]
    #: other coordinates for the family, by matrices in the present ones; None where it has none
    turn: Callable[[Mapping[str, Tensor]], None] | None = None


def means_of(family: Family) -> list[Mean]:
    """Of a family and all that it is made of; rows that are split over ranks have none.

    Example:
        >>> import torch
        >>> from structvi import MeanField, Parameters
        >>> (mean,) = means_of(MeanField().bind(Parameters({"w": torch.zeros(3, 2)})))
        >>> mean.parameter.shape, [axis.size for axis in mean.tensors[0].axes]
        (torch.Size([6]), [3, 2])
    """
    found: dict[int, Mean] = {}
    turns = {id(part.part): part.turn_by for part in family.families() if isinstance(part, Rotated)}
    for part in family.families():
        if part.mean_name is not None and part.space is not None and part.shard is None:
            parameter = getattr(part, part.mean_name)
            found[id(parameter)] = Mean(parameter, layout(part.space), turns.get(id(part)))
    return list(found.values())
