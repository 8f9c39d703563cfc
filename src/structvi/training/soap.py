"""Preconditioned means: Adam in Kronecker coordinates (SOAP) for the weights' means, plain Adam for all else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..basics.checks import check_integer, check_positive
from ..families.forms import Factor
from ..families.means import Mean
from .adam import DEFAULT_LR, Adam, Thin
from .kronecker import Alike, alike, along, by_size, turned


@dataclass(frozen=True)
class Soap:
    """Means move by Adam in the eigenbases of E GGᵀ and E GᵀG, everything else by plain Adam: `fit(optimizer=Soap())`.

    For each tensor's gradient G running averages of GGᵀ and GᵀG are kept (of a convolution for out, in and kernel; an
    axis above 2048, and tensors of one axis, stay as they are). With Q their eigenvectors the mean μ moves by

        μ ← μ − lr · Q [m / (√v + ε)],   m, v the averages of Qᵀg and of (Qᵀg)²

    which is SOAP (Vyas et al. 2024). It changes the way to the optimum and not the optimum: the family and what is
    maximised stay as they are. Q is refreshed every so many steps by one step of subspace iteration, outside of the
    captured step, and lives in checkpoints with all other moments.

    Args:
        lr: the highest learning rate of the means.
        scale_lr: of all else: log scales, noise, learned priors; factors as with the default optimizer.
        refresh: steps between two refreshes of the coordinates.
        turn: of `Rotated` families: every so many refreshes the family takes these coordinates for its own, until
            iterates are averaged; None: it keeps those it has.
        betas: of the averages m and v.
        gram_beta: of the averages of GGᵀ and GᵀG.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField())
        >>> bayes.fit(loader, epochs=2, optimizer=Soap(lr=0.01), progress=False).steps
        8
    """

    lr: float = 0.003
    scale_lr: float = DEFAULT_LR
    refresh: int = 10
    turn: int | None = 10
    betas: tuple[float, float] = (0.95, 0.95)
    gram_beta: float = 0.95

    def __post_init__(self) -> None:
        check_positive(self.lr, "lr")
        check_positive(self.scale_lr, "scale_lr")
        check_integer("refresh", self.refresh)
        if self.turn is not None:
            check_integer("turn", self.turn)
        for name, beta in (("betas", self.betas[0]), ("betas", self.betas[1]), ("gram_beta", self.gram_beta)):
            if not 0 <= beta < 1:
                raise ValueError(f"{name} must be inside [0, 1), got {beta!r}")

    def make(self, parameters: Sequence[Tensor], factors: Sequence[Factor], means: Sequence[Mean]) -> "SoapAdam":
        """The optimizer of these parameters."""
        if not means:
            raise TypeError(
                "optimizer=Soap() preconditions the means of the weights, and this family has none: it is for families "
                "with a mean, MAP, and those made of them, in one process or with whole copies in each. Leave it out"
            )
        return SoapAdam(parameters, self, factors, means)


class SoapAdam(Adam):
    """The optimizer of `Soap`: see there.

    The moments of a mean are those in its coordinates; beside them it has for each axis of each shape of tensors the
    average of second moments and the basis, [n, s, s] for n tensors.

    Args:
        parameters: what is moved.
        recipe: rates and averages.
        factors: those among the parameters that are low-rank factors.
        means: those that are preconditioned.
    """

    def __init__(
        self, parameters: Sequence[Tensor], recipe: Soap, factors: Sequence[Factor] = (), means: Sequence[Mean] = ()
    ):
        super().__init__(parameters, recipe.scale_lr, factors)
        self.recipe = recipe
        self.means: dict[Tensor, list[Alike]] = {mean.parameter: alike(mean.tensors) for mean in means}
        #: families that can take the coordinates of their means
        self.turns = {mean.parameter: mean.turn for mean in means if mean.turn is not None}
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if p not in self.means]
        self.param_groups = [group for group in self.param_groups if group["params"]]
        self.add_param_group({"params": list(self.means), "lr": recipe.lr, "betas": recipe.betas})
        self.param_groups.insert(0, self.param_groups.pop())  # the rate that a history tells is the means'

    plain = False

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        thin: Thin = MappingProxyType({}),
        coefficient: Tensor | float = 1.0,
        make: Tensor | None = None,
    ) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # before anything is moved: where there is no memory for the moments, nothing has changed
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            if parameter.grad is not None or parameter in thin:
                self._moments(parameter)
        for parameter in [p for p in self.means if p.grad is not None]:
            self._move(parameter, self.param_groups[0], coefficient, make)
            parameter.grad = None  # it has been taken: what is left is Adam's
        super().step(thin=thin, coefficient=coefficient, make=make)
        return loss

    def _moments(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state and parameter in self.means:
            own: dict[str, Any] = {"made": 0}  # as `step`, known to the host
            for group in self.means[parameter]:
                n = len(group.starts)
                for axis in group.axes:
                    eye = torch.eye(axis.size, dtype=parameter.dtype, device=parameter.device)
                    own[f"gram{axis.name}"] = torch.zeros_like(eye).repeat(n, 1, 1)
                    own[f"basis{axis.name}"] = eye.repeat(n, 1, 1)
            super()._moments(parameter)
            state |= own
            return state
        return super()._moments(parameter)

    def _basis(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        return {axis.name: state[f"basis{axis.name}"] for group in self.means[parameter] for axis in group.axes}

    def _move(self, parameter: Tensor, rates: dict, coefficient: Tensor | float, make: Tensor | None) -> None:
        """One step of a mean: as many kernels as there are shapes, and nothing that the host must wait for."""
        assert parameter.grad is not None
        state, groups, basis = self.state[parameter], self.means[parameter], self._basis(parameter)
        like = {"dtype": parameter.dtype, "device": parameter.device}
        made = torch.ones((), **like) if make is None else make.to(**like)
        lr, clip = (
            x.to(**like) if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float32).to(**like)
            for x in (rates["lr"], coefficient)
        )
        # a step that is left out has no gradient, and weights of zero in all averages
        gradient = torch.where(made > 0, parameter.grad * clip, 0.0)
        (beta1, beta2), beta3 = rates["betas"], self.recipe.gram_beta
        self._average_grams(state, groups, gradient, made * (1 - beta3))
        inside = turned(gradient, groups, basis, back=True)
        state["step"] += made.to(state["step"].dtype)
        first, second, steps = state["exp_avg"], state["exp_avg_sq"], state["step"].to(parameter.dtype)
        first.lerp_(inside, made * (1 - beta1))
        second.lerp_(inside.square(), made * (1 - beta2))
        unbiased = first / (1 - beta1**steps).clamp_min(1e-12)
        size = (second / (1 - beta2**steps).clamp_min(1e-12)).sqrt() + rates["eps"]
        parameter.sub_(turned(unbiased / size, groups, basis, back=False) * (lr * made))

    @staticmethod
    def _average_grams(state: dict[str, Tensor], groups: Sequence[Alike], gradient: Tensor, weight: Tensor) -> None:
        for group in groups:
            G = group.of(gradient)
            for axis in group.axes:
                unfolded = along(G, axis.index)
                state[f"gram{axis.name}"].lerp_(unfolded @ unfolded.mT, weight)

    # --------------------------------------------------------------------------------------------- the coordinates

    @torch.no_grad()
    def after_step(self) -> None:
        """After a step that was made, captured or not: the coordinates are refreshed where it is time, in place."""
        recipe = self.recipe
        for parameter in self.means:
            if parameter not in self.state:
                continue
            state = self.state[parameter]
            state["made"] += 1
            if state["made"] % recipe.refresh == 0:
                self._refresh(parameter, first=state["made"] == recipe.refresh)
            if recipe.turn and not self.settled and state["made"] % (recipe.refresh * recipe.turn) == 0:
                self._turn(parameter)

    def _refresh(self, parameter: Tensor, first: bool) -> None:
        """The basis one step nearer to the eigenvectors, the moments in it: m exactly, v by the squares."""
        state, groups, basis = self.state[parameter], self.means[parameter], self._basis(parameter)
        new = by_size({name: state[f"gram{name}"] for name in basis}, basis, first)
        change = {name: basis[name].mT @ Q for name, Q in new.items()}
        state["exp_avg"].copy_(turned(state["exp_avg"], groups, change, back=True))
        state["exp_avg_sq"].copy_(turned(state["exp_avg_sq"], groups, change, back=True, squared=True))
        for name, Q in new.items():
            basis[name].copy_(Q)

    def _turn(self, parameter: Tensor) -> None:
        """The family's coordinates become these: its mean, and what is known in them, stay what they are."""
        turn, state = self.turns.get(parameter), self.state[parameter]
        if turn is None:
            return
        change: dict[str, Tensor] = {}
        for group in self.means[parameter]:
            for axis in group.axes:
                Q, moments = state[f"basis{axis.name}"], state[f"gram{axis.name}"]
                change |= dict(zip(axis.members, Q, strict=True))
                moments.copy_(Q.mT @ moments @ Q)
        turn(change)
        for Q in self._basis(parameter).values():
            Q.copy_(torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device).expand_as(Q))
