"""A point estimate: all mass at one weight vector."""

import torch
from torch import Tensor, nn

from ..couplings import Coupling, naive
from ..parameters import Parameters
from ..util.checks import check_one_of
from .family import STARTS, Density, Draws, Family, check_draw, initial_mean
from .normal import Diagonal, NormalForm


class PointMass(Density):
    """δ(θ − point): [P]. It has no density: the objective is E[log joint] without an entropy."""

    has_density = False
    finite = True

    def __init__(self, point: Tensor):
        self.point = point

    @property
    def mean(self) -> Tensor:
        return self.point

    @property
    def variance(self) -> Tensor:
        return torch.zeros_like(self.point)

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        """Return `groups` draws, all the same and of equal weight."""
        check_draw(groups, generator)
        return Draws(self.point.expand(groups, -1), self.point.new_full((groups,), 1 / groups))

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        return self.point.new_zeros(rows.stop - rows.start, columns.stop - columns.start)


class MAP(Family):
    """Maximum a posteriori: θ = θ̂, P parameters. A point mass: no density, no entropy, no lower bound.

    Args:
        initial_mean: the point starts at the network's "current" values, at a "fresh" draw of its initialisation or
            at "zero".

    Example:
        >>> from structvi import Parameters
        >>> MAP().bind(Parameters({"z": torch.ones(2)}))().draw().theta
        tensor([[1., 1.]], grad_fn=<ExpandBackward0>)
    """

    point: Tensor

    def __init__(self, initial_mean: str = "current"):
        super().__init__()
        check_one_of("initial_mean", initial_mean, STARTS)
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
