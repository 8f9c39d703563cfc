"""Maps of one image or volume: the predicted mean, its uncertainty, and the two parts of that."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical
from torch.nn.functional import avg_pool3d

from ..predict.predictive import Predictive
from ..predict.tiles import predict_tiles

if TYPE_CHECKING:
    from ..ensemble.ensemble import Ensemble
    from ..posterior import Posterior


@dataclass(frozen=True)
class Maps:
    """Predictions for every pixel of one image, or every voxel of one volume, on the CPU in float32.

    Args:
        mean: class probabilities [C, ..]; with `Bernoulli` the probability of 1, of numbers the mean, [channels, ..].
        epistemic: [..]; of labels the mutual information in nats, of numbers a standard deviation.
        aleatoric: [..]; of labels the expected entropy in nats, of numbers a standard deviation.
        kind: "classes", "binary" or "numbers": the meaning of `mean`.

    Example:
        >>> from structvi import likelihoods
        >>> pred = Predictive(torch.randn(8, 1, 3, 6, 6, 6), torch.full((8,), 1 / 8), likelihoods.Categorical())
        >>> maps = Maps.each(pred)[0]
        >>> maps.label.shape, maps.mean.shape, maps.unit
        (torch.Size([6, 6, 6]), torch.Size([3, 6, 6, 6]), 'nats')
    """

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    kind: str

    @classmethod
    def each(cls, predictive: Predictive) -> "list[Maps]":
        """Return the maps of every row of a predictive with outputs [S, B, channels, ..], averaged over channels."""
        d = predictive.components
        kind = "classes" if isinstance(d, Categorical) else "binary" if isinstance(d, Bernoulli) else "numbers"
        if kind == "numbers":
            parts = predictive.epistemic, predictive.aleatoric
        else:
            parts = predictive.mutual_information, predictive.expected_entropy
        mean, *parts = (part.detach().cpu().float() for part in (predictive.mean, *parts))
        if mean.ndim < 3:
            raise ValueError(f"maps are of images, a prediction for every pixel: got {tuple(mean.shape[1:])}")
        if kind != "classes":  # [B, channels, ..], as the mean
            parts = [part.mean(1) for part in parts]
        if kind == "numbers":
            parts = [part.sqrt() for part in parts]
        return [Maps(*row, kind) for row in zip(mean, parts[0], parts[1], strict=True)]

    @property
    def uncertainty(self) -> Tensor:
        """Both parts together, [..]: the predictive entropy of labels, the standard deviation of numbers.

        The entropy finds wrong labels better than its epistemic part alone.
        """
        if self.kind == "numbers":
            return (self.epistemic.square() + self.aleatoric.square()).sqrt()
        return self.epistemic + self.aleatoric

    @property
    def label(self) -> Tensor:
        """The most probable label of every voxel, [..]; of several binary channels [channels, ..]."""
        if self.kind == "numbers":
            raise TypeError("the predictions are of numbers, which have no label: look at `mean`")
        if self.kind == "classes":
            return self.mean.argmax(0)
        label = (self.mean > 0.5).long()
        return label[0] if len(label) == 1 else label

    @property
    def unit(self) -> str:
        """The unit of the uncertainties."""
        return "std" if self.kind == "numbers" else "nats"

    @property
    def shape(self) -> tuple[int, ...]:
        """The spatial shape."""
        return tuple(self.epistemic.shape)

    def named(self) -> dict[str, Tensor]:
        """Return every map that can be looked at or written, by name."""
        mean = {"mean": self.mean} if self.kind == "numbers" else {"label": self.label, "probability": self.mean}
        return mean | {"uncertainty": self.uncertainty, "epistemic": self.epistemic, "aleatoric": self.aleatoric}


def predict_maps(
    posterior: "Posterior | Ensemble",
    volume: Tensor | np.ndarray,
    tile: int | Sequence[int] | None = None,
    margin: int | Sequence[int] = 0,
    draws: int = 16,
    *,
    pad: bool = True,
    **options: Any,
) -> Maps:
    """Return the maps of one volume, tile by tile: only the maps have its size, draws have a tile's.

    Args:
        posterior: of a network from [B, channels, ..] to outputs [B, .., ..] of the same spatial shape.
        volume: [channels, ..].
        tile, margin, pad: as in `predict_tiles`; without a tile the whole volume at once. With `pad` an axis
            shorter than a tile is padded by its border voxels, also for a network that could do without.
        draws, **options: as in `predict_tiles`: reference, generator and the others.

    Example:
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Conv3d(1, 2, 3, padding=1), likelihoods.Categorical(), num_data=10)
        >>> maps = predict_maps(bayes, torch.randn(1, 20, 8, 8), tile=(8, 8, 8), margin=1, draws=4)
        >>> maps.epistemic.shape
        torch.Size([20, 8, 8])
    """
    spatial = tuple(volume.shape[1:])
    whole: Maps | None = None
    for where, predictive in predict_tiles(posterior, volume, tile or spatial, margin, draws, pad=pad, **options):
        part = Maps.each(predictive)[0]
        if whole is None:
            whole = Maps(torch.zeros(len(part.mean), *spatial), torch.zeros(spatial), torch.zeros(spatial), part.kind)
        whole.mean[(slice(None), *where)] = part.mean
        whole.epistemic[where], whole.aleatoric[where] = part.epistemic, part.aleatoric
    assert whole is not None
    return whole


def most_uncertain(uncertainty: Tensor) -> list[int]:
    """Return the voxel of [x, y, z] with the largest mean over its neighbourhood, which one odd voxel is not.

    Example:
        >>> import torch
        >>> values = torch.zeros(5, 6, 7)
        >>> values[2:4, 3:5, 4:6] = 1.0
        >>> most_uncertain(values)
        [2, 3, 4]
    """
    blurred = avg_pool3d(uncertainty[None, None].nan_to_num(0.0), 3, 1, 1)[0, 0]
    return [int(i) for i in np.unravel_index(int(blurred.argmax()), tuple(blurred.shape))]
