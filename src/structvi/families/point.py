"""A point estimate: all mass at one weight vector."""

import torch
from torch import Tensor, nn

from ..couplings import Coupling, naive
from ..parameters import Parameters
from .family import Density, Draws, Family, check_draw, check_initial_mean, initial_mean
from .normal import Diagonal, NormalForm


class PointMass(Density):
    """δ(θ − point): [P]. It has no density; `log_prob` is the log probability of a point: 0 there, −∞ elsewhere."""

    has_density = False

    def __init__(self, point: Tensor):
        self.point = point

    @property
    def mean(self) -> Tensor:
        return self.point

    @property
    def variance(self) -> Tensor:
        return torch.zeros_like(self.point)

    @property
    def finite(self) -> bool:
        return True

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        """Return `groups` draws, all the same and of equal weight."""
        check_draw(groups, coupling, generator, self.point.device)
        return Draws(self.point.expand(groups, -1), self.point.new_full((groups,), 1 / groups))

    def log_prob(self, theta: Tensor) -> Tensor:
        hit = (self._check_theta(theta) == self.point).all(-1)
        return torch.where(hit, 0.0, -torch.inf).to(theta.dtype)

    def score(self, theta: Tensor) -> Tensor:
        raise NotImplementedError("a point mass has no density and so no score")

    def entropy(self) -> Tensor:
        raise NotImplementedError(
            "a point mass has no finite differential entropy (it is −∞): the objective is E[log joint] without it"
        )

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        return self.point.new_zeros(rows.stop - rows.start, columns.stop - columns.start)


class MAP(Family):
    """Maximum a posteriori: θ = θ̂, P parameters. A point mass: no density, no entropy, no lower bound.

    Args:
        initial_mean: the point starts at the network's "current" values, at a "fresh" draw of its initialisation or
            at "zero".

    Example:
        >>> from structvi import Parameters
        >>> MAP().bind(Parameters({"z": torch.zeros(2)}))().log_prob(torch.zeros(1, 2))
        tensor([0.])
    """

    point: Tensor

    def __init__(self, initial_mean: str = "current"):
        super().__init__()
        check_initial_mean(initial_mean)
        self.initial_mean = initial_mean

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        self.point = nn.Parameter(initial_mean(parameters, self.initial_mean, generator))

    def forward(self) -> PointMass:
        return PointMass(self.point)

    def normal(self) -> NormalForm:
        point = self.point.detach()
        return NormalForm(point.clone(), Diagonal(torch.zeros_like(point)))

    @torch.no_grad()
    def set_normal(self, form: NormalForm) -> None:
        self.point.copy_(form.mean)
