"""A Gaussian in coordinates of its own: N(Qm, QΣQᵀ), with Q orthogonal and cheap."""

import copy
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..couplings import Coupling, naive
from ..parameters import Parameters
from .basis import Basis
from .family import Draws, Family
from .gaussian import Gaussian
from .mean_field import ScaledFamily
from .normal import Diagonal, LowRank, NormalForm
from .point import MAP


class RotatedDensity(Gaussian):
    """θ = Qξ with ξ ~ the inner Gaussian.

    log q(θ) = log q_ξ(Qᵀθ), the entropy is that of ξ, and the score Q ∇ log q_ξ: Q has determinant one. Diagonals turn
    with the squares of Q's elements, which have the same cheap form as Q.
    """

    def __init__(self, inner: Gaussian, basis: Basis):
        self.inner, self.basis, self.rank = inner, basis, inner.rank

    @cached_property
    def location(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        with torch.enable_grad():  # a value without a graph must not be found by who wants one
            return self.basis(self.inner.mean)

    @property
    def accurate(self) -> bool:
        return self.inner.accurate

    def draw_scored(
        self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None
    ) -> tuple[Draws, Tensor | None]:
        """Return draws of ξ, turned, and log q of ξ: it is the same at θ."""
        draws, log_q = self.inner.draw_scored(groups, coupling, generator)
        return Draws(self.basis(draws.theta), draws.weight), log_q

    def transform(self, diagonal: Tensor, low_rank: Tensor) -> Tensor:
        return self.basis(self.inner.transform(diagonal, low_rank))

    def precision_product(self, x: Tensor) -> Tensor:
        return self.basis(self.inner.precision_product(self.basis(x, back=True)))

    def quadratic(self, x: Tensor) -> Tensor:
        return self.inner.quadratic(self.basis(x, back=True))

    def half_log_det(self) -> Tensor:
        return self.inner.half_log_det()

    def covariance_product(self, x: Tensor) -> Tensor:
        return self.basis(self.inner.covariance_product(self.basis(x, back=True)))

    @property
    def variance(self) -> Tensor:
        d, V, C = self.inner.low_rank()
        QV = self.basis(V.mT).mT
        return self.basis(d, squared=True) + ((QV @ C) * QV).sum(-1)


class Rotated(Family):
    """Any Gaussian family over θ = Qξ: its axes are the columns of Q instead of the weights.

    Q is an orthogonal matrix for each axis of each tensor (`Basis`), the identity until it is chosen. `set_normal`
    takes it from the columns of a precision, as a fit around a network gives them. `Soap` and `NaturalGradient` take
    it from averages of E GGᵀ and E GᵀG of each tensor's gradients G. In these Kronecker coordinates the data determine
    fewer directions, and a diagonal says more. Beyond the family's own it keeps n² numbers for each axis of n.

    Args:
        part: the family of ξ: `MeanField()`, `LowRankPrecision(rank=8)`.

    Example:
        >>> from structvi import MeanField, Parameters
        >>> q = Rotated(MeanField()).bind(Parameters({"w": torch.zeros(3, 2)}))
        >>> q().variance.shape
        torch.Size([6])
    """

    basis: Basis

    def __init__(self, part: Family):
        super().__init__()
        self.part = part

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        self.part = self.part.bind(parameters, generator)
        self.basis = Basis(parameters)
        if self.part.normal() is None or not isinstance(self.part(), Gaussian):
            raise TypeError(f"Rotated is for Gaussian families, and {type(self.part).__name__} is none")

    def forward(self) -> RotatedDensity:
        inner = self.part()
        assert isinstance(inner, Gaussian)
        return RotatedDensity(inner, self.basis)

    @property
    def rank(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.part.rank

    def set_normal(self, form: NormalForm) -> None:
        """Turn the mean and the factor exactly, and keep the diagonal of the precision along the axes.

        Columns W of a precision choose the axes: the eigenvectors of Σ GGᵀ for the columns G, unfolded along an axis.
        """
        root = form.root
        if isinstance(root, LowRank) and root.of_precision and form.rank:
            self.basis.set(self.basis.of_gradients((root.factor / root.scale.unsqueeze(-1)).mT))
        self.part.set_normal(_turned(form, self.basis))

    @torch.no_grad()
    def turn(self, change: Mapping[str, Tensor]) -> None:
        """Take other axes: Q becomes QR, made orthogonal to rounding; the law changes as little as in `set_normal`.

        Args:
            change: an orthogonal R in the present coordinates for each axis, by the names of `basis.axes()`.
        """
        step, form = copy.deepcopy(self.basis), self.part.normal()
        step.set(change)
        assert form is not None
        self.part.set_normal(_turned(form, step))
        turned = {name: Q.double() @ change[name].double() for name, Q in self.basis.named_buffers()}
        self.basis.set({name: 1.5 * Q - 0.5 * Q @ (Q.mT @ Q) for name, Q in turned.items()})


def _turned(form: NormalForm, basis: Basis) -> NormalForm:
    """Return the normal of ξ, θ = Qξ, for one of θ: the mean and factor exactly, of the diagonal its own diagonal."""
    mean, root = basis(form.mean, back=True), form.root
    if not isinstance(root, LowRank):
        diagonal = form.precision_diagonal
        return NormalForm(mean, Diagonal(basis(diagonal, back=True, squared=True).rsqrt()))
    scale = basis(root.scale.square().reciprocal(), back=True, squared=True).rsqrt()
    size = -1 if root.of_precision else 1  # the columns are SF of a covariance, S⁻¹F of a precision
    columns = basis((root.factor * root.scale.unsqueeze(-1) ** size).mT, back=True).mT
    return NormalForm(mean, LowRank(scale, columns / scale.unsqueeze(-1) ** size, root.of_precision))


def rotation(family: Family) -> Rotated | None:
    """Return the `Rotated` family that this is, or None.

    Example:
        >>> from structvi import MeanField
        >>> rotation(MeanField()) is None, rotation(Rotated(MeanField())).part
        (True, MeanField(initial_mean='current', initial_scale=0.1, unbound))
    """
    return family if isinstance(family, Rotated) else None


class Mean(NamedTuple):
    """A parameter [P] with a number for each weight, and the tensors that it is made of."""

    parameter: Tensor
    space: Parameters
    #: other coordinates for the family, by matrices in the present ones; None if it has none
    turn: Callable[[Mapping[str, Tensor]], None] | None = None


def means_of(family: Family) -> list[Mean]:
    """Return the means and points of our families among a family and its parts, each over a space of its own.

    Example:
        >>> import torch
        >>> from structvi import MeanField, Parameters
        >>> (mean,) = means_of(MeanField().bind(Parameters({"w": torch.zeros(3, 2)})))
        >>> mean.parameter.shape, mean.space.names
        (torch.Size([6]), ('w',))
    """
    found: dict[int, Mean] = {}
    parts = [part for part in family.modules() if isinstance(part, Family)]
    turns = {id(part.part): part.turn for part in parts if isinstance(part, Rotated)}
    for part in parts:
        parameter = part.point if isinstance(part, MAP) else part.mean if isinstance(part, ScaledFamily) else None
        if isinstance(parameter, nn.Parameter) and part.space is not None and len(parameter) == part.space.size:
            found[id(parameter)] = Mean(parameter, part.space, turns.get(id(part)))
    return list(found.values())
