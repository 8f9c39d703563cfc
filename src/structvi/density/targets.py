"""Targets as searches see them: counted, checked, and in other coordinates."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import Any

import torch
from torch import Tensor

from ..models.bayesian_model import rows_of
from ..models.target import Target
from .lowrank import LowRankMatrix

#: relative difference that rounding may make between two values of a log density at one point
SAME = 1e-4
ADVICE = "write it with operations of torch alone, without numpy, float(), .item() and .detach()"
#: errors of a log density that say "not here": a matrix that is not positive, an argument that a distribution refuses
REFUSALS = (torch.linalg.LinAlgError, ValueError, ArithmeticError)  # pyright: ignore[reportPrivateImportUsage]


class Limit(Exception):
    """No evaluation is left."""


class Counted:
    """A target with a count and a limit of evaluations; the first answer is checked.

    A point at which the log density raises one of `REFUSALS` has the density zero, and is counted in `refused`. If it
    raises at all points of the first call, then the error is raised.
    """

    def __init__(self, target: Target, limit: float = inf, checked: bool = False):
        self.target, self.space, self.limit = target, target.space, limit
        self.evaluations, self.refused, self.exhausted = 0, 0, False
        #: whether a search ended at a part of the limit
        self.shortened = False
        #: two values at one point, if they differ
        self.random: tuple[float, float] | None = None
        self._known = checked

    def log_joint(self, theta: Tensor, batch: object = None) -> Tensor:
        """Return log p, [S, P] → [S]."""
        if self.evaluations + len(theta) > self.limit:
            self.exhausted = True
            raise Limit
        self.evaluations += len(theta)
        if self._known:
            return self._or_zero(theta)
        value = self._or_zero(theta, checked_log_joint)
        if self.refused == len(theta):
            self.target.log_joint(theta)  # raises what it has raised everywhere
        self._known = True
        self._ask_again(theta.detach()[-4:], value.detach()[-4:])
        return value

    def _or_zero(self, theta: Tensor, function: Callable[[Target, Tensor], Tensor] | None = None) -> Tensor:
        """Return log p; where it raises that of halves of the rows, and −∞ of a row that raises alone."""
        try:
            return function(self.target, theta) if function else self.target.log_joint(theta)
        except REFUSALS:
            if len(theta) > 1:
                return torch.cat([self._or_zero(half) for half in theta.split((len(theta) + 1) // 2)])
            self.refused += 1
            return theta.sum(-1) * 0 - inf

    @torch.no_grad()
    def _ask_again(self, theta: Tensor, value: Tensor) -> None:
        """Compare values with those at the same points a moment ago: a random log density has no maximum."""
        if self.evaluations + len(theta) > self.limit:
            return
        self.evaluations += len(theta)
        with suppress(*REFUSALS):
            again = self.target.log_joint(theta)
            for row in ((value - again).abs() > SAME * (1 + value.abs())).nonzero().flatten().tolist():
                self.random = (value[row].item(), again[row].item())

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """Allow this share of the evaluations that are left; after it the target is not `exhausted`."""
        limit = self.limit
        self.limit = self.evaluations + share * (limit - self.evaluations)
        try:
            yield
        finally:
            self.limit = limit
            self.shortened, self.exhausted = self.shortened or self.exhausted, False


def checked_log_joint(target: Target, theta: Tensor) -> Tensor:
    """Return log p at θ [S, P], after checks: one value a draw, with a gradient.

    Example:
        >>> from structvi import LogDensity, Parameters
        >>> target = LogDensity(lambda p: -p["z"].detach().square().sum(), Parameters({"z": torch.zeros(2)}))
        >>> checked_log_joint(target, torch.zeros(3, 2, requires_grad=True))
        Traceback (most recent call last):
        TypeError: the log density has no gradient: what it returns does not follow θ; write it with operations of ...
    """
    try:
        value: Any = target.log_joint(theta)
    except RuntimeError as error:
        if "numpy()" in str(error):  # torch's words for numpy on what has a gradient
            raise TypeError(f"the log density has no gradient: it calls numpy; {ADVICE}") from error
        if "dtype" in str(error) or "expected scalar type" in str(error):  # the latter is torch 2.6
            raise TypeError(
                f"the log density mixes precisions: {error}; the parameters are {theta.dtype}, give the data in it too"
            ) from error
        raise
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        came = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TypeError(f"the log density has no gradient: it returns {came}; {ADVICE}")
    if value.shape != theta.shape[:1]:
        raise TypeError(
            f"log_joint must return one value for each of {len(theta)} draws, [{len(theta)}], got {list(value.shape)}; "
            "sum over all but the first axis"
        )
    if theta.requires_grad and not value.requires_grad:
        raise TypeError(f"the log density has no gradient: what it returns does not follow θ; {ADVICE}")
    return value


class OverBatches:
    """A log density of all data, the mean over batches of its estimates: `log_joint` reads all of them.

    Estimates of batches count by their rows: with (N/B) Σ in each, the mean over unequal ones is not the whole.

    Example:
        >>> from structvi import LogDensity, Parameters
        >>> target = LogDensity(lambda p, x: p["z"] * 3 / len(x) * x.sum(), Parameters({"z": torch.zeros(())}))
        >>> OverBatches(target, [torch.tensor([1.0, 2.0]), torch.tensor([4.0])]).log_joint(torch.ones(1, 1))
        tensor([7.])
    """

    def __init__(self, target: Target, loader: Iterable[Any]):
        self.target, self.loader, self.space = target, loader, target.space

    def log_joint(self, theta: Tensor, batch: Any = None, **options: Any) -> Tensor:
        if batch is not None:
            return self.target.log_joint(theta, batch, **options)
        return _mean((self.target.log_joint(theta, own, **options), rows_of(own)) for own in self.loader)


def _mean(parts: Iterable[tuple[Tensor, int | None]]) -> Tensor:
    """Return the mean of values, weighted by rows where all are known."""
    values, rows = zip(*parts, strict=True)
    if not all(rows):
        rows = [1] * len(rows)
    weights = torch.tensor(rows, dtype=values[0].dtype, device=values[0].device) / sum(rows)
    return torch.tensordot(weights, torch.stack(values), dims=1)


class View:
    """A target in other coordinates, θ = centre + root z, with log p(θ) + log |det root|.

    Args:
        target: the target in θ.
        centre: [P].
        root: [P, P], [P] for a diagonal, or a `LowRankMatrix`: the covariance of θ for standard z.
    """

    def __init__(self, target: Target, centre: Tensor, root: Tensor | LowRankMatrix):
        self.target, self.centre, self.root = target, centre, root
        self.space = target.space.at(torch.zeros_like(target.space.initial))
        self.scale: Tensor  # [P]
        if isinstance(root, LowRankMatrix):
            self.scale, log_det = root.diagonal().sqrt(), root.log_det() / 2
        elif root.ndim == 1:
            self.scale, log_det = root.abs(), root.abs().log().sum().item()
        else:
            self.scale, log_det = root.norm(dim=-1), torch.linalg.slogdet(root).logabsdet.item()
        self.log_det: float = log_det

    def steps(self, z: Tensor) -> Tensor:
        """Return root z of rows."""
        if isinstance(self.root, LowRankMatrix):
            return self.root.root(z)
        return z * self.root if self.root.ndim == 1 else z @ self.root.mT

    def back(self, x: Tensor) -> Tensor:
        """Return rootᵀ x of rows: gradients by z from those by θ."""
        if isinstance(self.root, LowRankMatrix):
            return self.root.root_transposed(x)
        return x * self.root if self.root.ndim == 1 else x @ self.root

    def z(self, theta: Tensor) -> Tensor:
        """Return the coordinates of rows of θ."""
        x = theta - self.centre
        if isinstance(self.root, LowRankMatrix):
            return self.root.inverse().root_transposed(x)
        return x / self.root if self.root.ndim == 1 else torch.linalg.solve(self.root, x.mT).mT

    def theta(self, z: Tensor) -> Tensor:
        """Return θ of rows of coordinates."""
        return self.centre + self.steps(z.to(self.centre))

    def log_joint(self, theta: Tensor, batch: object = None) -> Tensor:
        """Return the log density of z = `theta`."""
        return self.target.log_joint(self.theta(theta).to(self.space.initial)) + self.log_det

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log density and its gradient by z: [n, P] → [n], [n, P], in float64."""
        z = z.detach().double().requires_grad_()
        value = self.log_joint(z)
        (gradient,) = torch.autograd.grad(value.sum(), z)
        return value.detach().double(), gradient

    @torch.no_grad()
    def values(self, z: Tensor) -> Tensor:
        """Return the log density, −∞ where it is not finite."""
        value = self.log_joint(z).double()
        return torch.where(value.isfinite(), value, -inf)
