"""Three planes through a voxel: what a volume is looked at by."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from torch.nn.functional import avg_pool3d

#: axis that is cut → axes to the right and upwards
PLANES = ((1, 2), (0, 2), (0, 1))
AXES = "xyz"


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
