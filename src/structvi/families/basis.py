"""Orthogonal coordinates that are cheap: an orthogonal matrix for each axis of each tensor, θ = Qξ."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..parameters import Parameters

#: a longer axis, such as the rows of an embedding, is not turned
LONGEST = 2048


class Axis(NamedTuple):
    """One axis of one tensor that is turned."""

    name: str  # of its matrix among the buffers
    index: int  # among the tensor's axes
    size: int


class Tensors(NamedTuple):
    """A stretch of θ: one tensor, its shape here, and the axes that are turned."""

    start: int
    stop: int
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]


def layout(space: Parameters) -> list[Tensors]:
    """Return how each tensor of a space is reshaped, and its axes that are turned."""
    found, start = [], 0
    for number, shape in enumerate(space.shapes):
        whole = tuple(shape[:2]) + ((prod(shape[2:]),) if len(shape) > 2 else ())
        sizes = enumerate(whole) if len(shape) > 1 else ()
        axes = tuple(Axis(f"q{number}_{i}", i, n) for i, n in sizes if 1 < n <= LONGEST)
        found.append(Tensors(start, start + prod(shape), whole, axes))
        start += prod(shape)
    return found


class Basis(nn.Module):
    """Q, made of an orthogonal matrix [n, n] for each axis of each tensor with two axes or more.

    A convolution's kernel counts as one axis: out, in, kernel. Axes of one number, or of more than `LONGEST`, and
    tensors of one axis stay as they are. Q and its transpose cost Σ n for each number of θ, and n² numbers to keep.

    Example:
        >>> basis = Basis(Parameters({"w": torch.zeros(3, 2), "b": torch.zeros(3)}))
        >>> [(axis.name, axis.size) for axis in basis.axes()]
        [('q0_0', 3), ('q0_1', 2)]
        >>> basis(torch.arange(9.0)).tolist() == list(range(9))  # it begins as the identity
        True
    """

    def __init__(self, space: Parameters):
        super().__init__()
        self.tensors = layout(space)
        for axis in self.axes():
            self.register_buffer(axis.name, torch.eye(axis.size, dtype=space.dtype, device=space.device))

    def axes(self) -> list[Axis]:
        return [axis for tensor in self.tensors for axis in tensor.axes]

    def forward(self, x: Tensor, *, back: bool = False, squared: bool = False) -> Tensor:
        """Return Qx, or Qᵀx (`back`), of rows [.., P]; with the squares of all elements of Q, to turn diagonals."""
        lead, parts = x.shape[:-1], []
        for tensor in self.tensors:
            y = x[..., tensor.start : tensor.stop]
            if tensor.axes:
                y = y.reshape(*lead, *tensor.shape)
                for axis in tensor.axes:
                    Q = getattr(self, axis.name)
                    Q = Q.square() if squared else Q
                    where = len(lead) + axis.index
                    y = (y.movedim(where, -1) @ (Q if back else Q.mT)).movedim(-1, where)
                y = y.flatten(len(lead))
            parts.append(y)
        return torch.cat(parts, -1)

    @torch.no_grad()
    def set(self, matrices: Mapping[str, Tensor]) -> None:
        """Overwrite the matrices of these axes."""
        for name, Q in matrices.items():
            getattr(self, name).copy_(Q)

    @torch.no_grad()
    def of_gradients(self, gradients: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return for each axis, by name, the eigenvectors of Σ GGᵀ, G [n, rest] a gradient [P] unfolded along it.

        In these coordinates the second moment of gradients that are E GGᵀ ⊗ E GᵀG is diagonal.
        """
        moments = {name: torch.zeros_like(Q, dtype=torch.float64) for name, Q in self.named_buffers()}
        for gradient in gradients:
            for tensor in self.tensors:
                G = gradient[tensor.start : tensor.stop].reshape(tensor.shape).double()
                for axis in tensor.axes:
                    unfolded = G.movedim(axis.index, 0).flatten(1)
                    moments[axis.name].addmm_(unfolded, unfolded.mT)
        return {name: torch.linalg.eigh(moment).eigenvectors.flip(1) for name, moment in moments.items()}
