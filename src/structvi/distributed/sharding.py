"""Posteriors larger than one device: each rank holds its rows of mean, scales and factor, and their moments.

In a step the drawn weights [S, P], their gradients and sums of size K×K travel between ranks. Every rank makes the
whole noise [S, P] from the common generator, and takes its columns: one process would draw the same.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..couplings import Coupling, Noise, naive
from ..families.family import Density, Draws, Family
from ..families.gaussian import LowRankDensity
from ..families.low_rank import LowRankNormal, LowRankPrecision
from ..families.mean_field import MeanField
from ..util.checks import check_theta
from ..util.configuration import configuration
from .collectives import all_gather, all_reduce, from_rank_0

if TYPE_CHECKING:
    from ..posterior import Posterior

AnyPosterior = TypeVar("AnyPosterior", bound="Posterior")


class Rows(NamedTuple):
    """The rows `start` to `stop` of P, which this rank holds: all ranks have `most`, but for the last ones."""

    start: int
    stop: int
    P: int
    most: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


# ---------------------------------------------------------------------- collectives, each with its adjoint for Σ_r L_r


class _Gather(torch.autograd.Function):
    """Columns of all ranks, [S, p] → [S, P]; backward, the sum over ranks of this rank's columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        padded = nn.functional.pad(x, (0, rows.most - x.shape[-1]))
        return torch.cat(all_gather(padded), dim=-1)[:, : rows.P]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_reduce(gradient.clone())[:, ctx.rows.slice], None


class _Sum(torch.autograd.Function):
    """Σ over ranks, the same on all of them; backward, the sum over ranks of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_summed: bool) -> Tensor:
        return x.view_as(x) if is_summed else all_reduce(x.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_reduce(gradient.clone()), None


def whole(x: Tensor, rows: Rows) -> Tensor:
    """Return the columns of all ranks, [S, p] → [S, P]."""
    return cast(Tensor, _Gather.apply(x, rows))


# ---------------------------------------------------------------------------------------------- densities and families


class ShardedDensity(Density):
    """A diagonal plus low-rank Gaussian whose rows are spread over ranks; all ranks call each method together."""

    def __init__(self, part: LowRankDensity, rows: Rows):
        self.part, self.rows = part, rows
        part.reduce, part.P_whole = lambda x: _Sum.apply(x, False), rows.P

    @property
    def P(self) -> int:
        return self.rows.P

    @property
    def mean(self) -> Tensor:
        return self._whole(self.part.mean)

    @property
    def variance(self) -> Tensor:
        return self._whole(self.part.variance)

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        return self.draw_scored(groups, coupling, generator)[0]

    def draw_scored(
        self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None
    ) -> tuple[Draws, Tensor | None]:
        def cut(groups, p, K, generator, dtype, device):
            noise = coupling(groups, self.P, K, generator, dtype, device)
            return Noise(noise[0][:, self.rows.slice], noise[1])

        draws, log_q = self.part.draw_scored(groups, cut if callable(coupling) else coupling, generator)
        return Draws(whole(draws.theta, self.rows), draws.weight), cast(Tensor, _Sum.apply(log_q, True))

    def log_prob(self, theta: Tensor) -> Tensor:
        return self.part.log_prob(check_theta(theta, self.P)[:, self.rows.slice])

    def score(self, theta: Tensor) -> Tensor:
        return whole(self.part.score(check_theta(theta, self.P)[:, self.rows.slice]), self.rows)

    def entropy(self) -> Tensor:
        return self.part.entropy()

    def _whole(self, own: Tensor) -> Tensor:
        return whole(own.unsqueeze(0), self.rows).squeeze(0)


class Sharded:
    """The base of sharded families: this rank's rows, and the density over the rows of all ranks."""

    rows: Rows

    @property
    def row_tensors(self) -> tuple[str, ...]:
        """The names of the tensors that are cut into rows: all that a family has."""
        return tuple(self.state_dict())  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self) -> Density:
        return ShardedDensity(super().forward(), self.rows)  # pyright: ignore[reportAttributeAccessIssue]

    def normal(self) -> None:
        """Return None: no rank has all rows."""


class ShardedMeanField(Sharded, MeanField):
    """Some rows of a `MeanField`."""


class ShardedLowRankNormal(Sharded, LowRankNormal):
    """Some rows of a `LowRankNormal`."""


class ShardedLowRankPrecision(Sharded, LowRankPrecision):
    """Some rows of a `LowRankPrecision`."""


#: of each family the one that has some of its rows
SHARDED: dict[type[Family], type[Family]] = {
    MeanField: ShardedMeanField, LowRankNormal: ShardedLowRankNormal, LowRankPrecision: ShardedLowRankPrecision,
}  # fmt: skip
WHOLE = {sharded: whole for whole, sharded in SHARDED.items()}


def whole_family(family: Family) -> Family:
    """Return the family; for a sharded one, the recipe of the whole."""
    return WHOLE[type(family)](**configuration(family)) if isinstance(family, Sharded) else family


def shard(posterior: AnyPosterior) -> AnyPosterior:
    """Return the posterior with this rank's rows of the variational parameters: P(K + 2)/w numbers on each of w ranks.

    `fit`, `predict` and `elbo` work as before, called on all ranks at once; in a fit each rank takes its part of every
    batch. All start from the values of rank 0, also of the network. Make the posterior on the CPU, shard it, and move
    it to the rank's device. It can be neither saved nor grown: `gather` it first.

        bayes = shard(variationalize(net, likelihood, LowRankNormal(rank=8))).to(device)
        bayes.fit(loader, epochs=10)
        whole = gather(bayes.cpu())

    Args:
        posterior: with a `LowRankNormal`, `LowRankPrecision` or `MeanField`; it is not changed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "shard needs a process group: start the script with torchrun and call "
            "torch.distributed.init_process_group()"
        )
    family = posterior.family
    kind = SHARDED.get(type(family))
    if kind is None:
        raise TypeError(
            f"a {type(family).__name__} cannot be sharded; shard is for LowRankNormal, LowRankPrecision and MeanField"
        )
    rank, size, P = dist.get_rank(), dist.get_world_size(), posterior.space.size
    most = -(-P // size)
    rows = Rows(min(rank * most, P), min((rank + 1) * most, P), P, most)
    from_rank_0([*posterior.net.parameters(), *posterior.net.buffers()])
    tensors = {name: tensor.detach().clone() for name, tensor in family.state_dict().items()}
    from_rank_0(tensors.values())
    made = _with_tensors(posterior, kind, {name: tensor[rows.slice] for name, tensor in tensors.items()})
    vars(made.family).update(rows=rows, stream=rows.start + 1)
    return made


def gather(posterior: AnyPosterior) -> AnyPosterior:
    """Return the whole posterior, on every rank: the inverse of `shard`. Move a large one to the CPU first.

    To store a sharded posterior, let rank 0 save the whole one; `shard(load(path, net))` restores it on any number of
    ranks.
    """
    family = posterior.family
    if not isinstance(family, Sharded):
        raise TypeError(f"gather expects a posterior that shard made, got one with a {type(family).__name__}")
    rows, tensors = family.rows, {}
    for name in family.row_tensors:
        own = getattr(family, name).detach()
        columns = own.reshape(rows.stop - rows.start, -1).mT.contiguous()  # [K, p] or [1, p]
        tensors[name] = whole(columns, rows).mT.reshape(rows.P, *own.shape[1:])
    return _with_tensors(posterior, WHOLE[type(family)], tensors)


def _with_tensors(posterior: AnyPosterior, kind: type[Family], tensors: dict[str, Tensor]) -> AnyPosterior:
    """Return the posterior with a family of this kind, of the same configuration and space, with these tensors."""
    made = kind(**configuration(posterior.family))
    made.space = posterior.family.space
    for name, tensor in tensors.items():
        own = tensor.mT.contiguous().mT if tensor.ndim == 2 else tensor.clone()  # a factor: column by column
        if name == "unit":
            made.register_buffer(name, own)
        else:
            setattr(made, name, nn.Parameter(own))
    other = posterior.with_family(made)
    other.fit_status = posterior.fit_status
    return other
