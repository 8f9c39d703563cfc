"""The full normal N(μ, LLᵀ), for small P."""

import torch
from torch import Tensor, nn

from ..parameters import Parameters
from .family import MAX_DENSE, Family, check_initial_mean, check_initial_scale, initial_mean
from .gaussian import Gaussian, LowRankCovariance
from .normal import NormalForm, Triangle
from .numerics import solve, sum_weights


class FullNormalDensity(Gaussian):
    """N(mean, LLᵀ), L lower triangular with a positive diagonal: [P], [P, P]."""

    def __init__(self, mean: Tensor, cholesky: Tensor):
        self.location: Tensor = mean
        self.cholesky: Tensor = cholesky

    def transform(self, diagonal: Tensor, low_rank: Tensor) -> Tensor:
        return diagonal @ self.cholesky.mT

    def precision_product(self, x: Tensor) -> Tensor:
        return solve(self.cholesky, x)

    def quadratic(self, x: Tensor) -> Tensor:
        return sum_weights(torch.linalg.solve_triangular(self.cholesky, x.mT, upper=False).mT.square())

    def half_log_det(self) -> Tensor:
        return self.cholesky.diagonal().log().sum(dtype=torch.float64)

    def low_rank(self) -> LowRankCovariance:
        identity = torch.eye(self.P, dtype=self.mean.dtype, device=self.mean.device)
        return LowRankCovariance(torch.zeros_like(self.mean), self.cholesky, identity)

    def precision_diagonal(self) -> Tensor:
        identity = torch.eye(self.P, dtype=self.mean.dtype, device=self.mean.device)
        return torch.linalg.solve_triangular(self.cholesky, identity, upper=False).square().sum(0)

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        return self.cholesky[rows] @ self.cholesky[columns].mT

    @property
    def variance(self) -> Tensor:
        return self.cholesky.square().sum(-1)


class FullNormal(Family):
    """All covariances, N(μ, LLᵀ): P(P + 3)/2 variational parameters, for P up to a few thousand.

    L = diag(s₀) L̃ with s₀ the initial scale, the diagonal of L̃ as logarithms: a step of the optimizer means the same
    relative change in every weight.

    Args:
        initial_mean: means start at the network's "current" values, at a "fresh" draw of its initialisation or at
            "zero".
        initial_scale: L starts diagonal, at this fraction of each tensor's initialisation scale.

    Example:
        >>> from structvi import Parameters
        >>> FullNormal().bind(Parameters({"z": torch.zeros(3)}))().covariance().shape
        torch.Size([3, 3])
    """

    mean: Tensor
    log_diagonal: Tensor
    lower: Tensor
    unit: Tensor

    def __init__(self, initial_mean: str = "current", initial_scale: float = 0.1):
        super().__init__()
        check_initial_mean(initial_mean)
        check_initial_scale(initial_scale)
        self.initial_mean, self.initial_scale = initial_mean, initial_scale

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        P = parameters.size
        if P > MAX_DENSE:
            raise ValueError(
                f"FullNormal needs {P}² numbers and refuses beyond P = {MAX_DENSE}; "
                "use LowRankNormal(rank) or LowRankPrecision(rank), or select fewer tensors"
            )
        self.mean = nn.Parameter(initial_mean(parameters, self.initial_mean, generator))
        self.log_diagonal = nn.Parameter(torch.zeros_like(self.mean))
        self.lower = nn.Parameter(self.mean.new_zeros(P * (P - 1) // 2))
        self.register_buffer("unit", self.initial_scale * parameters.scale)

    def forward(self) -> FullNormalDensity:
        P = self.mean.shape[0]
        rows, columns = torch.tril_indices(P, P, offset=-1, device=self.mean.device)
        relative = torch.diag(self.log_diagonal.exp()).index_put((rows, columns), self.lower)
        return FullNormalDensity(self.mean, self.unit.unsqueeze(-1) * relative)

    @torch.no_grad()
    def normal(self) -> NormalForm:
        return NormalForm(self.mean.detach().clone(), Triangle(self.forward().cholesky))

    @torch.no_grad()
    def set_normal(self, form: NormalForm) -> None:
        self.mean.copy_(form.mean)
        root = form.triangle().to(self.unit)
        self.unit.copy_(root.diagonal())
        rows, columns = torch.tril_indices(len(root), len(root), offset=-1, device=root.device)
        self.lower.copy_((root / self.unit.unsqueeze(-1))[rows, columns])
        self.log_diagonal.zero_()
