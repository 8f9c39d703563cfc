"""Natural-gradient steps of the scales (variational online Newton), beside SOAP's of the mean, to compare with Adam's.

With L = −(E log lik − λ KL)/N and q = N(m, diag(s²)), E ∂²/∂θ² of −(log lik + λ log prior)/N is (∂L/∂log s + λ/N)/s²;
the precision's natural-gradient step of rate ρ is towards N/λ times that. Kept positive as IVON keeps it (Lin, Schmidt
and Khan 2020) it is

    1/s² ← (1 + u + u²/2)/s²,   u = ρ (N/λ) ∂L/∂log s,   or   log s ← log s − ½ log(1 + u + u²/2)

The gradient is that of a step of `bayes.fit`, whatever its estimator: both ways have one objective and the same draws.
"""

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from structvi import Family, Soap
from structvi.families.means import means_of
from structvi.training.adam import Thin
from structvi.training.soap import SoapAdam


class NewtonScales(SoapAdam):
    """`Soap`, with its `scale_lr` the rate ρ of the scales' natural-gradient steps.

    Args:
        parameters: of the posterior.
        recipe: rates and averages.
        family: a normal without a factor, also rotated.
        nats: N/λ.

    Example:
        >>> import structvi as vi
        >>> q = vi.MeanField().bind(vi.Parameters({"w": torch.zeros(2)}))
        >>> optimizer = NewtonScales(list(q.parameters()), Soap(scale_lr=0.5), q, nats=2.0)
        >>> before = q.log_scale.detach().clone()
        >>> q.log_scale.grad = torch.tensor([1.0, 0.0])
        >>> optimizer.step()
        >>> (q.log_scale.detach() - before)  # −½ log(1 + 1 + ½)
        tensor([-0.4581,  0.0000])
    """

    def __init__(self, parameters: Sequence[Tensor], recipe: Soap, family: Family, nats: float):
        super().__init__(parameters, recipe, (), means_of(family))
        self.nats = nats
        scales = [p for name, p in family.named_parameters() if name.endswith("log_scale")]
        self.scales = [p for p in parameters if any(p is scale for scale in scales)]

    @torch.no_grad()
    def step(
        self,
        closure=None,
        *,
        thin: Thin = MappingProxyType({}),
        coefficient: Tensor | float = 1.0,
        make: Tensor | None = None,
    ):
        gradients = {scale: scale.grad for scale in self.scales if scale.grad is not None}
        for scale in gradients:
            scale.grad = None  # not Adam's
        loss = super().step(closure, thin=thin, coefficient=coefficient, make=make)
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        for scale, gradient in gradients.items():
            u = gradient * (coefficient * groups[scale]["lr"] * self.nats)
            change = 0.5 * (u + 0.5 * u.square()).log1p()
            scale.sub_(change if make is None else torch.where(make > 0, change, 0.0))
            scale.grad = gradient
        return loss
