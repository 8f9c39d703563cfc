"""Two posteriors of one model, side by side: ELBO, divergence, scales and what they predict."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical

from ..families.family import Family
from ..families.gaussian import Gaussian, kl
from ..objective import Estimate
from ..predict.predict import predict
from ..predict.predictive import Predictive
from ..train.batches import Batches
from ..train.comparing import elbo_over
from ..util.checks import check_seed

if TYPE_CHECKING:
    from ..posterior import Posterior

#: Points at which two densities of a number are compared.
GRID = 1025


@dataclass(frozen=True)
class Comparison:
    """How posterior b differs from posterior a. `print` tells it.

    Attributes:
        elbo: ELBO(b) − ELBO(a) on common draws and all data, with the standard error of the difference; nats.
        kl_ab, kl_ba: KL[a‖b] and KL[b‖a] in nats; None where one of them is not Gaussian.
        sd_ratio: tensor → geometric mean of b's standard deviations over a's.
        shift: tensor → root mean square of the difference of the means, in a's standard deviations.
        total_variation: between the predictives, averaged over the elements of the inputs' targets; from 0 to 1.
        agreement: how often both find the same label most probable; None for numbers.
    """

    elbo: Estimate
    kl_ab: float | None
    kl_ba: float | None
    sd_ratio: dict[str, float]
    shift: dict[str, float]
    total_variation: float | None = None
    agreement: float | None = None

    @property
    def verdict(self) -> str:
        value, error = self.elbo.value, self.elbo.standard_error
        if not self.elbo.bound:
            return "one of them has point masses: its ELBO is no bound, and the two cannot be ranked by it"
        if abs(value) <= 2 * error:
            return f"the ELBO does not tell them apart ({value:.3g} ± {error:.2g} nats)"
        better, worse = ("b", "a") if value > 0 else ("a", "b")
        return f"{better} is nearer to the posterior than {worse}, by {abs(value):.4g} ± {error:.2g} nats"

    def __str__(self) -> str:
        lines = [self.verdict]
        if self.kl_ab is not None:
            lines.append(f"KL[a‖b] = {self.kl_ab:.4g} nats, KL[b‖a] = {self.kl_ba:.4g} nats")
        if self.total_variation is not None:
            lines.append(f"predictive total variation {self.total_variation:.3g}")
        if self.agreement is not None:
            lines.append(f"same label in {100 * self.agreement:.4g} % of cases")
        width = max(map(len, self.sd_ratio))
        lines.append(f"{'tensor':<{width}}{'sd b/a':>10}{'shift (sd)':>12}")
        lines += [f"{name:<{width}}{self.sd_ratio[name]:>10.3g}{self.shift[name]:>12.3g}" for name in self.sd_ratio]
        return "\n".join(lines)


def compare(
    a: "Posterior",
    b: "Posterior",
    loader: Iterable[Any],
    inputs: Any = None,
    *,
    groups: int = 256,
    draws: int = 256,
    seed: int = 0,
) -> Comparison:
    """Compare two posteriors over the same tensors.

    Args:
        a, b: posteriors of one model.
        loader: the data, for the ELBO.
        inputs: as `predict` takes them, for the predictives; None leaves them out.
        groups: of draws for the ELBO, common to both.
        draws: for the predictives.
        seed: of the draws.

    Example:
        >>> from structvi import MeanField, LowRankNormal, likelihoods, variationalize
        >>> net, batch = torch.nn.Linear(2, 1), (torch.randn(9, 2), torch.randn(9, 1))
        >>> a, b = (variationalize(net, likelihoods.Gaussian(1.0), q, num_data=9) for q in (MeanField(), MeanField()))
        >>> compare(a, b, [batch], batch[0]).verdict
        'the ELBO does not tell them apart (0 ± 0 nats)'
    """
    check_seed(seed)
    for one in (a, b):
        _check_posterior(one)
    if (a.space.names, a.space.shapes) != (b.space.names, b.space.shapes):
        raise ValueError(
            f"the posteriors are over different tensors, P = {a.space.size} and P = {b.space.size}: "
            "compare posteriors of one model"
        )
    one, other = (
        elbo_over(
            x,
            Batches(loader, device=x.device).everything(),
            groups=groups,
            generator=torch.Generator(x.device).manual_seed(seed),
        )
        for x in (a, b)
    )
    difference = Estimate.of(other.per_group - one.per_group, one.bound and other.bound)
    with torch.no_grad():
        q, p = a.family(), b.family()
        gaussian = isinstance(q, Gaussian) and isinstance(p, Gaussian)
        both = (kl(q, p).item(), kl(p, q).item()) if gaussian else (None, None)
        tiny = torch.finfo(torch.float64).tiny
        variance = [density.variance.double().clamp(min=tiny) for density in (q, p)]
        ratio = a.space.unravel(0.5 * (variance[1] / variance[0]).log())
        shift = a.space.unravel((p.mean - q.mean).double().square() / variance[0])
    predictives = {}
    if inputs is not None:
        pair = [predict(x, inputs, draws, generator=torch.Generator(x.device).manual_seed(seed)) for x in (a, b)]
        predictives = _predictives(*pair)
    return Comparison(
        difference,
        *both,
        {name: exp(value.mean().item()) for name, value in ratio.items()},
        {name: value.mean().sqrt().item() for name, value in shift.items()},
        **predictives,
    )


def _check_posterior(value: Any) -> None:
    if not isinstance(getattr(value, "family", None), Family):
        raise TypeError(f"compare expects two posteriors from variationalize, got {type(value).__name__}")


def _predictives(a: Predictive, b: Predictive) -> dict[str, float]:
    """Total variation ½∫|p − q|, averaged, and of labels how often the most probable one is the same."""
    if isinstance(a.components, Categorical):
        p, q = a.mean.double(), b.mean.double()
        same = (p.argmax(1) == q.argmax(1)).double().mean().item()
        return {"total_variation": 0.5 * (p - q).abs().sum(1).mean().item(), "agreement": same}
    if isinstance(a.components, Bernoulli):
        p, q = a.mean.double(), b.mean.double()
        return {
            "total_variation": (p - q).abs().mean().item(),
            "agreement": ((p > 0.5) == (q > 0.5)).double().mean().item(),
        }
    return {"total_variation": _density_distance(a, b)}


def _density_distance(a: Predictive, b: Predictive) -> float:
    """½∫|p − q| of two mixtures of a number, by distribution functions on cells of a grid that covers both.

    Between neighbouring points the probabilities are exact; what is lost is where p − q changes sign within a cell.
    """
    low = torch.minimum(*(x.mean - 8 * x.std for x in (a, b)))
    high = torch.maximum(*(x.mean + 8 * x.std for x in (a, b)))
    before: list[Tensor] = []
    total = torch.zeros_like(low, dtype=torch.float64)
    for step in range(GRID):
        at = low + (high - low) * (step / (GRID - 1))
        now = [x.cdf(at).double() for x in (a, b)]
        if before:
            total += 0.5 * ((now[0] - before[0]) - (now[1] - before[1])).abs()
        before = now
    return total.mean().item()
