"""Which observations a `DataLoader` can ever give, found from indices alone, and in which order."""

import warnings
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..util.random_streams import borrowed_stream

#: A sampler that is not torch's is read so many times: one that gives others each time cannot be counted.
READ = 2
#: and at most so many times the length of its data set, or so many indices: it may be endless.
MOST_TIMES, MOST = 100, 1_000_000


class Reachable(NamedTuple):
    """What a loader's sampler can give."""

    #: the distinct indices, in the order of the sampler's first pass; None where that cannot be known
    indices: list[int] | None
    #: "sequential" or "shuffled" where the order can be made here; None where it is the sampler's own
    order: Literal["sequential", "shuffled"] | None = None
    #: why N cannot be told from the indices; None where it can
    question: str | None = None
    #: the largest batch of a batch sampler of the user's own
    size: int | None = None


def reachable(loader: DataLoader[Any]) -> Reachable:
    """What the loader of a map-style data set can give; nothing is read from the data set but its length.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.zeros(101, 1))
        >>> reachable(DataLoader(data, sampler=[3, 5, 7])).indices
        [3, 5, 7]
    """
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        batches = _passes(loader.batch_sampler, len(loader.dataset))  # pyright: ignore[reportArgumentType]
        return _counted(batches, "batch sampler", lists=True)
    sampler: Any = loader.sampler
    kind = type(sampler)
    if kind is SequentialSampler:
        return Reachable(list(range(len(sampler.data_source))), "sequential")
    if kind is RandomSampler:
        every = list(range(len(sampler.data_source)))
        whole = not sampler.replacement and sampler.num_samples == len(every)
        return Reachable(every, "shuffled" if whole else None)
    if kind is SubsetRandomSampler:
        indices = [int(i) for i in sampler.indices]
        return _distinct(indices, "SubsetRandomSampler", "shuffled")
    if kind is DistributedSampler:  # the ranks together give all of it
        return Reachable(list(range(len(sampler.dataset))))
    if kind is WeightedRandomSampler:
        return Reachable([i for i, weight in enumerate(torch.as_tensor(sampler.weights).tolist()) if weight > 0])
    if isinstance(sampler, list | tuple | range | Tensor):
        return _distinct([int(i) for i in sampler], "sampler", "sequential")
    return _counted(_passes(sampler, len(loader.dataset)), f"{kind.__name__}")  # pyright: ignore[reportArgumentType]


def warn_of_weights(loader: DataLoader[Any]) -> None:
    for sampler in (loader.sampler, loader.batch_sampler):
        # a weighted sampler of the user's own has no class to know it by
        weights = getattr(sampler, "weights", None)
        if weights is not None and len(set(torch.as_tensor(weights).tolist())) > 1:
            warnings.warn(
                f"the loader's {type(sampler).__name__} draws some observations more often than others: a minibatch "
                "scaled by N/B then estimates the log likelihood of other data than yours (each observation counted "
                "in proportion to its weight), and the posterior is that of those. Shuffle uniformly, and give class "
                "weights to the likelihood where that is what you want",
                stacklevel=7,
            )


def _passes(sampler: Iterable[Any], length: int) -> list[list[Any]] | None:
    """What a sampler gives in each of some passes; None where a pass does not end."""
    most = max(MOST, MOST_TIMES * length)
    passes = []
    with borrowed_stream(torch.Generator().manual_seed(0)):  # the user's stream is left alone
        for _ in range(READ):
            passes.append(list(islice(sampler, most + 1)))
            if len(passes[-1]) > most:
                return None
    return passes


def _counted(passes: list[list[Any]] | None, name: str, lists: bool = False) -> Reachable:
    if passes is None:
        return Reachable(None, question=f"the loader's {name} does not end")
    flat = [[int(i) for part in one for i in (part if lists else [part])] for one in passes]
    size = max((len(part) for one in passes for part in one), default=1) if lists else None
    if len({frozenset(one) for one in flat}) > 1:
        return Reachable(
            None,
            question=f"the loader's {name} gives other observations in each pass, and which it can give is not known",
            size=size,
        )
    return _distinct(flat[0], name)._replace(size=size)


def _distinct(indices: Sequence[int], name: str, order: Literal["sequential", "shuffled"] | None = None) -> Reachable:
    distinct = list(dict.fromkeys(indices))
    if len(distinct) == len(indices):
        return Reachable(distinct, order)
    question = (
        f"the loader's {name} gives {len(distinct)} observations {len(indices)} times in a pass: N may be the one, "
        "where they are the same each time, or the other, where each is an observation of its own (crops of one image)"
    )
    return Reachable(distinct, None, question)
