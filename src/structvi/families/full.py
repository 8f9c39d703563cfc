"""The full normal N(μ, LLᵀ), for small P."""

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, MultivariateNormal

from ..parameters import Parameters
from .density import MAX_DENSE
from .family import Coordinates, Family
from .gaussian import Gaussian, LowRank
from .normal import NormalForm, Triangle
from .numerics.algebra import solve, sum_weights
from .starts import check_start, initial_mean

#: of a larger normal a start from the curvature has the diagonal alone
MOST_COLUMNS = 1024


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

    def low_rank(self) -> LowRank:
        identity = torch.eye(self.P, dtype=self.mean.dtype, device=self.mean.device)
        return LowRank(torch.zeros_like(self.mean), self.cholesky, identity)

    def precision_diagonal(self) -> Tensor:
        identity = torch.eye(self.P, dtype=self.mean.dtype, device=self.mean.device)
        return torch.linalg.solve_triangular(self.cholesky, identity, upper=False).square().sum(0)

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        return self.cholesky[rows] @ self.cholesky[columns].mT

    @property
    def variance(self) -> Tensor:
        return self.cholesky.square().sum(-1)

    def to_distribution(self) -> Distribution:
        return MultivariateNormal(self.mean, scale_tril=self.cholesky)


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
        check_start(initial_mean, initial_scale)
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

    def begin_again(self, generator: torch.Generator) -> None:
        if self.space is not None:
            self.initial_mean = "fresh"
            self.initialise(self.space, generator)

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
        self._set_root(form.triangle().to(self.unit))

    def hold_mean(self) -> None:
        self.mean.requires_grad_(False)

    def place_at(self, mean: Tensor, scale: Tensor) -> None:
        self.mean.copy_(mean)
        self._set_root(torch.diag(scale))

    @property
    def precision_columns(self) -> int:
        """All, where that is not too many to be found."""
        return len(self.mean) if len(self.mean) <= MOST_COLUMNS else 0

    def place_columns(self, columns: Tensor) -> None:
        precision = torch.diag(self.unit.double() ** -2) + columns.double() @ columns.double().mT
        root = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(precision)))
        self._set_root(root.to(self.unit))

    @torch.no_grad()
    def move_to(self, theta: Tensor) -> None:
        self.mean.copy_(theta)

    @property
    def coordinates(self) -> Coordinates:
        return "full"

    @torch.no_grad()
    def standardise(self, generator: torch.Generator | None) -> None:
        self.mean.zero_()
        self._set_root(torch.eye(len(self.mean), dtype=self.mean.dtype, device=self.mean.device))

    @torch.no_grad()
    def change_coordinates(self, shift: Tensor, root: Tensor) -> None:
        root = torch.diag(root) if root.ndim == 1 else root
        self.mean.copy_(shift + self.mean @ root.mT)
        self._set_root(root @ self.forward().cholesky)

    def _set_root(self, root: Tensor) -> None:
        """L [P, P], with its diagonal as the unit."""
        self.unit.copy_(root.diagonal())
        rows, columns = torch.tril_indices(len(root), len(root), offset=-1, device=root.device)
        self.lower.copy_((root / self.unit.unsqueeze(-1))[rows, columns])
        self.log_diagonal.zero_()
