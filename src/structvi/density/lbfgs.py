"""L-BFGS with a line search that survives points where the function has no value."""

from collections import deque
from collections.abc import Callable, Sequence
from math import inf, isfinite

import torch
from torch import Tensor

#: f: [d] → value and gradient [d], float64; (inf, anything) where there is no value.
Function = Callable[[Tensor], tuple[float, Tensor]]

#: pairs (step, change of gradient) that are remembered
MEMORY = 50
#: evaluations of one line search
SEARCH = 25
#: iterations over which a decrease must be seen
WINDOW = 5
#: strong Wolfe conditions: sufficient decrease and curvature
DECREASE, CURVATURE = 1e-4, 0.9


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """One vector of them all, in float64."""
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors])


class Curvature:
    """What is known of the inverse Hessian: the last steps s and the changes of gradient y = Hs that they met.

    Functions that differ little, such as averages over other draws, can share one.
    """

    def __init__(self) -> None:
        self.pairs: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=MEMORY)

    def add(self, s: Tensor, y: Tensor) -> None:
        """Pairs that would make the estimate indefinite are left out."""
        product = float(s @ y)
        if product > 1e-10 * float(s.norm() * y.norm()):
            self.pairs.append((s, y, product))

    def newton(self, gradient: Tensor) -> Tensor:
        """H⁻¹ g by the two-loop recursion: [d] → [d]."""
        if not self.pairs:
            return gradient / max(1.0, float(gradient.norm()))
        x, weights = gradient.clone(), []
        for s, y, product in reversed(self.pairs):
            weights.append(float(s @ x) / product)
            x.sub_(y, alpha=weights[-1])
        _, y, product = self.pairs[-1]
        x.mul_(product / float(y @ y))
        for (s, y, product), weight in zip(self.pairs, reversed(weights), strict=True):
            x.add_(s, alpha=weight - float(y @ x) / product)
        return x


def minimise(
    function: Function,
    x: Tensor,
    *,
    tolerance: float,
    iterations: int = 1000,
    curvature: Curvature | None = None,
) -> tuple[Tensor, float, bool]:
    """The best point found, its value, and whether it is a minimum to within `tolerance`, in the function's units.

    It ends where a Newton step promises less than the tolerance, ½ gᵀH⁻¹g, and five iterations have gained
    less, or where no step along the gradient decreases the function by more than rounding.

    Example:
        >>> start = torch.zeros(2, dtype=torch.float64)
        >>> x, value, converged = minimise(lambda x: (float(x @ x - 6 * x.sum()), 2 * x - 6), start, tolerance=1e-6)
        >>> x.round(decimals=3).tolist(), converged
        ([3.0, 3.0], True)
    """
    curvature = Curvature() if curvature is None else curvature
    value, gradient = function(x)
    if not isfinite(value):
        return x, value, False
    values = [value]
    for _ in range(iterations):
        direction = -curvature.newton(gradient)
        slope = float(gradient @ direction)
        settled = len(values) > WINDOW and values[-1 - WINDOW] - value < tolerance
        if curvature.pairs and -slope / 2 < tolerance and (settled or -slope / 2 < 1e-3 * tolerance):
            return x, value, True
        found = _search(function, x, value, gradient, direction, slope)
        if found is None:
            if not curvature.pairs:
                return x, value, -slope < max(tolerance, 1e-12 * abs(value))
            curvature.pairs.clear()
            continue
        step, value, new_gradient = found
        curvature.add(step * direction, new_gradient - gradient)
        x, gradient = x + step * direction, new_gradient
        values.append(value)
    return x, value, False


def _search(
    function: Function, x: Tensor, value: float, gradient: Tensor, direction: Tensor, slope: float
) -> tuple[float, float, Tensor] | None:
    """A step that meets the strong Wolfe conditions, or failing that the best that decreases: step, value, gradient.

    An interval is kept that holds such a step: its lower end decreases enough and still descends, its upper end does
    not decrease enough, climbs, or has no value. A point without value shortens the step to a tenth or, once there is a
    lower end, halves the interval.
    """
    if not slope < 0:
        return None
    low, low_value, low_slope, low_gradient = 0.0, value, slope, gradient
    high, high_value = inf, inf
    step = 1.0
    for _ in range(SEARCH):
        new_value, new_gradient = function(x + step * direction)
        new_slope = float(new_gradient @ direction) if isfinite(new_value) else inf
        if not (isfinite(new_value) and isfinite(new_slope)):
            high, high_value = step, inf
        elif new_value > value + DECREASE * step * slope or new_value >= low_value:
            high, high_value = step, new_value
        elif abs(new_slope) <= -CURVATURE * slope:
            return step, new_value, new_gradient
        elif new_slope > 0:
            high, high_value = low, low_value
            low, low_value, low_slope, low_gradient = step, new_value, new_slope, new_gradient
        else:
            low, low_value, low_slope, low_gradient = step, new_value, new_slope, new_gradient
        step = _next(low, low_value, low_slope, high, high_value)
        if abs(high - low) <= 1e-9 * max(1.0, low):
            break
    return (low, low_value, low_gradient) if low_value < value else None


def _next(low: float, low_value: float, low_slope: float, high: float, high_value: float) -> float:
    """The minimum of the parabola through what is known, kept inside the interval; beyond it where there is no end."""
    if high == inf:
        return 4 * low
    width = high - low
    if high_value == inf:
        return low + (0.1 if low == 0.0 else 0.5) * width
    bend = high_value - low_value - low_slope * width
    fraction = -low_slope * width / (2 * bend) if bend > 0 else 0.5
    return low + min(max(fraction, 0.1), 0.9) * width
