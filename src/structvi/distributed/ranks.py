"""A fit over the ranks of a `torch.distributed` process group: who reads what, and how gradients become one.

`posterior.fit` does all of it by itself under `torchrun`; for loops of your own see `own_loops`.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.linalg import LinAlgError  # pyright: ignore

from ..families.family import Family
from ..models.bayesian_model import observations, rows
from ..objective import Estimate, NonFiniteError
from .collectives import LostRankError, all_gather, all_reduce, collective, from_rank_0, sum_gradients
from .sharding import Sharded

Parallel = Literal["auto", "data", "draws"] | None
T = TypeVar("T")


#: the group over gloo beside a default process group: it is made once, fit after fit
_control: tuple[Any, Any] | None = None


class Splits(Protocol):
    """What ranks ask of the data they read."""

    @property
    def splits(self) -> bool:
        """Whether every batch can be split into parts."""
        ...

    def rows_of(self, index: int) -> tuple[int, int]:
        """Observations of a batch of the epoch: this rank's, and all ranks'."""
        ...


class Taken(NamedTuple):
    """The batches of one step."""

    batches: list[Any]
    #: observations of each that count for this rank
    rows: list[float]
    #: observations of all of them, on all ranks
    whole: int


class Ranks:
    """The ranks of one fit; a fit in one process is a fit of one rank.

    - "data": the same weights are drawn everywhere and each rank takes its part of every batch. What is computed is
      the gradient of the union of the parts, Σ_r (B_r/B) g_r.
    - "draws": each rank draws its own weights for the same batch: the mean over the ranks' gradients.

    Beside the group of the gradients there is one over gloo for what the ranks tell each other: it notices at once
    where a rank is gone, and needs no accelerator to be waited for.

    Args:
        parallel: "data", "draws", "auto" (data where there is a process group of more than one rank), or None.
        family: what is fitted; some of its tensors may be sharded.

    Example:
        >>> ranks = Ranks("auto")
        >>> ranks.rank, ranks.size, ranks.mode
        (0, 1, None)
    """

    def __init__(self, parallel: Parallel = None, family: Family | None = None):
        if parallel not in ("auto", "data", "draws", None):
            raise ValueError(f'parallel must be "auto", "data", "draws" or None, got {parallel!r}')
        there = dist.is_available() and dist.is_initialized()
        if parallel in ("data", "draws") and not there:
            raise ValueError(
                f'parallel="{parallel}" needs a process group: start the script with torchrun and call '
                "torch.distributed.init_process_group() before the fit"
            )
        self.rank, self.size, self.mode = 0, 1, None
        #: the names of tensors of which each rank has its rows, see `structvi.distributed.sharding`
        self.sharded: frozenset[str] = frozenset()
        self.rows: Any = None
        if isinstance(family, Sharded):
            self.sharded = frozenset(f"family.{name}" for name in family.row_tensors)
            self.rows = family.rows
        self._own: torch.Generator | None = None
        #: whether this rank was asked to stop, and whether any was
        self.interrupted, self.stopping = False, False
        if there and parallel is not None and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.mode = "data" if parallel == "auto" else parallel
            self.control = _control_group()

    @property
    def part(self) -> tuple[int, int]:
        """Which part of every batch this rank takes, and of how many."""
        return (self.rank, self.size) if self.mode == "data" else (0, 1)

    def close(self) -> None:
        """End a fit: if it fails on this rank, the others lose their connection to it and do not wait."""
        global _control
        if self.size > 1 and sys.exc_info()[0] is not None:
            _control = None
            dist.destroy_process_group(self.control)

    # -------------------------------------------------------------------------------------------------- the start

    def start(self, settings: Mapping[str, Any], learned: Mapping[str, Tensor], others: Iterable[Tensor]) -> None:
        """All ranks must have been told the same; they start from the values of rank 0.

        Args:
            settings: by name, what must be the same everywhere.
            learned: what the fit changes; rows that are each rank's own stay.
            others: what else all ranks must have the same values of.
        """
        if self.sharded and self.mode != "data" and dist.get_world_size() > 1:
            raise ValueError(
                f"the ranks of a sharded posterior need each other for every draw: parallel={self.mode!r} does not go "
                'with it, leave it at "auto"'
            )
        if self.size == 1:
            return
        common = {name: tensor for name, tensor in learned.items() if name not in self.sharded}
        shapes = {f"the shape of {name}": tuple(tensor.shape) for name, tensor in common.items()}
        theirs = self.tell({**settings, "parallel": self.mode, **shapes})
        differ = [
            f"{key}: {theirs[0].get(key)!r} on rank 0, {one.get(key)!r} on rank {rank}"
            for rank, one in enumerate(theirs)
            for key in {**theirs[0], **one}
            if one.get(key) != theirs[0].get(key)
        ]
        if differ:
            raise ValueError(f"all ranks must fit the same posterior with the same options; {'; '.join(differ)}")
        from_rank_0([*common.values(), *others])

    # --------------------------------------------------------------------------------------------------- one step

    def take(self, iterator: Iterator[Any], count: int, batches: Splits, index: int) -> "Taken":
        """The next `count` batches of this rank, with their rows and those of all ranks together.

        Where the loader's order is its own, each rank has a loader of its own: an epoch ends for all of them when one
        has no batch left.
        """
        batch = list(islice(iterator, count))
        if batches.splits:
            pairs = [batches.rows_of(index + i) for i in range(len(batch))]
            return self._taken(batch, [own for own, _ in pairs], sum(whole for _, whole in pairs))
        counts = [rows(one) for one in batch]
        if self.size == 1:
            return self._taken(batch, counts, sum(counts))
        table = torch.tensor(self.tell(counts + [0] * (count - len(batch))))  # [ranks, count]
        ready = int((table > 0).all(0).long().cumprod(0).sum())
        union = table[0] if self.mode == "draws" else table.sum(0)
        return self._taken(batch[:ready], counts[:ready], int(union[:ready].sum()))

    def _taken(self, batch: list[Any], own: Sequence[int], whole: int) -> "Taken":
        parts = 1 if self.mode != "draws" else self.size  # each draws for all of the batch
        return Taken(batch, [count / parts for count in own], whole)

    def generator(self, common: torch.Generator) -> torch.Generator:
        """Where this rank's draws come from: the common stream, or one of its own that the common one seeds."""
        if self.mode != "draws":
            return common
        if self._own is None:
            self._own = torch.Generator(common.device)
        seed = int(torch.randint(2**62, (), generator=common, device=common.device))
        return self._own.manual_seed((seed + 1_000_003 * self.rank) % 2**63)

    def together(self) -> "_Together":
        """What is not finite on one rank is so on all of them, and an error on one ends all: nobody waits for it."""
        return _Together(self)

    def reduce(self, named: Mapping[str, Tensor], values: Tensor) -> Tensor:
        """Sum gradients over ranks, in place, and values of the groups of draws [.., groups], weighted by share.

        With "draws" the groups of all ranks stand side by side: their spread is the standard error of the mean. The
        gradients of sharded parameters are sums already.
        """
        if self.size == 1:
            return values
        sum_gradients([parameter for name, parameter in named.items() if name not in self.sharded])
        if self.mode == "draws":
            return torch.cat(all_gather(values * self.size), -1)
        return all_reduce(values)

    def norm(self, named: Mapping[str, Tensor], norm: Callable[[Iterable[Tensor]], Tensor]) -> Tensor:
        """Of all gradients, by `norm` of those of some parameters: of what is sharded, over the rows of all ranks."""
        own = [parameter for name, parameter in named.items() if name in self.sharded]
        if not own:
            return norm(named.values())
        square = all_reduce(norm(own).square())
        common = [p for name, p in named.items() if name not in self.sharded and p.grad is not None]
        return (square + norm(common).square()).sqrt() if common else square.sqrt()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, a first Ctrl-C on any rank ends the fit of all of them after the same step; a second acts at once."""
        if self.size == 1 or threading.current_thread() is not threading.main_thread():
            yield
            return
        usual = signal.getsignal(signal.SIGINT)

        def note(number: int, frame: Any) -> None:
            if self.interrupted and callable(usual):
                usual(number, frame)
            self.interrupted = True

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, usual)

    def stop_together(self) -> None:
        """After a step: where a rank was interrupted before it, all end here."""
        if self.stopping:
            raise KeyboardInterrupt

    # ------------------------------------------------------------------------------------------------ checkpoints

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a checkpoint, "part/name" or "part/name/moment": on rank 0 with the rows of all ranks, in memory
        of the host."""
        if self.size == 1 or not self.sharded:
            return dict(tensors)
        return {path: self._gathered(x) if self._is_cut(path, x) else x for path, x in tensors.items()}

    def own(self, path: str, tensor: Tensor) -> Tensor:
        """This rank's rows of a tensor from a checkpoint."""
        return tensor[self.rows.slice].clone() if self._is_cut(path, tensor) else tensor

    def _is_cut(self, path: str, tensor: Tensor) -> bool:
        return tensor.ndim > 0 and any(name in self.sharded for name in path.split("/"))

    def _gathered(self, tensor: Tensor) -> Tensor:
        mine = tensor.detach().cpu()
        mine = torch.cat([mine, mine.new_zeros(self.rows.most - len(mine), *mine.shape[1:])])
        theirs = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else None
        collective(lambda: dist.gather(mine, theirs, 0, self.control))  # pyright: ignore
        return mine if theirs is None else torch.cat(theirs)[: self.rows.P]

    # ---------------------------------------------------------------------------------------------------- the end

    def pool(self, estimate: Estimate, count: int) -> Estimate:
        """One estimate of those from each rank's data, on common draws, weighted by the number of observations."""
        if self.size == 1:
            return estimate
        theirs = self.tell((estimate.per_group, max(1, count)))
        total = sum(count for _, count in theirs)
        per_group = sum(values * (count / total) for values, count in theirs)
        assert isinstance(per_group, Tensor)
        return Estimate.of(per_group, estimate.bound)

    def tell(self, mine: T) -> list[T]:
        """What every rank has to say, rank by rank."""
        if self.size == 1:
            return [mine]
        theirs: list[Any] = [None] * self.size
        collective(lambda: dist.all_gather_object(theirs, mine, self.control))
        return theirs


def _control_group() -> Any:
    """Return the group over gloo of the present default group."""
    global _control
    if _control is None or _control[0] is not dist.group.WORLD:
        group = dist.new_group(backend="gloo")
        # all are connected before one of them may fail and close it: the others would wait for the connection
        collective(lambda: dist.barrier(group))  # pyright: ignore[reportArgumentType]
        _control = dist.group.WORLD, group
    return _control[1]


class _Together:
    """A block at whose end every rank tells the others whether it came through."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        ranks = self.ranks
        silent = isinstance(error, LostRankError) or not (error is None or isinstance(error, Exception))
        if ranks.size == 1 or silent:
            return
        harmless = isinstance(error, NonFiniteError | LinAlgError)
        told = torch.tensor([0 if error is None else 1 if harmless else 2, ranks.interrupted])
        collective(lambda: dist.all_reduce(told, dist.ReduceOp.MAX, ranks.control))
        level, ranks.stopping = int(told[0]), bool(told[1])
        if level == 0:
            return
        said = ranks.tell((0, "") if error is None else (1 if harmless else 2, f"{type(error).__name__}: {error}"))
        if error is not None and not harmless:
            return  # it goes on as it is
        rank, what = next((rank, what) for rank, (its, what) in enumerate(said) if its == level)
        if level == 2:
            raise LostRankError(f"rank {rank} failed, and the fit with it: {what}") from error
        raise NonFiniteError(f"on rank {rank}: {what}") from error


class Counted:
    """Batches, and how many observations they held."""

    def __init__(self, batches: Iterable[Any]):
        self.batches, self.observations = batches, 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.observations += observations(batch)
            yield batch
