"""Quality of a segmentation, structure by structure and case by case: Dice, calibration, referral."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..models.likelihoods import split_mask
from ..predict.metrics import CalibrationHistogram, Reliability
from ..predict.predictive import Predictive, observed_target
from .maps import Maps

#: voxels whose probability of a structure is below this say nothing of its calibration: nearly all are far from it
SLIGHT = 0.01


class Referral(NamedTuple):
    """The gain from handing the cases with the lowest expected Dice to a human.

    Args:
        share: of cases that are referred, from 0 up to all but one, [n].
        dice: the mean Dice of the other cases, [n].
        ideal: the same if the worst cases were known, [n].
    """

    share: Tensor
    dice: Tensor
    ideal: Tensor


@dataclass(frozen=True)
class StructureMetrics:
    """Results for n cases and K structures; `print` gives a table.

    Dice is 2 |A ∩ B| / (|A| + |B|) of predicted voxels A and annotated ones B, nan where neither has any. *Expected*
    Dice is what the posterior itself expects of A, from the probabilities p alone: 2 Σ_A p / (|A| + Σ p).

    Args:
        names: of the structures.
        dice, expected_dice: [n, K].
        volume: predicted voxels minus annotated ones, [n, K].
        ece: expected calibration error of the probability of a structure, over voxels where it is at least 1 %, [K].
        missed: the share of a structure's annotated voxels whose probability is below 1 %, [K].
        reliability: the curve of each structure, over the same voxels as `ece`.
    """

    names: tuple[str, ...]
    dice: Tensor
    expected_dice: Tensor
    volume: Tensor
    ece: Tensor
    missed: Tensor
    reliability: tuple[Reliability, ...] = field(repr=False)

    @property
    def case_dice(self) -> Tensor:
        """The mean over a case's structures, [n]; nan where it has none."""
        return self.dice.nanmean(1)

    @property
    def uncertainty(self) -> Tensor:
        """One minus the expected Dice of each case, [n]; zero where nothing is there and nothing is expected."""
        return 1 - self.expected_dice.nanmean(1).nan_to_num(1.0)

    def referral(self) -> Referral:
        """Return the mean Dice of the rest as the most uncertain cases are referred; cases without any are left out."""
        has = ~self.case_dice.isnan()
        if not bool(has.any()):
            raise ValueError("no case has a structure, predicted or annotated: there is no Dice to look at")
        dice, kept = self.case_dice[has], torch.arange(1, int(has.sum()) + 1)
        by_certainty = dice[self.uncertainty[has].argsort(stable=True)], dice.sort(descending=True).values
        rest, ideal = ((order.cumsum(0) / kept).flip(0) for order in by_certainty)
        return Referral((1 - kept / len(dice)).flip(0), rest, ideal)

    def __str__(self) -> str:
        width = max(len("structure"), *map(len, self.names))
        lines = [f"{'structure':{width}}  cases   Dice  (expected)    ECE  missed"]
        for k, name in enumerate(self.names):
            own = self.dice[:, k]
            lines.append(
                f"{name:{width}}  {int((~own.isnan()).sum()):5}  {own.nanmean():.3f}  "
                f"({self.expected_dice[:, k].nanmean():8.3f})  {self.ece[k]:.3f}  {self.missed[k]:6.3f}"
            )
        return "\n".join(lines)


def by_structure(
    cases: Iterable[tuple[Maps | Predictive, Any]], names: Sequence[str] | None = None, *, background: int | None = 0
) -> StructureMetrics:
    """Return Dice and calibration of each structure, over cases: images or volumes with labels.

    Args:
        cases: pairs of maps and the annotation of one case, or of a predictive and the targets of a whole batch. The
            predictive is of `Categorical` (a structure for each class) or `Bernoulli` (one for each channel). A target
            may be a pair with a mask; masked labels and `ignore_index` do not count.
        names: of the structures, without the background.
        background: the class that is none; None to count all. With `Bernoulli` there is none.

    Example:
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Conv2d(1, 3, 3, padding=1), likelihoods.Categorical(), num_data=10)
        >>> loader = [(torch.randn(5, 1, 8, 8), torch.randint(3, (5, 8, 8)))]
        >>> found = by_structure(((bayes.predict(x, 8), t) for x, t in loader), ["liver", "spleen"])
        >>> found.dice.shape, len(found.reliability)
        (torch.Size([5, 2]), 2)
    """
    rows: list[list[Tensor]] = []
    histograms: list[CalibrationHistogram] = []
    for maps, target in _each(cases):
        if maps.kind == "numbers":
            raise TypeError("the maps are of numbers, which have no structures")
        classes, p = maps.kind == "classes", maps.mean.double()
        t, mask = (None if x is None else _shaped(x, p.shape[1:] if classes else p.shape) for x in split_mask(target))
        which = [c for c in range(len(p)) if not classes or c != background]
        names = [f"{'class' if classes else 'channel'} {c}" for c in which] if names is None else names
        if len(names) != len(which):
            raise ValueError(f"{len(names)} names for {len(which)} structures; the background ({background}) has none")
        histograms = histograms or [CalibrationHistogram() for _ in which]
        own, label = p[which], torch.tensor(which).reshape(-1, *[1] * (p.ndim - 1))
        found, drawn = (p.argmax(0) == label, t == label) if classes else (own > 0.5, t == 1)  # [K, ..]
        if mask is not None:
            own, found, drawn = own * mask, found & mask, drawn & mask
        some = own >= SLIGHT
        for histogram, probability, outcome, chosen in zip(histograms, own, drawn, some, strict=True):
            histogram.add(probability[chosen], outcome[chosen].double())
        sums = (found & drawn, found, drawn, own * found, own, drawn & ~some)
        both, a, b, expected, mass, missed = (x.flatten(1).double().sum(1) for x in sums)  # [K]
        hoped = torch.where((a > 0) | (mass > 0.5), 2 * expected / (a + mass), torch.nan)
        rows.append([2 * both / (a + b), hoped, a - b, b, missed])
    if names is None or not rows:
        raise ValueError("there is no case to evaluate: the loader is empty")
    dice, hoped, volume, annotated, missed = (torch.stack(own) for own in zip(*rows, strict=True))
    ece, curves = torch.tensor([one.error() for one in histograms]), tuple(one.curve() for one in histograms)
    share = (missed.sum(0) / annotated.sum(0)).float()
    return StructureMetrics(tuple(names), dice, hoped, volume, ece, share, curves)


def _each(cases: Iterable[tuple[Maps | Predictive, Any]]) -> Iterator[tuple[Maps, Any]]:
    """Yield maps and target of each case; batches are taken apart."""
    for one, target in cases:
        if isinstance(one, Maps):
            yield one, target
            continue
        t, observed = observed_target(one.likelihood, target)
        targets = t.cpu() if observed is None else zip(t.cpu(), observed.cpu(), strict=True)
        yield from zip(Maps.each(one), targets, strict=True)


def _shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return labels in the shape of the probabilities, with or without an axis of one channel."""
    if [n for n in x.shape if n > 1] != [n for n in shape if n > 1]:
        raise ValueError(f"probabilities of the voxels {tuple(shape)} and labels {tuple(x.shape)} differ in shape")
    return x.reshape(shape)
