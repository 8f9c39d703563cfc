"""Parameters that cannot take every value: positive, in an interval, on a simplex, ordered, a correlation.

Each has a smooth bijection y = f(x) from free numbers x, which a family sees. `LogDensity` adds log |det ∂y/∂x| to the
log density of y. It is the bijection of
`torch.distributions.biject_to`, if that has one. It is computed in logarithms: far from zero torch's are clipped or
infinite, and these are finite.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import inf, log
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad, softplus

Shape = int | Sequence[int]
Values = float | Sequence[Any] | Tensor


class Constraint(ABC):
    """A bijection from free numbers x to values y that obey a constraint, on the last axes; any axes may be before.

    The density of y is with respect to all numbers of it that can be chosen: the elements below the diagonal of
    `cholesky_correlation`, all but one of a `simplex`. `torch.distributions` does the same.
    """

    #: what the constraint is called
    name: str
    #: the word before the name of a free number
    symbol: str = "free"
    #: whether x has no unit, so that a step of one is as large wherever the values begin
    relative: bool = True

    @abstractmethod
    def natural(self, x: Tensor) -> Tensor:
        """y of x."""

    @abstractmethod
    def free(self, y: Tensor) -> Tensor:
        """x of y, which must be inside."""

    @abstractmethod
    def log_jacobian(self, x: Tensor) -> Tensor:
        """Terms with the leading axes of x whose sum over all others is log |det ∂y/∂x|."""


class Constrained(NamedTuple):
    """A constraint with the values to begin at: what `positive(1.0)` and the others return, for `Parameters`."""

    constraint: Constraint
    initial: Tensor


class Positive(Constraint):
    """y = eˣ, between the smallest number and the root of the largest, whose square is a number too.

    Beyond, where a computer has no such y, the density is zero: log |det| is −∞, and y stays at its end.
    """

    name, symbol = "positive", "log"

    def _ends(self, x: Tensor) -> tuple[float, float]:
        info = torch.finfo(x.dtype)
        return log(info.tiny), 0.5 * log(info.max) - 0.1  # 0.1: rounding

    def natural(self, x: Tensor) -> Tensor:
        return x.clamp(*self._ends(x)).exp()

    def free(self, y: Tensor) -> Tensor:
        return y.log()

    def log_jacobian(self, x: Tensor) -> Tensor:
        low, high = self._ends(x)
        return torch.where((low <= x) & (x <= high), x, -inf)


class Interval(Constraint):
    """y = low + (high − low)/(1 + e⁻ˣ)."""

    symbol = "logit"

    def __init__(self, low: Tensor, high: Tensor):
        self.low, self.high = low, high
        ends = f"{low.item():g}, {high.item():g}" if low.numel() == 1 == high.numel() else ".., .."
        self.name = f"interval({ends})"

    def _ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.low.to(x.device, x.dtype), self.high.to(x.device, x.dtype)

    def natural(self, x: Tensor) -> Tensor:
        low, high = self._ends(x)
        part = (high - low) * torch.sigmoid(-x.abs())  # the distance from the nearer end, exact to rounding
        y = torch.where(x > 0, high - part, low + part)
        info = torch.finfo(x.dtype)
        margin_low, margin_high = (info.eps * end.abs() + info.tiny for end in (low, high))
        return y.clamp(low + margin_low, high - margin_high)

    def free(self, y: Tensor) -> Tensor:
        low, high = self._ends(y)
        return (y - low).log() - (high - y).log()

    def log_jacobian(self, x: Tensor) -> Tensor:
        low, high = self._ends(x)
        return (high - low).log() + logsigmoid(x) + logsigmoid(-x)


class Simplex(Constraint):
    """Parts broken off a stick: y_k = z_k Π_{j<k} (1 − z_j), z_k = 1/(1 + (K − k) e^{−x_k}), the rest last.

    log |det| = Σ_{k<K} [log y_k + log(1 − z_k)]. Equal parts are x = 0, and a Dirichlet makes the x_k independent.
    """

    name = "simplex"

    def _logs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """log y [.., K] and log(1 − z) [.., K − 1]."""
        x = x - self._behind(x).log()
        left = logsigmoid(-x)
        return pad(logsigmoid(x), (0, 1)) + pad(left.cumsum(-1), (1, 0)), left

    def _behind(self, x: Tensor) -> Tensor:
        """K − k, how many parts come after each: [K − 1]."""
        return torch.arange(x.shape[-1], 0, -1, device=x.device, dtype=x.dtype)

    def natural(self, x: Tensor) -> Tensor:
        return self._logs(x)[0].exp().clamp_min(torch.finfo(x.dtype).tiny)

    def free(self, y: Tensor) -> Tensor:
        left = y.flip(-1).cumsum(-1).flip(-1)[..., 1:]
        first = y[..., :-1]
        return first.log() - left.log() + self._behind(first).log()

    def log_jacobian(self, x: Tensor) -> Tensor:
        y, left = self._logs(x)
        return y[..., :-1] + left


class Ordered(Constraint):
    """y₁ = x₁, y_k = y_{k−1} + e^{x_k}."""

    name, relative = "ordered", False

    def natural(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., :1], x[..., 1:].exp()], -1).cumsum(-1)

    def free(self, y: Tensor) -> Tensor:
        return torch.cat([y[..., :1], y.diff(dim=-1).log()], -1)

    def log_jacobian(self, x: Tensor) -> Tensor:
        return x[..., 1:].sum(-1)


class CholeskyCorrelation(Constraint):
    """L_ij = w_ij Π_{k<j} √(1 − w_ik²) for j < i, w = tanh x, and the diagonal makes rows of length one.

    log |det| = Σ_{j<i} [log(1 − w_ij²) + ½ Σ_{k<j} log(1 − w_ik²)].
    """

    name = "cholesky_correlation"

    def __init__(self, size: int):
        self.size = size
        rows, columns = torch.tril_indices(size, size, -1)
        #: the index of each element of a [K, K] matrix among the free numbers; behind them, if it has none
        self.where = torch.full((size, size), len(rows))
        self.where[rows, columns] = torch.arange(len(rows))
        self.below = rows * size + columns

    def _matrices(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, log(1 − tanh² x), and ½ of its sum over the columns before: [.., K, K] each, zeros elsewhere."""
        x = pad(x, (0, 1))[..., self.where.to(x.device)]
        size = x.abs()
        rest = 2 * (log(2) - size - softplus(-2 * size))
        rest = rest.tril(-1)
        return x, rest, 0.5 * (rest.cumsum(-1) - rest)

    def natural(self, x: Tensor) -> Tensor:
        x, _, before = self._matrices(x)
        diagonal = before.diagonal(dim1=-2, dim2=-1).exp().clamp_min(torch.finfo(x.dtype).tiny)
        return x.tanh() * before.exp() + torch.diag_embed(diagonal)

    def free(self, y: Tensor) -> Tensor:
        # Σ_{k>j} L_ik², summed from the right, where nothing cancels; sinh x = w/√(1 − w²) = L_ij over its root
        behind = pad(y.square().flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))
        x = torch.asinh(y / behind.sqrt().clamp_min(torch.finfo(y.dtype).tiny))
        return x.flatten(-2)[..., self.below.to(y.device)]

    def log_jacobian(self, x: Tensor) -> Tensor:
        _, rest, before = self._matrices(x)
        return (rest + before.tril(-1)).flatten(-2)


def free_tensors(tensors: Mapping[str, Tensor | Constrained | float], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Free numbers in place of constrained values, where the other tensors are, all of one dtype if one is chosen.

    A plain number is a scalar tensor: of the others' dtype, or float64.
    """
    plain = [tensor for tensor in tensors.values() if isinstance(tensor, Tensor)]
    like = plain[0] if plain else torch.zeros((), dtype=torch.float64)
    if dtype is None and any(isinstance(tensor, Constrained) for tensor in tensors.values()):
        dtype = torch.float64
    free = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Constrained):
            tensor = tensor.constraint.free(tensor.initial).to(like.device)
        elif isinstance(tensor, int | float):
            tensor = like.new_tensor(tensor)
        is_floating = isinstance(tensor, Tensor) and tensor.dtype.is_floating_point
        free[name] = tensor.to(dtype or tensor.dtype) if is_floating else tensor
    return free


def positive(initial: Values = 1.0, *, shape: Shape = ()) -> Constrained:
    """Positive numbers, y = eˣ: scales, rates, variances.

    Args:
        initial: where to begin, a number or a tensor of them: `positive(8)` is one number that begins at 8.
        shape: how many: `positive(1.0, shape=8)` is eight that begin at 1.

    Example:
        >>> positive(2.0, shape=3).initial
        tensor([2., 2., 2.], dtype=torch.float64)
    """
    return _constrained(Positive(), initial, shape)


def interval(low: Values, high: Values, initial: Values | None = None, *, shape: Shape = ()) -> Constrained:
    """Numbers between two ends, y = low + (high − low)/(1 + e⁻ˣ): probabilities, correlations, known ranges.

    Args:
        low, high: the ends, finite: numbers, or tensors for a vector of intervals.
        initial: where to begin; the middle if None.
        shape: how many: `interval(0, 1, shape=3)`.

    Example:
        >>> interval(0, torch.tensor([1.0, 10.0])).initial
        tensor([0.5000, 5.0000], dtype=torch.float64)
    """
    ends = [torch.as_tensor(end, dtype=torch.float64) for end in (low, high)]
    middle = (ends[0] + ends[1]) / 2
    value = middle if initial is None else torch.as_tensor(initial, dtype=torch.float64) + 0 * middle
    return _constrained(Interval(*ends), value, shape)


def simplex(initial: Values, *, shape: Shape = ()) -> Constrained:
    """Positive parts that sum to one, along the last axis: mixture proportions, transition probabilities.

    Args:
        initial: how many parts, an integer, which begin equal; or their values.
        shape: how many simplices: `simplex(3, shape=4)` is [4, 3], each row one.

    Example:
        >>> simplex(4).initial
        tensor([0.2500, 0.2500, 0.2500, 0.2500], dtype=torch.float64)
    """
    value = [1 / initial] * initial if isinstance(initial, int) else initial
    return _constrained(Simplex(), value, shape, axes=1)


def ordered(initial: Values, *, shape: Shape = ()) -> Constrained:
    """Numbers that increase along the last axis, y₁ = x₁, y_k = y_{k−1} + e^{x_k}: cut points, labelled components.

    Args:
        initial: how many, an integer, which begin one apart around zero; or their values.
        shape: how many such vectors: `ordered(3, shape=2)` is [2, 3].

    Example:
        >>> ordered(5).initial
        tensor([-2., -1.,  0.,  1.,  2.], dtype=torch.float64)
    """
    value = torch.arange(initial) - (initial - 1) / 2 if isinstance(initial, int) else initial
    return _constrained(Ordered(), value, shape, axes=1)


def cholesky_correlation(initial: Values, *, shape: Shape = ()) -> Constrained:
    """L, lower triangular with a positive diagonal and rows of length one: LLᵀ is a correlation matrix.

    Its prior is `torch.distributions.LKJCholesky`. With scales s, diag(s) L is the Cholesky root of a covariance, for
    `MultivariateNormal(mean, scale_tril=s.unsqueeze(-1) * L)`.

    Args:
        initial: of how many numbers, an integer, which begin uncorrelated; or L.
        shape: how many matrices.

    Example:
        >>> cholesky_correlation(2).initial
        tensor([[1., 0.],
                [0., 1.]], dtype=torch.float64)
    """
    value = torch.eye(initial) if isinstance(initial, int) else torch.as_tensor(initial)
    return _constrained(CholeskyCorrelation(len(value.mT)), value, shape, axes=2)


def _constrained(constraint: Constraint, initial: Any, shape: Shape, axes: int = 0) -> Constrained:
    """Return the constraint with its values to begin at, [*shape, *the last axes] in float64, which must obey it."""
    value = torch.as_tensor(initial, dtype=torch.float64).detach()
    lead = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if lead:
        value = value.expand(*lead, *value.shape[value.ndim - axes :]).clone()
    free = constraint.free(value) if value.ndim >= axes else torch.tensor(inf)
    if not bool(free.isfinite().all()) or not torch.allclose(constraint.natural(free), value):
        also = "; of a correlation matrix R give torch.linalg.cholesky(R)" if axes == 2 else ""
        raise ValueError(f"{constraint.name}: expected finite values that obey it, got {_few(value)}{also}")
    return Constrained(constraint, value)


def _few(value: Tensor) -> str:
    shown = ", ".join(f"{x:.4g}" for x in value.flatten()[:6].tolist())
    return shown if value.numel() == 1 else f"[{shown}{', ..' if value.numel() > 6 else ''}]"
