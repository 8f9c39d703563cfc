"""The data of a fit: how many observations there are, in which order they come, and all of them once."""

import warnings
from collections.abc import Iterable, Iterator, Sized
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from ..distributed.ranks import Ranks
from ..models.bayesian_model import rows
from ..util.checks import check_iterable
from ..util.random_streams import borrowed_stream

#: (r, w): the r-th of w parts
Part = tuple[int, int]


class Batches:
    """A `DataLoader`, or any re-iterable of batches, as a fit reads it.

    For a `DataLoader` over a map-style data set in torch's own shuffled or sequential order, the order is made here,
    from seed and epoch alone. The same seed then gives the same batches, and a run can resume in the middle of an
    epoch. All other batches come from the loader in its order, and `inexact` says so.

    Args:
        loader: what to read.
        seed: of the order.
        device: where batches are moved to; they stay where they are if None.
        part: (r, w): every batch is the union of w batches of the loader's size, and this process reads the r-th. If
            the order is not made here, batches come from the loader, which must know its part.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.arange(5.0), torch.arange(5.0))
        >>> batches = Batches(DataLoader(data, batch_size=2, shuffle=True))
        >>> batches.num_data, batches.length, batches.inexact
        (5, 3, None)
    """

    def __init__(self, loader: Iterable[Any], seed: int = 0, device: torch.device | None = None, part: Part = (0, 1)):
        check_iterable(loader)
        if isinstance(loader, Iterator):
            raise TypeError(f"a {type(loader).__name__} can be read only once: give a DataLoader or a list of batches")
        self.loader, self.seed, self.device, self.part = loader, seed, device, part
        #: N, if the loader knows it; and the reason why a data set with a length does not give it
        self.num_data: int | None = None
        self.question: str | None = None
        #: N of the model, if known: no more rows of a stream are read as all data
        self.known_num_data: int | None = None
        #: batches to an epoch, if known before one is read
        self.length: int | None = None
        #: why the order cannot be repeated exactly; None if it can
        self.inexact: str | None = "the loader has an order of its own"
        #: the distinct observations that the loader can give, [N]; empty if unknown
        self.indices: Tensor = torch.empty(0, dtype=torch.int64)
        #: whether the order is made here, and every batch can be split into parts
        self.splits = False
        #: whether reading may draw random numbers from the global streams
        self.draws = not isinstance(loader, list | tuple)
        self._order: _Order | None = None
        if isinstance(loader, DataLoader):
            self._read_dataloader(loader)
        else:
            self.length = len(loader) if isinstance(loader, Sized) else None
            self.inexact = self.inexact if self.draws else None
        if self.length == 0:
            raise ValueError("the loader gives no batch: is the data set smaller than batch_size with drop_last=True?")

    def _read_dataloader(self, loader: DataLoader[Any]) -> None:
        if isinstance(loader.dataset, torch_data.IterableDataset):
            return
        _warn_of_weights(loader)
        self.length = len(loader)
        if loader.batch_size is None and loader.batch_sampler is None:  # items are batches: they come as they are
            return
        found = reachable(loader)
        self.question = found.question
        if found.indices is None:
            return
        self.indices, self.num_data = found.indices, None if found.question else len(found.indices)
        self._order = _Order(loader, loader.batch_size or found.size, found.order == "shuffled")
        if found.order is None:
            return
        self.inexact = "random numbers of the loader's worker processes are not kept" if loader.num_workers else None
        self.splits, self.draws = True, not (loader.num_workers or _is_fixed(loader))
        N, size = len(self.indices), self._order.size * self.part[1]
        if loader.drop_last and found.order == "sequential" and N % size and self.length:
            warnings.warn(
                f"drop_last=True without shuffling: the last {N % size} of {N} observations are never seen",
                stacklevel=5,
            )
        if self.part[1] > N:
            raise ValueError(f"{self.part[1]} ranks share {N} observations: use fewer ranks")
        self.length = N // size if loader.drop_last else -(-N // size)

    def share(self, ranks: Ranks) -> None:
        """Count the observations of all ranks together, if each has a sampler of its own."""
        if ranks.size > 1 and not self.splits:
            indices = torch.cat(ranks.tell(self.indices)).unique()
            if len(indices):
                self.indices, self.num_data = indices, None if self.question else len(indices)

    def mean_rows(self, accumulate: int, ranks: Ranks) -> float | None:
        """Return the observations a step over an epoch, on all ranks; None if not known before one was read."""
        observations, loader = None, self.loader
        if self.splits and self._order is not None and self.length is not None:
            observations = min(len(self.indices), self.length * self._order.size * self.part[1])
        elif isinstance(loader, list | tuple):
            observations = sum(map(rows, loader))
        elif isinstance(loader, DataLoader) and self.num_data is not None and loader.batch_size is not None:
            observations = min(len(loader.sampler), len(loader) * loader.batch_size)  # pyright: ignore
        if ranks.size > 1 and not self.splits:  # each has a loader of its own; the shortest ends the epoch
            theirs = ranks.tell((self.length, observations))
            known = [count for length, count in theirs if count is not None and length == self.length]
            observations = sum(known) if len(known) == ranks.size else None
        return None if observations is None or self.length is None else observations / -(-self.length // accumulate)

    def rows_of(self, index: int) -> tuple[int, int]:
        """Return how many observations of a batch of the epoch are this part's, and how many there are: B_r and B."""
        start, stop, count = self._range(index)
        return stop - start, count

    def _range(self, index: int) -> tuple[int, int, int]:
        """Return from where to where in an epoch's order this part of a batch goes, and B."""
        assert self._order is not None
        (r, w), size = self.part, self._order.size * self.part[1]
        count = min(size, len(self.indices) - index * size)
        return index * size + r * count // w, index * size + (r + 1) * count // w, count

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Give the batches of one epoch, without the first `skip`."""
        if self._order is None or not self.splits or self.length is None:
            yield from map(self._moved, islice(self.loader, skip, None))
            return
        # one number for each pair of seed and epoch: an epoch's order does not depend on the ones before
        seed, order = (self.seed * 1_000_003 + epoch) % 2**63, self.indices
        self._order.generator.manual_seed((seed + 999_983 * self.part[0]) % 2**63)
        if self._order.shuffled:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))]
        ranges = (self._range(index)[:2] for index in range(skip, self.length))
        # a part without observations reads one all the same: its share of the batch is zero
        yield from self._read(order[start : max(stop, start + 1)] for start, stop in ranges)

    def _read(self, lists: Iterable[Tensor]) -> Iterator[Any]:
        """Give the batches of these observations."""
        assert self._order is not None
        self._order.lists = lists
        yield from map(self._moved, self._order.loader)

    def everything(self, most: int | None = None, part: Part = (0, 1)) -> Iterator[Any]:
        """Give every observation once in a fixed order if the loader allows it, else one pass over the loader.

        The first N rows are read of a stream that may not end.

        Args:
            most: at most this many batches: of map-style data evenly spread over the whole, else the first ones.
            part: (r, w): of map-style data the r-th of w parts, each of one batch at least.
        """
        if self._order is not None:
            r, w = part
            count = max(w, -(-len(self.indices) // self._order.size))
            # strided, not consecutive: data sorted by class give every batch a bit of each
            yield from self._read(
                self.indices[start::count] for start in range(count if most is None else min(count, max(most, w)))[r::w]
            )
            return
        seen = 0
        for batch in islice(self.loader, most):
            yield self._moved(batch)
            seen += rows(batch)
            if self.length is None and self.known_num_data is not None and seen >= self.known_num_data:
                return

    def in_order(self, multiple: int, most: int | None = None) -> Iterator[Any]:
        """Give every observation once in the data's own order, in batches of whole multiples of some number of rows.

        Parts of `multiple` rows are then the same whatever the batch size. If the loader does not allow it, batches
        come in its own order.

        Args:
            multiple: number of rows.
            most: read at most this many observations, in parts of `multiple` rows evenly spread over the whole.
        """
        if self._order is None:
            yield from self.everything()
            return
        indices = self.indices
        if most is not None and most < len(indices):
            parts, count = indices.split(multiple), -(-most // multiple)
            indices = torch.cat([parts[k * len(parts) // count] for k in range(count)])
        yield from self._read(indices.split(multiple * -(-self._order.size // multiple)))

    def first_items(self, seed: int = 0) -> tuple[Any, int] | None:
        """Return a batch of at most two items and how many, or the first batch of a list; None for streams.

        Args:
            seed: of the random numbers that the data set draws.
        """
        loader = self.loader
        if isinstance(loader, list | tuple):
            return (self._moved(loader[0]), -1) if loader else None
        if self._order is None or getattr(loader, "collate_fn", None) is None:
            return None
        with borrowed_stream(
            torch.Generator().manual_seed(seed)
        ):  # by the workers too: files may be readable there alone
            return next(self._read([self.indices[:2]])), len(self.indices[:2])

    def _moved(self, batch: Any) -> Any:
        return on_device(batch, self.device)


def on_device(batch: Any, device: torch.device | None) -> Any:
    """Return the batch with its tensors on the device."""
    if device is None:
        return batch
    return tree_map(lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, batch)


def _is_fixed(loader: DataLoader[Any]) -> bool:
    """Return whether items are rows of tensors, read without any code of the user's."""
    data: Any = loader.dataset
    while type(data) is torch_data.Subset:
        data = data.dataset
    return type(data) is torch_data.TensorDataset and loader.collate_fn is torch_data.default_collate


class _Order:
    """The batch sampler of a `DataLoader` that is otherwise the user's: it gives the lists of indices of `lists`.

    One loader for all epochs, so that its workers live on if the user asked for that.
    """

    def __init__(self, loader: DataLoader, size: int, shuffled: bool):
        self.size, self.shuffled = size, shuffled
        self.lists: Iterable[Tensor] = []
        # a loader without one takes its workers' seed from the global stream, each time it is asked for an iterator
        self.generator = torch.Generator()
        same = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
        kept = {name: getattr(loader, name) for name in (*same, "prefetch_factor", "persistent_workers")}
        self.loader = DataLoader(loader.dataset, batch_sampler=self, generator=self.generator, **kept)  # pyright: ignore

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self.lists)


class Reread:
    """The batches of `Batches.everything`, at most `most`, for many readings."""

    def __init__(self, batches: Batches, most: int | None = None):
        self.batches, self.most = batches, most

    def __iter__(self) -> Iterator[Any]:
        return self.batches.everything(self.most)


def held_out_batches(data: Iterable[Any], seed: int, device: torch.device) -> Reread:
    """Return held-out data that have the same rows in the same order in every reading: a stream is kept in memory."""
    batches = Batches(data, seed, device)
    if isinstance(batches.loader, list | tuple) or len(batches.indices):
        return Reread(batches)
    kept = list(batches.everything())
    return Reread(Batches(kept, seed, device) if kept else batches)


# ------------------------------------------------------------------------------------------------------------ samplers


class Reachable(NamedTuple):
    """The observations that a loader's sampler can give."""

    #: the distinct indices, in the order of the sampler's first pass; None if that cannot be known
    indices: Tensor | None
    #: "sequential" or "shuffled" if the order can be made here; None if it is the sampler's own
    order: Literal["sequential", "shuffled"] | None = None
    #: the reason why the indices do not give N; None if they do
    question: str | None = None
    #: the first batch's, of a batch sampler of the user's own
    size: int = 1


def reachable(loader: DataLoader[Any]) -> Reachable:
    """Return what the loader of a map-style data set can give, without reading any item.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.zeros(101, 1))
        >>> reachable(DataLoader(data, sampler=[3, 5, 7])).indices
        tensor([3, 5, 7])
    """
    N = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not torch_data.BatchSampler:
        return _counted(loader.batch_sampler, "batch sampler")
    sampler: Any = loader.sampler
    kind = type(sampler)
    if kind is torch_data.SequentialSampler:
        return Reachable(torch.arange(N), "sequential")
    if kind is torch_data.RandomSampler:
        return Reachable(torch.arange(N), "shuffled" if not sampler.replacement and sampler.num_samples == N else None)
    if kind is torch_data.SubsetRandomSampler:
        return _distinct(torch.as_tensor(sampler.indices, dtype=torch.int64), kind.__name__, "shuffled")
    if kind is torch_data.DistributedSampler:  # the ranks together give all of it
        return Reachable(torch.arange(N))
    if kind is torch_data.WeightedRandomSampler:
        return Reachable(torch.as_tensor(sampler.weights).nonzero().squeeze(-1))
    if isinstance(sampler, list | tuple | range | Tensor):
        return _distinct(torch.as_tensor(list(sampler), dtype=torch.int64), "sampler", "sequential")
    return _counted(sampler, kind.__name__)


def _counted(sampler: Any, name: str) -> Reachable:
    """Return what a sampler of the user's own gives in two passes, if that is the same."""
    batched, size = name == "batch sampler", 1
    with borrowed_stream(torch.Generator().manual_seed(0)):  # the user's stream is left alone
        passes = []
        for _ in range(2):
            items = islice(sampler, len(sampler))
            indices = chain.from_iterable(items) if batched else items
            passes.append(torch.from_numpy(np.fromiter(map(int, indices), dtype=np.int64)))
        if batched:
            size = len(next(iter(sampler), [0]))
    if not torch.equal(passes[0].unique(), passes[1].unique()):
        return Reachable(None, question=f"the loader's {name} gives other observations in each pass")
    return _distinct(passes[0], name)._replace(size=size)


def _distinct(indices: Tensor, name: str, order: Literal["sequential", "shuffled"] | None = None) -> Reachable:
    distinct = indices.unique()
    if len(distinct) == len(indices):
        return Reachable(indices, order)
    question = f"the loader's {name} gives {len(distinct)} observations {len(indices)} times in a pass"
    return Reachable(distinct, None, question)


def _warn_of_weights(loader: DataLoader[Any]) -> None:
    for sampler in (loader.sampler, loader.batch_sampler):
        # a weighted sampler of the user's own has no class to know it by
        weights = getattr(sampler, "weights", None)
        if weights is not None and len(torch.as_tensor(weights).unique()) > 1:
            warnings.warn(
                f"the loader's {type(sampler).__name__} draws some observations more often than others: the posterior "
                "is that of data where each counts in proportion to its weight. Shuffle uniformly; a likelihood can "
                "have class weights",
                stacklevel=6,
            )


def warn_of_seen(loader: Iterable[Any], held_out: Iterable[Any]) -> None:
    """Warn if held-out data are fitted too, as far as loaders of one data set tell: it would select what over-fits."""
    share = 1.0 if loader is held_out else 0.0
    if isinstance(loader, DataLoader) and isinstance(held_out, DataLoader) and loader is not held_out:
        (data, fitted), (other, held) = _items(loader), _items(held_out)
        if data is other and fitted is not None and held is not None and len(held):
            share = float(torch.isin(held, fitted).double().mean())
    if share:
        what = "are the data that are fitted" if share == 1.0 else f"have {share:.0%} of their rows from those fitted"
        warnings.warn(
            f"validation= {what}: there the network looks better than it is. Give data held out of the training",
            stacklevel=2,
        )


def _items(loader: DataLoader[Any]) -> tuple[Any, Tensor | None]:
    """Return the data set below all subsets, and the numbers of its items that a loader gives; None if unknown."""
    data = loader.dataset
    if isinstance(data, torch_data.IterableDataset):
        return data, None
    indices = reachable(loader).indices
    while indices is not None and isinstance(data, torch_data.Subset):
        data, indices = data.dataset, torch.as_tensor(data.indices)[indices]
    return data, indices
