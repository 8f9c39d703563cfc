"""Natural-gradient steps (variational online Newton) for means and scales of normals, plain Adam for the rest."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..families.mean_field import diagonal_normals
from ..families.rotated import means_of
from ..util.checks import check_fraction, check_positive
from .adam import DEFAULT_LR
from .coordinates import CoordinateOptimizer

if TYPE_CHECKING:
    from ..posterior import Posterior


class NaturalGradient(CoordinateOptimizer):
    """Move means and scales of normals without a factor by natural-gradient steps, everything else by plain Adam.

    With L = −elbo/N, q = N(m, diag(s²)) moves by

        m ← m − lr · s z,   z = N s g cut to ±radius,   g the average of ∂L/∂m
        1/s² ← (1 + u + u²/2)/s²,   u = scale_lr · N ∂L/∂log s

    Both are steps along the inverse Fisher information of q; u²/2 keeps variances positive (Lin, Schmidt and Khan
    2020). It is the rule of variational online Newton (Khan et al. 2018) with the gradients of the step's own
    estimator. It changes the way to the optimum, and not the optimum. In a fit with `kl_weight=λ` a rate of 1/λ is a
    whole step.

    A `Rotated` family takes the eigenvectors of E GGᵀ and E GᵀG of its gradients for its coordinates, as with `Soap`,
    until iterates are averaged. The optimizer is for `Rotated(MeanField())` in deep networks at λ = 1, where its
    coordinates make the curvature nearly diagonal; elsewhere `Soap` is faster.

    Args:
        posterior: from `variationalize`.
        lr: the highest rate of the means; 1 is a whole step.
        scale_lr: the highest rate of the scales.
        beta: of the average of the means' gradients.
        radius: standard deviations that a mean may move in a whole step: without a bound steps are too long before
            scales have found their size.
        rest_lr: Adam's learning rate for noise and learned priors.
        refresh, turn, gram_beta: of the coordinates of `Rotated` families, as in `Soap`.

    Example:
        >>> import torch
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField())
        >>> bayes.fit(loader, epochs=2, optimizer=NaturalGradient(bayes, lr=0.2), progress=False).steps
        8
    """

    def __init__(
        self, posterior: "Posterior", lr: float = 0.3, scale_lr: float = 0.1, *, beta: float = 0.9, radius: float = 1.0,
        rest_lr: float = DEFAULT_LR, refresh: int = 10, turn: int | None = 1, gram_beta: float = 0.95,
    ):  # fmt: skip
        for name, value in (("lr", lr), ("scale_lr", scale_lr), ("radius", radius), ("rest_lr", rest_lr)):
            check_positive(value, name)
        check_fraction("beta", beta)
        family = posterior.family
        #: means and log scales [P] of each normal
        self.normals = diagonal_normals(family)
        if not self.normals:
            raise TypeError(
                "NaturalGradient is for normals without a factor, MeanField() and what is made of such, and this "
                "family has none. Leave optimizer= out, or take Soap"
            )
        own = {id(mean) for mean, _ in self.normals}
        means = [mean for mean in means_of(family) if mean.turn is not None and id(mean.parameter) in own]
        groups = [
            {"params": [mean for mean, _ in self.normals], "lr": lr},
            {"params": [log_scale for _, log_scale in self.normals], "lr": scale_lr},
        ]
        options = {"scale_lr": scale_lr, "beta": beta, "radius": radius}
        super().__init__(posterior, groups, rest_lr, means, refresh, turn, gram_beta, **options)
        self.beta, self.radius, self.model = beta, radius, posterior.model

    def _move(self) -> None:
        lr, scale_lr = (group["lr"] for group in self.param_groups[:2])
        for mean, log_scale in self.normals:
            # both gradients are of the same point: the scale moves last
            if mean.grad is not None:
                mean.sub_(log_scale.exp() * self._direction(mean, log_scale.exp()), alpha=lr)
            if log_scale.grad is not None:
                u = log_scale.grad * (scale_lr * self.model.num_data)
                log_scale.sub_((u + 0.5 * u.square()).log1p(), alpha=0.5)

    def _direction(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Return z: how far the mean moves in a whole step, in standard deviations."""
        assert mean.grad is not None
        state, coordinates = self.state[mean], self.coordinates.get(mean)
        if not state:
            state |= {"step": torch.zeros(()), "exp_avg": mean.new_zeros(mean.shape)}
            state |= {} if coordinates is None else coordinates.initial(mean)
        if coordinates is not None:
            coordinates.observe(state, mean.grad, self.gram_weight)
        state["step"] += 1
        average = state["exp_avg"].lerp_(mean.grad, 1 - self.beta) / (1 - self.beta ** int(state["step"]))
        return (self.model.num_data * scale * average).clamp_(-self.radius, self.radius)

    def _given(self, mean: Tensor) -> None:
        state = self.state[mean]
        state["exp_avg"].copy_(self.coordinates[mean].turned(state["exp_avg"], state, back=True))
