"""What families with a mean and a log scale for each weight share: where they start, and how they begin again."""

from abc import ABC

import torch
from torch import Tensor, nn

from ..parameters import Parameters
from .family import Family
from .starts import check_start, initial_mean


class Scaled(Family, ABC):
    """Mean [P] and log scale [P].

    Args:
        initial_mean: means start at the network's "current" values, at a "fresh" draw of its initialisation or at
            "zero".
        initial_scale: scales start at this fraction of each tensor's initialisation scale.
    """

    mean: Tensor
    log_scale: Tensor
    row_tensors = ("mean", "log_scale")
    mean_name = "mean"

    def __init__(self, initial_mean: str = "current", initial_scale: float = 0.1):
        super().__init__()
        check_start(initial_mean, initial_scale)
        self.initial_mean, self.initial_scale = initial_mean, initial_scale

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        self.mean = nn.Parameter(initial_mean(parameters, self.initial_mean, generator))
        self.log_scale = nn.Parameter((self.initial_scale * parameters.scale).log())

    def is_fresh(self) -> bool | None:
        if self.space is None:
            return None
        start = (self.initial_scale * self.space.scale).log().to(self.log_scale)
        return torch.allclose(self.log_scale, self.own_rows(start), rtol=0, atol=1e-6)

    def begin_again(self, generator: torch.Generator) -> None:
        if self.space is not None:
            self.initial_mean = "fresh"
            self.initialise(self.space, generator)
