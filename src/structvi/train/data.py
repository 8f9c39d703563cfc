"""The data of a fit: how many observations there are, in which order they come, and all of them once."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from ..distributed.ranks import Ranks
from ..models.bayesian_model import rows
from ..util.checks import check_iterable
from ..util.random_streams import borrowed_stream

#: numbers of a stream of held-out data that are kept
KEPT = 2**26
#: a stream that has given this multiple of N rows has no end
ENDLESS = 20
#: indices that are read from a sampler of the user's, which may be endless; or this multiple of its data set
MOST, MOST_TIMES = 1_000_000, 100
#: (r, w): the r-th of w parts
Part = tuple[int, int]


class Batches:
    """A `DataLoader`, or any re-iterable of batches, as a fit reads it.

    For a `DataLoader` over a map-style data set in torch's own shuffled or sequential order, the order is made here,
    from seed and epoch alone. The same seed then gives the same batches, and a run can resume in the middle of an
    epoch. All other batches come from the loader in its order, and `exact` is False.

    Args:
        loader: what to read.
        seed: of the order.
        device: where batches are moved to; they stay where they are if None.
        part: (r, w): every batch is the union of w batches of the loader's size, and this process reads the r-th. If
            the order is not made here, batches come from the loader, which must know its part.

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
        #: N, if the loader knows it; and the reason why a data set with a length does not give it
        self.num_data: int | None = None
        self.question: str | None = None
        #: N of the model, if known: a stream that gives far more rows does not end
        self.known_num_data: int | None = None
        #: batches to an epoch, if known before one is read
        self.length: int | None = None
        #: why the order cannot be repeated exactly; None if it can
        self.inexact: str | None = "the loader is no DataLoader: its order is its own"
        #: the distinct observations that the loader can give, [N]; empty if unknown
        self.indices: Tensor = torch.empty(0, dtype=torch.int64)
        #: whether the order is made here, and every batch can be split into parts
        self.splits = False
        #: whether reading may draw random numbers from the global streams
        self.draws = not isinstance(loader, list | tuple)
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

    def share(self, ranks: Ranks) -> None:
        """Count the observations of all ranks together, if each has a sampler of its own."""
        if ranks.size > 1 and not self.splits:
            indices = torch.cat(ranks.tell(self.indices)).unique()
            if len(indices):
                self.indices, self.num_data = indices, None if self.question else len(indices)

    def rows_of(self, index: int) -> tuple[int, int]:
        """Return how many observations of a batch of the epoch are this part's, and how many there are: B_r and B."""
        start, stop, count = self._range(index)
        return stop - start, count

    def mean_rows(self, accumulate: int) -> float | None:
        """Return the observations a step, over an epoch and all parts; None if not known before it was read."""
        if self.length is None:
            return None
        steps, loader = -(-self.length // accumulate), self.loader
        if self.splits:
            assert self._order is not None
            return min(len(self.indices), self.length * self._order.size * self.part[1]) / steps
        if isinstance(loader, list | tuple):
            return sum(rows(batch) for batch in loader) / steps
        one_each = self._order is not None and self.question is None  # an item is an observation
        if not (one_each and isinstance(loader, DataLoader) and isinstance(loader.sampler, Sized)):
            return None
        return None if loader.batch_size is None else min(len(loader.sampler), self.length * loader.batch_size) / steps

    def _range(self, index: int) -> tuple[int, int, int]:
        """Return from where to where in an epoch's order this part of a batch goes, and B."""
        assert self._order is not None
        (r, w), size, total = self.part, self._order.size * self.part[1], len(self.indices)
        count = min(size, total - index * size)
        return index * size + r * count // w, index * size + (r + 1) * count // w, count

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Give the batches of one epoch, without the first `skip`."""
        if self._order is None or not self.splits:
            yield from map(self._moved, islice(self.loader, skip, None))
            return
        assert self.length is not None
        self._order.generator.manual_seed((self.seed * 1_000_003 + epoch + 999_983 * self.part[0]) % 2**63)
        order = self.indices[self._shuffled(epoch)] if self._order.shuffled else self.indices
        ranges = (self._range(index)[:2] for index in range(skip, self.length))
        # a part without observations reads one all the same: its share of the batch is zero
        yield from self._read(order[start : max(stop, start + 1)] for start, stop in ranges)

    def _shuffled(self, epoch: int) -> Tensor:
        # one number for each pair of seed and epoch: an epoch's order does not depend on the ones before
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(len(self.indices), generator=generator)

    def _read(self, lists: Iterable[Tensor]) -> Iterator[Any]:
        """Give the batches of these observations."""
        assert self._order is not None
        self._order.lists = lists
        yield from map(self._moved, self._order.loader)

    def everything(self, most: int | None = None, part: Part = (0, 1)) -> Iterator[Any]:
        """Give every observation once in a fixed order if the loader allows it, else one pass over the loader.

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
            if self.length is None and self.known_num_data is not None and seen > ENDLESS * self.known_num_data:
                raise ValueError(
                    f"the loader has given {seen} rows and does not end, where N = {self.known_num_data}: all data are "
                    "read here. Give one that ends after a pass"
                )

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
        if self.device is None:
            return batch
        return tree_map(lambda x: x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x, batch)

    def _read_dataloader(self, loader: DataLoader) -> None:
        if isinstance(loader.dataset, IterableDataset):
            self.inexact = "an IterableDataset's order is its own"
            return
        _warn_of_weights(loader)
        if not len(loader.dataset):  # pyright: ignore[reportArgumentType]
            raise ValueError("the loader's data set is empty: there is nothing to fit to")
        found = reachable(loader)
        self.question, self.length = found.question, len(loader)
        if loader.batch_size is None and loader.batch_sampler is None:  # items are batches: they come as they are
            self.inexact = "the loader's items are batches, in an order of its own"
            return
        if found.indices is not None:
            self.indices = found.indices
            self.num_data = None if found.question else len(found.indices)
            self._order = _Order(loader, loader.batch_size or found.size or 1, found.order == "shuffled")
        sampler = loader.sampler if loader.batch_size is not None else loader.batch_sampler
        self.inexact = f"the loader's {type(sampler).__name__} has an order of its own"
        if loader.batch_size is None:
            self.inexact = "the loader has a batch sampler of its own"
        if found.order is None or self._order is None or self.num_data is None or loader.batch_size is None:
            return
        left_over = self.num_data % loader.batch_size
        if loader.drop_last and found.order == "sequential" and left_over and self.length:
            warnings.warn(
                f"drop_last=True without shuffling: the last {left_over} of {self.num_data} observations are never "
                "seen; leave drop_last out, or shuffle",
                stacklevel=6,
            )
        self.inexact = "random numbers that the loader's worker processes draw are not kept"
        if not loader.num_workers:
            self.inexact = None
        self.splits, self.draws = True, not (loader.num_workers or _is_fixed(loader))
        if self.part[1] > self.num_data:
            raise ValueError(f"{self.part[1]} ranks share {self.num_data} observations: use fewer ranks")
        if self.part[1] > 1:
            size = self._order.size * self.part[1]
            self.length = self.num_data // size if loader.drop_last else -(-self.num_data // size)


def _is_fixed(loader: DataLoader[Any]) -> bool:
    """Return whether items are rows of tensors, read without any code of the user's."""
    data: Any = loader.dataset
    while type(data) is Subset:
        data = data.dataset
    return type(data) is TensorDataset and loader.collate_fn is default_collate


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
    """Return held-out data that have the same rows in the same order in every reading.

    A stream may have another order each time: it is kept in memory, up to `KEPT` numbers.
    """
    batches = Batches(data, seed, device)
    if isinstance(batches.loader, list | tuple) or len(batches.indices):
        return Reread(batches)
    kept, numbers = [], 0
    for batch in batches.everything():
        kept.append(batch)
        numbers += sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        if numbers > KEPT:
            return Reread(batches)
    return Reread(Batches(kept, seed, device) if kept else batches)


def mean_rows(batches: Batches, accumulate: int, ranks: Ranks) -> float | None:
    """Return the observations a step over an epoch, on all ranks; None if not known before one was read."""
    own = batches.mean_rows(accumulate)
    if ranks.size == 1 or batches.splits:
        return own
    theirs = ranks.tell((batches.length, own))  # each has a loader of its own; the shortest ends the epoch
    known = [mean for length, mean in theirs if mean is not None and length == batches.length]
    return sum(known) if len(known) == ranks.size else None


# ------------------------------------------------------------------------------------------------------------ samplers


class Reachable(NamedTuple):
    """The observations that a loader's sampler can give."""

    #: the distinct indices, in the order of the sampler's first pass; None if that cannot be known
    indices: Tensor | None
    #: "sequential" or "shuffled" if the order can be made here; None if it is the sampler's own
    order: Literal["sequential", "shuffled"] | None = None
    #: the reason why the indices do not give N; None if they do
    question: str | None = None
    #: the largest batch of a batch sampler of the user's own
    size: int | None = None


def reachable(loader: DataLoader[Any]) -> Reachable:
    """Return what the loader of a map-style data set can give, without reading any item.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.zeros(101, 1))
        >>> reachable(DataLoader(data, sampler=[3, 5, 7])).indices
        tensor([3, 5, 7])
    """
    N = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return _of_batch_sampler(loader.batch_sampler, N)
    sampler: Any = loader.sampler
    kind = type(sampler)
    if kind is SequentialSampler:
        return Reachable(torch.arange(N), "sequential")
    if kind is RandomSampler:
        return Reachable(torch.arange(N), "shuffled" if not sampler.replacement and sampler.num_samples == N else None)
    if kind is SubsetRandomSampler:
        return _distinct(torch.as_tensor(sampler.indices, dtype=torch.int64), kind.__name__, "shuffled")
    if kind is DistributedSampler:  # the ranks together give all of it
        return Reachable(torch.arange(N))
    if kind is WeightedRandomSampler:
        return Reachable(torch.as_tensor(sampler.weights).nonzero().squeeze(-1))
    if isinstance(sampler, list | tuple | range | Tensor):
        return _distinct(torch.as_tensor(list(sampler), dtype=torch.int64), "sampler", "sequential")
    return _counted(_two_passes(lambda: sampler, N), kind.__name__)


def _of_batch_sampler(sampler: Iterable[Any], N: int) -> Reachable:
    sizes = list[int]()

    def indices() -> Iterator[int]:
        for part in sampler:
            sizes.append(len(part))
            yield from part

    found = _counted(_two_passes(indices, N), "batch sampler")
    return found._replace(size=max(sizes, default=1))


def _two_passes(sampler: Callable[[], Iterable[Any]], N: int) -> list[Tensor | None]:
    """Return the indices of two passes of a sampler; None for a pass that does not end."""
    most, passes = max(MOST, MOST_TIMES * N), list[Tensor | None]()
    with borrowed_stream(torch.Generator().manual_seed(0)):  # the user's stream is left alone
        for _ in range(2):
            found = np.fromiter(islice(map(int, sampler()), most + 1), dtype=np.int64)
            passes.append(None if len(found) > most else torch.from_numpy(found))
    return passes


def _counted(passes: list[Tensor | None], name: str) -> Reachable:
    first, second = passes
    if first is None or second is None:
        return Reachable(None, question=f"the loader's {name} does not end")
    if not torch.equal(first.unique(), second.unique()):  # a sampler that gives others each time cannot be counted
        question = f"the loader's {name} gives other observations in each pass, and which it can give is not known"
        return Reachable(None, question=question)
    return _distinct(first, name)


def _distinct(indices: Tensor, name: str, order: Literal["sequential", "shuffled"] | None = None) -> Reachable:
    distinct = indices.unique()
    if len(distinct) == len(indices):
        return Reachable(indices, order)
    question = (
        f"the loader's {name} gives {len(distinct)} observations {len(indices)} times in a pass: N may be the one, "
        "where they are the same each time, or the other, where each is an observation of its own (crops of one image)"
    )
    return Reachable(distinct, None, question)


def _warn_of_weights(loader: DataLoader[Any]) -> None:
    for sampler in (loader.sampler, loader.batch_sampler):
        # a weighted sampler of the user's own has no class to know it by
        weights = getattr(sampler, "weights", None)
        if weights is not None and len(torch.as_tensor(weights).unique()) > 1:
            warnings.warn(
                f"the loader's {type(sampler).__name__} draws some observations more often than others: a minibatch "
                "scaled by N/B then estimates the log likelihood of other data than yours (each observation counted "
                "in proportion to its weight), and the posterior is that of those. Shuffle uniformly, and give class "
                "weights to the likelihood if that is what you want",
                stacklevel=7,
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
            f"validation= {what}: on them the network looks better than it is, and every posterior too wide. Give data "
            "that were held out of the training",
            stacklevel=2,
        )


def _items(loader: DataLoader[Any]) -> tuple[Any, Tensor | None]:
    """Return the data set below all subsets, and the numbers of its items that a loader gives; None if unknown."""
    data = loader.dataset
    if isinstance(data, IterableDataset):
        return data, None
    indices = reachable(loader).indices
    while indices is not None and isinstance(data, Subset):
        data, indices = data.dataset, torch.as_tensor(data.indices)[indices]
    return data, indices
