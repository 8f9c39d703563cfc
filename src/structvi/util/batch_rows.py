"""How many observations are in a batch."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def rows_of(batch: Any) -> int | None:
    """The number of observations, where every leaf of the batch is a tensor with one row for each; else None.

    Example:
        >>> import torch
        >>> rows_of({"x": torch.zeros(8, 3), "t": torch.zeros(8)})
        8
    """
    leaves = tree_leaves(batch)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        return None
    rows = {leaf.shape[0] for leaf in leaves}
    return rows.pop() if len(rows) == 1 else None
