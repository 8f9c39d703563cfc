"""The batches of M fits, each in its own order, as one batch with a leading axis."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..models.batch import batch_size, rows, split_batch
from ..util.random_streams import borrowed_stream, one_seed_on
from .batches import Batches


class Read(NamedTuple):
    """One batch of each member."""

    batch: Any  # [M, B, ..]
    #: how many rows of each member's are its own; the rest is masked
    rows: list[int]
    #: B
    padded: int


class Feed:
    """Reads the next batch of every member, epoch after epoch, each in the order in which it would alone.

    From each generator as many numbers are taken as by a fit alone, which seeds the global stream for every batch.

    Args:
        batches: of each member.
        generators: of each member's fit.
    """

    def __init__(self, batches: Sequence[Batches], generators: Sequence[torch.Generator]):
        self.batches, self.generators = batches, generators
        self.epochs, self.indices = [0] * len(batches), [0] * len(batches)
        #: inputs and targets of all members, and where each one's begin [M, 1]; None where they are no table
        self.table = _joined(batches)
        self._iterators: list[Iterator[Any] | None] = [None] * len(batches)
        self._last: list[Any] = [None] * len(batches)
        self._which: list[int] = []
        self._read: Read | None = None

    @property
    def uneven(self) -> bool:
        """Whether members may come to have batches of different sizes in one step."""
        sizes = {(one.num_data, one.length, one.mean_rows(1)) for one in self.batches}
        return len(sizes) > 1 or None in next(iter(sizes))

    def read(self, active: Sequence[bool]) -> Read:
        """The next batch of each active member; of the others their last one, which is to count nothing."""
        for m, goes_on in enumerate(active):
            if goes_on:
                self._last[m] = self._next(m)
        if self.table is None:
            return _stacked(self._last)
        which = [id(own) for own in self._last]
        if which != self._which:  # else all have their whole data again
            self._which, self._read = which, self._rows_of_table(self.table)
        assert self._read is not None
        return self._read

    def _rows_of_table(self, table: tuple[list[Tensor], Tensor]) -> Read:
        columns, offsets = table
        counts = [len(own) for own in self._last]
        most = max(counts)
        if min(counts) == most:
            at = torch.stack(self._last) + offsets
            return Read([column[at.to(column.device)] for column in columns], counts, most)
        at = torch.stack([torch.cat([own, own[:1].expand(most - len(own))]) for own in self._last]) + offsets
        x, t = (column[at.to(column.device)] for column in columns)
        mask = torch.arange(most, device=t.device) < torch.tensor(counts, device=t.device).unsqueeze(-1)
        return Read((x, (t, mask.view(*mask.shape, *[1] * (t.ndim - 2)).expand_as(t))), counts, most)

    def _next(self, m: int) -> Any:
        while True:
            if self._iterators[m] is None:
                own, epoch = self.batches[m], self.epochs[m]
                self._iterators[m] = own.epoch(epoch) if self.table is None else iter(own.indices_of(epoch))
            iterator = self._iterators[m]
            assert iterator is not None
            if self.table is None:
                with borrowed_stream(self.generators[m]):
                    batch = next(iterator, None)
            else:
                one_seed_on(self.generators[m])  # of a stream that nothing draws from
                batch = next(iterator, None)
            if batch is not None:
                self.indices[m] += 1
                return batch
            if self.indices[m] == 0:
                raise ValueError("the loader gave no batch in an epoch; can it be read more than once?")
            self.epochs[m], self.indices[m], self._iterators[m] = self.epochs[m] + 1, 0, None


def _joined(batches: Sequence[Batches]) -> tuple[list[Tensor], Tensor] | None:
    """All members' tables below each other, data that several share once, and where each begins [M, 1]."""
    tables = [one.table() for one in batches]
    found = [table for table in tables if table is not None]
    if len(found) < len(tables):
        return None
    forms = {tuple((x.shape[1:], x.dtype) for x in table) for table in found}
    if len(forms) > 1 or len(found[0]) != 2:
        return None
    begins: dict[int, int] = {}
    kept, total = [], 0
    for table in found:
        if id(table) not in begins:
            begins[id(table)] = total
            kept.append(table)
            total += len(table[0])
    columns = [torch.cat(column).to(batches[0].device) for column in zip(*kept, strict=True)]
    return columns, torch.tensor([[begins[id(table)]] for table in found])


def _stacked(batches: Sequence[Any], more: int = 0) -> Read:
    counts = [rows(batch) for batch in batches]
    most = max(counts) + more
    if min(counts) < most:
        batches = [padded(batch, most) for batch in batches]
    try:
        return Read(pytree.tree_map(_column, batches[0], *batches[1:]), counts, most)
    except (RuntimeError, ValueError) as error:
        error.add_note("batches of fits that are made at once must have one form: give at_once=False")
        raise


def with_masked_row(read: Read) -> Read:
    """The same with one row more, of which nothing counts."""
    if min(read.rows) < read.padded:
        return read
    members = [
        pytree.tree_map(lambda x, m=m: x[m] if isinstance(x, Tensor) else x, read.batch) for m in range(len(read.rows))
    ]
    return _stacked(members, more=1)


def _column(*values: Any) -> Any:
    return torch.stack(values) if isinstance(values[0], Tensor) else values[0]


def padded(batch: Any, size: int) -> Any:
    """A batch of fewer rows with so many, the others masked: its first row again, which counts nothing.

    Example:
        >>> x, (t, mask) = padded((torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 4.0])), 3)
        >>> t, mask
        (tensor([3., 4., 3.]), tensor([ True,  True, False]))
    """
    inputs, target = split_batch(batch)
    B = batch_size(target)
    again = torch.cat([torch.arange(B), torch.zeros(size - B, dtype=torch.long)])

    def longer(x: Any) -> Any:
        return x[again.to(x.device)] if isinstance(x, Tensor) else x

    t, mask = target if isinstance(target, tuple | list) else (target, torch.ones_like(target, dtype=torch.bool))
    own = (torch.arange(size, device=mask.device) < B).view(-1, *[1] * (mask.ndim - 1))
    return pytree.tree_map(longer, inputs), (longer(t), longer(mask) & own)
