"""L-BFGS for every row of a matrix at once, each by itself or on a plane of its own."""

from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

#: f: [n, P] → values [n] and gradients [n, P]
RowFunction = Callable[[Tensor], tuple[Tensor, Tensor]]

#: evaluations of one line search, at most
SEARCH = 20
#: factor of a longer step, if the slope at the end of a step is nearly the slope at its beginning
LONGER = 4.0
#: that share of the slope
STEEP = 0.9
#: iterations over which a gain must be seen
WINDOW = 4


class Ascent(NamedTuple):
    """The ends of rows: points [n, P], values [n], and whether a further step promises less than the tolerance [n]."""

    z: Tensor
    value: Tensor
    converged: Tensor


class Pairs:
    """Inverse Hessians of rows: steps s [n, P] and the changes of gradient y [n, P] that they met.

    Example:
        >>> pairs = Pairs(memory=5)
        >>> pairs.add(torch.tensor([[1.0, 0.0]]), torch.tensor([[4.0, 0.0]]), torch.ones(1))
        >>> pairs.newton(torch.eye(2))[0, 0]
        tensor(0.2500)
    """

    def __init__(self, memory: int) -> None:
        self.pairs: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=memory)
        self.scale: Tensor | None = None  # [n]

    def add(self, s: Tensor, y: Tensor, first: Tensor) -> None:
        """Add a pair to rows whose estimate stays positive; `first` [n] is their scale before the first pair."""
        product, square = (s * y).sum(-1), y.square().sum(-1)
        sound = (product > 1e-10 * s.norm(dim=-1) * y.norm(dim=-1)) & (square > 1e-300) & product.isfinite()
        s, y = (torch.where(sound.unsqueeze(-1), x, 0.0) for x in (s, y))
        self.pairs.append((s, y, torch.where(sound, 1 / torch.where(sound, product, 1.0), 0.0)))
        before = first if self.scale is None else self.scale
        self.scale = torch.where(sound, product / torch.where(sound, square, 1.0), before)

    def forget(self, rows: Tensor, first: Tensor) -> None:
        """Forget all pairs of rows, a mask [n]."""
        self.pairs = deque([(s, y, torch.where(rows, 0.0, i)) for s, y, i in self.pairs], maxlen=self.pairs.maxlen)
        if self.scale is not None:
            self.scale = torch.where(rows, first, self.scale)

    def newton(self, gradient: Tensor) -> Tensor:
        """Return H⁻¹ g of every row, by the two-loop recursion: [n, P] → [n, P]."""
        if self.scale is None:
            return gradient * unit(gradient).unsqueeze(-1)
        x, weights = gradient, []
        for s, y, inverse in reversed(self.pairs):
            weights.append(inverse * (s * x).sum(-1))
            x = x - weights[-1].unsqueeze(-1) * y
        x = x * self.scale.unsqueeze(-1)
        for (s, y, inverse), weight in zip(self.pairs, reversed(weights), strict=True):
            x = x + (weight - inverse * (y * x).sum(-1)).unsqueeze(-1) * s
        return x


def unit(gradient: Tensor) -> Tensor:
    """Return the factor [n] that makes a first step no longer than one."""
    return 1 / gradient.norm(dim=-1).clamp(min=1)


def tangent(rows: Tensor, normal: Tensor) -> Tensor:
    """Return rows without their part along the normals, [n, P] each."""
    return rows - (rows * normal).sum(-1, keepdim=True) * normal


def ascend(
    function: RowFunction,
    z: Tensor,
    normal: Tensor | None = None,
    *,
    tolerance: float = 1e-2,
    iterations: int = 60,
    memory: int = 8,
    path: list[tuple[Tensor, Tensor, Tensor]] | None = None,
) -> Ascent:
    """Return the highest points found from the rows of z.

    A row that starts where the function has no value stays there, with the value −∞. A row ends where four iterations
    have gained less than the tolerance and the next promises less, or where a line search along the gradient finds
    nothing.

    Args:
        function: values and gradients at rows.
        z: starts, [n, P].
        normal: of length one, [n, P]: each row stays on the plane with this normal.
        tolerance, iterations: when to end.
        memory: pairs of steps and gradients that are remembered.
        path: a list to which every iteration adds points [n, P], their values [n] and gradients [n, P].

    Example:
        >>> start, normal = torch.tensor([[2.0, 5.0]]), torch.tensor([[1.0, 0.0]])
        >>> ascend(lambda z: (-z.square().sum(-1), -2 * z), start, normal).z
        tensor([[2., 0.]])
    """
    normal = torch.zeros_like(z) if normal is None else normal

    def on_plane(rows: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = function(rows)
        sound = value.isfinite() & gradient.isfinite().all(-1)
        return torch.where(sound, value, -inf), torch.where(sound.unsqueeze(-1), tangent(gradient, normal), 0.0)

    at = (z, *on_plane(z, normal))
    active, pairs, values = at[1].isfinite(), Pairs(memory), [at[1]]
    converged, steepest = torch.zeros_like(active), torch.ones_like(active)
    path = [] if path is None else path
    path.append(at)
    for _ in range(iterations):
        gradient = at[2]
        direction = tangent(pairs.newton(gradient), normal)
        slope = (gradient * direction).sum(-1)
        lost = ~(slope > 0) | ~slope.isfinite()
        direction = torch.where(lost.unsqueeze(-1), gradient * unit(gradient).unsqueeze(-1), direction)
        slope = (gradient * direction).sum(-1)
        gained = values[-1] - values[max(0, len(values) - 1 - WINDOW)]
        settled = (gained < tolerance) & (len(values) > WINDOW)
        converged |= active & ((settled & (slope < 2 * tolerance)) | (slope < 1e-3 * tolerance))
        active = active & ~converged
        if not bool(active.any()):
            break
        found = _search(on_plane, at, normal, direction, slope, active)
        moved = found[1] > at[1]
        pairs.add(found[0] - at[0], gradient - found[2], unit(gradient))
        stuck = active & ~moved
        if bool((stuck & ~steepest).any()):  # once more along the gradient
            pairs.forget(stuck, unit(gradient))
        converged |= stuck & steepest & (slope < tolerance)
        active, steepest = active & (moved | ~steepest), stuck
        at = found
        values.append(at[1])
        path.append(at)
    return Ascent(at[0], at[1], converged)


Point = tuple[Tensor, Tensor, Tensor]


def _search(
    function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    at: Point,
    normal: Tensor,
    direction: Tensor,
    slope: Tensor,
    active: Tensor,
) -> Point:
    """Return a step of every active row that gains enough.

    If the slope at a step's end is nearly that of its beginning, the step is made longer. If the step gains too little,
    a parabola makes it shorter; if its end has no value, it becomes a tenth.
    """
    z, value, gradient = (x.clone() for x in at)
    step, left, grown = torch.ones_like(slope), active.nonzero().squeeze(-1), torch.zeros_like(active)
    for _ in range(SEARCH):
        if not len(left):
            break
        trial = at[0][left] + step[left].unsqueeze(-1) * direction[left]
        new_value, new_gradient = function(trial, normal[left])
        good = (new_value >= at[1][left] + 1e-4 * step[left] * slope[left]) & (new_value > value[left])
        rows = left[good]
        z[rows], value[rows], gradient[rows] = trial[good], new_value[good], new_gradient[good]
        steep = (new_gradient * direction[left]).sum(-1) > STEEP * slope[left]
        longer = left[good & steep]
        grown[longer] = True
        old = step[left]
        bend = at[1][left] + slope[left] * old - new_value
        known = bend.isfinite() & (bend > 0)
        shorter = torch.where(known, slope[left] * old.square() / (2 * torch.where(known, bend, 1.0)), 0.1 * old)
        step[left] = torch.clamp(shorter, 0.05 * old, 0.5 * old)
        step[longer] = LONGER * old[good & steep]
        left = left[(good & steep) | (~good & ~grown[left])]
    return z, value, gradient
