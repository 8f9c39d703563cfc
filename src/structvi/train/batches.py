"""What a fit asks of its data: how many observations there are, in which order they come, and all of them once."""

import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from ..distributed.ranks import Ranks
from ..models.batch import rows
from ..util.checks import check_iterable
from ..util.random_streams import borrowed_stream
from .samplers import reachable, warn_of_weights

#: numbers of a stream of held-out data that are kept
KEPT = 2**26
#: a stream that has given so many times N rows has no end
ENDLESS = 20
#: (r, w): the r-th of w parts
Part = tuple[int, int]


class Batches:
    """A `DataLoader`, or any re-iterable of batches, as a fit reads it.

    Where the loader is a `DataLoader` over a map-style data set with torch's own shuffled or sequential order, the
    order is made here, from the seed and the epoch alone: the same seed gives the same batches, and a run can go on in
    the middle of an epoch. Elsewhere batches come as the loader gives them, and `exact` is False.

    Args:
        loader: what to read.
        seed: of the order.
        device: where batches are moved to; they stay where they are if None.
        part: (r, w): every batch is the union of w of the loader's size, of which this one reads the r-th; where the
            order is not made here, batches come as the loader gives them, and the loader must know its part.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.arange(5.0), torch.arange(5.0))
        >>> batches = Batches(DataLoader(data, batch_size=2, shuffle=True))
        >>> batches.num_data, batches.length, batches.exact
        (5, 3, True)
    """

    def __init__(self, loader: Iterable[Any], seed: int = 0, device: torch.device | None = None, part: Part = (0, 1)):
        check_iterable(loader)
        if isinstance(loader, Iterator):
            raise TypeError(
                f"a {type(loader).__name__} can be read only once, and a fit reads the data many times; "
                "give a DataLoader or a list of batches"
            )
        if isinstance(loader, Tensor):
            raise TypeError("expected batches, got a tensor; wrap it: DataLoader(TensorDataset(x, t), batch_size=128)")
        self.loader, self.seed, self.device, self.part = loader, seed, device, part
        #: N, where the loader knows it
        self.num_data: int | None = None
        #: N of the model, where it is known: a stream that gives far more rows does not end
        self.told: int | None = None
        #: why N cannot be told from the loader, where it has a data set with a length
        self.question: str | None = None
        #: batches to an epoch, where that is known before one is read
        self.length: int | None = None
        #: why the order cannot be repeated exactly; None where it can
        self.inexact: str | None = "the loader is no DataLoader: its order is its own"
        self._indices: list[int] = []  # the distinct ones that a DataLoader of map-style data can give
        self._rows: Tensor | None = None  # the same as a tensor, once asked for
        self._own_order = False
        self._order: _Order | None = None
        if isinstance(loader, DataLoader):
            self._read_dataloader(loader)
        elif isinstance(loader, Sized):
            self.length = len(loader)
            if isinstance(loader, list | tuple):
                self.inexact = None
        if self.length == 0:
            raise ValueError(
                "the loader gives no batch; is the data set empty, or smaller than batch_size with drop_last=True?"
            )

    @property
    def exact(self) -> bool:
        return self.inexact is None

    @property
    def splits(self) -> bool:
        """Whether the order is made here, and every batch can be split into parts."""
        return self._own_order

    @property
    def indices(self) -> list[int]:
        """The distinct observations that the loader can give, where they are known; else none."""
        return self._indices

    def restrict(self, indices: list[int]) -> None:
        """All ranks' observations together, where each has a sampler of its own."""
        if indices:
            self._indices, self.num_data = indices, None if self.question else len(indices)

    def rows_of(self, index: int) -> tuple[int, int]:
        """Of a batch of the epoch how many observations are this part's, and how many there are: B_r and B."""
        start, stop, count = self._range(index)
        return stop - start, count

    def mean_rows(self, accumulate: int) -> float | None:
        """Observations a step, over an epoch and all parts; None where that is not known before it was read."""
        if self.length is None:
            return None
        steps, loader = -(-self.length // accumulate), self.loader
        if self._own_order:
            return sum(self._range(index)[2] for index in range(self.length)) / steps
        if isinstance(loader, list | tuple):
            return sum(rows(batch) for batch in loader) / steps
        one_each = self._order is not None and self.question is None  # an item is an observation
        if not (one_each and isinstance(loader, DataLoader) and isinstance(loader.sampler, Sized)):
            return None
        return None if loader.batch_size is None else min(len(loader.sampler), self.length * loader.batch_size) / steps

    def _range(self, index: int) -> tuple[int, int, int]:
        """From where to where in an epoch's order this part of a batch goes, and B: all parts are as long or by one."""
        assert self._order is not None
        (r, w), size, total = self.part, self._order.size * self.part[1], len(self._indices)
        count = min(size, total - index * size)
        return index * size + r * count // w, index * size + (r + 1) * count // w, count

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """The batches of one epoch, without the first `skip`."""
        if self._order is None or not self._own_order:
            for index, batch in enumerate(self.loader):
                if index >= skip:
                    yield self._moved(batch)
            return
        order = self._shuffled(epoch)
        self._order.generator.manual_seed((self.seed * 1_000_003 + epoch + 999_983 * self.part[0]) % 2**63)
        assert self.length is not None
        ranges = [self._range(index)[:2] for index in range(skip, self.length)]
        # a part without observations reads one all the same: its share of the batch is zero
        self._order.lists = [
            [self._indices[i] for i in order[start : max(stop, start + 1)].tolist()] for start, stop in ranges
        ]
        for batch in self._order.loader:
            yield self._moved(batch)

    def _shuffled(self, epoch: int) -> Tensor:
        assert self._order is not None
        if not self._order.shuffled:
            return torch.arange(len(self._indices))
        # one number for each pair of seed and epoch: an epoch's order does not depend on the ones before
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(len(self._indices), generator=generator)

    def table(self) -> tuple[Tensor, ...] | None:
        """The tensors of a `TensorDataset` that is read as it is, batch by batch of `indices_of`; None of all else."""
        loader = self.loader
        if not isinstance(loader, DataLoader) or not self._own_order or loader.num_workers:
            return None
        data = loader.dataset
        plain = type(data) is TensorDataset and loader.collate_fn is default_collate
        return data.tensors if plain and isinstance(data, TensorDataset) else None

    def indices_of(self, epoch: int) -> list[Tensor]:
        """Which rows of the table each batch of an epoch has; of a batch with all of them the order says nothing."""
        assert self.length is not None
        if self._rows is None:
            self._rows = torch.tensor(self._indices)
        if self.length == 1 and self._range(0)[2] == len(self._rows):
            return [self._rows]
        order = self._rows[self._shuffled(epoch)]
        return [order[start:stop] for start, stop, _ in map(self._range, range(self.length))]

    def everything(self, most: int | None = None, part: Part = (0, 1)) -> Iterator[Any]:
        """Every observation once in a fixed order, where the loader allows it, else one pass over the loader.

        Args:
            most: at most this many batches: of map-style data evenly spread over the whole, else the first ones.
            part: (r, w): of map-style data the r-th of w parts, each of one batch at least.
        """
        if self._order is None:
            seen = 0
            for index, batch in enumerate(self.loader):
                if index == most:
                    return
                yield self._moved(batch)
                seen += rows(batch)
                if self.length is None and self.told is not None and seen > ENDLESS * self.told:
                    raise ValueError(
                        f"the loader has given {seen} rows and does not end, where N = {self.told}: all data are read "
                        "here. Give one that ends after a pass"
                    )
            return
        self._order.lists = self.spread(most, part)
        for batch in self._order.loader:
            yield self._moved(batch)

    def spread(self, most: int | None, part: Part = (0, 1)) -> list[list[int]]:
        """The indices of the batches of `everything`, of map-style data."""
        assert self._order is not None
        r, w = part
        count = max(w, -(-len(self._indices) // self._order.size))
        # strided, not consecutive: data sorted by class give every batch a bit of each
        lists = [self._indices[start::count] for start in range(count)]
        return lists[: None if most is None else max(most, w)][r::w]

    def in_order(self, multiple: int, most: int | None = None) -> Iterator[Any]:
        """Every observation once in the data's own order, in batches of whole multiples of some number of rows.

        Parts of so many rows are then the same whatever the batch size; where the loader does not allow it, as it is.

        Args:
            multiple: of how many rows.
            most: of more observations only so many are read, in parts of `multiple` evenly spread over the whole.
        """
        if self._order is None:
            yield from self.everything()
            return
        indices = self._indices
        if most is not None and most < len(indices):
            parts = [indices[start : start + multiple] for start in range(0, len(indices), multiple)]
            count = -(-most // multiple)
            indices = [index for k in range(count) for index in parts[k * len(parts) // count]]
        size = multiple * -(-self._order.size // multiple)
        self._order.lists = [indices[start : start + size] for start in range(0, len(indices), size)]
        for batch in self._order.loader:
            yield self._moved(batch)

    def probe(self) -> tuple[Any, int] | None:
        """A batch of at most two items, put together in this process, and how many; None where items are not known.

        Data that worker processes read may be readable there alone: files that `worker_init_fn` opens.
        """
        loader = self.loader
        if self._order is None or not isinstance(loader, DataLoader) or loader.collate_fn is None:
            return None
        chosen = self._indices[:2]
        together = getattr(loader.dataset, "__getitems__", None)  # as torch's own fetcher has it
        try:
            with borrowed_stream(torch.Generator().manual_seed(0)):
                items = [loader.dataset[i] for i in chosen] if together is None else together(chosen)
                return loader.collate_fn(items), len(chosen)
        except Exception:
            if loader.num_workers:
                return None
            raise

    def _moved(self, batch: Any) -> Any:
        if self.device is None:
            return batch
        return tree_map(lambda x: x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x, batch)

    def _read_dataloader(self, loader: DataLoader) -> None:
        if isinstance(loader.dataset, IterableDataset):
            self.inexact = "an IterableDataset's order is its own"
            return
        warn_of_weights(loader)
        if not len(loader.dataset):  # pyright: ignore[reportArgumentType]
            raise ValueError("the loader's data set is empty: there is nothing to fit to")
        found = reachable(loader)
        self.question, self.length = found.question, len(loader)
        if loader.batch_size is None and loader.batch_sampler is None:  # items are batches: they come as they are
            self.inexact = "the loader's items are batches, in an order of its own"
            return
        if found.indices is not None:
            self._indices = found.indices
            self.num_data = None if found.question else len(found.indices)
            size = loader.batch_size or found.size or 1
            self._order = _Order(loader, size)
        sampler = loader.sampler if loader.batch_size is not None else loader.batch_sampler
        self.inexact = f"the loader's {type(sampler).__name__} has an order of its own"
        if loader.batch_size is None:
            self.inexact = "the loader has a batch sampler of its own"
        if found.order is None or self._order is None or self.num_data is None or loader.batch_size is None:
            return
        shuffled = found.order == "shuffled"
        left_over = self.num_data % loader.batch_size
        if loader.drop_last and not shuffled and left_over and self.length:
            warnings.warn(
                f"drop_last=True without shuffling: the last {left_over} of {self.num_data} observations are never "
                "seen; leave drop_last out, or shuffle",
                stacklevel=6,
            )
        self.inexact = None
        if loader.num_workers:
            self.inexact = "random numbers that the loader's worker processes draw are not kept"
        self._own_order, self._order.shuffled = True, shuffled
        if self.part[1] > self.num_data:
            raise ValueError(f"{self.part[1]} ranks share {self.num_data} observations: use fewer ranks")
        if self.part[1] > 1:
            size = self._order.size * self.part[1]
            self.length = self.num_data // size if loader.drop_last else -(-self.num_data // size)


def mean_rows(batches: Batches, accumulate: int, ranks: Ranks) -> float | None:
    """Observations a step over an epoch, on all ranks, where that is known before one was read."""
    own = batches.mean_rows(accumulate)
    if batches.splits or ranks.size == 1:
        return own
    if ranks.mode != "data":
        return None
    theirs = ranks.tell((batches.length, own))  # each has a loader of its own; the shortest ends the epoch
    known = [mean for length, mean in theirs if mean is not None and length == batches.length]
    return sum(known) if len(known) == ranks.size else None


class Reread:
    """Batches as `Batches.everything` gives them, at most so many, as often as asked."""

    def __init__(self, batches: Batches, most: int | None = None):
        self.batches, self.most = batches, most

    def __iter__(self) -> Iterator[Any]:
        return self.batches.everything(self.most)


def held_out_batches(data: Iterable[Any], seed: int, device: torch.device) -> Reread:
    """Held-out data, in every reading the same rows in the same order: candidates are compared row by row.

    A stream may have another order each time: it is kept in memory, up to `KEPT` numbers.
    """
    batches = Batches(data, seed, device)
    if isinstance(batches.loader, list | tuple) or batches.indices:
        return Reread(batches)
    kept, numbers = [], 0
    for batch in batches.everything():
        kept.append(batch)
        numbers += sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        if numbers > KEPT:
            return Reread(batches)
    return Reread(Batches(kept, seed, device) if kept else batches)


class _Order:
    """The batch sampler of a `DataLoader` that is otherwise the user's: it gives the index lists it was handed last.

    One loader for all epochs, so that its workers live on where the user asked for that.
    """

    def __init__(self, loader: DataLoader, size: int):
        self.shuffled, self.size, self.drop_last = False, size, loader.drop_last
        self.lists: list[list[int]] = []
        # a loader without one takes its workers' seed from the global stream, each time it is asked for an iterator
        self.generator = torch.Generator()
        self.loader = DataLoader(
            loader.dataset,
            batch_sampler=self,  # pyright: ignore[reportArgumentType]
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=self.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.lists)

    def __len__(self) -> int:
        return len(self.lists)
