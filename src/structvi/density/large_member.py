"""The member of a family, diagonal plus low rank, that is best for a normal whose precision is one: no P×P matrix."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.family import Family
from ..families.forms import RelativeForm
from .lbfgs import minimise
from .low_rank_matrix import LowRankMatrix, top_eigenvectors

#: of more numbers than this nothing P×P is made for a family that is a diagonal plus low rank
LARGE = 256
#: least eigenvalue of the normal that a factor is made for, its inverse the greatest
LEAST = 1e-9
#: of the penalty on (log s − log s₀)² that keeps scales finite
RIDGE = 1e-6


class Member(NamedTuple):
    """N(·, S(I + GGᵀ)S), S = diag(scale), or with the precision S⁻¹(I + GGᵀ)S⁻¹; the columns of G are orthogonal."""

    scale: Tensor  # [P]
    factor: Tensor  # G [P, K]
    of_precision: bool

    @staticmethod
    def of(form: RelativeForm) -> "Member":
        """In float64."""
        factor = form.factor.double()
        if bool(factor.isfinite().all()):
            U, size, _ = torch.linalg.svd(factor, full_matrices=False)
            factor = U * size
        return Member(form.scale.double(), factor, form.of_precision)

    def precision(self) -> LowRankMatrix:
        size = self.factor.norm(dim=0)
        U = self.factor / size.clamp(min=1e-300)
        if self.of_precision:
            return LowRankMatrix(self.scale**-2, U, size.square())
        return LowRankMatrix(self.scale.square(), U, size.square()).inverse()


class Members:
    """The family's best for one precision after another.

    Args:
        rank: K.
        of_precision: the form.
    """

    def __init__(self, rank: int, of_precision: bool):
        self.rank, self.of_precision = rank, of_precision
        self._vectors: Tensor | None = None

    def kl(self, log_scale: Tensor, precision: LowRankMatrix) -> tuple[float, Tensor, Tensor, Tensor]:
        """KL to N(·, Λ⁻¹) of the best with these scales, its gradient by them, and the eigenpairs of G.

        With λ the eigenvalues of SΛS each costs ½(λ − 1 − log λ), but for the K greatest above one or, of the
        covariance form, the K least below: trace and determinant give the sum over all.
        """
        scale = log_scale.exp()
        inverse = precision.inverse()
        d, X = precision.scaled(scale)
        diagonal = d + X.square() @ precision.v
        total = diagonal.sum() - len(d) - (precision.log_det() + 2 * log_scale.sum())
        if self.rank == 0:
            empty = d.new_zeros(len(d), 0)
            return total.item() / 2, diagonal - 1, d.new_zeros(0), empty
        form = (d, X, precision.v) if self.of_precision else (*inverse.scaled(1 / scale), inverse.v)
        values, vectors, self._vectors = top_eigenvectors(*form, self.rank, self._vectors)
        held = values.clamp(1.0, 1 / LEAST)
        values = held if self.of_precision else 1 / held
        kl = 0.5 * (total - (values - 1 - values.log()).sum())
        return kl.item(), diagonal - 1 - vectors.square() @ (values - 1), held, vectors

    def best(self, precision: LowRankMatrix, starts: Sequence[Tensor], tolerance: float, iterations: int) -> Member:
        """The best of the searches from several scales, [P] each."""
        if self.rank == 0:
            scale = precision.diagonal().rsqrt()
            return Member(scale, scale.new_zeros(len(scale), 0), self.of_precision)
        found = [self._searched(precision, start.log(), tolerance, iterations) for start in starts]
        return min(found, key=lambda one: one[0])[1]

    def nearest(self, precision: LowRankMatrix, starts: Sequence[Tensor]) -> Tensor:
        """Of these scales those with the least KL."""
        return min(starts, key=lambda start: self.kl(start.log(), precision)[0])

    def _searched(
        self, precision: LowRankMatrix, origin: Tensor, tolerance: float, iterations: int
    ) -> tuple[float, Member]:
        def function(x: Tensor) -> tuple[float, Tensor]:
            kl, gradient, _, _ = self.kl(x, precision)
            away = x - origin
            return kl + RIDGE * float(away @ away), gradient + 2 * RIDGE * away

        self._vectors = None  # those of another search may leave out what is greatest now
        x, _, _ = minimise(function, origin, tolerance=tolerance, iterations=iterations)
        kl, _, held, vectors = self.kl(x, precision)
        return kl, Member(x.exp(), vectors * (held - 1).sqrt(), self.of_precision)


def large_form(family: Family) -> RelativeForm | None:
    """The form of a bound family of many numbers that is a diagonal plus low rank; None of all others."""
    if family().P <= LARGE or family.coordinates != "diagonal":
        return None
    return family.relative_form()
