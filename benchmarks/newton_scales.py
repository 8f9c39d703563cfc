"""Natural-gradient steps (variational online Newton) of scales, and of means, to compare with Adam's and SOAP's.

With L = −(E log lik − λ KL)/N and q = N(m, diag(s²)), E ∂²/∂θ² of −(log lik + λ log prior)/N is (∂L/∂log s + λ/N)/s²;
the precision's natural-gradient step of rate ρ is towards N/λ times that. Kept positive as IVON keeps it (Lin, Schmidt
and Khan 2020) it is

    1/s² ← (1 + u + u²/2)/s²,   u = ρ (N/λ) ∂L/∂log s,   or   log s ← log s − ½ log(1 + u + u²/2)

and the mean's, of rate α with the average g of its gradients, m ← m − α (N/λ) s² g. The gradients are those of a step
of `bayes.fit`, whatever its estimator: all ways have one objective and the same draws.
"""

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from structvi import Family, Soap
from structvi.families.means import means_of
from structvi.training.adam import Thin
from structvi.training.kronecker import turned
from structvi.training.soap import SoapAdam


class NewtonScales(SoapAdam):
    """`Soap`, with its `scale_lr` the rate ρ of the scales' natural-gradient steps.

    Args:
        parameters: of the posterior.
        recipe: rates and averages.
        family: a normal without a factor, also rotated.
        nats: N/λ.
        means: their steps too, with `lr` as α; else SOAP's.

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

    def __init__(self, parameters: Sequence[Tensor], recipe: Soap, family: Family, nats: float, means: bool = False):
        super().__init__(parameters, recipe, (), means_of(family))
        self.nats = nats
        named = dict(family.named_parameters())
        pairs = [
            (named[name.removesuffix("log_scale") + "mean"], scale)
            for name, scale in named.items()
            if name.endswith("log_scale")
        ]
        self.scales = [scale for _, scale in pairs]
        #: with the averages of their gradients, and how many there are
        self.moved = [(m, s, torch.zeros_like(m), torch.zeros_like(m[:1])) for m, s in pairs] if means else []

    @torch.no_grad()
    def step(
        self,
        closure=None,
        *,
        thin: Thin = MappingProxyType({}),
        coefficient: Tensor | float = 1.0,
        make: Tensor | None = None,
    ):
        own = [*self.scales, *(mean for mean, *_ in self.moved)]
        gradients = {p: p.grad for p in own if p.grad is not None}
        for parameter in gradients:
            parameter.grad = None  # not Adam's
        loss = super().step(closure, thin=thin, coefficient=coefficient, make=make)
        rates = {parameter: group["lr"] for group in self.param_groups for parameter in group["params"]}
        made = torch.ones(()) if make is None else make
        for mean, scale, average, count in self.moved:
            (beta, _), gradient = self.recipe.betas, gradients[mean] * coefficient
            if mean in self.turns:
                self._average_grams(self._moments(mean), self.means[mean], gradient, made * (1 - self.recipe.gram_beta))
            average.add_(torch.where(made > 0, (gradient - average) * (1 - beta), 0.0))
            count.add_(made)
            variance = (2 * scale).exp()
            mean.sub_(rates[mean] * self.nats * variance * average / (1 - beta**count).clamp_min(1e-12) * made)
        for scale in self.scales:
            u = gradients[scale] * (coefficient * rates[scale] * self.nats)
            change = 0.5 * (u + 0.5 * u.square()).log1p()
            scale.sub_(change if make is None else torch.where(make > 0, change, 0.0))
        return loss

    def _turn(self, parameter: Tensor) -> None:
        for mean, _, average, _ in self.moved:
            if mean is parameter:
                average.copy_(turned(average, self.means[mean], self._basis(mean), back=True))
        super()._turn(parameter)
