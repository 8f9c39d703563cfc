"""A normal distribution as one value: its mean, and a root of its covariance or of its precision."""

from typing import NamedTuple

import torch
from torch import Tensor


class Diagonal(NamedTuple):
    """Σ = S², S = diag(scale). Scales of zero are a point mass."""

    scale: Tensor  # [P]


class LowRank(NamedTuple):
    """Σ = S(I + FFᵀ)S or, of the precision, Λ = S⁻¹(I + FFᵀ)S⁻¹, S = diag(scale)."""

    scale: Tensor  # [P]
    factor: Tensor  # [P, K]
    of_precision: bool


class Triangle(NamedTuple):
    """Σ = LLᵀ, L lower triangular with a positive diagonal."""

    lower: Tensor  # [P, P]


class NormalForm(NamedTuple):
    """N(mean, Σ): what a Gaussian family is, and can be set to, whatever its own parameters are.

    Example:
        >>> form = NormalForm(torch.zeros(2), LowRank(torch.ones(2), torch.tensor([[1.0], [0.0]]), of_precision=True))
        >>> form.variance, form.precision_diagonal
        (tensor([0.5000, 1.0000]), tensor([2., 1.]))
    """

    mean: Tensor  # [P]
    root: Diagonal | LowRank | Triangle

    @property
    def rank(self) -> int:
        """K, the columns of the factor; none of a diagonal and a triangle."""
        return self.root.factor.shape[1] if isinstance(self.root, LowRank) else 0

    @property
    def variance(self) -> Tensor:
        """The diagonal of Σ: [P]."""
        root = self.root
        if isinstance(root, Triangle):
            return root.lower.square().sum(-1)
        return root.scale.square() * (_diagonal(root.factor, root.of_precision) if isinstance(root, LowRank) else 1)

    @property
    def precision_diagonal(self) -> Tensor:
        """The diagonal of Λ = Σ⁻¹: [P], infinite where the scale is zero."""
        root = self.root
        if isinstance(root, Triangle):
            return torch.cholesky_inverse(root.lower).diagonal()
        return (_diagonal(root.factor, not root.of_precision) if isinstance(root, LowRank) else 1) / root.scale.square()

    def diagonal(self) -> Diagonal:
        """Return the diagonal normal whose precision has the same diagonal."""
        return self.root if isinstance(self.root, Diagonal) else Diagonal(self.precision_diagonal.rsqrt())

    def low_rank(self, rank: int, of_precision: bool) -> LowRank:
        """Return this root with `rank` columns of one form: the first ones, zeros where there are fewer.

        Further columns are added to the diagonal. A root of the other form gives its diagonal and columns of zeros.
        """
        root = self.root
        if not isinstance(root, LowRank) or root.of_precision != of_precision:
            scale = self.diagonal().scale
            return LowRank(scale, scale.new_zeros(len(scale), rank), of_precision)
        # the diagonal takes the other columns: U = S F of the covariance, or W = S⁻¹F of the precision, does not change
        wider = (1 + root.factor[:, rank:].square().sum(-1)).sqrt()
        factor = root.factor.new_zeros(len(wider), rank)
        factor[:, : root.factor.shape[1]] = root.factor[:, :rank] / wider.unsqueeze(-1)
        return LowRank(root.scale / wider if of_precision else root.scale * wider, factor, of_precision)

    def affine(self, shift: Tensor, root: Tensor) -> "NormalForm":
        """Return the law of shift + root z for z of this law: root [P] is a diagonal, root [P, P] lower triangular."""
        own = self.root
        if root.ndim == 2:
            return NormalForm(shift + root @ self.mean, Triangle(root @ self.triangle()))
        mean = shift + root * self.mean
        if isinstance(own, Triangle):
            return NormalForm(mean, Triangle(root.unsqueeze(-1) * own.lower))
        return NormalForm(mean, own._replace(scale=root * own.scale))

    def standard(self) -> "NormalForm":
        """Return N(0, I) with a root of the same kind; a factor is zero."""
        root, one = self.root, torch.ones_like(self.mean)
        if isinstance(root, Triangle):
            return NormalForm(0 * one, Triangle(torch.diag(one)))
        if isinstance(root, LowRank):
            return NormalForm(0 * one, root._replace(scale=one, factor=torch.zeros_like(root.factor)))
        return NormalForm(0 * one, Diagonal(one))

    def triangle(self) -> Tensor:
        """Return L [P, P], the lower Cholesky root of Σ."""
        root = self.root
        if isinstance(root, Triangle):
            return root.lower
        if isinstance(root, Diagonal):
            return torch.diag(root.scale)
        factor, scale = root.factor.double(), root.scale.double()
        matrix = torch.eye(len(scale), dtype=torch.float64, device=scale.device) + factor @ factor.mT
        if root.of_precision:
            matrix = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
        return (scale.unsqueeze(-1) * torch.linalg.cholesky(matrix)).to(root.scale)


def _diagonal(factor: Tensor, of_inverse: bool) -> Tensor:
    """The diagonal of I + FFᵀ, or of its inverse I − F(I + FᵀF)⁻¹Fᵀ: [P]."""
    if not of_inverse:
        return 1 + factor.square().sum(-1)
    wide = factor.double()
    M = torch.eye(wide.shape[1], dtype=torch.float64, device=wide.device) + wide.mT @ wide
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(M), wide.mT, upper=False)
    return (1 - half.square().sum(0)).to(factor)
