"""Posterior predictive checks: do data replicated from the fitted model look like the data?"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical

from ..predict.predict import predictive_at
from ..predict.predictive import observed_target
from ..predict.sample import IndependentDraws
from ..train.data import Batches
from ..util.checks import check_seed
from ..util.random_streams import borrowed_stream

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..posterior import Posterior

Statistic = Callable[[Tensor], Tensor | float]

NUMBERS: dict[str, Statistic] = {"mean": torch.mean, "sd": torch.std, "min": torch.min, "max": torch.max}
#: probability that a right model fails one of the statistics
FALSE_ALARM = 0.05


@dataclass(frozen=True)
class PredictiveCheck:
    """Statistics of the observed data, and of replicated data sets.

    Attributes:
        observed: statistic → its value on the data.
        replicated: statistic → its values on the replicated data sets, [S].
    """

    observed: dict[str, float]
    replicated: dict[str, Tensor]

    @property
    def p_values(self) -> dict[str, float]:
        """P(T(replicated) > T(observed)), with equal ones half: near 0 or 1 if the model misses the statistic."""
        result = {}
        for name, value in self.observed.items():
            above, equal = (self.replicated[name] > value), (self.replicated[name] == value)
            result[name] = (above.double() + 0.5 * equal).mean().item()
        return result

    @property
    def verdict(self) -> str:
        limit = FALSE_ALARM / 2 / len(self.observed)
        missed = {name: p for name, p in self.p_values.items() if min(p, 1 - p) < limit}
        if not missed:
            return "replicated data look like the data by every statistic"
        said = [f"{name} ({'too small' if p < 0.5 else 'too large'} in replicated data)" for name, p in missed.items()]
        return f"the model misses {', '.join(said)}"

    def plot(self, statistic: str | None = None, ax: "Axes | None" = None) -> "Axes":
        """Draw the statistic of the replicated data sets as a histogram, and of the data as a line."""
        from ..plots import BLUE, ORANGE, axes_of, finish

        name = next(iter(self.observed)) if statistic is None else statistic
        ax = axes_of(ax)
        ax.hist(self.replicated[name].numpy(), bins=30, color=BLUE, alpha=0.5, label="replicated")
        ax.axvline(self.observed[name], color=ORANGE, linewidth=2, label=f"data, p = {self.p_values[name]:.2g}")
        ax.set_xlabel(name)
        ax.set_ylabel("data sets")
        return finish(ax, loc="best")

    def __str__(self) -> str:
        lines = [f"{'statistic':<16}{'data':>12}{'replicated':>24}{'p':>8}"]
        for name, value in self.observed.items():
            own = self.replicated[name]
            spread = f"{own.mean():.4g} ± {own.std():.2g}"
            lines.append(f"{name:<16}{value:>12.4g}{spread:>24}{self.p_values[name]:>8.3f}")
        return "\n".join([*lines, self.verdict])


def predictive_check(
    posterior: "Posterior",
    loader: Iterable[Any],
    statistics: Mapping[str, Statistic] | None = None,
    draws: int = 200,
    *,
    seed: int = 0,
) -> PredictiveCheck:
    """Replicate the data set at S draws of the weights, t ~ p(t | y_s(x)) at its own inputs, and compare statistics.

    Args:
        posterior: what `variationalize` returns.
        loader: the data, with targets; elements that were not observed take no part.
        statistics: name → function from the observed targets, as one tensor, to a number. By default mean, sd, min
            and max of numbers, and the frequency of each label.
        draws: S, replicated data sets.
        seed: of draws and replicated data.

    Example:
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(torch.nn.Linear(1, 1), likelihoods.Gaussian(1.0), num_data=50)
        >>> batch = torch.zeros(50, 1), 5 + torch.randn(50, 1)
        >>> predictive_check(bayes, [batch]).p_values["mean"]  # never as large as the data's
        0.0
    """
    check_seed(seed)
    batches = Batches(loader, device=posterior.device)
    generator = torch.Generator(posterior.device).manual_seed(seed)
    chosen: Mapping[str, Statistic] = statistics or {}
    replicated: dict[str, list[Tensor]] = {}
    observed: dict[str, float] = {}
    for drawn in IndependentDraws(posterior.family(), draws, generator, 16):
        pieces, data = [], []
        with borrowed_stream(generator):  # torch's distributions draw from the global stream
            for batch in batches.everything():
                pred, target = predictive_at(posterior, drawn, batch)
                chosen = chosen or _defaults(pred)
                t, mask = observed_target(posterior.model.likelihood, target)
                t_new = pred.components.sample()  # [s, B, ..]
                pieces.append(t_new if mask is None else t_new[:, mask])
                data.append(t if mask is None else t[mask])
        if not observed:
            observed = {name: float(function(torch.cat(data))) for name, function in chosen.items()}
        for t_new in torch.cat(pieces, dim=1):
            for name, function in chosen.items():
                replicated.setdefault(name, []).append(torch.as_tensor(float(function(t_new)), dtype=torch.float64))
    return PredictiveCheck(observed, {name: torch.stack(values) for name, values in replicated.items()})


def _defaults(pred: Any) -> dict[str, Statistic]:
    if isinstance(pred.components, Bernoulli):
        return {"frequency of 1": lambda t: t.double().mean()}
    if isinstance(pred.components, Categorical):
        classes = pred.components.probs.shape[-1]
        return {f"frequency of {c}": lambda t, c=c: (t == c).double().mean() for c in range(classes)}
    return NUMBERS
