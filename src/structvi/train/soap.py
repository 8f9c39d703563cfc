"""Preconditioned means: Adam in Kronecker coordinates (SOAP) for the weights' means, plain Adam for all else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..families.family import Family
from ..families.means import means_of
from ..util.checks import check_integer, check_positive
from .adam import DEFAULT_LR, Thin
from .kronecker import spread_precision, turned
from .turning import TurningAdam


@dataclass(frozen=True)
class Soap:
    """Means move by Adam in the eigenbases of E GGᵀ and E GᵀG, everything else by plain Adam: `fit(optimizer=Soap())`.

    For each tensor's gradient G running averages of GGᵀ and GᵀG are kept (of a convolution for out, in and kernel; an
    axis above 2048, and tensors of one axis, stay as they are). With Q their eigenvectors the mean μ moves by

        μ ← μ − lr · Q [m / (√v + ε)],   m, v the averages of Qᵀg and of (Qᵀg)²

    which is SOAP (Vyas et al. 2024). It changes the way to the optimum and not the optimum: the family and what is
    maximised stay as they are. Q is refreshed every so many steps by one step of subspace iteration, outside of the
    captured step, and lives in checkpoints with all other moments.

    With `natural=True` the means move by natural-gradient steps in these coordinates, L as in `NaturalGradient`:

        μ ← μ − lr · Q [s z],   z = (N/λ) s m cut to ±radius,   1/s² = κ v + δ

    The precision of the family's own scales is spread over the coordinates of a tensor as the squared gradients v are:
    δ is one over the mean of the family's variances there, and κ such that 1/s² has the mean of its precisions, which
    no rotation changes. It is for λ = 1 and networks of few layers; in deep ones a `Rotated` family with
    `NaturalGradient` is ahead of it (docs/from_scratch.md).

    Args:
        lr: the highest learning rate of the means.
        scale_lr: of all else: log scales, noise, learned priors; factors as with the default optimizer.
        refresh: steps between two refreshes of the coordinates.
        turn: of `Rotated` families: every so many refreshes the family takes these coordinates for its own, until
            iterates are averaged; None: it keeps those it has.
        betas: of the averages m and v.
        gram_beta: of the averages of GGᵀ and GᵀG.
        natural: natural-gradient steps; lr = 1 is then a whole one, and 0.05 to 0.1 a good start.
        radius: of these: how many standard deviations a coordinate may move in a whole step.

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
    natural: bool = False
    radius: float = 3.0

    def __post_init__(self) -> None:
        for name in ("lr", "scale_lr", "radius"):
            check_positive(getattr(self, name), name)
        check_integer("refresh", self.refresh)
        if self.turn is not None:
            check_integer("turn", self.turn)
        for name, beta in (("betas", self.betas[0]), ("betas", self.betas[1]), ("gram_beta", self.gram_beta)):
            if not 0 <= beta < 1:
                raise ValueError(f"{name} must be inside [0, 1), got {beta!r}")

    def make(self, parameters: Sequence[Tensor], family: Family, nats: float) -> "SoapAdam":
        """The optimizer of these parameters; `nats` is N/λ."""
        return SoapAdam(parameters, self, family, nats)


class SoapAdam(TurningAdam):
    """The optimizer of `Soap`: see there. The moments of a mean are those in its coordinates.

    Args:
        parameters: what is moved.
        recipe: rates and averages.
        family: whose means are preconditioned.
        nats: N/λ.
    """

    def __init__(self, parameters: Sequence[Tensor], recipe: Soap, family: Family, nats: float):
        means = means_of(family)
        if not means:
            raise TypeError(
                "optimizer=Soap() preconditions the means of the weights, and this family has none: it is for families "
                "with a mean, MAP, and those made of them, in one process or with whole copies in each. Leave it out"
            )
        super().__init__(parameters, recipe.scale_lr, family.factors(), means, recipe.refresh, recipe.turn)
        self.recipe, self.nats = recipe, nats
        forms = [form for part in family.families() if recipe.natural and (form := part.low_rank_form()) is not None]
        #: the log scales beside each mean, of natural gradients
        self.scales = {form.mean: form.log_scale for form in forms}
        if recipe.natural and any(mean.parameter not in self.scales for mean in means):
            raise TypeError(
                "Soap(natural=True) takes the scales of normals for its steps, and this family has a mean without any: "
                "leave natural out"
            )
        self.move_apart(list(self.means), lr=recipe.lr, betas=recipe.betas)

    def _step(self, thin: Thin, coefficient: Tensor | float, make: Tensor | None) -> None:
        # before anything is moved: where there is no memory for the moments, nothing has changed
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            if parameter.grad is not None or parameter in thin:
                self._moments(parameter)
        for parameter in [p for p in self.means if p.grad is not None]:
            self._move(parameter, self.param_groups[0], coefficient, make)
            parameter.grad = None  # it has been taken: what is left is Adam's
        super()._step(thin, coefficient, make)

    def _moments(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state and parameter in self.means:
            own = self.coordinates(parameter)
            super()._moments(parameter)
            state |= own
            return state
        return super()._moments(parameter)

    def _move(self, parameter: Tensor, rates: dict, coefficient: Tensor | float, make: Tensor | None) -> None:
        """One step of a mean: as many kernels as there are shapes, and nothing that the host must wait for."""
        assert parameter.grad is not None
        state, groups, basis = self.state[parameter], self.means[parameter], self.basis(parameter)
        like = {"dtype": parameter.dtype, "device": parameter.device}
        made = torch.ones((), **like) if make is None else make.to(**like)
        lr, clip = (
            x.to(**like) if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float32).to(**like)
            for x in (rates["lr"], coefficient)
        )
        # a step that is left out has no gradient, and weights of zero in all averages
        gradient = torch.where(made > 0, parameter.grad * clip, 0.0)
        (beta1, beta2), beta3 = rates["betas"], self.recipe.gram_beta
        self.average_grams(state, groups, gradient, made * (1 - beta3))
        inside = turned(gradient, groups, basis, back=True)
        state["step"] += made.to(state["step"].dtype)
        first, second, steps = state["exp_avg"], state["exp_avg_sq"], state["step"].to(parameter.dtype)
        first.lerp_(inside, made * (1 - beta1))
        second.lerp_(inside.square(), made * (1 - beta2))
        unbiased = first / (1 - beta1**steps).clamp_min(1e-12)
        squares = second / (1 - beta2**steps).clamp_min(1e-12)
        if self.recipe.natural:
            scale = spread_precision(self.scales[parameter].exp(), squares, groups).rsqrt()
            change = scale * (self.nats * scale * unbiased).clamp_(-self.recipe.radius, self.recipe.radius)
        else:
            change = unbiased / (squares.sqrt() + rates["eps"])
        parameter.sub_(turned(change, groups, basis, back=False) * (lr * made))

    def refreshed(self, parameter: Tensor, change: Mapping[str, Tensor]) -> None:
        """The moments into the new basis: m exactly, v by the squares."""
        state, groups = self.state[parameter], self.means[parameter]
        state["exp_avg"].copy_(turned(state["exp_avg"], groups, change, back=True))
        state["exp_avg_sq"].copy_(turned(state["exp_avg_sq"], groups, change, back=True, squared=True))
