"""The mixture of several models' predictions for rows, also where their noises are of different kinds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.special import stdtrit
from torch import Tensor, special
from torch.distributions import Normal

from structvi.predict.predictive import Predictive

#: points that stand for each draw's distribution where quantiles of the mixture are asked for
POINTS = 64


@dataclass
class Mixture:
    """Σ_c w_c p_c(t | x): predictives of the same rows, one for each member of each model, and their weights.

    Their shape is [B, 1] for amounts and [B, C] for classes.

    Example:
        >>> from structvi import likelihoods
        >>> one = Predictive(torch.zeros(1, 3, 1), torch.ones(1), likelihoods.Gaussian(1.0))
        >>> two = Predictive(torch.full((1, 3, 1), 2.0), torch.ones(1), likelihoods.StudentT(1.0, 4.0))
        >>> both = Mixture([one, two], [0.5, 0.5])
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
    def entropy(self) -> Tensor:
        p = self.mean
        return -torch.xlogy(p, p).sum(1)

    @property
    def expected_entropy(self) -> Tensor:
        return self._sum([part.expected_entropy for part in self.parts])

    def log_prob(self, t: Tensor) -> Tensor:
        """Return [B] for a target [B, 1] of amounts or [B] of labels."""
        log_w = torch.tensor(self.weights, dtype=torch.float64).log()
        each = torch.stack([part.log_prob(t).double().reshape(len(t)) for part in self.parts])
        return (each + log_w.unsqueeze(-1)).logsumexp(0)

    def cdf(self, t: Tensor) -> Tensor:
        """Return P(T ≤ t), [B], of amounts."""
        return self._sum([part.cdf(t).reshape(len(t)) for part in self.parts]).clamp(0, 1)

    def quantiles(self, p: Sequence[float]) -> Tensor:
        """Return [B, Q] of amounts: of the mixture in which `POINTS` quantiles stand for each draw's distribution."""
        points = torch.cat([_points(part) for part in self.parts])  # [S·POINTS, B]
        own = [w * part.weights.double() for w, part in zip(self.weights, self.parts, strict=True)]
        weight = torch.cat(own).repeat_interleave(POINTS) / POINTS
        value, order = points.mT.contiguous().sort(1)  # [B, S·POINTS]
        share = weight[order]
        middle = share.cumsum(1) - 0.5 * share
        at = torch.tensor(p, dtype=torch.float64).expand(len(value), -1).contiguous()
        index = torch.searchsorted(middle, at).clamp(1, middle.shape[1] - 1)
        low, high = middle.gather(1, index - 1), middle.gather(1, index)
        part = ((at - low) / (high - low).clamp(min=1e-300)).clamp(0, 1)
        return torch.lerp(value.gather(1, index - 1), value.gather(1, index), part)


def _points(predictive: Predictive) -> Tensor:
    """Return quantiles at (i + ½)/POINTS of every draw: [S·POINTS, B]."""
    d: Any = predictive.components
    levels = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
    loc, scale = (x.double().reshape(predictive.draws, 1, -1) for x in (d.loc, d.scale))
    if isinstance(d, Normal):
        z = special.ndtri(levels).unsqueeze(0)
    else:
        df = d.df.double().reshape(predictive.draws, -1)[:, :1]
        z = torch.as_tensor(stdtrit(df.numpy(), levels.numpy()))
    return (loc + scale * z.unsqueeze(-1)).flatten(0, 1)
