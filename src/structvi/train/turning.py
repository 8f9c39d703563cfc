"""Kronecker coordinates of means, kept beside Adam: eigenvectors of E GGᵀ and E GᵀG, refreshed, given to families."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..families.forms import Factor
from ..families.means import Mean
from .adam import Adam
from .kronecker import Alike, alike, along, by_size


class TurningAdam(Adam):
    """Adam for all but the means, whose coordinates it keeps: for each axis of each shape of tensors the average of
    second moments and the basis, [n, s, s] for n tensors, in `state`.

    Args:
        parameters: what is moved.
        lr: of all that Adam moves.
        factors: those among the parameters that are low-rank factors.
        means: those whose coordinates are kept.
        refresh: steps between two refreshes of the coordinates.
        turn: every so many refreshes families that can take the coordinates for their own do; None: never.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        lr: float,
        factors: Sequence[Factor],
        means: Sequence[Mean],
        refresh: int,
        turn: int | None,
    ):
        super().__init__(parameters, lr, factors)
        self.means: dict[Tensor, list[Alike]] = {mean.parameter: alike(mean.tensors) for mean in means}
        #: families that can take the coordinates of their means
        self.turns = {mean.parameter: mean.turn for mean in means if mean.turn is not None}
        self.refresh, self.turn = refresh, turn

    def move_apart(self, parameters: Sequence[Tensor], **settings: Any) -> None:
        """These are no longer Adam's; their group is the first, whose rate a history tells."""
        own = {id(parameter) for parameter in parameters}
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in own]
        self.param_groups = [group for group in self.param_groups if group["params"]]
        self.add_param_group({"params": list(parameters), **settings})
        self.param_groups.insert(0, self.param_groups.pop())

    def coordinates(self, parameter: Tensor) -> dict[str, Any]:
        """What is kept of the coordinates of a mean, at its start."""
        own: dict[str, Any] = {"made": 0}  # as `step`, known to the host
        for group in self.means[parameter]:
            n = len(group.starts)
            for axis in group.axes:
                eye = torch.eye(axis.size, dtype=parameter.dtype, device=parameter.device)
                own[f"gram{axis.name}"] = torch.zeros_like(eye).repeat(n, 1, 1)
                own[f"basis{axis.name}"] = eye.repeat(n, 1, 1)
        return own

    def basis(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        return {axis.name: state[f"basis{axis.name}"] for group in self.means[parameter] for axis in group.axes}

    @staticmethod
    def average_grams(state: Mapping[str, Tensor], groups: Sequence[Alike], gradient: Tensor, weight: Tensor) -> None:
        for group in groups:
            G = group.of(gradient)
            for axis in group.axes:
                unfolded = along(G, axis.index)
                state[f"gram{axis.name}"].lerp_(unfolded @ unfolded.mT, weight)

    @torch.no_grad()
    def after_step(self) -> None:
        """After a step that was made, captured or not: the coordinates are refreshed where it is time, in place."""
        for parameter in self.means:
            if parameter not in self.state:
                continue
            state = self.state[parameter]
            state["made"] += 1
            if state["made"] % self.refresh == 0:
                self._refresh(parameter, first=state["made"] == self.refresh)
            if self.turn and not self.settled and state["made"] % (self.refresh * self.turn) == 0:
                self._turn(parameter)

    def _refresh(self, parameter: Tensor, first: bool) -> None:
        """The basis one step nearer to the eigenvectors."""
        state, basis = self.state[parameter], self.basis(parameter)
        new = by_size({name: state[f"gram{name}"] for name in basis}, basis, first)
        self.refreshed(parameter, {name: basis[name].mT @ Q for name, Q in new.items()})
        for name, Q in new.items():
            basis[name].copy_(Q)

    def refreshed(self, parameter: Tensor, change: Mapping[str, Tensor]) -> None:
        """Before a basis changes by these matrices: what is known in it follows."""

    def _turn(self, parameter: Tensor) -> None:
        """The family's coordinates become these: its mean, and what is known in them, stay what they are."""
        turn, state = self.turns.get(parameter), self.state[parameter]
        if turn is None:
            return
        self.family_turns(parameter)
        change: dict[str, Tensor] = {}
        for group in self.means[parameter]:
            for axis in group.axes:
                Q, moments = state[f"basis{axis.name}"], state[f"gram{axis.name}"]
                change |= dict(zip(axis.members, Q, strict=True))
                moments.copy_(Q.mT @ moments @ Q)
        turn(change)
        for Q in self.basis(parameter).values():
            Q.copy_(torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device).expand_as(Q))

    def family_turns(self, parameter: Tensor) -> None:
        """Before a family takes the coordinates for its own: what is known in its present ones follows."""
