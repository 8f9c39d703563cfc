"""log p(θ): a prior is any callable (parameters, theta [S, P]) → [S]; one that learns is an `nn.Module`."""

from collections.abc import Callable
from math import log, pi

from torch import Tensor

from .families.algebra import sum_weights
from .parameters import Parameters

Prior = Callable[[Parameters, Tensor], Tensor]


class NormalPrior:
    """Independent normals, θ_i ~ N(0, scale²): l2 regularisation with its normalising constant.

    Args:
        scale: the standard deviation, > 0.

    Example:
        >>> import torch
        >>> NormalPrior(1.0)(Parameters({"z": torch.zeros(2)}), torch.zeros(1, 2))
        tensor([-1.8379])
    """

    def __init__(self, scale: float = 1.0):
        if not isinstance(scale, int | float) or not 0 < scale < float("inf"):
            raise ValueError(f"the scale of a NormalPrior must be a positive number, got {scale!r}")
        self.scale = scale

    def __repr__(self) -> str:
        return f"NormalPrior({self.scale})"

    def __call__(self, parameters: Parameters, theta: Tensor) -> Tensor:
        constant = parameters.size * (log(self.scale) + 0.5 * log(2 * pi))
        return (-0.5 * sum_weights(theta.square()) / self.scale**2 - constant).to(theta.dtype)
