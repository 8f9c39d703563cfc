"""The matrix normal: the numbers of one layer as a matrix, outputs by features, with a Kronecker product of axes."""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..parameters import Parameters
from .family import MAX_DENSE
from .gaussian import Gaussian
from .mean_field import ScaledFamily
from .normal import NormalForm
from .numerics import sum_weights


class MatrixNormalDensity(Gaussian):
    """T = M + A (s ∘ Z) Bᵀ for a matrix T [C, D], with Z standard normal, A and Q orthogonal and B = diag(unit) Q.

    Σ = (A ⊗ B) diag(s²) (A ⊗ B)ᵀ: C² + D² numbers beside mean and scales. With s of rank one it is the matrix normal;
    with s² = 1/(1 + λ_A λ_B) the inverse of a Kronecker product plus a diagonal, exactly.

    Args:
        mean: M as θ [P].
        log_scale: log s [C·D].
        left: A [C, C].
        right: Q [D, D].
        unit: [D].
        widths: how many columns of T each tensor has, in the order of θ.
    """

    def __init__(
        self, mean: Tensor, log_scale: Tensor, left: Tensor, right: Tensor, unit: Tensor, widths: Sequence[int]
    ):
        self.location, self.left, self.unit, self.widths = mean, left, unit, list(widths)
        self.log_scale = log_scale.view(len(left), len(right))
        self.scale = self.log_scale.exp()  # s [C, D]
        self.right = unit.unsqueeze(-1) * right  # B [D, D]
        self.inverse = right / unit.unsqueeze(-1)  # B⁻ᵀ

    def matrix(self, x: Tensor) -> Tensor:
        """Return rows of θ [.., P] as matrices [.., C, D]."""
        C = len(self.left)
        parts = torch.split(x, [C * width for width in self.widths], dim=-1)
        return torch.cat([part.unflatten(-1, (C, -1)) for part in parts], -1)

    def vector(self, T: Tensor) -> Tensor:
        """Return matrices [.., C, D] as rows of θ [.., P]."""
        return torch.cat([part.flatten(-2) for part in torch.split(T, self.widths, dim=-1)], -1)

    def transform(self, diagonal: Tensor, low_rank: Tensor) -> Tensor:
        Z = diagonal.unflatten(-1, self.log_scale.shape)
        return self.vector(self.left @ (self.scale * Z) @ self.right.mT)

    def precision_product(self, x: Tensor) -> Tensor:
        return self._along_axes(x, self.scale.square().reciprocal(), self.inverse)

    def covariance_product(self, x: Tensor) -> Tensor:
        return self._along_axes(x, self.scale.square(), self.right)

    def _along_axes(self, x: Tensor, weights: Tensor, right: Tensor) -> Tensor:
        """Return (A ⊗ R) diag(weights) (A ⊗ R)ᵀ x for the rows of x."""
        inner = (self.left.mT @ self.matrix(x) @ right) * weights
        return self.vector(self.left @ inner @ right.mT)

    def half_log_det(self) -> Tensor:
        return sum_weights(self.log_scale.flatten()) + len(self.left) * sum_weights(self.unit.log())

    def precision_diagonal(self) -> Tensor:
        return self.vector(self.left.square() @ self.scale.square().reciprocal() @ self.inverse.square().mT)

    @property
    def variance(self) -> Tensor:
        return self.vector(self.left.square() @ self.scale.square() @ self.right.square().mT)


class MatrixNormal(ScaledFamily):
    """A normal over the weight [C, ..] and bias [C] of one layer, its covariance (A ⊗ B) diag(s²) (A ⊗ B)ᵀ.

    A and B are the axes of outputs and of features, the weights' own until `fit_head` sets them: 2P + C² + D² numbers.
    A fit learns the mean and the scales s. Tensors without a common first axis lie in one row, C = 1.

    Args:
        initial_mean: means start at the network's "current" values, at a "fresh" draw of its initialisation or at
            "zero".
        initial_scale: scales start at this fraction of each tensor's initialisation scale.

    Example:
        >>> from structvi import Parameters
        >>> q = MatrixNormal().bind(Parameters({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}))
        >>> q.left.shape, q.right.shape
        (torch.Size([3, 3]), torch.Size([5, 5]))
    """

    left: Tensor
    right: Tensor
    unit: Tensor

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        super().initialise(parameters, generator)
        firsts = {shape[0] if shape else 1 for shape in parameters.shapes}
        C = firsts.pop() if len(firsts) == 1 else 1
        self.widths = [prod(shape) // C for shape in parameters.shapes]
        D = sum(self.widths)
        if max(C, D) > MAX_DENSE:
            raise ValueError(f"MatrixNormal keeps {C}² and {D}² numbers for the axes of a layer, at most {MAX_DENSE}²")
        for name, size in (("left", C), ("right", D)):
            self.register_buffer(name, torch.eye(size).to(self.mean))
        self.register_buffer("unit", self.mean.new_ones(D))
        with torch.no_grad():
            by_rows = self.forward().matrix(self.log_scale)
        self.log_scale = nn.Parameter(by_rows.flatten())

    def forward(self) -> MatrixNormalDensity:
        return MatrixNormalDensity(self.mean, self.log_scale, self.left, self.right, self.unit, self.widths)

    @torch.no_grad()
    def set_axes(self, left: Tensor, right: Tensor, unit: Tensor, scale: Tensor) -> None:
        """Take other axes and scales: A [C, C] and Q [D, D], orthogonal, unit [D] and s [C, D]."""
        self.left.copy_(left)
        self.right.copy_(right)
        self.unit.copy_(unit)
        self.log_scale.copy_(scale.log().flatten())

    @torch.no_grad()
    def set_normal(self, form: NormalForm) -> None:
        """Take the mean and the diagonal of the precision, along the weights' own axes."""
        self.mean.copy_(form.mean)
        one, other = (torch.eye(len(axes)).to(axes) for axes in (self.left, self.right))
        scale = self.forward().matrix(form.diagonal().scale.to(self.mean))
        self.set_axes(one, other, torch.ones_like(self.unit), scale)


def matrix_normal(family: nn.Module) -> MatrixNormal | None:
    """Return the `MatrixNormal` family that this is, or None.

    Example:
        >>> matrix_normal(nn.Identity()) is None
        True
    """
    return family if isinstance(family, MatrixNormal) else None


# ---------------------------------------------------------------------------------------- the outputs of a layer


class OutputNormals(NamedTuple):
    """Normals of C outputs at n rows around their mean: covariance Σ = A diag(v) Aᵀ."""

    axes: Tensor  # A [C, C], the same at all rows, or [n, C, C]
    along: Tensor  # v [n, C]

    @property
    def variance(self) -> Tensor:
        """The variance of every output: [n, C]."""
        return (self.axes.square() @ self.along.unsqueeze(-1)).squeeze(-1)

    @property
    def centred(self) -> "OutputNormals":
        """Independent normals of each output less the mean of all outputs, which labels do not tell."""
        axes = self.axes - self.axes.mean(-2, keepdim=True)
        return OutputNormals(
            torch.ones_like(self.along[:1, :1]), (axes.square() @ self.along.unsqueeze(-1)).squeeze(-1)
        )

    def draw(self, noise: Tensor) -> Tensor:
        """Return deviations from the mean at standard noise [S, C] or [S, n, C]: [S, n, C]."""
        noise = noise if noise.ndim == 3 else noise.unsqueeze(1)
        scaled = noise * self.along.sqrt()
        if self.axes.shape == (1, 1):  # of one output, or of independent ones
            return scaled * self.axes
        if self.axes.ndim == 2:
            return scaled @ self.axes.mT
        return (scaled.movedim(0, 1) @ self.axes.mT).movedim(1, 0)


def layer_outputs(density: Gaussian, outputs: int, order: Tensor) -> Callable[[Tensor], OutputNormals]:
    """Return the function of features [n, D] that gives the normals of a layer's outputs.

    Args:
        density: over the weight [C, ..] of the layer, and its bias [C].
        outputs: C.
        order: where in θ the numbers of output 0 lie, then those of output 1, ..: [C·D].

    Example:
        >>> from structvi import MeanField, Parameters
        >>> space = Parameters({"weight": torch.zeros(2, 3)})
        >>> one, other = (family.bind(space)() for family in (MatrixNormal(), MeanField()))
        >>> a, b = (layer_outputs(q, 2, torch.arange(6))(torch.ones(4, 3)).variance for q in (one, other))
        >>> torch.allclose(a, b.float())
        True
    """
    if isinstance(density, MatrixNormalDensity):
        right, square, left = density.right, density.scale.square().mT, density.left
        return lambda features: OutputNormals(left, (features @ right).square() @ square)
    d, V, core = density.low_rank()
    D = len(order) // outputs
    d, sides = d[order].view(outputs, D), [side[order].view(outputs, D, -1).movedim(1, 0) for side in (V, V @ core)]

    def dense(features: Tensor) -> OutputNormals:
        left, right = (torch.tensordot(features, side, dims=1) for side in sides)  # [n, C, K]
        covariance = left @ right.mT + torch.diag_embed(features.square() @ d.mT)
        finite = covariance.isfinite().all(-1).all(-1)  # [n]: a row that is not has NaN, and no other
        along, axes = torch.linalg.eigh(torch.where(finite[:, None, None], covariance.double(), 0.0))
        along = torch.where(finite.unsqueeze(-1), along.clamp(min=0.0), torch.nan)
        return OutputNormals(axes.to(features), along.to(features))

    return dense
