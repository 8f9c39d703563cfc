"""The best output that ignores the input: what a fit is worth less than has learned nothing.

Sums over targets that come in batches; the log likelihood is that of the best constant for them, as if it had been
known before: no prior is paid. Vectors of up to `COLUMNS` numbers have a constant for each, images one for all pixels.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import log, pi

import torch
from torch import Tensor

#: more columns of a target are taken together
COLUMNS = 64


class Constant(ABC):
    """Told the targets, it says what the best constant output is worth."""

    @abstractmethod
    def add(self, target: Tensor, mask: Tensor | None) -> None:
        """Targets [B, ..], and which of their elements were observed."""

    @abstractmethod
    def log_likelihood(self) -> float:
        """Σ log p(t | best constant) over all that was added, in nats."""


class GaussianConstant(Constant):
    """A mean for each column; a noise that is known, one that is not ("point", "random"), or one a column ("head").

    Example:
        >>> best = GaussianConstant(1.0)
        >>> best.add(torch.tensor([[1.0], [3.0]]), None)
        >>> round(best.log_likelihood(), 4)  # mean 2: two residuals of one
        -2.8379
    """

    def __init__(self, noise: float | str):
        self.noise = noise
        self.count, self.total, self.square = torch.zeros(1), torch.zeros(1), torch.zeros(1)

    def add(self, target: Tensor, mask: Tensor | None) -> None:
        t = target.detach().double().cpu()
        seen = torch.ones_like(t) if mask is None else mask.detach().double().cpu()
        t = t.masked_fill(seen == 0, 0.0)
        if t.ndim != 2 or t.shape[1] > COLUMNS:
            t, seen = t.reshape(-1, 1), seen.reshape(-1, 1)
        self.count = self.count + seen.sum(0)
        self.total = self.total + t.sum(0)
        self.square = self.square + t.square().sum(0)

    def log_likelihood(self) -> float:
        n = self.count.clamp(min=1.0)
        residual = (self.square - self.total.square() / n).clamp(min=0.0)  # [columns]
        if isinstance(self.noise, float):
            variance = torch.full_like(residual, self.noise**2)
        elif self.noise == "head":
            variance = residual / n
        else:
            variance = (residual.sum() / n.sum()).expand_as(residual)
        variance = variance.clamp(min=torch.finfo(torch.float64).tiny)
        return float((-0.5 * residual / variance - 0.5 * self.count * (variance.log() + log(2 * pi))).sum())


class ClassesConstant(Constant):
    """The frequencies of the labels, of weighted ones the weighted frequencies.

    Example:
        >>> best = ClassesConstant(None, None)
        >>> best.add(torch.tensor([0, 1, 1, 1]), None)
        >>> round(best.log_likelihood(), 4)
        -2.2493
    """

    def __init__(self, ignore_index: int | None, class_weights: Sequence[float] | None):
        self.ignore_index, self.class_weights = ignore_index, class_weights
        self.counts = torch.zeros(0, dtype=torch.float64)

    def add(self, target: Tensor, mask: Tensor | None) -> None:
        labels = target.detach().cpu()
        keep = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask.detach().cpu()
        if self.ignore_index is not None:
            keep = keep & (labels != self.ignore_index)
        counts = torch.bincount(labels[keep].long().clamp(min=0)).double()
        longer, shorter = (self.counts, counts) if len(self.counts) >= len(counts) else (counts, self.counts)
        self.counts = longer.clone()
        self.counts[: len(shorter)] += shorter

    def log_likelihood(self) -> float:
        counts = self.counts
        if self.class_weights is not None:
            weights = torch.tensor(self.class_weights, dtype=torch.float64)[: len(counts)]
            counts = counts * weights
        return float(torch.xlogy(counts, counts / counts.sum().clamp(min=1e-300)).sum())


class PoissonConstant(Constant):
    """The mean of the counts.

    Example:
        >>> best = PoissonConstant()
        >>> best.add(torch.tensor([1.0, 1.0]), None)
        >>> best.log_likelihood()
        -2.0
    """

    def __init__(self) -> None:
        self.count, self.total, self.factorials = 0.0, 0.0, 0.0

    def add(self, target: Tensor, mask: Tensor | None) -> None:
        t = target.detach().double().cpu()
        t = t.reshape(-1) if mask is None else t[mask.detach().cpu()]
        self.count += t.numel()
        self.total += float(t.sum())
        self.factorials += float((t + 1).lgamma().sum())

    def log_likelihood(self) -> float:
        if not self.total:
            return -self.factorials
        return self.total * log(self.total / self.count) - self.total - self.factorials
