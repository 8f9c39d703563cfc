"""How good a segmentation is, structure by structure and case by case: Dice, calibration, and whom to refer."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..models.likelihoods import split_mask
from ..predict.metrics import CalibrationHistogram, Reliability
from ..predict.predict import draws_for
from ..predict.predictive import observed_target
from .maps import Maps

if TYPE_CHECKING:
    from ..ensemble.ensemble import Ensemble
    from ..posterior import Posterior

#: Voxels whose probability of a structure is below this say nothing of its calibration: nearly all are far from it.
SLIGHT = 0.01
By = Literal["expected_dice", "entropy", "mutual_information"]


@dataclass(frozen=True)
class Referral:
    """What is gained by handing the most uncertain cases to a human.

    Args:
        share: of cases that are referred, from 0 up to all but one, [n].
        dice: the mean Dice of those that are kept, [n].
        ideal: the same if the worst cases were known, [n].
    """

    share: Tensor
    dice: Tensor
    ideal: Tensor


@dataclass(frozen=True)
class StructureMetrics:
    """Of n cases and K structures; `print` gives a table.

    Dice is 2 |A ∩ B| / (|A| + |B|) of predicted voxels A and annotated ones B, nan where neither has any. *Expected*
    Dice is what the posterior itself expects of A, from the probabilities p alone: 2 Σ_A p / (|A| + Σ p).

    Args:
        names: of the structures.
        dice, expected_dice: [n, K].
        volume: predicted voxels minus annotated ones, [n, K].
        ece: expected calibration error of the probability of a structure, over voxels where it is at least 1 %, [K].
        missed: the share of a structure's annotated voxels whose probability is below 1 %, [K].
        reliability: the curve of each structure, over the same voxels as `ece`.
        entropy, mutual_information: of each case, the mean over its voxels in nats, [n].
    """

    names: tuple[str, ...]
    dice: Tensor
    expected_dice: Tensor
    volume: Tensor
    ece: Tensor
    missed: Tensor
    reliability: tuple[Reliability, ...] = field(repr=False)
    entropy: Tensor = field(repr=False)
    mutual_information: Tensor = field(repr=False)

    @property
    def case_dice(self) -> Tensor:
        """The mean over a case's structures, [n]; nan where it has none."""
        return self.dice.nanmean(1)

    def uncertainty(self, by: By = "expected_dice") -> Tensor:
        """Of each case, [n]: one minus the expected Dice, mean over structures, or the mean entropy of its voxels."""
        if by == "expected_dice":
            return 1 - self.expected_dice.nanmean(1).nan_to_num(1.0)  # nothing there, and nothing expected
        if by not in ("entropy", "mutual_information"):
            raise ValueError(f"by must be expected_dice, entropy or mutual_information, got {by!r}")
        return self.entropy if by == "entropy" else self.mutual_information

    def referral(self, by: By = "expected_dice") -> Referral:
        """Mean Dice of the cases that are kept, the most uncertain ones referred first; cases without any are left out.

        Args:
            by: which uncertainty ranks the cases.
        """
        has = ~self.case_dice.isnan()
        if not bool(has.any()):
            raise ValueError("no case has a structure, predicted or annotated: there is no Dice to look at")
        dice, n = self.case_dice[has], int(has.sum())
        kept = torch.arange(1, n + 1)
        share = 1 - kept / n
        by_certainty = dice[self.uncertainty(by)[has].argsort(stable=True)]
        best = dice.sort(descending=True).values
        return Referral(share.flip(0), (by_certainty.cumsum(0) / kept).flip(0), (best.cumsum(0) / kept).flip(0))

    def __str__(self) -> str:
        width = max(len("structure"), *map(len, self.names))
        lines = [f"{'structure':{width}}  cases   Dice  (expected)    ECE  missed"]
        for k, name in enumerate(self.names):
            own = self.dice[:, k]
            cases = int((~own.isnan()).sum())
            lines.append(
                f"{name:{width}}  {cases:5}  {own.nanmean():.3f}  ({self.expected_dice[:, k].nanmean():8.3f})  "
                f"{self.ece[k]:.3f}  {self.missed[k]:6.3f}"
            )
        return "\n".join(lines)


def by_structure(
    posterior: "Posterior | Ensemble",
    loader: Iterable[Any],
    names: Sequence[str] | None = None,
    draws: int = 16,
    *,
    background: int | None = 0,
    generator: torch.Generator | None = None,
    calibrated: bool = True,
) -> StructureMetrics:
    """Return Dice and calibration of each structure, on a loader whose rows are cases: images or volumes with labels.

    Args:
        posterior: with `Categorical` (a structure for each class) or `Bernoulli` (one for each channel).
        loader: batches as `fit` takes them, with targets; masks and `ignore_index` are left out.
        names: of the structures, without the background.
        background: the class that is none; None to count all. With `Bernoulli` there is none.
        draws, generator, calibrated: as in `predict`.

    Example:
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Conv2d(1, 3, 3, padding=1), likelihoods.Categorical(), num_data=10)
        >>> found = by_structure(bayes, [(torch.randn(5, 1, 8, 8), torch.randint(3, (5, 8, 8)))], ["liver", "spleen"])
        >>> found.dice.shape, len(found.reliability)
        (torch.Size([5, 2]), 2)
    """

    def cases() -> Iterator[tuple[Maps, Any]]:
        predict = None
        for batch in loader:
            if predict is None:
                inputs = batch if posterior.model.user_forward is not None else posterior.model.split(batch)[0]
                predict = draws_for(posterior, inputs, draws, generator=generator, calibrated=calibrated)
            inputs, target = predict.split(batch)
            pred = predict(inputs)
            t, observed = observed_target(posterior.model.likelihood, target)
            if not pred.is_of_labels or t.ndim < 2:
                raise TypeError(
                    "by_structure is for labels of pixels: Categorical with labels [B, ..], or Bernoulli with labels "
                    f"[B, channels, ..]; the labels here are {tuple(t.shape)}"
                )
            for b, maps in enumerate(Maps.each(pred)):
                yield maps, t[b].cpu() if observed is None else (t[b].cpu(), observed[b].cpu())

    return structures_of(cases(), names, background=background)


def structures_of(
    cases: Iterable[tuple[Maps, Any]], names: Sequence[str] | None = None, *, background: int | None = 0
) -> StructureMetrics:
    """Return the same of maps, for volumes that are predicted tile by tile: (maps, labels [..]) of each case.

    Args:
        cases: what `predict_maps` gave, and the annotation, or a pair of it and a mask of what was annotated.
        names, background: as in `by_structure`.

    Example:
        >>> p = torch.rand(2, 6, 6, 6).softmax(0)
        >>> maps = Maps(p, torch.zeros(6, 6, 6), torch.ones(6, 6, 6), "classes")
        >>> structures_of([(maps, p.argmax(0))], ["tumour"]).dice
        tensor([[1.]], dtype=torch.float64)
    """
    rows: list[list[Tensor]] = []
    histograms: list[CalibrationHistogram] = []
    for maps, target in cases:
        if maps.kind == "numbers":
            raise TypeError("the maps are of numbers, which have no structures")
        classes, p = maps.kind == "classes", maps.mean.double()
        t, mask = (None if x is None else _shaped(x, p.shape[1:] if classes else p.shape) for x in split_mask(target))
        assert t is not None
        which = [c for c in range(len(p)) if not classes or c != background]
        names = [f"{'class' if classes else 'channel'} {c}" for c in which] if names is None else names
        if len(names) != len(which):
            raise ValueError(
                f"{len(names)} names for {len(which)} structures: {list(names)}; of {len(p)} classes the "
                f"background ({background}) has none, give background=None to count it"
            )
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
        seen = slice(None) if mask is None else mask if classes else mask.any(0)
        mutual = maps.epistemic[seen].double().mean()
        entropy = mutual + maps.aleatoric[seen].double().mean()
        rows.append([2 * both / (a + b), hoped, a - b, b, missed, entropy, mutual])
    if names is None or not rows:
        raise ValueError("there is no case to evaluate: the loader is empty")
    dice, hoped, volume, annotated, missed, entropy, mutual = (torch.stack(own) for own in zip(*rows, strict=True))
    return StructureMetrics(
        tuple(names), dice, hoped, volume, torch.tensor([one.error() for one in histograms]),
        (missed.sum(0) / annotated.sum(0)).float(), tuple(one.curve() for one in histograms), entropy, mutual,
    )  # fmt: skip


def _shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Labels in the shape of the probabilities, with or without an axis of one channel."""
    if [n for n in x.shape if n > 1] != [n for n in shape if n > 1]:
        raise ValueError(f"probabilities of the voxels {tuple(shape)} and labels {tuple(x.shape)} differ in shape")
    return x.reshape(shape)
