"""What a posterior says of every pixel or voxel of one image: mean, and both kinds of uncertainty."""

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

#: axis that is cut → axes to the right and upwards
PLANES = ((1, 2), (0, 2), (0, 1))
AXES = "xyz"


@dataclass(frozen=True)
class Maps:
    """Of one image or volume, on the CPU, in float32.

    Args:
        mean: class probabilities [C, ..]; with `Bernoulli` the probability of 1, of numbers the mean, [channels, ..].
        epistemic: [..]; of labels the mutual information in nats, of numbers a standard deviation.
        aleatoric: [..]; of labels the expected entropy in nats, of numbers a standard deviation.
        kind: "classes", "binary" or "numbers": what `mean` is.

    Example:
        >>> from structvi import likelihoods
        >>> pred = Predictive(torch.randn(8, 1, 3, 6, 6, 6), torch.full((8,), 1 / 8), likelihoods.Categorical())
        >>> maps = Maps.of(pred)
        >>> maps.label.shape, maps.mean.shape, maps.unit
        (torch.Size([6, 6, 6]), torch.Size([3, 6, 6, 6]), 'nats')
    """

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    kind: str

    @classmethod
    def of(cls, predictive: Predictive, index: int = 0) -> "Maps":
        """Return the maps of one row of a predictive whose outputs are [S, B, channels, ..]."""
        return cls.each(predictive)[index]

    @classmethod
    def each(cls, predictive: Predictive) -> "list[Maps]":
        """Return the maps of every row; over channels uncertainty is averaged."""
        d = predictive.components
        kind = "classes" if isinstance(d, Categorical) else "binary" if isinstance(d, Bernoulli) else "numbers"
        if kind == "numbers":
            both = predictive.epistemic.sqrt(), predictive.aleatoric.sqrt()
        else:
            both = predictive.mutual_information, predictive.expected_entropy
        mean, epistemic, aleatoric = (part.detach().cpu().float() for part in (predictive.mean, *both))
        if mean.ndim < 3:
            raise ValueError(
                f"maps are of images, a prediction for every pixel: got a mean of shape {tuple(mean.shape[1:])}"
            )
        if kind != "classes":  # [B, channels, ..], as the mean
            epistemic, aleatoric = epistemic.mean(1), aleatoric.mean(1)
        return [cls(*parts, kind) for parts in zip(mean, epistemic, aleatoric, strict=True)]

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
        """Of both uncertainties."""
        return "std" if self.kind == "numbers" else "nats"

    @property
    def shape(self) -> tuple[int, ...]:
        """The spatial shape."""
        return tuple(self.epistemic.shape)

    def named(self) -> dict[str, Tensor]:
        """Every map that can be looked at or written, by name."""
        found = {"epistemic": self.epistemic, "aleatoric": self.aleatoric}
        if self.kind == "numbers":
            return {"mean": self.mean, **found}
        return {"label": self.label, "probability": self.mean, **found}


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
    """The maps of one volume, tile by tile: only they have its size, the draws are those of a tile.

    Args:
        posterior: of a network from [B, channels, ..] to outputs [B, .., ..] of the same spatial shape.
        volume: [channels, ..].
        tile, margin, pad: as in `predict_tiles`; without a tile the whole volume at once. With `pad` an axis
            shorter than a tile is padded by its border voxels, also for a network that could do without.
        draws, **options: as in `predict_tiles`: coupling, chunk, generator and the others.

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
        part = Maps.of(predictive)
        if whole is None:
            whole = Maps(torch.zeros(len(part.mean), *spatial), torch.zeros(spatial), torch.zeros(spatial), part.kind)
        whole.mean[(slice(None), *where)] = part.mean
        whole.epistemic[where], whole.aleatoric[where] = part.epistemic, part.aleatoric
    assert whole is not None
    return whole


def most_uncertain(epistemic: Tensor) -> list[int]:
    """The voxel of [x, y, z] around which the mean over a neighbourhood is largest: a single odd voxel is not.

    Example:
        >>> import torch
        >>> values = torch.zeros(5, 6, 7)
        >>> values[2:4, 3:5, 4:6] = 1.0
        >>> most_uncertain(values)
        [2, 3, 4]
    """
    blurred = avg_pool3d(epistemic[None, None].nan_to_num(0.0), 3, 1, 1)[0, 0]
    return [int(i) for i in np.unravel_index(int(blurred.argmax()), tuple(blurred.shape))]


def planes(values: Tensor, at: Sequence[int]) -> list[Tensor]:
    """Those through a voxel, cut at x, y and z: rows from the top down, as `imshow` draws them.

    Example:
        >>> import torch
        >>> [tuple(plane.shape) for plane in planes(torch.zeros(5, 6, 7), (0, 0, 0))]
        [(7, 6), (7, 5), (6, 5)]
    """
    return [values.select(axis, at[axis]).T.flip(0) for axis in range(3)]


def check_voxel(at: Sequence[int], shape: Sequence[int]) -> None:
    if len(at) != 3 or any(not 0 <= i < length for i, length in zip(at, shape, strict=True)):
        raise ValueError(f"at must be a voxel of the volume's {tuple(shape)}, got {tuple(at)}")
