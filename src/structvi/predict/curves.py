"""Reliability and risk–coverage curves, as histograms that are filled batch by batch in constant memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

#: Bins of the calibration error and the reliability diagram.
CALIBRATION_BINS = 15


@dataclass(frozen=True)
class Reliability:
    """Per bin of confidence: how many labels, their mean confidence, and how often they were right."""

    count: Tensor
    confidence: Tensor
    accuracy: Tensor


@dataclass(frozen=True)
class RiskCoverage:
    """The mean risk of the most certain observations against the fraction that they are."""

    coverage: Tensor
    risk: Tensor


class CalibrationHistogram:
    """Confidences and how often they were right, in equal bins of [0, 1].

    Example:
        >>> histogram = CalibrationHistogram()
        >>> histogram.add(torch.tensor([0.8, 0.8]), torch.tensor([1.0, 0.0]))
        >>> round(histogram.error(), 4)
        0.3
    """

    def __init__(self) -> None:
        self.count, self.confidence, self.right = torch.zeros(3, CALIBRATION_BINS, dtype=torch.float64)

    def add(self, confidence: Tensor, right: Tensor) -> None:
        """[n] probabilities, and the outcomes 0 or 1 that they are of."""
        if bad := int(confidence.isnan().sum()):
            raise ValueError(
                f"{bad} of {len(confidence)} probabilities are NaN, and in no bin: look at the network's outputs "
                "there, predict(x).outputs, for inputs or weights that are not finite"
            )
        bins = (confidence * CALIBRATION_BINS).floor().long().clamp(max=CALIBRATION_BINS - 1).cpu()
        self.count.index_add_(0, bins, torch.ones_like(bins, dtype=torch.float64))
        self.confidence.index_add_(0, bins, confidence.double().cpu())
        self.right.index_add_(0, bins, right.double().cpu())

    def error(self) -> float:
        """The expected calibration error Σ_b (n_b/N) |mean confidence − frequency|."""
        return ((self.confidence - self.right).abs().sum() / self.count.sum()).item()

    def curve(self) -> Reliability:
        filled = self.count > 0
        count = self.count[filled]
        return Reliability(count, self.confidence[filled] / count, self.right[filled] / count)


class RiskHistogram:
    """Risks by uncertainty, in constant memory: the area under the risk–coverage curve, ties in random order.

    The bins are the leading bits of the uncertainty as a float32, whose order as integers is that of the numbers:
    uncertainties within 2⁻¹² of each other, relatively, may count as ties.

    Example:
        >>> histogram = RiskHistogram()
        >>> histogram.add(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.0, 0.0, 1.0]))
        >>> round(histogram.area(), 4)
        0.1111
    """

    def __init__(self) -> None:
        self.count, self.risk = torch.zeros(2, 2**20, dtype=torch.float64)

    def add(self, uncertainty: Tensor, risk: Tensor) -> None:
        """[n] uncertainties ≥ 0, and what relying on each of the n observations costs."""
        if bad := int(uncertainty.isnan().sum()):  # as a number of bits it would be the most uncertain
            raise ValueError(
                f"{bad} of {len(uncertainty)} uncertainties are NaN, and cannot be ranked: look at the network's "
                "outputs there, predict(x).outputs, for inputs or weights that are not finite"
            )
        bins = uncertainty.float().clamp(min=0).contiguous().view(torch.int32).long().cpu() >> 11
        self.count.index_add_(0, bins, torch.ones_like(bins, dtype=torch.float64))
        self.risk.index_add_(0, bins, risk.double().cpu())

    def area(self) -> float:
        """(1/N) Σ_n (mean risk of the n most certain)."""
        filled = self.count > 0
        count, risk = self.count[filled], self.risk[filled]
        n, R = count.cumsum(0) - count, risk.cumsum(0) - risk  # before each bin
        mean = risk / count
        # Σ_j (R + j r̄)/(n + j) over the bin's j = 1 … c
        harmonic = torch.digamma(n + count + 1) - torch.digamma(n + 1)
        return ((mean * count + (R - mean * n) * harmonic).sum() / count.sum()).item()

    def curve(self) -> RiskCoverage:
        filled = self.count > 0
        count = self.count[filled].cumsum(0)
        return RiskCoverage(count / count[-1], self.risk[filled].cumsum(0) / count)
