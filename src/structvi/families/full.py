"""The full normal N(μ, LLᵀ), for small P."""

import torch
from torch import Tensor, nn

from ..parameters import Parameters
from .family import MAX_DENSE
from .gaussian import Gaussian
from .mean_field import ScaledFamily
from .normal import NormalForm, Triangle
from .numerics import solve, sum_weights


class FullNormalDensity(Gaussian):
    """N(mean, LLᵀ), L lower triangular with a positive diagonal: [P], [P, P]."""

    def __init__(self, mean: Tensor, cholesky: Tensor):
        self.location, self.cholesky = mean, cholesky

    def transform(self, diagonal: Tensor, low_rank: Tensor) -> Tensor:
        return diagonal @ self.cholesky.mT

    def precision_product(self, x: Tensor) -> Tensor:
        return solve(self.cholesky, x)

    def quadratic(self, x: Tensor) -> Tensor:
        return sum_weights(torch.linalg.solve_triangular(self.cholesky, x.mT, upper=False).mT.square())

    def half_log_det(self) -> Tensor:
        return self.cholesky.diagonal().log().sum(dtype=torch.float64)

    def covariance_product(self, x: Tensor) -> Tensor:
        return x @ self.cholesky @ self.cholesky.mT

    @property
    def variance(self) -> Tensor:
        return self.cholesky.square().sum(-1)


class FullNormal(ScaledFamily):
    """All covariances, N(μ, LLᵀ): P(P + 3)/2 variational parameters, for P up to a few thousand.

    The diagonal of L is learned as logarithms, and the rows below it relative to the initial scale. A step of the
    optimizer then means the same relative change in every weight.

    Args:
        initial_mean: means start at the network's "current" values, at a "fresh" draw of its initialisation or at
            "zero".
        initial_scale: L starts diagonal, at this fraction of each tensor's initialisation scale.

    Example:
        >>> from structvi import Parameters
        >>> FullNormal().bind(Parameters({"z": torch.zeros(3)}))().covariance().shape
        torch.Size([3, 3])
    """

    lower: Tensor
    unit: Tensor

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        P = parameters.size
        if P > MAX_DENSE:
            raise ValueError(f"FullNormal refuses P = {P} beyond {MAX_DENSE}: use LowRankNormal(rank)")
        super().initialise(parameters, generator)
        self.lower = nn.Parameter(self.mean.new_zeros(P * (P - 1) // 2))
        self.register_buffer("unit", self.log_scale.detach().exp())

    def forward(self) -> FullNormalDensity:
        P = len(self.mean)
        rows, columns = torch.tril_indices(P, P, offset=-1, device=self.mean.device)
        below = self.lower * self.unit[rows]
        return FullNormalDensity(self.mean, torch.diag(self.log_scale.exp()).index_put((rows, columns), below))

    @torch.no_grad()
    def normal(self) -> NormalForm:
        return NormalForm(self.mean.detach().clone(), Triangle(self.forward().cholesky))

    @torch.no_grad()
    def set_normal(self, form: NormalForm) -> None:
        self.mean.copy_(form.mean)
        root = form.triangle().to(self.unit)
        self.unit.copy_(root.diagonal())
        self.log_scale.copy_(self.unit.log())
        rows, columns = torch.tril_indices(len(root), len(root), offset=-1, device=root.device)
        self.lower.copy_(root[rows, columns] / self.unit[rows])
