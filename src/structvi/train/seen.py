"""Held-out data that are not held out: those that are fitted, or some of them."""

import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from ..predict.cases import case_hashes
from .batches import Batches
from .samplers import reachable

#: of data in memory so many rows are looked at, 10 µs each
MOST_ROWS = 50_000
#: the share of held-out cases that stand among those that are fitted, input and target alike, from which on they are
#: called copies; not of data of which fewer than `DIFFERENT` of the rows are different: there they are equal by chance
COPIES, DIFFERENT = 0.5, 0.9


def warn_of_seen(loader: Iterable[Any], held_out: Iterable[Any]) -> None:
    """A warning where held-out data are fitted too: the choice would be made by data that have been seen.

    Items of one data set are known by their numbers, through any `Subset`; other data in memory by their values.
    """
    share = 1.0 if loader is held_out else _share_of_items(loader, held_out)
    if share is None:
        share = _share_of_copies(loader, held_out)
    if share:
        what = "are the data that are fitted" if share == 1.0 else f"have {share:.0%} of their rows from those fitted"
        warnings.warn(
            f"validation= {what}: on them the network looks better than it is, and every posterior too wide. Give data "
            "that were held out of the training",
            stacklevel=2,
        )


def _share_of_items(loader: Iterable[Any], held_out: Iterable[Any]) -> float | None:
    """Of the held-out items those that are fitted; None where they are not of one data set, or not known."""
    (data, fitted), (other, held) = _items(loader), _items(held_out)
    if data is None or data is not other:
        return None
    return len(fitted & held) / max(1, len(held))


def _items(loader: Iterable[Any]) -> tuple[Any, set[int]]:
    """The data set below all subsets, and the numbers of its items that a loader gives; None where that is unknown."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None, set()
    data, indices = loader.dataset, reachable(loader).indices
    while indices is not None and isinstance(data, Subset):
        data, indices = data.dataset, [int(data.indices[i]) for i in indices]
    return (None, set()) if indices is None else (data, set(indices))


def _share_of_copies(loader: Iterable[Any], held_out: Iterable[Any]) -> float | None:
    """Of data in memory the share of held-out cases that are fitted too, where most are."""
    if not all(_in_memory(one) for one in (loader, held_out)):
        return None
    fitted, held = (
        [code for batch in Batches(one, 0).everything() for code in case_hashes(batch)] for one in (loader, held_out)
    )
    if len(set(fitted)) < DIFFERENT * len(fitted):
        return None
    share = len(set(held) & set(fitted)) / max(1, len(set(held)))
    return share if share >= COPIES else None


def _in_memory(loader: Iterable[Any]) -> bool:
    if isinstance(loader, list | tuple):
        return sum(len(batch[0]) for batch in loader if _is_pair(batch)) <= MOST_ROWS and all(map(_is_pair, loader))
    if not isinstance(loader, DataLoader) or loader.num_workers:
        return False
    data = loader.dataset
    while isinstance(data, Subset):
        data = data.dataset
    return type(data) is TensorDataset and len(data) <= MOST_ROWS


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[0], Tensor) and batch[0].ndim > 0
