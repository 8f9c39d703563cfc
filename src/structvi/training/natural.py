"""Natural-gradient steps (variational online Newton) of means and scales of normals, plain Adam for all else."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ..basics.checks import check_positive
from ..families.family import Family, MeanAndScale
from ..families.forms import Factor
from .adam import DEFAULT_LR, Adam, Thin


@dataclass(frozen=True)
class NaturalGradient:
    """Means and scales of normals without a factor move by natural-gradient steps: `fit(optimizer=NaturalGradient())`.

    With L = −(E log lik − λ KL)/N, which a step descends, q = N(m, diag(s²)) moves by

        m ← m − lr · (N/λ) s² g,   g the average of ∂L/∂m
        1/s² ← (1 + u + u²/2)/s²,   u = scale_lr · (N/λ) ∂L/∂log s

    Both are steps along the inverse Fisher information of q: near the optimum (N/λ) s² is the inverse of the curvature.
    u²/2 keeps variances positive (Lin, Schmidt and Khan 2020). It is the rule of variational online Newton (Khan et al.
    2018) with the gradients of the step's own estimator, and changes the way to the optimum, not the optimum.

    Where λ is small, scales that start wide make the first steps of the mean large: start them near the width that
    they end with, `MeanField(initial_scale=0.02)`.

    Args:
        lr: the highest rate of the means; 1 is a whole step.
        scale_lr: of the scales.
        beta: of the average of the means' gradients.
        rest_lr: of all else, noise and learned priors: Adam's.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField())
        >>> bayes.fit(loader, epochs=2, optimizer=NaturalGradient(lr=0.2), progress=False).steps
        8
    """

    lr: float = 0.1
    scale_lr: float = 0.1
    beta: float = 0.9
    rest_lr: float = DEFAULT_LR

    def __post_init__(self) -> None:
        for name in ("lr", "scale_lr", "rest_lr"):
            check_positive(getattr(self, name), name)
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta must be inside [0, 1), got {self.beta!r}")

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
        return NaturalAdam(parameters, self, factors, pairs, nats)


class NaturalAdam(Adam):
    """The optimizer of `NaturalGradient`: see there.

    Args:
        parameters: what is moved.
        recipe: rates and averages.
        factors: those among the parameters that are low-rank factors.
        pairs: means and log scales, of which both are among the parameters.
        nats: N/λ.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        recipe: NaturalGradient,
        factors: Sequence[Factor],
        pairs: Sequence[MeanAndScale],
        nats: float,
    ):
        super().__init__(parameters, recipe.rest_lr, factors)
        self.recipe, self.pairs, self.nats = recipe, pairs, nats
        own = {id(parameter) for pair in pairs for parameter in pair}
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in own]
        self.param_groups = [group for group in self.param_groups if group["params"]]
        for rate, index in ((recipe.scale_lr, 1), (recipe.lr, 0)):
            self.add_param_group({"params": [pair[index] for pair in pairs], "lr": rate})
            self.param_groups.insert(0, self.param_groups.pop())  # the rate that a history tells is the means'

    @torch.no_grad()
    def step(
        self,
        closure=None,
        *,
        thin: Thin = MappingProxyType({}),
        coefficient: Tensor | float = 1.0,
        make: Tensor | None = None,
    ):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # before anything is moved: where there is no memory for the averages, nothing has changed
        for mean, _ in self.pairs:
            if mean.grad is not None and not self.state[mean]:
                step = torch.zeros((), dtype=torch.float32, device=mean.device)
                self.state[mean] |= {"step": step, "exp_avg": torch.zeros_like(mean)}
        for mean, log_scale in self.pairs:
            self._move(mean, log_scale, coefficient, make)
            mean.grad = log_scale.grad = None  # they have been taken: what is left is Adam's
        super().step(thin=thin, coefficient=coefficient, make=make)
        return loss

    def _move(self, mean: Tensor, log_scale: Tensor, coefficient: Tensor | float, make: Tensor | None) -> None:
        """One step of a normal, of which the host waits for nothing."""
        like = {"dtype": mean.dtype, "device": mean.device}
        made = torch.ones((), **like) if make is None else make.to(**like)
        lr, scale_lr, clip = (
            x.to(**like) if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float32).to(**like)
            for x in (self.param_groups[0]["lr"], self.param_groups[1]["lr"], coefficient)
        )
        # a step that is left out has no gradient, and no weight in the average
        slope, spread = (
            None if x.grad is None else torch.where(made > 0, x.grad * clip, 0.0) for x in (mean, log_scale)
        )
        if slope is not None:
            state, beta = self.state[mean], self.recipe.beta
            state["step"] += made.to(state["step"].dtype)
            average = state["exp_avg"].lerp_(slope, made * (1 - beta))
            unbiased = average / (1 - beta ** state["step"].to(mean.dtype)).clamp_min(1e-12)
            mean.sub_((2 * log_scale).exp() * unbiased * (lr * made * self.nats))
        if spread is not None:
            u = spread * (scale_lr * self.nats)
            log_scale.sub_(0.5 * (u + 0.5 * u.square()).log1p())
