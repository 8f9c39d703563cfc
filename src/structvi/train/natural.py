"""Natural-gradient steps (variational online Newton) of means and scales of normals, plain Adam for all else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..families.family import Family
from ..families.forms import Factor, MeanAndScale
from ..families.means import Mean, means_of
from ..util.checks import check_integer, check_positive
from .adam import DEFAULT_LR, Thin
from .kronecker import turned
from .turning import TurningAdam


@dataclass(frozen=True)
class NaturalGradient:
    """Means and scales of normals without a factor move by natural-gradient steps: `fit(optimizer=NaturalGradient())`.

    With L = −(E log lik − λ KL)/N, which a step descends, q = N(m, diag(s²)) moves by

        m ← m − lr · s z,   z = (N/λ) s g cut to ±radius,   g the average of ∂L/∂m
        1/s² ← (1 + u + u²/2)/s²,   u = scale_lr · (N/λ) ∂L/∂log s

    Both are steps along the inverse Fisher information of q: near the optimum (N/λ) s² is the inverse of the curvature.
    u²/2 keeps variances positive (Lin, Schmidt and Khan 2020). It is the rule of variational online Newton (Khan et al.
    2018) with the gradients of the step's own estimator, and changes the way to the optimum, not the optimum.

    A `Rotated` family takes the eigenvectors of E GGᵀ and E GᵀG of its gradients for its coordinates, as with `Soap`,
    until iterates are averaged. In deep networks at λ = 1 it is for `Rotated(MeanField())`, in whose coordinates the
    curvature is nearly diagonal; elsewhere `Soap` is the faster one (docs/from_scratch.md).

    Args:
        lr: the highest rate of the means; 1 is a whole step.
        scale_lr: of the scales.
        beta: of the average of the means' gradients.
        radius: how many of its standard deviations a mean may move in a whole step: before scales have found their
            size, steps are too long without it.
        rest_lr: of all else, noise and learned priors: Adam's.
        refresh, turn, gram_beta: of the coordinates of rotated families, as in `Soap`.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField())
        >>> bayes.fit(loader, epochs=2, optimizer=NaturalGradient(lr=0.2), progress=False).steps
        8
    """

    lr: float = 0.3
    scale_lr: float = 0.1
    beta: float = 0.9
    radius: float = 1.0
    rest_lr: float = DEFAULT_LR
    refresh: int = 10
    turn: int | None = 1
    gram_beta: float = 0.95

    def __post_init__(self) -> None:
        for name in ("lr", "scale_lr", "radius", "rest_lr"):
            check_positive(getattr(self, name), name)
        check_integer("refresh", self.refresh)
        if self.turn is not None:
            check_integer("turn", self.turn)
        for name in ("beta", "gram_beta"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be inside [0, 1), got {getattr(self, name)!r}")

    def make(
        self, parameters: Sequence[Tensor], factors: Sequence[Factor], family: Family, nats: float
    ) -> "NaturalAdam":
        """The optimizer of these parameters; `nats` is N/λ."""
        pairs = [own for part in family.families() if (own := part.mean_and_scale()) is not None]
        if not pairs:
            raise TypeError(
                "optimizer=NaturalGradient() is for normals without a factor, MeanField() and what is made of such: "
                "this family has none. Leave it out, or take Soap()"
            )
        own = {id(pair.mean) for pair in pairs}
        means = [mean for mean in means_of(family) if mean.turn is not None and id(mean.parameter) in own]
        return NaturalAdam(parameters, self, factors, pairs, means, nats)


class NaturalAdam(TurningAdam):
    """The optimizer of `NaturalGradient`: see there.

    Args:
        parameters: what is moved.
        recipe: rates and averages.
        factors: those among the parameters that are low-rank factors.
        pairs: means and log scales, of which both are among the parameters.
        means: those whose coordinates are turned.
        nats: N/λ.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        recipe: NaturalGradient,
        factors: Sequence[Factor],
        pairs: Sequence[MeanAndScale],
        means: Sequence[Mean],
        nats: float,
    ):
        super().__init__(parameters, recipe.rest_lr, factors, means, recipe.refresh, recipe.turn)
        self.recipe, self.pairs, self.nats = recipe, pairs, nats
        self.move_apart([pair.log_scale for pair in pairs], lr=recipe.scale_lr)
        self.move_apart([pair.mean for pair in pairs], lr=recipe.lr)

    def _step(self, thin: Thin, coefficient: Tensor | float, make: Tensor | None) -> None:
        # before anything is moved: where there is no memory for the averages, nothing has changed
        for mean, _ in self.pairs:
            if mean.grad is not None and not self.state[mean]:
                self.state[mean] |= self._start(mean)
        for mean, log_scale in self.pairs:
            self._move(mean, log_scale, coefficient, make)
            mean.grad = log_scale.grad = None  # they have been taken: what is left is Adam's
        super()._step(thin, coefficient, make)

    def _start(self, mean: Tensor) -> dict[str, Any]:
        step = torch.zeros((), dtype=torch.float32, device=mean.device)
        own = {"step": step, "exp_avg": torch.zeros_like(mean)}
        return own | self.coordinates(mean) if mean in self.means else own

    def _move(self, mean: Tensor, log_scale: Tensor, coefficient: Tensor | float, make: Tensor | None) -> None:
        """One step of a normal, of which the host waits for nothing."""
        like = {"dtype": mean.dtype, "device": mean.device}
        made = torch.ones((), **like) if make is None else make.to(**like)
        lr, scale_lr, clip = (
            x.to(**like) if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float32).to(**like)
            for x in (self.param_groups[0]["lr"], self.param_groups[1]["lr"], coefficient)
        )
        # a step that is left out has no gradient, and no weight in the averages
        slope, spread = (
            None if x.grad is None else torch.where(made > 0, x.grad * clip, 0.0) for x in (mean, log_scale)
        )
        if slope is not None:
            state, recipe = self.state[mean], self.recipe
            if mean in self.means:
                self.average_grams(state, self.means[mean], slope, made * (1 - recipe.gram_beta))
            state["step"] += made.to(state["step"].dtype)
            average = state["exp_avg"].lerp_(slope, made * (1 - recipe.beta))
            unbiased = average / (1 - recipe.beta ** state["step"].to(mean.dtype)).clamp_min(1e-12)
            scale = log_scale.exp()
            z = (self.nats * scale * unbiased).clamp_(-recipe.radius, recipe.radius)
            mean.sub_(scale * z * (lr * made))
        if spread is not None:
            u = spread * (scale_lr * self.nats)
            log_scale.sub_(0.5 * (u + 0.5 * u.square()).log1p())

    def family_turns(self, parameter: Tensor) -> None:
        """The average of the gradients is turned with the family."""
        average = self.state[parameter]["exp_avg"]
        average.copy_(turned(average, self.means[parameter], self.basis(parameter), back=True))
