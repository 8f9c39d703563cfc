"""Many small tensors in orthogonal coordinates at once: those of one shape are turned together, in a few kernels."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.basis import Tensors

#: to second moments before they are turned into a basis, as a part of their mean eigenvalue: directions without any
#: gradient have one too
RIDGE = 1e-4
#: steps that square the error of orthogonality
POLISH = 3


class Axis(NamedTuple):
    """One axis of all tensors of a shape."""

    name: str
    index: int
    size: int
    #: of the same axis in each of the tensors
    members: tuple[str, ...] = ()


class Alike(NamedTuple):
    """Tensors of one shape, as [n, *shape]; where each begins in a vector of all weights."""

    starts: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]

    def of(self, x: Tensor) -> Tensor:
        """Their values in a vector [P], copied: [n, *shape]."""
        return torch.stack(self.views(x)).unflatten(1, self.shape)

    def views(self, x: Tensor) -> list[Tensor]:
        size = 1
        for n in self.shape:
            size *= n
        return [x[start : start + size] for start in self.starts]


def alike(tensors: Sequence[Tensors]) -> list[Alike]:
    """Tensors with axes that are turned, by their shapes.

    Example:
        >>> from structvi import Parameters
        >>> from structvi.families.basis import layout
        >>> space = Parameters({"a": torch.zeros(3, 2), "b": torch.zeros(4), "c": torch.zeros(3, 2)})
        >>> [(group.starts, group.shape) for group in alike(layout(space))]
        [((0, 10), (3, 2))]
    """
    found: dict[tuple[int, ...], list[Tensors]] = {}
    for tensor in tensors:
        if tensor.axes:
            found.setdefault(tensor.shape, []).append(tensor)
    groups = []
    for number, (shape, members) in enumerate(found.items()):
        axes = tuple(
            Axis(f"{number}_{axis.index}", axis.index, axis.size, tuple(member.axes[i].name for member in members))
            for i, axis in enumerate(members[0].axes)
        )
        groups.append(Alike(tuple(member.start for member in members), shape, axes))
    return groups


def along(x: Tensor, axis: int) -> Tensor:
    """[n, *shape] unfolded along an axis of the shape: [n, size, rest]."""
    return x.movedim(axis + 1, 1).flatten(2)


def multiplied(x: Tensor, matrices: Tensor, axis: int) -> Tensor:
    """The product with a matrix for each of n tensors along an axis: [n, *shape], [n, size, size]."""
    if axis == x.ndim - 2:
        return (x.flatten(1, -2) @ matrices.mT).view(x.shape)
    if axis == 0:
        return (matrices @ x.flatten(2)).view(x.shape)
    moved = x.movedim(axis + 1, 1)
    return (matrices @ moved.flatten(2)).view(moved.shape).movedim(1, axis + 1)


def turned(
    x: Tensor, groups: Sequence[Alike], matrices: Mapping[str, Tensor], *, back: bool, squared: bool = False
) -> Tensor:
    """Q x of a vector [P], or Qᵀ x (`back`: into the coordinates), also with the squares of all elements of Q.

    Example:
        >>> group = Alike((0,), (2, 1), (Axis("q", 0, 2),))
        >>> swap = {"q": torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])}
        >>> turned(torch.tensor([1.0, 2.0, 3.0]), [group], swap, back=True)
        tensor([2., 1., 3.])
    """
    out = x.clone()
    into: list[Tensor] = []
    values: list[Tensor] = []
    for group in groups:
        y = group.of(x)
        for axis in group.axes:
            Q = matrices[axis.name]
            Q = Q.square() if squared else Q
            y = multiplied(y, Q.mT if back else Q, axis.index)
        into += group.views(out)
        values += list(y.reshape(len(y), -1))
    if into:
        torch._foreach_copy_(into, values)  # pyright: ignore[reportPrivateImportUsage]
    return out


def spread_precision(scale: Tensor, squares: Tensor, groups: Sequence[Alike]) -> Tensor:
    """Precisions [P] along other coordinates of each tensor: κ · squares + δ.

    δ is one over the mean of the variances scale², and κ such that the mean of the precisions stays. Of numbers that
    have no other coordinates the precision is 1/scale².

    Example:
        >>> group = Alike((0,), (2, 1), (Axis("q", 0, 2),))
        >>> spread_precision(torch.tensor([1.0, 0.5, 0.1]), torch.tensor([0.0, 3.0, 7.0]), [group])
        tensor([  1.6000,   3.4000, 100.0000])
    """
    precision, variance = scale.pow(-2), scale.square()
    out = precision.clone()
    into: list[Tensor] = []
    values: list[Tensor] = []
    for group in groups:
        v, own, spread = (group.of(x).flatten(1) for x in (squares, precision, variance))
        least = 1 / spread.mean(1, keepdim=True)
        factor = (own.mean(1, keepdim=True) - least).clamp_min(0) / v.mean(1, keepdim=True).clamp_min(1e-30)
        into += group.views(out)
        values += list(factor * v + least)
    if into:
        torch._foreach_copy_(into, values)  # pyright: ignore[reportPrivateImportUsage]
    return out


def eigenvectors(moments: Tensor) -> Tensor:
    """Of symmetric matrices [n, s, s], those of the greatest eigenvalues first."""
    return torch.linalg.eigh(_ridged(moments)).eigenvectors.flip(-1).to(moments.dtype)


def iterated(moments: Tensor, Q: Tensor) -> Tensor:
    """One step of subspace iteration from Q [n, s, s] towards the eigenvectors of the moments, orthonormal.

    The columns of M Q are made orthonormal by the Cholesky factor of their products, in float64: of small matrices on a
    GPU that is much faster than Householder's QR, and the same but for signs. What rounding leaves of an error is
    squared away by X(3 − XᵀX)/2; where one is left, Q stays.
    """
    X = _ridged(moments) @ Q.double()
    X = X / torch.linalg.vector_norm(X, dim=-2, keepdim=True)
    L, _ = torch.linalg.cholesky_ex(X.mT @ X)
    X = torch.linalg.solve_triangular(L, X.mT, upper=False).mT
    for _ in range(POLISH):
        X = 1.5 * X - 0.5 * X @ (X.mT @ X)
    good = (X.mT @ X - _identity(X)).abs().amax((-2, -1), keepdim=True) < 1e-7  # not of NaN
    return torch.where(good, X, Q.double()).to(Q.dtype)


def by_size(moments: Mapping[str, Tensor], basis: Mapping[str, Tensor], first: bool) -> dict[str, Tensor]:
    """A refreshed basis for every axis; axes of one size at once, whatever they belong to.

    Args:
        moments, basis: [n, s, s] by the names of axes.
        first: take eigenvectors, not a step towards them.
    """
    sizes: dict[int, list[str]] = {}
    for name, Q in basis.items():
        sizes.setdefault(Q.shape[-1], []).append(name)
    found: dict[str, Tensor] = {}
    for names in sizes.values():
        M, Q = (torch.cat([one[name] for name in names]) for one in (moments, basis))
        new = eigenvectors(M) if first else iterated(M, Q)
        found |= dict(zip(names, new.split([len(basis[name]) for name in names]), strict=True))
    return found


def _ridged(moments: Tensor) -> Tensor:
    M = moments.double()
    mean = M.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return M + _identity(M) * (RIDGE * mean + torch.finfo(torch.float64).tiny)


def _identity(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
