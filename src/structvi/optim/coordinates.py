"""Kronecker coordinates of a mean: the eigenvectors of E GGᵀ and E GᵀG for the gradient G of each weight tensor."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call

from ..families.basis import Basis
from ..families.rotated import Mean
from ..util.checks import check_fraction, check_integer
from .adam import adam_groups

if TYPE_CHECKING:
    from ..posterior import Posterior

#: added to second moments before their eigenvectors are found, relative to the mean eigenvalue: directions without
#: any gradient then have an eigenvector too
RIDGE = 1e-4


class Coordinates(Basis):
    """An orthogonal matrix for each axis of each tensor of a mean, in an optimizer's `state` of that mean.

    `state["gram…"]` are running averages of GGᵀ along an axis, `state["basis…"]` the matrices Q, both [s, s].
    """

    def initial(self, mean: Tensor) -> dict[str, Tensor]:
        """Return the state at the start: averages of zero, and identities."""
        state = {}
        for axis in self.axes():
            eye = torch.eye(axis.size, dtype=mean.dtype, device=mean.device)
            state |= {f"gram{axis.name}": torch.zeros_like(eye), f"basis{axis.name}": eye}
        return state

    def turned(self, x: Tensor, matrices: Mapping[str, Tensor], *, back: bool, squared: bool = False) -> Tensor:
        """Return Qx of a vector [P], or Qᵀx (`back`: into the coordinates).

        Args:
            x: [P].
            matrices: "basis…" → [s, s].
            back: multiply with the transposes.
            squared: multiply with the squares of all elements of Q, which turns diagonals.
        """
        own = {axis.name: matrices[f"basis{axis.name}"] for axis in self.axes()}
        return functional_call(self, own, (x,), {"back": back, "squared": squared})

    def observe(self, state: Mapping[str, Tensor], gradient: Tensor, weight: float) -> None:
        """Move the running averages of GGᵀ towards GGᵀ of a gradient [P]."""
        for tensor in self.tensors:
            G = gradient[tensor.start : tensor.stop].reshape(tensor.shape)
            for axis in tensor.axes:
                unfolded = G.movedim(axis.index, 0).flatten(1)  # [s, rest]
                state[f"gram{axis.name}"].lerp_(unfolded @ unfolded.mT, weight)

    def refresh(self, state: Mapping[str, Tensor], first: bool) -> dict[str, Tensor]:
        """Move every basis towards the eigenvectors of its average; return the changes QᵀQ', by "basis…".

        Args:
            state: the optimizer's state of the mean.
            first: take the eigenvectors, instead of one step of subspace iteration towards them.
        """
        changes: dict[str, Tensor] = {}
        for axis in self.axes():
            gram, Q = state[f"gram{axis.name}"], state[f"basis{axis.name}"]
            new = eigenvectors(gram) if first else iterated(gram, Q)
            changes[f"basis{axis.name}"] = Q.mT @ new
            Q.copy_(new)
        return changes

    def give_to(self, turn: Callable[[Mapping[str, Tensor]], None], state: Mapping[str, Tensor]) -> None:
        """Let a `Rotated` family take these coordinates for its own; here they are the identity again."""
        turn({axis.name: state[f"basis{axis.name}"] for axis in self.axes()})
        for axis in self.axes():
            gram, Q = state[f"gram{axis.name}"], state[f"basis{axis.name}"]
            gram.copy_(Q.mT @ gram @ Q)
            Q.copy_(torch.eye(axis.size, dtype=Q.dtype, device=Q.device))


def eigenvectors(moments: Tensor) -> Tensor:
    """Return the eigenvectors of a symmetric matrix [s, s], by falling eigenvalues."""
    return torch.linalg.eigh(_with_ridge(moments)).eigenvectors.flip(-1).to(moments.dtype)


def iterated(moments: Tensor, Q: Tensor) -> Tensor:
    """Return Q [s, s] after one step of subspace iteration towards the eigenvectors of the moments.

    The columns of MQ become orthonormal by the Cholesky factor of their products, in float64: on a GPU that is much
    faster than Householder's QR. A second time removes what rounding leaves; where that fails, Q stays.
    """
    X = _with_ridge(moments) @ Q.double()
    X = X / torch.linalg.vector_norm(X, dim=0)
    for _ in range(2):
        L, _ = torch.linalg.cholesky_ex(X.mT @ X)
        X = torch.linalg.solve_triangular(L, X.mT, upper=False).mT
    eye = torch.eye(len(X), dtype=X.dtype, device=X.device)
    good = (X.mT @ X - eye).abs().amax() < 1e-7  # false for NaN
    return torch.where(good, X, Q.double()).to(Q.dtype)


def _with_ridge(moments: Tensor) -> Tensor:
    M = moments.double()
    ridge = RIDGE * M.diagonal().mean() + torch.finfo(torch.float64).tiny
    return M + ridge * torch.eye(len(M), dtype=M.dtype, device=M.device)


class CoordinateOptimizer(torch.optim.Adam):
    """Adam for all but some parameters, which a subclass moves in `_move`; it keeps the coordinates of means.

    Args:
        posterior: to fit.
        groups: the parameters that `_move` moves, with their rates; a history shows the rate of the first group.
        rest_lr: Adam's learning rate for all other parameters.
        means: those whose coordinates are kept.
        refresh: steps between two refreshes of the coordinates.
        turn: refreshes after which `Rotated` families take the coordinates for their own; None: never.
        gram_beta: of the averages of GGᵀ.
        options: what else `defaults` says of this optimizer: a fit is resumed by the same alone.
    """

    #: True once iterates are averaged: `Rotated` families then keep their coordinates
    settled = False

    def __init__(
        self, posterior: "Posterior", groups: list[dict[str, Any]], rest_lr: float, means: Sequence[Mean],
        refresh: int, turn: int | None, gram_beta: float, **options: Any,
    ):  # fmt: skip
        check_integer("refresh", refresh)
        check_integer("turn", turn, optional=True)
        check_fraction("gram_beta", gram_beta)
        own = [parameter for group in groups for parameter in group["params"]]
        super().__init__([*groups, *adam_groups(posterior, rest_lr, without=own)], lr=groups[0]["lr"])
        self.defaults |= {"rest_lr": rest_lr, "refresh": refresh, "turn": turn, "gram_beta": gram_beta, **options}
        self.own = own
        self.coordinates = {mean.parameter: Coordinates(mean.space) for mean in means}
        self.turns = {mean.parameter: mean.turn for mean in means if mean.turn is not None}
        self.refresh, self.turn, self.gram_weight = refresh, turn, 1 - gram_beta

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make one step, as any torch optimizer does."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        gradients = [parameter.grad for parameter in self.own]
        self._move()
        for parameter in self.own:
            parameter.grad = None  # Adam moves the rest
        super().step()
        for parameter, gradient in zip(self.own, gradients, strict=True):
            parameter.grad = gradient
        self._refresh()
        return loss

    def _move(self) -> None:
        """Move the parameters of the first groups."""
        raise NotImplementedError

    def _refreshed(self, mean: Tensor, changes: Mapping[str, Tensor]) -> None:
        """Express what the state says in new coordinates."""

    def _given(self, mean: Tensor) -> None:
        """Express what the state says in the coordinates that a family is about to take."""

    def _refresh(self) -> None:
        for mean, coordinates in self.coordinates.items():
            state = self.state[mean]
            if mean.grad is None:
                continue
            made = int(state["step"])  # on the CPU: nothing waits
            if made % self.refresh == 0:
                self._refreshed(mean, coordinates.refresh(state, first=made == self.refresh))
            turn = self.turns.get(mean)
            if turn is not None and self.turn and not self.settled and made % (self.refresh * self.turn) == 0:
                self._given(mean)
                coordinates.give_to(turn, state)
