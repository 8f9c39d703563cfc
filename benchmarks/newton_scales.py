"""Natural-gradient steps of the scales beside SOAP's of the mean, to compare with Adam's: see `vi.NaturalGradient`.

The gradients are those of a step of `bayes.fit`: both ways have one objective and the same draws.
"""

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from structvi import Family, Soap
from structvi.training.adam import Thin
from structvi.training.soap import SoapAdam


class NewtonScales(SoapAdam):
    """`Soap`, with its `scale_lr` the rate ρ of log s ← log s − ½ log(1 + u + u²/2), u = ρ (N/λ) ∂L/∂log s.

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
        super().__init__(parameters, recipe, family, nats)
        self.log_scales = [scale for name, scale in family.named_parameters() if name.endswith("log_scale")]

    @torch.no_grad()
    def step(
        self,
        closure=None,
        *,
        thin: Thin = MappingProxyType({}),
        coefficient: Tensor | float = 1.0,
        make: Tensor | None = None,
    ):
        gradients = {scale: scale.grad for scale in self.log_scales if scale.grad is not None}
        for scale in gradients:
            scale.grad = None  # not Adam's
        loss = super().step(closure, thin=thin, coefficient=coefficient, make=make)
        rates = {parameter: group["lr"] for group in self.param_groups for parameter in group["params"]}
        for scale, gradient in gradients.items():
            u = gradient * (coefficient * rates[scale] * self.nats)
            change = 0.5 * (u + 0.5 * u.square()).log1p()
            scale.sub_(change if make is None else torch.where(make > 0, change, 0.0))
        return loss
