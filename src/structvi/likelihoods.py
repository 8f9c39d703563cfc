"""log p(t | y): from a network's output y and the observed target t to log probabilities, one per observation."""

from abc import ABC, abstractmethod
from math import log, pi

import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, Independent, Normal


class Likelihood(nn.Module, ABC):
    """Called with (output [B, ..], target [B, ..]) it gives log p(t | y) of each observation: [B, ..]."""

    @abstractmethod
    def forward(self, output: Tensor, target: Tensor) -> Tensor: ...

    @abstractmethod
    def distribution(self, output: Tensor) -> Distribution:
        """p(t | y) as a torch distribution with the batch shape of the observations."""


class Gaussian(Likelihood):
    """t ~ N(y, noise²) with a known standard deviation, independently for every element of the output.

    Args:
        noise: the standard deviation, > 0.

    Example:
        >>> Gaussian(noise=0.25)(torch.zeros(5, 1), torch.zeros(5, 1)).shape
        torch.Size([5, 1])
    """

    def __init__(self, noise: float):
        super().__init__()
        if not isinstance(noise, int | float) or isinstance(noise, bool) or not 0 < noise < float("inf"):
            raise ValueError(f"noise must be a positive standard deviation, got {noise!r}")
        self.noise = float(noise)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if output.shape != target.shape:
            raise ValueError(
                f"Gaussian: the network's output has shape {tuple(output.shape)} and the target {tuple(target.shape)}; "
                "they must be equal (broadcasting would silently compare every output with every target)"
            )
        if not target.dtype.is_floating_point:
            raise TypeError(f"Gaussian: the target must be floating, got {target.dtype}; for classes use Categorical")
        return -0.5 * ((target - output) / self.noise).square() - log(self.noise) - 0.5 * log(2 * pi)

    def distribution(self, output: Tensor) -> Distribution:
        return Independent(Normal(output, self.noise, validate_args=False), 0)

    def extra_repr(self) -> str:
        return f"noise={self.noise}"


class Categorical(Likelihood):
    """t ~ softmax(y): output [B, C, ..] of logits, target [B, ..] of class labels 0 … C−1.

    Example:
        >>> Categorical()(torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)).shape
        torch.Size([5])
    """

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if output.ndim < 2 or target.shape != output.shape[:1] + output.shape[2:]:
            raise ValueError(
                "Categorical expects logits [B, C, ..] and labels [B, ..], "
                f"got {tuple(output.shape)} and {tuple(target.shape)}"
            )
        if target.dtype.is_floating_point or target.dtype == torch.bool:
            raise TypeError(f"Categorical: labels must be integers, got {target.dtype}; convert them with .long()")
        classes = output.shape[1]
        low, high = int(target.min()), int(target.max())
        if low < 0 or high >= classes:
            raise ValueError(
                f"Categorical: labels run from {low} to {high}, but the network has {classes} outputs: "
                f"labels must lie in 0 … {classes - 1}"
            )
        return -nn.functional.cross_entropy(output, target.long(), reduction="none")

    def distribution(self, output: Tensor) -> Distribution:
        return CategoricalDistribution(logits=output.movedim(1, -1), validate_args=False)
