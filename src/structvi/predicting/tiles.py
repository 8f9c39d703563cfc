"""Images and volumes too large for one pass, tile by tile: nothing of the volume's size is ever made."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..couplings import Coupling, naive
from ..posterior import NetworkMixtureBase, PosteriorBase
from .draws import DrawChunks
from .member_chunks import Chunks, chunks_of
from .predictive import Predictive

#: Of these a network's strides are, nearly always: they are tried where a tile's shape does not fit.
MULTIPLES = (2, 4, 8, 16, 32, 64)


def predict_tiles(
    posterior: PosteriorBase | NetworkMixtureBase,
    volume: Tensor | np.ndarray,
    tile: Sequence[int],
    margin: int | Sequence[int] = 0,
    draws: int = 64,
    *,
    coupling: Coupling = naive,
    chunk: int = 16,
    reference: Any = None,
    generator: torch.Generator | None = None,
    linearise: bool | None = None,
    calibrated: bool = True,
) -> Iterator[tuple[tuple[slice, ...], Predictive]]:
    """Where in the volume, and the predictive there: cores that cover the volume once, one after the other.

    A tile is seen with the margin around its core, which is cut off: no voxel is predicted from the edge of a tile, and
    none is blended from two. All tiles see the same draws of the weights, those of `predict` with a generator in the
    same state, so that there are no seams. Where the margin is at least the radius of what the network sees, the result
    is that of the whole volume in one pass; volume, tile and margin must then be multiples of the network's strides.
    With norms over the whole image (instance and group norm) it is not: they take the statistics of the tile. With
    `dropout="on"` it is not either: masks are drawn for the tile's shape.

    Args:
        posterior: of a network from [B, channels, ..] to outputs [B, .., ..] of the same spatial shape.
        volume: [channels, ..]; of a `np.memmap` only the tiles are read. Numbers of any dtype.
        tile: its size on each spatial axis, margins included; where the volume is smaller, all of it.
        margin: cut off on both sides, but at the volume's own border; one for all axes, or one for each.
        draws, coupling, chunk, reference, generator, linearise, calibrated: as in `predict`.

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
    sizes, tile = tuple(volume.shape[1:]), tuple(tile)
    margins = (margin,) * len(tile) if isinstance(margin, int) else tuple(margin)
    if not len(tile) == len(margins) == len(sizes) > 0:
        raise ValueError(
            "expected a volume [channels, ..] and a tile and margin for each of its spatial axes, got a volume of "
            f"shape {tuple(volume.shape)}, tile {tile} and margin {margins}"
        )
    for length, cut in zip(tile, margins, strict=True):
        if cut < 0 or length <= 2 * cut:
            raise ValueError(f"a tile must be longer than its two margins, which must be ≥ 0: got {tile} and {margins}")
    chunks = chunks_of(posterior, draws, coupling, chunk, reference, generator, linearise, calibrated)
    axes = [_windows(*axis) for axis in zip(sizes, tile, margins, strict=True)]
    return _predictives(chunks, volume, axes)


def _predictives(
    chunks: Chunks, volume: Any, axes: list[list[tuple[slice, slice]]]
) -> Iterator[tuple[tuple[slice, ...], Predictive]]:
    for place in product(*axes):
        windows, cores = (tuple(parts) for parts in zip(*place, strict=True))
        part = volume[(slice(None), *windows)]
        x = (part if isinstance(part, Tensor) else torch.tensor(part)).to(chunks.posterior.space.dtype).unsqueeze(0)
        whole = _of_tile(chunks, x)
        inside = tuple(slice(c.start - w.start, c.stop - w.start) for w, c in place)
        outputs = pytree.tree_map(lambda leaf, inside=inside: leaf[(..., *inside)], whole.outputs)
        core = Predictive(outputs, whole.weights, whole.likelihood, whole.values, whole.note)
        yield cores, core.calibrated(chunks.calibration)


def _of_tile(chunks: Chunks, x: Tensor) -> Predictive:
    """The predictive of one tile; a network that does not take its shape is refused, with a shape that it does take."""
    seen = tuple(x.shape[2:])
    try:
        whole, error = chunks.uncalibrated(x), None
    except (RuntimeError, ValueError) as raised:
        whole, error = None, raised
    if whole is not None and _same_shape(whole, seen):
        return whole
    if error is not None and _takes(chunks, x, seen):
        raise error  # of another cause than the shape
    multiple = next((m for m in MULTIPLES if _takes(chunks, x, _rounded(seen, m))), None)
    if multiple is None and error is not None:
        raise error
    came = f"gave {_shapes(whole)} for [S, B, ..]" if whole is not None else f"raised: {str(error).splitlines()[0]}"
    advice = f"nor does it keep the spatial shape of its input at multiples of {MULTIPLES}, and it must"
    if multiple is not None:
        advice = (
            f"it takes multiples of {multiple}: choose tile={_rounded(seen, multiple)}, for example; on an axis where "
            "the volume is shorter than that, pad the volume"
        )
    raise ValueError(f"the network saw a tile of spatial shape {seen} and {came}; {advice}") from error


def _takes(chunks: Chunks, x: Tensor, spatial: tuple[int, ...]) -> bool:
    """Whether the network, at one draw, gives outputs of its input's spatial shape."""
    one = DrawChunks(
        chunks.posterior, 1, naive, 1, chunks.reference, torch.Generator().manual_seed(0), chunks.linearise
    )
    try:
        return _same_shape(one.predictive(0, x.new_zeros(*x.shape[:2], *spatial)), spatial)
    except (RuntimeError, ValueError):
        return False


def _same_shape(predictive: Predictive, spatial: tuple[int, ...]) -> bool:
    return all(tuple(leaf.shape[-len(spatial) :]) == spatial for leaf in pytree.tree_leaves(predictive.outputs))


def _shapes(predictive: Predictive) -> str:
    return " and ".join(str(tuple(leaf.shape)) for leaf in pytree.tree_leaves(predictive.outputs))


def _rounded(spatial: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """Up, to multiples."""
    return tuple(-(-length // multiple) * multiple for length in spatial)


def _windows(size: int, tile: int, margin: int) -> list[tuple[slice, slice]]:
    """What is seen and what is kept of it along one axis: cores that meet; the last tile is moved back to end with it.

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
