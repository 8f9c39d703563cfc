"""Many small searches at once: L-BFGS for every row of a matrix, each on a plane of its own."""

from collections import deque
from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

#: f: [n, P] → values [n] and gradients [n, P]
RowFunction = Callable[[Tensor], tuple[Tensor, Tensor]]

#: pairs (step, change of gradient) that are remembered
MEMORY = 8
#: evaluations of one line search
SEARCH = 20
#: a step is made so many times longer where the slope at its end is still this share of that at its beginning
LONGER, STEEP = 4.0, 0.9
#: iterations over which a gain must be seen
WINDOW = 4


class Pairs:
    """What every row has learned of its inverse Hessian: steps s [n, P] and the changes of gradient y that they met."""

    def __init__(self) -> None:
        self.pairs: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=MEMORY)
        self.scale: Tensor | None = None  # [n]

    def add(self, s: Tensor, y: Tensor, first: Tensor) -> None:
        """Rows whose pair would make the estimate indefinite get none; `first` [n] is their scale before the first."""
        product, square = (s * y).sum(-1), y.square().sum(-1)
        sound = (product > 1e-10 * s.norm(dim=-1) * y.norm(dim=-1)) & (square > 1e-300) & product.isfinite()
        s, y = (torch.where(sound.unsqueeze(-1), x, 0.0) for x in (s, y))
        self.pairs.append((s, y, torch.where(sound, 1 / torch.where(sound, product, 1.0), 0.0)))
        before = first if self.scale is None else self.scale
        self.scale = torch.where(sound, product / torch.where(sound, square, 1.0), before)

    def newton(self, gradient: Tensor) -> Tensor:
        """H⁻¹ g of every row, by the two-loop recursion: [n, P] → [n, P]."""
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
    """The factor [n] that makes a first step no longer than one."""
    return 1 / gradient.norm(dim=-1).clamp(min=1)


def tangent(rows: Tensor, normal: Tensor) -> Tensor:
    """What is left of rows without their part along the normals, [n, P] each."""
    return rows - (rows * normal).sum(-1, keepdim=True) * normal


def ascend(
    function: RowFunction,
    z: Tensor,
    normal: Tensor,
    *,
    tolerance: float = 1e-2,
    iterations: int = 60,
    path: list[tuple[Tensor, Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """The highest points found from the rows of z, each with z·normal as it is, and their values.

    A row that starts where the function has no value stays there, with the value −∞. Rows end where four iterations
    have gained less than the tolerance, or a line search finds nothing.

    Args:
        function: values and gradients at rows.
        z: where to start, [n, P].
        normal: of length one, [n, P]; zero for rows that may go anywhere.
        tolerance, iterations: when to end.
        path: a list to which every iteration adds points [n, P], their values [n] and gradients [n, P].

    Example:
        >>> start, normal = torch.tensor([[2.0, 5.0]]), torch.tensor([[1.0, 0.0]])
        >>> ascend(lambda z: (-z.square().sum(-1), -2 * z), start, normal)
        (tensor([[2., 0.]]), tensor([-4.]))
    """

    def on_plane(rows: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = function(rows)
        sound = value.isfinite() & gradient.isfinite().all(-1)
        return torch.where(sound, value, -inf), torch.where(sound.unsqueeze(-1), tangent(gradient, normal), 0.0)

    value, gradient = on_plane(z, normal)
    active, pairs, values = value.isfinite(), Pairs(), [value]
    path = [] if path is None else path
    path.append((z, value, gradient))
    for _ in range(iterations):
        direction = tangent(pairs.newton(gradient), normal)
        slope = (gradient * direction).sum(-1)
        lost = ~(slope > 0) | ~slope.isfinite()
        steepest = gradient * unit(gradient).unsqueeze(-1)
        direction = torch.where(lost.unsqueeze(-1), steepest, direction)
        slope = (gradient * direction).sum(-1)
        active = active & (slope > 1e-3 * tolerance)
        if not bool(active.any()):
            break
        found = _search(on_plane, (z, value, gradient), normal, direction, slope, active)
        moved = found[1] > value
        pairs.add(found[0] - z, gradient - found[2], unit(gradient))
        z, value, gradient = found
        values.append(value)
        path.append(found)
        active = active & moved
        if len(values) > WINDOW:
            active = active & (value - values[-1 - WINDOW] > tolerance)
    return z, value


Point = tuple[Tensor, Tensor, Tensor]


def _search(
    function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    at: Point,
    normal: Tensor,
    direction: Tensor,
    slope: Tensor,
    active: Tensor,
) -> Point:
    """A step of every active row that gains enough: longer where the slope is still there, shorter where it gains less.

    Shorter by halving or, where there is a value, by the parabola.
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
