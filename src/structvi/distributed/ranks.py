"""A fit over the ranks of a `torch.distributed` process group: each reads its part, and gradients are summed.

`posterior.fit` does so under `torchrun`.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.linalg import LinAlgError  # pyright: ignore
from torch.nn.utils import get_total_norm

from ..families.family import Family
from ..models.bayesian_model import rows
from ..objective import Estimate, NonFiniteError
from ..util.checks import check_one_of
from ..util.interrupts import Interrupts
from .collectives import LostRankError, all_reduce, collective, from_rank_0, sum_gradients
from .sharding import Sharded

if TYPE_CHECKING:
    from ..train.data import Batches

Parallel = Literal["auto"] | None
T = TypeVar("T")

#: the default process group, and the group over gloo beside it: made once, and used by every fit
_control: tuple[Any, Any] | None = None


class Taken(NamedTuple):
    """The batches of one step."""

    batches: list[Any]
    #: observations of each that count for this rank
    rows: list[float]
    #: observations of all of them, on all ranks
    whole: int


class Ranks:
    """The ranks of one fit; a fit in one process is a fit of one rank.

    All ranks draw the same weights, and each takes its part of every batch. They sum the gradients to the gradient of
    the union of the parts, Σ_r (B_r/B) g_r.

    Ranks send messages over a group of their own, with gloo: it notices a lost rank at once, and needs no accelerator.

    Args:
        parallel: "auto" for the ranks of the process group if there is one, None for this process alone.
        family: of the posterior; some of its tensors may be sharded.

    Example:
        >>> ranks = Ranks("auto")
        >>> ranks.rank, ranks.size
        (0, 1)
    """

    def __init__(self, parallel: Parallel = None, family: Family | None = None):
        check_one_of("parallel", parallel, ("auto", None))
        others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if others and parallel else (0, 1)
        self.family = family if isinstance(family, Sharded) else None
        if self.family and others and parallel is None:
            raise ValueError(
                'the ranks of a sharded posterior need each other for every draw: leave parallel at "auto"'
            )
        #: names of the tensors that are sharded: each rank has its rows
        self.sharded = frozenset(f"family.{name}" for name in self.family.row_tensors) if self.family else frozenset()
        self._interrupts = Interrupts()
        #: whether any rank was asked to stop
        self.stopping = False
        self.control = _control_group() if self.size > 1 else None

    @property
    def part(self) -> tuple[int, int]:
        """Which part of every batch this rank takes, and of how many."""
        return self.rank, self.size

    def close(self) -> None:
        """End a fit: if it fails on this rank, the others lose their connection to it and do not wait."""
        global _control
        if self.size > 1 and sys.exc_info()[0] is not None:
            _control = None
            dist.destroy_process_group(self.control)

    def start(self, settings: Mapping[str, Any], learned: Mapping[str, Tensor], others: Iterable[Tensor]) -> None:
        """Start all ranks from the values of rank 0; raise ValueError if their settings differ.

        Args:
            settings: by name; they must be the same everywhere.
            learned: tensors that the fit changes; sharded rows stay.
            others: other tensors that all ranks must share.
        """
        if self.size == 1:
            return
        common = {name: tensor for name, tensor in learned.items() if name not in self.sharded}
        shapes = {f"the shape of {name}": tuple(tensor.shape) for name, tensor in common.items()}
        first, *rest = self.tell({**settings, **shapes})
        differ = [
            f"{key}: {first.get(key)!r} on rank 0, {one.get(key)!r} on rank {rank}"
            for rank, one in enumerate(rest, 1)
            for key in {**first, **one}
            if one.get(key) != first.get(key)
        ]
        if differ:
            raise ValueError(f"all ranks must fit the same posterior with the same options; {'; '.join(differ)}")
        from_rank_0([*common.values(), *others])

    def tell(self, mine: T) -> list[T]:
        """Return the values of all ranks."""
        if self.size == 1:
            return [mine]
        theirs: list[Any] = [None] * self.size
        collective(lambda: dist.all_gather_object(theirs, mine, self.control))
        return theirs

    # --------------------------------------------------------------------------------------------------- one step

    def take(self, iterator: Iterator[Any], count: int, batches: "Batches", index: int) -> Taken:
        """Return the next `count` batches of this rank, their rows, and the rows on all ranks together.

        If the loader has an order of its own, then each rank has its own loader: an epoch ends for all of them when one
        has no batch left.
        """
        batch = list(islice(iterator, count))
        if batches.splits:
            pairs = [batches.rows_of(index + i) for i in range(len(batch))]
            counts, whole = [own for own, _ in pairs], sum(union for _, union in pairs)
        else:
            counts = [rows(one) for one in batch]
            table = torch.tensor(self.tell(counts + [0] * (count - len(batch))))  # [ranks, count]
            ready = int((table > 0).all(0).long().cumprod(0).sum())
            batch, counts, whole = batch[:ready], counts[:ready], int(table[:, :ready].sum())
        return Taken(batch, [*map(float, counts)], whole)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on all ranks if something fails inside on one: nobody waits for it.

        A value that is not finite on one leaves the step out on all of them; every other error ends them.
        """
        error = None
        try:
            yield
        except LostRankError:
            raise
        except Exception as caught:  # the others must hear of it, whatever it is
            error = caught
        level = 0 if error is None else 1 if isinstance(error, NonFiniteError | LinAlgError) else 2
        told = torch.tensor([level, self._interrupts.kept])
        collective(lambda: dist.all_reduce(told, dist.ReduceOp.MAX, self.control))
        worst, self.stopping = int(told[0]), bool(told[1])
        if worst == 0:
            return
        said = self.tell((level, f"{type(error).__name__}: {error}"))
        if error is not None and level == 2:
            raise error
        rank, what = next((rank, what) for rank, (its, what) in enumerate(said) if its == worst)
        if worst == 2:
            raise LostRankError(f"rank {rank} failed, and the fit with it: {what}") from error
        raise NonFiniteError(f"on rank {rank}: {what}") from error

    def reduce(self, named: Mapping[str, Tensor], values: Tensor) -> Tensor:
        """Sum gradients over ranks, in place, and values [.., groups]; those of sharded parameters are sums already."""
        sum_gradients([parameter for name, parameter in named.items() if name not in self.sharded])
        return all_reduce(values)

    def norm(self, named: Mapping[str, Tensor]) -> Tensor:
        """Return the norm of all gradients, in float64; sharded ones count with the rows of all ranks."""

        def square(sharded: bool) -> Tensor:
            own = [p.grad for name, p in named.items() if p.grad is not None and (name in self.sharded) == sharded]
            return get_total_norm(own).double().square()

        return (square(False) + (all_reduce(square(True)) if self.sharded else 0.0)).sqrt()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Keep a first Ctrl-C on any rank, which ends the fit of all after the same step; a second acts at once."""
        with Interrupts(waits=self.size > 1) as self._interrupts:
            yield
            self._interrupts.kept = False  # after the last step there is nothing left to stop

    # ------------------------------------------------------------------------------------------------ checkpoints

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, "part/name" or "part/name/moment": on rank 0 with the rows of all ranks,
        in the host's memory."""
        return {path: self._gathered(x) if self._is_cut(path, x) else x for path, x in tensors.items()}

    def own(self, path: str, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a tensor from a checkpoint."""
        return tensor[self.family.rows.slice].clone() if self.family and self._is_cut(path, tensor) else tensor

    def _is_cut(self, path: str, tensor: Tensor) -> bool:
        return self.size > 1 and tensor.ndim > 0 and not self.sharded.isdisjoint(path.split("/"))

    def _gathered(self, tensor: Tensor) -> Tensor:
        assert self.family is not None
        mine, cut = tensor.detach().cpu(), self.family.rows
        mine = torch.cat([mine, mine.new_zeros(cut.most - len(mine), *mine.shape[1:])])
        theirs = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else None
        collective(lambda: dist.gather(mine, theirs, 0, self.control))  # pyright: ignore
        return mine if theirs is None else torch.cat(theirs)[: cut.P]

    # ---------------------------------------------------------------------------------------------------- the end

    def pool(self, estimate: Estimate, count: int) -> Estimate:
        """Return one estimate for the data of all ranks, on common draws, from each rank's for `count` observations."""
        if self.size == 1:
            return estimate
        theirs = self.tell((estimate.per_group, max(1, count)))
        per_group, counts = torch.stack([one for one, _ in theirs]), torch.tensor([count for _, count in theirs])
        return Estimate.of((per_group * (counts / counts.sum()).unsqueeze(-1)).sum(0), estimate.bound)


def _control_group() -> Any:
    """Return the group over gloo of the present default group."""
    global _control
    if _control is None or _control[0] is not dist.group.WORLD:
        group = dist.new_group(backend="gloo")
        # all are connected before one of them may fail and close it: the others would wait for the connection
        collective(lambda: dist.barrier(group))  # pyright: ignore[reportArgumentType]
        _control = dist.group.WORLD, group
    return _control[1]
