"""Images and volumes too large for one pass, tile by tile: nothing of the volume's size is ever made."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..couplings import Coupling, naive
from .draws import DrawChunks
from .member_chunks import Chunks, chunks_of
from .predictive import Predictive

if TYPE_CHECKING:
    from ..posterior import EnsembleBase, Posterior

#: Of these a network's strides are, nearly always: they are tried where a tile's shape does not fit.
MULTIPLES = (2, 4, 8, 16, 32, 64)
#: A network is tried on sides from this to twice this, with a tile's remainder: enough for strides up to it.
SMALL = 32


def predict_tiles(
    posterior: "Posterior | EnsembleBase",
    volume: Tensor | np.ndarray,
    tile: int | Sequence[int],
    margin: int | Sequence[int] = 0,
    draws: int = 64,
    *,
    pad: bool = False,
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
    Whether the network takes tiles of this shape at all is tried at once, before the first tile, with one draw on a
    small input: a U-Net with three poolings wants sides that 8 divides, and the error says so.

    With norms over the whole image (instance and group norm) tiles are not the whole: they take the statistics of the
    tile. With `dropout="on"` they are not either: masks are drawn for the tile's shape.

    Args:
        posterior: of a network from [B, channels, ..] to outputs [B, .., ..] of the same spatial shape.
        volume: [channels, ..]; of a `np.memmap` only the tiles are read. Numbers of any dtype.
        tile: its size on each spatial axis, or one for all, margins included; where the volume is smaller, all of it.
        margin: cut off on both sides, but at the volume's own border; one for all axes, or one for each.
        pad: fill tiles up with the border's values where the volume is shorter than a tile, and cut that off again:
            for networks that do not take the volume's own length there.
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
    sizes = tuple(volume.shape[1:])
    tile = (tile,) * len(sizes) if isinstance(tile, int) else tuple(tile)
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
    seen = tile if pad else tuple(min(pair) for pair in zip(sizes, tile, strict=True))
    _check_shape(chunks, volume.shape[0], seen, pad)
    return _predictives(chunks, volume, axes, seen)


def _predictives(
    chunks: Chunks, volume: Any, axes: list[list[tuple[slice, slice]]], seen: tuple[int, ...]
) -> Iterator[tuple[tuple[slice, ...], Predictive]]:
    for place in product(*axes):
        windows, cores = (tuple(parts) for parts in zip(*place, strict=True))
        part = volume[(slice(None), *windows)]
        x = (part if isinstance(part, Tensor) else torch.tensor(part)).to(chunks.device, chunks.posterior.space.dtype)
        for axis, length in enumerate(seen, 1):
            if x.shape[axis] < length:
                x = x.index_select(axis, torch.arange(length, device=x.device).clamp(max=x.shape[axis] - 1))
        whole = chunks.uncalibrated(x.unsqueeze(0))
        inside = tuple(slice(c.start - w.start, c.stop - w.start) for w, c in place)
        outputs = pytree.tree_map(lambda leaf, inside=inside: leaf[(..., *inside)], whole.outputs)
        core = Predictive(outputs, whole.weights, whole.likelihood, whole.values, whole.note)
        yield cores, core.calibrated(chunks.calibration)


def _check_shape(chunks: Chunks, channels: int, seen: tuple[int, ...], pad: bool) -> None:
    """A network that does not take tiles of this shape is refused, with the sizes that it does take."""
    small = tuple(length if length < 2 * SMALL else SMALL + length % SMALL for length in seen)
    found, error = _tried(chunks, channels, small)
    if not _is(found, small) and small != seen:  # strides beyond the small ones, or a network for one size alone
        small = seen
        found, error = _tried(chunks, channels, seen)
    if _is(found, small):
        return
    came = f"raised: {(str(error).splitlines() or [''])[0]}"
    if found is not None:
        came = f"gave {_shapes(found, chunks.draws)} for [S, B, ..]"

    def takes(m: int, more: int) -> bool:
        """Odd multiples, which no larger stride divides."""
        shape = tuple((-(-length // m) // 2 * 2 + 1 + more) * m for length in seen)
        return _is(_tried(chunks, channels, shape)[0], shape)

    multiple = next((m for m in MULTIPLES if takes(m, 0) and takes(m, 2)), None)
    rounded = (_rounded(seen, m) for m in MULTIPLES)
    alone = next((tile for tile in rounded if _is(_tried(chunks, channels, tile)[0], tile)), None)
    shorter = "" if pad else "; on an axis where the volume is shorter, pad the volume, or give pad=True"
    if multiple is not None:
        sides = ", ".join(str(k * multiple) for k in (1, 2, 3))
        tile = _rounded(seen, multiple)
        advice = f"it takes multiples of {multiple}: choose tile={tile}, for example, of sides {sides}, …{shorter}"
    elif alone is not None:
        advice = f"it takes tile={alone}{shorter}"
    elif error is not None:
        raise error  # of another cause than the shape
    else:
        advice = f"nor does it keep the spatial shape of its input at multiples of {MULTIPLES}, and it must"
    raise ValueError(f"the network saw a tile of spatial shape {seen} and {came}; {advice}") from error


def _tried(chunks: Chunks, channels: int, spatial: tuple[int, ...]) -> tuple[Predictive | None, Exception | None]:
    """The network at one draw on zeros, or what it raised."""
    one = DrawChunks(
        chunks.posterior, 1, naive, 1, chunks.reference, torch.Generator().manual_seed(0), chunks.linearise
    )
    x = torch.zeros(1, channels, *spatial, dtype=chunks.posterior.space.dtype, device=chunks.device)
    try:
        return one.predictive(0, x), None
    except (RuntimeError, ValueError) as error:
        return None, error


def _is(predictive: Predictive | None, spatial: tuple[int, ...]) -> bool:
    """Whether there is one, with outputs of this spatial shape."""
    if predictive is None:
        return False
    return all(tuple(leaf.shape[-len(spatial) :]) == spatial for leaf in pytree.tree_leaves(predictive.outputs))


def _shapes(predictive: Predictive, draws: int) -> str:
    return " and ".join(str((draws, *leaf.shape[1:])) for leaf in pytree.tree_leaves(predictive.outputs))


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
