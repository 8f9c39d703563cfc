"""How good a segmentation is, structure by structure and case by case: Dice, calibration, and whom to refer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

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


class _Cases:
    """Sums over cases, and what is kept of each."""

    def __init__(self, names: Sequence[str] | None, background: int | None):
        self.names, self.background = names, background
        self.rows: dict[str, list[Tensor]] = {}
        self.histograms: list[CalibrationHistogram] = []
        self.annotated = self.missed = torch.zeros(0)

    def structures(self, p: Tensor, classes: bool) -> list[int]:
        found = [c for c in range(len(p)) if not classes or c != self.background]
        if self.names is None:
            self.names = [f"class {c}" if classes else f"channel {c}" for c in found]
        if len(self.names) != len(found):
            raise ValueError(
                f"{len(self.names)} names for {len(found)} structures: {list(self.names)}; of {len(p)} classes the "
                f"background ({self.background}) has none, give background=None to count it"
            )
        if not self.histograms:
            self.histograms = [CalibrationHistogram() for _ in found]
            self.annotated, self.missed = torch.zeros(2, len(found), dtype=torch.float64)
        return found

    def add(
        self, p: Tensor, t: Tensor, observed: Tensor | None, classes: bool, entropy: Tensor, mutual: Tensor
    ) -> None:
        """One case: probabilities [C, ..], labels [..], or [C, ..] where they are binary."""
        p, t = p.double(), t.long()
        if t.shape != (p.shape[1:] if classes else p.shape):
            raise ValueError(f"probabilities {tuple(p.shape)} and labels {tuple(t.shape)} differ in shape")
        structures, label = self.structures(p, classes), p.argmax(0) if classes else None
        row = []
        for k, c in enumerate(structures):
            own = p[c]
            found, drawn = (label == c, t == c) if label is not None else (own > 0.5, t[c] == 1)
            if observed is not None:
                seen = observed if classes else observed[c]
                own, found, drawn = own[seen], found[seen], drawn[seen]
            both, a, b = (float(x.sum()) for x in (found & drawn, found, drawn))
            expected, mass = float(own[found].sum()), float(own.sum())
            dice = 2 * both / (a + b) if a + b else torch.nan
            hoped = 2 * expected / (a + mass) if a or mass > 0.5 else torch.nan
            row.append((dice, hoped, a - b))
            some = own >= SLIGHT
            self.histograms[k].add(own[some].flatten(), drawn[some].double().flatten())
            self.annotated[k] += b
            self.missed[k] += float((drawn & ~some).sum())
        values = torch.tensor(row, dtype=torch.float64).T  # [3, K]
        names = ("dice", "expected_dice", "volume", "entropy", "mutual_information")
        for name, value in zip(names, (*values, entropy, mutual), strict=True):
            self.rows.setdefault(name, []).append(value.double())

    def metrics(self) -> StructureMetrics:
        if not self.rows or self.names is None:
            raise ValueError("there is no case to evaluate: the loader is empty")
        empty = Reliability(*torch.zeros(3, 0, dtype=torch.float64))
        filled = [bool(one.count.sum()) for one in self.histograms]
        return StructureMetrics(
            tuple(self.names),
            ece=torch.tensor(
                [h.error() if some else torch.nan for h, some in zip(self.histograms, filled, strict=True)]
            ),
            missed=(self.missed / self.annotated).float(),
            reliability=tuple(h.curve() if some else empty for h, some in zip(self.histograms, filled, strict=True)),
            **{name: torch.stack(values) for name, values in self.rows.items()},
        )


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
    """Dice and calibration of each structure, on a loader whose rows are cases: images or volumes with their labels.

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
    cases, predict = _Cases(names, background), None
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
        mean, both = pred.mean, (pred.entropy, pred.mutual_information)
        for b in range(len(t)):
            seen = None if observed is None else observed[b]
            means = [(one[b] if seen is None else one[b][seen]).mean().cpu() for one in both]
            row = [None if x is None else x.cpu() for x in (mean[b], t[b], seen)]
            cases.add(*row, mean.ndim == t.ndim + 1, *means)  # pyright: ignore[reportArgumentType]
    return cases.metrics()


def structures_of(
    cases: Iterable[tuple[Maps, Tensor]], names: Sequence[str] | None = None, *, background: int | None = 0
) -> StructureMetrics:
    """The same of maps, for volumes that are predicted tile by tile: (maps, labels [..]) of each case.

    Args:
        cases: what `predict_maps` gave, and the annotation.
        names, background: as in `by_structure`.

    Example:
        >>> p = torch.rand(2, 6, 6, 6).softmax(0)
        >>> maps = Maps(p, torch.zeros(6, 6, 6), torch.ones(6, 6, 6), "classes")
        >>> structures_of([(maps, p.argmax(0))], ["tumour"]).dice
        tensor([[1.]], dtype=torch.float64)
    """
    found = _Cases(names, background)
    for maps, labels in cases:
        if maps.kind == "numbers":
            raise TypeError("the maps are of numbers, which have no structures")
        classes = maps.kind == "classes"
        t = labels[0] if labels.ndim == maps.mean.ndim and len(labels) == 1 else labels  # [1, ..], as MONAI has them
        t = t if classes or t.ndim == maps.mean.ndim else t.unsqueeze(0)
        entropy = (maps.epistemic + maps.aleatoric).mean()
        found.add(maps.mean, t, None, classes, entropy, maps.epistemic.mean())
    return found.metrics()
