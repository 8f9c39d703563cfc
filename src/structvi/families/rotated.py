"""A Gaussian in coordinates of its own: N(Qm, QΣQᵀ), with Q orthogonal and cheap."""

import copy
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal

from ..couplings import Coupling, naive
from ..parameters import Parameters
from .basis import Basis
from .density import Detached, Draws
from .family import Family
from .gaussian import Gaussian
from .gaussian import LowRank as LowRankCovariance
from .normal import Diagonal, LowRank, NormalForm, Triangle
from .numerics.detached import LowRankGradient

#: rows of Q that are made at a time
CHUNK = 256


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
    def P(self) -> int:
        return self.inner.P

    @property
    def noise_size(self) -> int:
        return self.inner.noise_size

    @property
    def accurate(self) -> bool:
        return self.inner.accurate

    def draw_scored(
        self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None
    ) -> tuple[Draws, Tensor | None]:
        """Draws of ξ, turned: log q at them is that of ξ."""
        draws, log_q = self.inner.draw_scored(groups, coupling, generator)
        return Draws(self.basis(draws.theta), draws.weight), log_q

    def draw_detached(
        self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None
    ) -> Detached | None:
        inner = self.inner.draw_detached(groups, coupling, generator)
        if inner is None:
            return None
        with torch.no_grad():
            theta = self.basis(inner.draws.theta).requires_grad_()

        def pull(g: Tensor, g_q: Tensor, slope: Tensor | None = None) -> list[tuple[Tensor, Tensor | LowRankGradient]]:
            return inner.pull(self.basis(g, back=True), g_q, slope)  # slope·θ turned back is slope·ξ

        return Detached(Draws(theta, inner.draws.weight), inner.log_q, pull, inner.squares)  # θ·θ = ξ·ξ

    def transform(self, diagonal: Tensor, low_rank: Tensor) -> Tensor:
        return self.basis(self.inner.transform(diagonal, low_rank))

    def precision_product(self, x: Tensor) -> Tensor:
        return self.basis(self.inner.precision_product(self.basis(x, back=True)))

    def quadratic(self, x: Tensor) -> Tensor:
        return self.inner.quadratic(self.basis(x, back=True))

    def half_log_det(self) -> Tensor:
        return self.inner.half_log_det()

    def low_rank(self) -> LowRankCovariance:
        """Q has no low rank: a dense V [P, P + K], refused where P is large."""
        self._check_dense("the covariance of a rotated family as diagonal plus low rank")
        d, V, C = self.inner.low_rank()
        columns = self.basis(torch.cat([torch.diag(d.sqrt()), V], -1).mT).mT
        identity = torch.eye(len(d), dtype=C.dtype, device=C.device)
        return LowRankCovariance(torch.zeros_like(d), columns, torch.block_diag(identity, C))

    def precision_diagonal(self) -> Tensor:
        rows = []
        for row in self._rows(slice(0, self.P)):
            rows.append((row * self.inner.precision_product(row)).sum(-1))
        return torch.cat(rows)

    @property
    def variance(self) -> Tensor:
        d, V, C = self.inner.low_rank()
        QV = self.basis(V.mT).mT
        return self.basis(d, squared=True) + ((QV @ C) * QV).sum(-1)

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        left, right = (torch.cat(list(self._rows(part))) for part in (rows, columns))
        return self.inner.between(left, right)

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        return self.inner.between(self.basis(left, back=True), self.basis(right, back=True))

    def trace(self, p: Gaussian) -> Tensor:
        if isinstance(p, RotatedDensity) and p.basis is self.basis:
            return self.inner.trace(p.inner)
        return super().trace(p)

    def to_distribution(self) -> Distribution:
        self._check_dense("to_distribution()")
        return MultivariateNormal(self.mean, self.covariance())

    def _rows(self, part: slice) -> "Iterable[Tensor]":
        """Rows of Q, a few at a time: [c, P]."""
        for start in range(part.start, part.stop, CHUNK):
            stop = min(start + CHUNK, part.stop)
            unit = self.location.new_zeros(stop - start, self.P)
            unit[torch.arange(stop - start), torch.arange(start, stop)] = 1.0
            yield self.basis(unit, back=True)


class Rotated(Family):
    """Any Gaussian family over θ = Qξ: its axes are those of Q, not the weights' own.

    Q is an orthogonal matrix for each axis of each tensor (`Basis`), the identity until gradients give one: at trained
    weights `fit(start="trained")` and the fit around a network take the eigenvectors of E GGᵀ and E GᵀG of each
    tensor's gradients G, with labels drawn from the model. In these Kronecker coordinates the data determine fewer
    directions, and a diagonal says more. Beyond the family's own it keeps n² numbers for each axis of n.

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
        if not isinstance(part, Family):
            raise TypeError(f"Rotated expects a family such as MeanField(), got {type(part).__name__}")
        if part.space is not None:
            raise ValueError("Rotated binds its part itself: give a recipe, such as MeanField()")
        self.part = part

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        self.part = self.part.bind(parameters, generator)
        self.basis = Basis(parameters)
        density = self.part()
        if not isinstance(density, Gaussian):
            raise TypeError(f"Rotated is for Gaussian families, and {type(self.part).__name__} is none")

    def forward(self) -> RotatedDensity:
        inner = self.part()
        assert isinstance(inner, Gaussian)
        return RotatedDensity(inner, self.basis)

    @property
    def rank(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.part.rank

    @property
    def precision_columns(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.part.precision_columns

    @torch.no_grad()
    def turn(self, matrices: Mapping[str, Tensor]) -> None:
        """Other coordinates: the mean and factors are turned exactly, and the diagonal of the precision is kept.

        Args:
            matrices: an orthogonal one for each axis, by the names of `basis.axes()`; others stay.
        """
        known = {axis.name: axis.size for axis in self.basis.axes()}
        for name, Q in matrices.items():
            if name not in known or Q.shape != (known[name], known[name]):
                raise ValueError(f"expected matrices [n, n] for the axes {known}, got {name!r} of {tuple(Q.shape)}")
            eye = torch.eye(len(Q), dtype=torch.float64, device=Q.device)
            if not torch.allclose(Q.double().mT @ Q.double(), eye, rtol=0, atol=1e-5):
                raise ValueError(f"the matrix of {name!r} is not orthogonal")
        step = copy.deepcopy(self.basis)
        old = {axis.name: self.basis.matrix(axis) for axis in self.basis.axes()}
        step.set({name: old[name].mT @ matrices.get(name, old[name]).to(old[name]) for name in old})
        self.part.change_basis(lambda x: step(x, back=True), lambda diagonal: step(diagonal, back=True, squared=True))
        self.basis.set({name: Q.to(old[name]) for name, Q in matrices.items()})

    @torch.no_grad()
    def turn_by(self, change: Mapping[str, Tensor]) -> None:
        """`turn` with matrices R in the present coordinates: Q becomes QR, made orthogonal to rounding."""
        matrices = {}
        for axis in self.basis.axes():
            if axis.name in change:
                Q = self.basis.matrix(axis).double() @ change[axis.name].double()
                matrices[axis.name] = 1.5 * Q - 0.5 * Q @ (Q.mT @ Q)
        self.turn(matrices)

    # ---- what fits ask

    def to_axes(self, x: Tensor) -> Tensor:
        return self.basis(x, back=True)

    def diagonal_to_axes(self, diagonal: Tensor) -> Tensor:
        return self.basis(diagonal.to(self.part().mean), back=True, squared=True).to(diagonal)

    @property
    def wants_gradients(self) -> bool:
        return True

    def take_gradients(self, gradients: Iterable[Tensor]) -> None:
        self.turn(self.basis.of_gradients(gradients))

    def place(
        self, mean: Mapping[str, Tensor], scale: Mapping[str, Tensor], columns: Mapping[str, Tensor] | None = None
    ) -> None:
        space = self.bound_space()
        centre = self.basis(space.ravel({name: mean[name] for name in space.names}), back=True)
        self.part.place(space.unravel(centre), scale, columns)

    def normal(self) -> None:
        """None: along the weights' own axes it has no cheap root."""

    def set_normal(self, form: NormalForm) -> None:
        """Turn the mean and the factor exactly, and keep the diagonal of the precision."""
        root = form.root
        if isinstance(root, Triangle):
            root = form.diagonal()
        turned = self.basis(root.scale.square().reciprocal(), back=True, squared=True).rsqrt()
        if isinstance(root, LowRank) and root.of_precision:
            columns = self.basis((root.factor / root.scale.unsqueeze(-1)).mT, back=True).mT
            own = LowRank(turned, columns * turned.unsqueeze(-1), True)
        elif isinstance(root, LowRank):
            columns = self.basis((root.factor * root.scale.unsqueeze(-1)).mT, back=True).mT
            own = LowRank(turned, columns / turned.unsqueeze(-1), False)
        else:
            own = Diagonal(turned)
        self.part.set_normal(NormalForm(self.basis(form.mean, back=True), own))

    def move_to(self, theta: Tensor) -> None:
        self.part.move_to(self.basis(theta, back=True))

    def config(self) -> dict[str, Any]:
        return {"part": self.part}


def rotation(family: Family) -> Rotated | None:
    """Return the `Rotated` family that this is, or None: `basis`, and `part`, the family of ξ, place it along its axes.

    Example:
        >>> from structvi import MeanField
        >>> rotation(MeanField()) is None, rotation(Rotated(MeanField())).part
        (True, MeanField(initial_mean='current', initial_scale=0.1, unbound))
    """
    return family if isinstance(family, Rotated) else None
