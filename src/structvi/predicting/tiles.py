"""Images and volumes too large for one pass, tile by tile: nothing of the volume's size is ever made."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..couplings import Coupling, naive
from ..posterior import PosteriorBase
from .predict import predict
from .predictive import Predictive


def predict_tiles(
    posterior: PosteriorBase,
    volume: Tensor | np.ndarray,
    tile: Sequence[int],
    margin: int | Sequence[int] = 0,
    draws: int = 64,
    *,
    coupling: Coupling = naive,
    chunk: int = 16,
    reference: Any = None,
    generator: torch.Generator | None = None,
) -> Iterator[tuple[tuple[slice, ...], Predictive]]:
    """Where in the volume, and the predictive there: cores that cover the volume once, one after the other.

    A tile is seen with the margin around its core, which is cut off: no voxel is predicted from the edge of a tile, and
    none is blended from two. All tiles see the same draws of the weights, so that there are no seams. Where the margin
    is at least the radius of what the network sees, the result is that of the whole volume in one pass; volume, tile
    and margin must then be multiples of the network's strides. With norms over the whole image (instance and group
    norm) it is not: they take the statistics of the tile.

    Args:
        posterior: of a network from [B, channels, ..] to outputs [B, .., ..] of the same spatial shape.
        volume: [channels, ..]; of a `np.memmap` only the tiles are read. Numbers of any dtype.
        tile: its size on each spatial axis, margins included; where the volume is smaller, all of it.
        margin: cut off on both sides, but at the volume's own border; one for all axes, or one for each.
        draws, coupling, chunk, reference, generator: as in `predict`.

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
    device = None if generator is None else generator.device
    seed = int(torch.randint(2**62, (), generator=generator, device=device))
    axes = [_windows(*axis) for axis in zip(sizes, tile, margins, strict=True)]
    return _predictives(posterior, volume, axes, draws, coupling, chunk, reference, seed)


def _predictives(
    posterior: PosteriorBase, volume: Any, axes: list[list[tuple[slice, slice]]], draws: int, coupling: Coupling,
    chunk: int, reference: Any, seed: int,
) -> Iterator[tuple[tuple[slice, ...], Predictive]]:  # fmt: skip
    for place in product(*axes):
        windows, cores = (tuple(parts) for parts in zip(*place, strict=True))
        part = volume[(slice(None), *windows)]
        x = (part if isinstance(part, Tensor) else torch.tensor(part)).to(posterior.space.dtype).unsqueeze(0)
        own = torch.Generator().manual_seed(seed)
        whole = predict(posterior, x, draws, coupling=coupling, chunk=chunk, reference=reference, generator=own)
        inside = tuple(slice(c.start - w.start, c.stop - w.start) for w, c in place)

        def cut(leaf: Tensor, inside: tuple[slice, ...] = inside, seen: torch.Size = x.shape[2:]) -> Tensor:
            if leaf.shape[-len(inside) :] != seen:
                raise ValueError(
                    f"the network must give outputs of its input's spatial shape {tuple(seen)}, got "
                    f"{tuple(leaf.shape)} for [S, B, ..]; choose a tile that its strides divide"
                )
            return leaf[(..., *inside)]

        outputs = pytree.tree_map(cut, whole.outputs)
        yield cores, Predictive(outputs, whole.weights, whole.likelihood, whole.values, whole.note)


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
