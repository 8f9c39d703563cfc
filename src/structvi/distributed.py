"""A fit over the ranks of a `torch.distributed` process group: who reads what, and how gradients become one.

`posterior.fit` does all of it by itself under `torchrun`. For a loop of your own there are `LossModule`, to be wrapped
in `DistributedDataParallel` or by Lightning Fabric, and `average_gradients`.
"""

import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.linalg import LinAlgError  # pyright: ignore
from torch.utils._pytree import tree_leaves

from .batches import Batches
from .collectives import LostRankError, all_gather, all_reduce, collective, from_rank_0, sum_gradients
from .elbo import NonFiniteError
from .estimate import Estimate
from .optimizing import gradient_norm

if TYPE_CHECKING:
    from .run import Run
    from .variationalize import Posterior

Parallel = Literal["auto", "data", "draws"] | None
T = TypeVar("T")


class Ranks:
    """The ranks of one fit; a fit in one process is a fit of one rank.

    - "data": the same weights are drawn everywhere and each rank takes its part of every batch. What is computed is
      the gradient of the union of the parts, Σ_r (B_r/B) g_r.
    - "draws": each rank draws its own weights for the same batch: the mean over the ranks' gradients.

    Beside the group of the gradients there is one over gloo for what the ranks tell each other: it notices at once
    where a rank is gone, and needs no accelerator to be waited for.

    Args:
        parallel: "data", "draws", "auto" (data where there is a process group of more than one rank), or None.
        posterior: what is fitted; some of its tensors may be sharded.

    Example:
        >>> ranks = Ranks("auto")
        >>> ranks.rank, ranks.size, ranks.mode
        (0, 1, None)
    """

    def __init__(self, parallel: Parallel = None, posterior: "Posterior | None" = None):
        if parallel not in ("auto", "data", "draws", None):
            raise ValueError(f'parallel must be "auto", "data", "draws" or None, got {parallel!r}')
        there = dist.is_available() and dist.is_initialized()
        if parallel in ("data", "draws") and not there:
            raise ValueError(
                f'parallel="{parallel}" needs a process group: start the script with torchrun and call '
                "torch.distributed.init_process_group() before the fit"
            )
        self.rank, self.size, self.mode = 0, 1, None
        #: the names of tensors of which each rank has its rows, see `structvi.sharding`
        self.sharded: frozenset[str] = frozenset()
        self.rows: Any = None
        if posterior is not None and hasattr(posterior.family, "sharded"):
            self.sharded = frozenset(f"family.{name}" for name in posterior.family.sharded)  # pyright: ignore
            self.rows = posterior.family.rows
        self._own: torch.Generator | None = None
        #: whether this rank was asked to stop, and whether any was
        self.interrupted, self.stopping = False, False
        if there and parallel is not None and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.mode = "data" if parallel == "auto" else parallel
            self.control = dist.new_group(backend="gloo")

    @property
    def part(self) -> tuple[int, int]:
        """Which part of every batch this rank takes, and of how many."""
        return (self.rank, self.size) if self.mode == "data" else (0, 1)

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group(self.control)  # pyright: ignore[reportArgumentType]

    # -------------------------------------------------------------------------------------------------- the start

    def start(self, run: "Run", every: int | None) -> None:
        """All ranks must have been told the same; they start from the values of rank 0.

        Args:
            run: about to begin.
            every: how many steps lie between checkpoints, for which sharded tensors are put together; None for none.
        """
        if self.sharded and self.mode != "data" and dist.get_world_size() > 1:
            raise ValueError(
                f"the ranks of a sharded posterior need each other for every draw: parallel={self.mode!r} does not go "
                'with it, leave it at "auto"'
            )
        if self.size == 1:
            return
        learned = {name: tensor for name, tensor in run.learned().items() if name not in self.sharded}
        settings = {
            **asdict(run.options),
            "parallel": self.mode,
            "optimizer": type(run.optimizer).__name__,
            "learning rates": run.schedule.highest,
            "step resumed from": run.step,
            "family": repr(run.posterior.family),
            "steps between checkpoints": every if self.sharded else None,
            **{f"the shape of {name}": tuple(tensor.shape) for name, tensor in learned.items()},
        }
        theirs = self.tell(settings)
        differ = [
            f"{key}: {theirs[0].get(key)!r} on rank 0, {one.get(key)!r} on rank {rank}"
            for rank, one in enumerate(theirs)
            for key in {**theirs[0], **one}
            if one.get(key) != theirs[0].get(key)
        ]
        if differ:
            raise ValueError(f"all ranks must fit the same posterior with the same options; {'; '.join(differ)}")
        net = run.posterior.net
        from_rank_0([*learned.values(), *net.parameters(), *net.buffers()])

    # --------------------------------------------------------------------------------------------------- one step

    def take(self, iterator: Iterator[Any], count: int, batches: Batches, index: int) -> tuple[list[Any], list[float]]:
        """The next `count` batches of this rank, and its share B_r/B in the union of each.

        Where the loader's order is its own, each rank has a loader of its own: an epoch ends for all of them when one
        has no batch left.
        """
        batch = list(islice(iterator, count))
        if self.size == 1:
            return batch, [1.0] * len(batch)
        if batches.splits:
            shares = [batches.share(index + i) for i in range(len(batch))]
        else:
            counts = [observations(one) for one in batch] + [0] * (count - len(batch))
            table = torch.tensor(self.tell(counts), dtype=torch.float64)  # [ranks, count]
            whole = int((table > 0).all(0).long().cumprod(0).sum())
            batch, shares = batch[:whole], (table[self.rank] / table.sum(0)).tolist()[:whole]
        return batch, shares if self.mode == "data" else [1 / self.size] * len(batch)

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
        """Sum gradients over ranks, in place, and the values of the groups of draws [groups], weighted by share.

        With "draws" the groups of all ranks stand side by side: their spread is the standard error of the mean. The
        gradients of sharded parameters are sums already.
        """
        if self.size == 1:
            return values
        sum_gradients([parameter for name, parameter in named.items() if name not in self.sharded])
        if self.mode == "draws":
            return torch.cat(all_gather(values * self.size))
        return all_reduce(values)

    def norm(self, named: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
        """Of all gradients: of what is sharded, over the rows of all ranks."""
        own = [parameter for name, parameter in named.items() if name in self.sharded]
        if not own:
            return gradient_norm(named.values(), optimizer)
        square = all_reduce(gradient_norm(own, optimizer).square())
        common = [p for name, p in named.items() if name not in self.sharded and p.grad is not None]
        return (square + gradient_norm(common, optimizer).square()).sqrt() if common else square.sqrt()

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


def observations(batch: Any) -> int:
    """B: the length of a batch's first tensor."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    if not tensors:
        raise TypeError(f"cannot tell how many observations are in a batch without tensors: {type(batch).__name__}")
    return tensors[0].shape[0]


# ------------------------------------------------------------------------------------------------ loops of your own


class LossModule(nn.Module):
    """`posterior.loss` as the forward of a module, for `DistributedDataParallel` and `Fabric.setup`.

    Its parameters are what is learned, and not the network's own: those get no gradient, and DDP would wait for one.
    Every rank needs a generator of the same seed, so that all draw the same weights, or of its own, for more draws.

    Args:
        posterior: its `loss` is called with what the module is called with.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField(), num_data=10)
        >>> module = LossModule(bayes)
        >>> module((torch.zeros(5, 3), torch.zeros(5, 1))).shape, len(list(module.parameters()))
        (torch.Size([]), 2)
    """

    def __init__(self, posterior: "Posterior"):
        super().__init__()
        self._posterior = (posterior,)  # not a child
        self.family = posterior.family
        for name in ("likelihood", "prior"):
            part = getattr(posterior.model, name)
            if isinstance(part, nn.Module):
                self.add_module(name, part)

    def forward(self, batch: Any, **options: Any) -> Tensor:
        return self._posterior[0].loss(batch, **options)


def average_gradients(posterior: nn.Module, count: int | None = None) -> None:
    """After `posterior.loss(..).backward()`: the gradient of the union of the ranks' batches, on every rank.

        posterior.loss(batch, generator=generator).backward()
        average_gradients(posterior, len(target))
        optimizer.step()

    Args:
        posterior: what was differentiated; its `.grad` are changed.
        count: B_r, how many observations this rank's batch had, where ranks may have different numbers; None for the
            plain mean, also right where ranks have the same batch and draws of their own.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    parameters = list(posterior.parameters())
    share = 1 / dist.get_world_size()
    if count is not None:
        total = all_reduce(torch.tensor(float(count), dtype=torch.float64, device=parameters[0].device))
        share = count / float(total)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(share)
    sum_gradients(parameters)
