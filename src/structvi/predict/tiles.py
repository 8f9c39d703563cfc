"""Images and volumes too large for one pass, tile by tile: nothing of the volume's size is ever made."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .predict import draws_for
from .predictive import Predictive, PredictiveDraws

if TYPE_CHECKING:
    from ..ensemble.ensemble import Ensemble
    from ..posterior import Posterior


def predict_tiles(
    posterior: "Posterior | Ensemble",
    volume: Tensor | np.ndarray,
    tile: int | Sequence[int],
    margin: int | Sequence[int] = 0,
    draws: int = 64,
    *,
    pad: bool = False,
    **options: Any,
) -> Iterator[tuple[tuple[slice, ...], Predictive]]:
    """Yield where in the volume, and the predictive there: cores that cover the volume once, one after the other.

    The network sees a tile with the margin around its core, which is cut off: no voxel is predicted from the edge of a
    tile. All tiles see the same draws of the weights, so that there are no seams. Where the margin is at least the
    radius of what the network sees, the result is that of the whole volume in one pass; volume, tile and margin must
    then be multiples of the network's strides.

    With norms over the whole image (instance and group norm) tiles are not the whole: they take the statistics of the
    tile. With `dropout="on"` they are not either: masks are drawn for the tile's shape.

    Args:
        posterior: of a network from [B, channels, ..] to outputs [B, .., ..] of the same spatial shape.
        volume: [channels, ..]; of a `np.memmap` only the tiles are read. Numbers of any dtype.
        tile: its size on each spatial axis, or one for all, margins included; where the volume is smaller, all of it.
        margin: cut off on both sides, but at the volume's own border; one for all axes, or one for each.
        draws: of the weights.
        pad: fill tiles up with the border's values where the volume is shorter than a tile, and cut that off again.
        **options: reference, generator, linearise and calibrated, as in `predict`.

    Example:
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Conv3d(1, 2, 3, padding=1), likelihoods.Categorical(), num_data=10)
        >>> volume, uncertainty = torch.randn(1, 20, 8, 8), torch.zeros(20, 8, 8)
        >>> for where, pred in predict_tiles(bayes, volume, tile=(8, 8, 8), margin=1, draws=4):
        ...     uncertainty[where] = pred.mutual_information[0]
        >>> bool((uncertainty > 0).all())
        True
    """
    sizes = tuple(volume.shape[1:])
    tile = (tile,) * len(sizes) if isinstance(tile, int) else tuple(tile)
    margins = (margin,) * len(tile) if isinstance(margin, int) else tuple(margin)
    if not len(tile) == len(margins) == len(sizes) > 0:
        raise ValueError(
            f"expected a volume [channels, ..], a tile and a margin with {len(sizes)} axes, got {tile}, {margins}"
        )
    if any(cut < 0 or length <= 2 * cut for length, cut in zip(tile, margins, strict=True)):
        raise ValueError(f"a tile must be longer than its two margins, which must be ≥ 0: got {tile} and {margins}")
    axes = [_windows(*axis) for axis in zip(sizes, tile, margins, strict=True)]
    shape = tile if pad else tuple(min(pair) for pair in zip(sizes, tile, strict=True))
    return _predictives(draws_for(posterior, volume, draws, **options), volume, axes, shape)


def _predictives(
    draws: PredictiveDraws, volume: Any, axes: list[list[tuple[slice, slice]]], shape: tuple[int, ...]
) -> Iterator[tuple[tuple[slice, ...], Predictive]]:
    advice = "give tile= sides that the network's strides divide, such as multiples of 32, and pad=True"
    for place in product(*axes):
        windows, cores = (tuple(parts) for parts in zip(*place, strict=True))
        part = volume[(slice(None), *windows)]
        x = part if isinstance(part, Tensor) else torch.tensor(part)
        x = x.to(draws.device, draws.posterior.space.dtype)
        for axis, length in enumerate(shape, 1):  # the border again where the volume is shorter
            x = x.index_select(axis, torch.arange(length, device=x.device).clamp(max=x.shape[axis] - 1))
        try:
            whole = draws.mixture(x.unsqueeze(0))
        except RuntimeError as error:
            raise ValueError(f"the network takes no tile of spatial shape {shape} ({error}): {advice}") from error
        inside = tuple(slice(c.start - w.start, c.stop - w.start) for w, c in place)
        for leaf in pytree.tree_leaves(whole.outputs):
            if tuple(leaf.shape[-len(shape) :]) != shape:
                raise ValueError(
                    f"the network's outputs must have the spatial shape of its inputs: of a tile {shape} it gave "
                    f"{tuple(leaf.shape)} for [S, B, ..]; {advice}"
                )
        outputs = pytree.tree_map(lambda leaf, inside=inside: leaf[(..., *inside)], whole.outputs)
        core = Predictive(outputs, whole.weights, whole.likelihood, whole.values, whole.note)
        yield cores, core.calibrated(draws.calibration)


def _windows(size: int, tile: int, margin: int) -> list[tuple[slice, slice]]:
    """The windows of the network and their cores along one axis: cores that meet; the last tile ends with the axis.

    Example:
        >>> [(w.start, w.stop, c.start, c.stop) for w, c in _windows(10, 6, 1)]
        [(0, 6, 0, 5), (4, 10, 5, 10)]
    """
    if size <= tile:
        return [(slice(0, size), slice(0, size))]
    starts = [*range(0, size - tile, tile - 2 * margin), size - tile]
    ends = [*(start + tile - margin for start in starts[:-1]), size]
    return [
        (slice(start, start + tile), slice(first, end))
        for start, first, end in zip(starts, [0, *ends[:-1]], ends, strict=True)
    ]
