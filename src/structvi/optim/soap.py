"""Preconditioned means: Adam in Kronecker coordinates (SOAP) for the weights' means, plain Adam for the rest."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..families.rotated import means_of
from ..util.checks import check_fraction, check_positive
from .adam import DEFAULT_LR
from .coordinates import CoordinateOptimizer

if TYPE_CHECKING:
    from ..posterior import Posterior


class Soap(CoordinateOptimizer):
    """Move means by Adam in the eigenbases of E GGᵀ and E GᵀG, and everything else by plain Adam.

    For each tensor's gradient G the optimizer keeps running averages of GGᵀ and GᵀG (for a convolution: out, in and
    kernel; axes above 2048 and vectors keep their coordinates). With their eigenvectors Q the mean μ moves by

        μ ← μ − lr · Q [m / (√v + ε)],   m, v the averages of Qᵀg and of (Qᵀg)²

    This is SOAP (Vyas et al. 2024). It changes the way to the optimum, and not the optimum. Every few steps Q moves by
    one step of subspace iteration. A `Rotated` family takes Q for its own coordinates, until iterates are averaged.
    The step runs outside of CUDA graphs.

    Args:
        posterior: from `variationalize`.
        lr: the highest learning rate of the means.
        scale_lr: the highest learning rate of log scales, noise and learned priors, by Adam.
        refresh: steps between two refreshes of the coordinates.
        turn: refreshes after which `Rotated` families take the coordinates; None: they never do.
        betas: of the averages m and v.
        gram_beta: of the averages of GGᵀ and GᵀG.

    Example:
        >>> import torch
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField())
        >>> bayes.fit(loader, epochs=2, optimizer=Soap(bayes, lr=0.01), progress=False).steps
        8
    """

    def __init__(
        self, posterior: "Posterior", lr: float = 0.003, scale_lr: float = DEFAULT_LR, *, refresh: int = 10,
        turn: int | None = 10, betas: tuple[float, float] = (0.95, 0.95), gram_beta: float = 0.95,
    ):  # fmt: skip
        check_positive(lr, "lr")
        check_positive(scale_lr, "scale_lr")
        for beta in betas:
            check_fraction("betas", beta)
        means = means_of(posterior.family)
        if not means:
            raise TypeError(
                "Soap preconditions the means of the weights, and this family has none: it is for families with a "
                "mean, MAP, and those made of them, whole in each process. Leave optimizer= out"
            )
        group = {"params": [mean.parameter for mean in means], "lr": lr, "betas": betas}
        super().__init__(posterior, [group], scale_lr, means, refresh, turn, gram_beta, betas=betas)

    def _move(self) -> None:
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        for mean, coordinates in self.coordinates.items():
            if mean.grad is None:
                continue
            state = self.state[mean]
            if not state:
                zeros = {key: mean.new_zeros(mean.shape) for key in ("exp_avg", "exp_avg_sq")}
                state |= {"step": torch.zeros(()), **zeros, **coordinates.initial(mean)}
            coordinates.observe(state, mean.grad, self.gram_weight)
            inside = coordinates.turned(mean.grad, state, back=True)
            state["step"] += 1
            made = int(state["step"])
            first = state["exp_avg"].lerp_(inside, 1 - beta1) / (1 - beta1**made)
            second = state["exp_avg_sq"].lerp_(inside.square(), 1 - beta2) / (1 - beta2**made)
            change = first / (second.sqrt() + group["eps"])
            mean.sub_(coordinates.turned(change, state, back=False), alpha=group["lr"])

    def _refreshed(self, mean: Tensor, changes: Mapping[str, Tensor]) -> None:
        state, coordinates = self.state[mean], self.coordinates[mean]
        state["exp_avg"].copy_(coordinates.turned(state["exp_avg"], changes, back=True))
        state["exp_avg_sq"].copy_(coordinates.turned(state["exp_avg_sq"], changes, back=True, squared=True))
