"""The mixture of several models' predictions for rows, also where their noises are of different kinds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Normal

from structvi.models.likelihoods.student_t import students_t_cdf
from structvi.predict.predictive import Predictive

#: points that stand for each draw's distribution where quantiles of the mixture are asked for
POINTS = 64
#: rows whose points are sorted at once
ROWS = 512
#: of an interval that holds a quantile of Student's t
HALVINGS = 50


@dataclass
class Pooled:
    """Σ_c w_c p_c(t | x): predictives of the same rows, one for each member of each model, and their weights.

    Of amounts they have the shape [B, 1], of classes [B, C].

    Example:
        >>> from structvi import likelihoods
        >>> one = Predictive(torch.zeros(1, 3, 1), torch.ones(1), likelihoods.Gaussian(1.0))
        >>> two = Predictive(torch.full((1, 3, 1), 2.0), torch.ones(1), likelihoods.StudentT(1.0, 4.0))
        >>> both = Pooled([one, two], [0.5, 0.5])
        >>> both.mean[0].item(), both.epistemic[0].item(), both.aleatoric[0].item()
        (1.0, 1.0, 1.5)
    """

    parts: Sequence[Predictive]
    weights: Sequence[float]

    def _sum(self, values: Sequence[Tensor]) -> Tensor:
        return sum((w * v.double() for w, v in zip(self.weights, values, strict=True)), torch.zeros(()))

    @property
    def mean(self) -> Tensor:
        return self._sum([part.mean for part in self.parts])

    @property
    def aleatoric(self) -> Tensor:
        """E Var[t | y, model]."""
        return self._sum([part.aleatoric for part in self.parts])

    @property
    def epistemic(self) -> Tensor:
        """Var E[t | y, model]: within each model's posterior and between models."""
        mean = self.mean
        return self._sum([part.epistemic + (part.mean - mean).square() for part in self.parts])

    @property
    def std(self) -> Tensor:
        return (self.epistemic + self.aleatoric).clamp(min=0).sqrt()

    @property
    def entropy(self) -> Tensor:
        p = self.mean
        return -torch.xlogy(p, p).sum(1)

    @property
    def expected_entropy(self) -> Tensor:
        return self._sum([part.expected_entropy for part in self.parts])

    def log_prob(self, t: Tensor) -> Tensor:
        """[B] for a target [B, 1] of amounts or [B] of labels."""
        log_w = torch.tensor(self.weights, dtype=torch.float64).log()
        each = torch.stack([part.log_prob(t).double().reshape(len(t)) for part in self.parts])
        return (each + log_w.unsqueeze(-1)).logsumexp(0)

    def cdf(self, t: Tensor) -> Tensor:
        """P(T ≤ t), [B], of amounts."""
        return self._sum([part.cdf(t).reshape(len(t)) for part in self.parts]).clamp(0, 1)

    def quantiles(self, p: Sequence[float]) -> Tensor:
        """[B, Q] of amounts: of the mixture in which `POINTS` quantiles stand for each draw's distribution."""
        points, weights = zip(*(_points(part) for part in self.parts), strict=True)
        weight = torch.cat([w * own for w, own in zip(self.weights, weights, strict=True)])  # [S·POINTS]
        every = torch.cat(points)  # [S·POINTS, B]
        found = []
        for rows in every.split(ROWS, 1):
            value, order = rows.sort(0)
            share = weight[order]
            middle = share.cumsum(0) - 0.5 * share  # [S·POINTS, B]
            at = torch.tensor(p, dtype=torch.float64).expand(rows.shape[1], -1).contiguous()
            index = torch.searchsorted(middle.mT.contiguous(), at).clamp(1, len(middle) - 1)
            high, low = middle.mT.gather(1, index), middle.mT.gather(1, index - 1)
            part = ((at - low) / (high - low).clamp(min=1e-300)).clamp(0, 1)
            a, b = value.mT.gather(1, index - 1), value.mT.gather(1, index)
            found.append(a + part * (b - a))
        return torch.cat(found)


def _points(predictive: Predictive) -> tuple[Tensor, Tensor]:
    """Quantiles at (i + ½)/POINTS of every draw, [S·POINTS, B], and their weights."""
    d = predictive.components
    levels = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
    loc, scale = (x.double().reshape(predictive.draws, -1) for x in (d.loc, d.scale))  # pyright: ignore
    if isinstance(d, Normal):
        z = Normal(0.0, 1.0).icdf(levels).expand(predictive.draws, -1)
    else:
        z = _unit_quantiles(d.df.double().reshape(predictive.draws, -1)[:, 0], levels)  # pyright: ignore
    points = loc.unsqueeze(1) + scale.unsqueeze(1) * z.unsqueeze(-1)  # [S, POINTS, B]
    weight = predictive.weights.double().unsqueeze(-1).expand(-1, POINTS) / POINTS
    return points.flatten(0, 1), weight.flatten()


def _unit_quantiles(df: Tensor, levels: Tensor) -> Tensor:
    """Of Student's t with the degrees of freedom of each draw, [S, POINTS], by bisection."""
    each, where = df.unique(return_inverse=True)
    half = levels[: len(levels) // 2].expand(len(each), -1)
    number = each.unsqueeze(-1).expand_as(half)
    low, high = torch.full_like(half, -1.0), torch.zeros_like(half)
    while bool((students_t_cdf(low, number) > half).any()):
        low = 2 * low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        below = students_t_cdf(middle, number) < half
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    lower = (low + high) / 2
    return torch.cat([lower, -lower.flip(1)], 1)[where]
