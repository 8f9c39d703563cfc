"""Mean field: independent normals, N(μ, diag(s)²)."""

from abc import ABC

import torch
from torch import Tensor, nn

from ..parameters import Parameters
from ..util.checks import check_one_of, check_positive
from .family import STARTS, Family, initial_mean
from .gaussian import LowRankDensity
from .normal import Diagonal, NormalForm


class ScaledFamily(Family, ABC):
    """Mean [P] and log scale [P], which the normal families share."""

    mean: Tensor
    log_scale: Tensor

    def __init__(self, initial_mean: str = "current", initial_scale: float = 0.1):
        super().__init__()
        check_one_of("initial_mean", initial_mean, STARTS)
        check_positive(initial_scale, "initial_scale")
        self.initial_mean, self.initial_scale = initial_mean, initial_scale

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        self.mean = nn.Parameter(initial_mean(parameters, self.initial_mean, generator))
        self.log_scale = nn.Parameter((self.initial_scale * parameters.scale).log())


class MeanField(ScaledFamily):
    """Independent normals over all weights, θ_i ~ N(μ_i, s_i²): 2P variational parameters.

    Args:
        initial_mean: means start at the network's "current" values, at a "fresh" draw of its initialisation or at
            "zero".
        initial_scale: scales start at this fraction of each tensor's initialisation scale.

    Example:
        >>> import torch
        >>> from structvi import Parameters
        >>> q = MeanField().bind(Parameters({"z": torch.zeros(3)}))
        >>> q().variance.shape
        torch.Size([3])
    """

    def forward(self) -> LowRankDensity:
        return LowRankDensity(self.mean, self.log_scale, self.mean.new_empty(len(self.mean), 0), self.mean.detach())

    @torch.no_grad()
    def normal(self) -> NormalForm:
        return NormalForm(self.mean.detach().clone(), Diagonal(self.log_scale.exp()))

    @torch.no_grad()
    def set_normal(self, form: NormalForm) -> None:
        self.mean.copy_(form.mean)
        self.log_scale.copy_(form.diagonal().scale.log())


def diagonal_normals(family: Family) -> list[tuple[Tensor, Tensor]]:
    """Return mean and log scale [P], the parameters, of each `MeanField` among a family and its parts."""
    return [(own.mean, own.log_scale) for own in family.modules() if isinstance(own, MeanField)]
