"""What every target has: a space, and the log joint at S points of it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..parameters import Parameters

NOTHING: Mapping[str, Tensor] = MappingProxyType({})


@runtime_checkable
class Target(Protocol):
    """An unnormalised log posterior over `space`."""

    space: Parameters

    def log_joint(self, theta: Tensor, batch: Any = None) -> Tensor:
        """log p(data, θ), or an unbiased estimate of it from a batch: [S, P] → [S].

        `BayesianModel` and `LogDensity` also take `fixed`, from families with point-estimated blocks: named tensors
        that are the same in every draw and are missing from `theta`. For other targets they are joined to `theta`.
        """
        ...


def check_theta(theta: Any, space: Parameters) -> None:
    if not isinstance(theta, Tensor) or theta.ndim != 2 or theta.shape[0] == 0 or theta.shape[1] != space.size:
        came = tuple(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
        raise ValueError(
            f"expected theta of shape [S, P] with S ≥ 1 and P = {space.size}, got {came}; for one point add a row axis"
        )
