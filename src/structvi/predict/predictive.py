"""The predictive distribution: a weighted mixture over draws, Σ_s w_s p(t | y_s), and everything to ask of it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, MixtureSameFamily, Normal, Poisson
from torch.utils import _pytree as pytree

from ..models import likelihoods
from ..models.calibration import Calibration
from ..models.likelihoods import NO_VALUES, Likelihood, split_mask
from ..util.random_streams import borrowed_stream
from . import conformal
from .closed_form import NormalOutputs, with_noise
from .components import HALF, at_least_float32, concatenated, in_range, mapped
from .probabilities import as_log_probability, as_probability, label_entropy
from .quantiles import continuous_quantile, count_quantile, normal_mixture_crps, poisson_cdf
from .recalibrated import recalibrated

_DISCRETE = (Bernoulli, Poisson, Categorical)


class Predictive:
    """p(t | x) = Σ_s w_s p(t | y_s): the network's outputs y at S draws, their weights, and what follows from them.

    y is the noise-free function (for a classifier the logits), t the observation. Everything is per element of the
    target: per observation, per pixel. A classifier's label counts as the indicator of its class, so that its `mean`
    is the class probabilities, [B, C, ..], and `variance` p(1 − p). What is a probability lies in [0, 1], also where
    rounding lets the weights add up to more than one.

    Args:
        outputs: [S, B, ..], or a tuple or dict of such.
        weights: [S], they sum to one.
        likelihood: what made t of y. Of a plain function, instead of a `Likelihood`, only `log_prob` is known.
        values: the likelihood's random tensors at the draws, [S, *shape] each.
        note: how the number of draws came about, where it is not the one asked for; and how it is calibrated.
        by_input: whether the outputs were drawn at every input by itself, in function space: how inputs go together
            is then not known.
        moments: weights [M], means and variances [M, B, ..] of outputs that are a mixture of normals. With Gaussian
            noise that does not depend on them p(t | x) is then in closed form: all but `outputs` and `components` come
            from it.

    Example:
        >>> from structvi import likelihoods
        >>> pred = Predictive(torch.tensor([[[0.0]], [[2.0]]]), torch.tensor([0.5, 0.5]), likelihoods.Gaussian(1.0))
        >>> pred.mean.item(), pred.epistemic.item(), pred.aleatoric.item(), pred.variance.item()
        (1.0, 1.0, 1.0, 2.0)
    """

    def __init__(
        self,
        outputs: Any,
        weights: Tensor,
        likelihood: Callable[[Any, Any], Tensor],
        values: Mapping[str, Tensor] = NO_VALUES,
        note: str = "",
        by_input: bool = False,
        moments: tuple[Tensor, Tensor, Tensor] | None = None,
    ):
        S = weights.shape[0] if weights.ndim == 1 else -1
        for leaf in pytree.tree_leaves(outputs):
            if not isinstance(leaf, Tensor) or leaf.ndim < 2 or leaf.shape[0] != S:
                came = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                raise ValueError(f"expected outputs [S, B, ..] and weights [S], got {came} and {tuple(weights.shape)}")
        self.outputs = pytree.tree_map(at_least_float32, outputs)
        if weights.dtype in HALF:  # 64 of 1/64 make one in any type, three of 1/3 make 1.002 in bfloat16
            weights = weights.float() / weights.float().sum()
        self.weights, self.likelihood, self.values, self.note = weights, likelihood, values, note
        self.by_input = by_input
        self._components: Distribution | None = None
        if isinstance(likelihood, Likelihood):
            with torch.no_grad():  # now, not when asked: learned noise may change later
                self._components = likelihood.distribution(self.outputs, values)
                if type(self._components) is Normal and not _has_known_noise(likelihood):
                    self._components = in_range(self._components)
        self._drawn, self.calibration = self._components, None
        self._normal = None if moments is None else with_noise(likelihood, self._drawn, *moments)

    @classmethod
    def joined(cls, parts: "Sequence[Predictive]", shares: Sequence[float], note: str = "") -> "Predictive":
        """The mixture of predictives of one input, each with its share: their draws together."""
        whole = copy.copy(parts[0])
        outputs = [part.outputs for part in parts]
        whole.outputs = pytree.tree_map(lambda *leaves: torch.cat(leaves), outputs[0], *outputs[1:])
        whole.weights = torch.cat([share * part.weights for share, part in zip(shares, parts, strict=True)])
        whole.values = {name: torch.cat([part.values[name] for part in parts]) for name in whole.values}
        whole.note = note
        if not whole.is_function:
            whole._components = whole._drawn = concatenated([part.components for part in parts])
        whole._normal = NormalOutputs.joined([part._normal for part in parts], shares)
        return whole

    def calibrated(self, calibration: Calibration | None) -> "Predictive":
        """With the temperature or scale of a calibration where that is applied, and its conformal sets.

        All that follows agrees with it but `outputs` and `function`: these are what the network gave. Of a temperature
        `mean` is p̄^(1/T), normalised; see `predict/recalibrated.py` for the draws.
        """
        if calibration is None:
            return self
        changed = copy.copy(self)
        changed.calibration, applied = calibration, calibration.applied
        if applied is not None and self._drawn is not None:
            with torch.no_grad():
                changed._components = recalibrated(self._drawn, self.weights, applied)
            changed.note = f"{self.note}{', ' if self.note else ''}{applied.kind} {applied.value:.3g}"
        return changed

    @property
    def draws(self) -> int:
        """S; at least what was asked for, `note` says why where it is more."""
        return self.weights.shape[0]

    @property
    def is_function(self) -> bool:
        """Whether the likelihood is a plain function (output, target) → log p, of which no distribution is known."""
        return self._components is None

    @property
    def is_discrete(self) -> bool:
        """Whether t is a label or a count, and p(t | y) a probability."""
        return isinstance(self._components, _DISCRETE)

    def __repr__(self) -> str:
        shapes = pytree.tree_map(lambda leaf: tuple(leaf.shape), self.outputs)
        return f"Predictive(draws={self.draws}, outputs={shapes}{', ' if self.note else ''}{self.note})"

    @property
    def components(self) -> Distribution:
        """p(t | y_s), a torch distribution with batch shape [S, B, ..]."""
        if self._components is None:
            raise TypeError(
                "the likelihood is a plain function, which gives log p(t | y) and no more: `outputs`, `function_mean`, "
                "`function_variance`, `log_prob` and `joint_log_prob` work; for the rest write a Likelihood, whose "
                "distribution(output, values) is p(t | y)"
            )
        return self._components

    @property
    def in_closed_form(self) -> NormalOutputs | None:
        """Outputs and noise, where the outputs are known to be normal, and both; after a scale that is applied."""
        applied = None if self.calibration is None else self.calibration.applied
        return self._normal if self._normal is None or applied is None else self._normal.stretched(applied.value)

    @property
    def mixture(self) -> tuple[Tensor, Distribution]:
        """Weights [M] and distributions [M, B, ..] of t whose mixture is p(t | x): a draw each, or all of them."""
        found = self.in_closed_form
        return (self.weights, self.components) if found is None else (found.weights, found.observed())

    # y: the function

    @property
    def function(self) -> Any:
        """y at the draws, [S, B, ..]: the network's output, without the log scales of a Gaussian("head")."""
        if self._drawn is not None and isinstance(self.likelihood, likelihoods.Gaussian):
            return self._drawn.mean
        return self.outputs

    @property
    def function_mean(self) -> Any:
        """Σ_s w_s y_s: [B, ..]."""
        return pytree.tree_map(self._average, self.function) if self._normal is None else self._normal.average

    @property
    def function_variance(self) -> Any:
        """Σ_s w_s (y_s − ȳ)²: [B, ..]."""
        return pytree.tree_map(self._spread, self.function) if self._normal is None else self._normal.spread

    # t: the observation

    @property
    def mean(self) -> Tensor:
        """E t; of a classifier the class probabilities, [B, C, ..]."""
        found = self.in_closed_form
        mean = self._average(self._means()) if found is None else found.average
        return as_probability(mean) if isinstance(self.components, Categorical | Bernoulli) else mean

    @property
    def epistemic(self) -> Tensor:
        """Var_s E[t | y_s]: what more data could remove."""
        found = self.in_closed_form
        return self._spread(self._means()) if found is None else found.spread

    @property
    def aleatoric(self) -> Tensor:
        """E_s Var[t | y_s]: the noise of the observations."""
        if isinstance(self.components, Categorical):
            return self._average(self._means() * (1 - self._means()))
        return self._average(self.components.variance)

    @property
    def variance(self) -> Tensor:
        """Var t = epistemic + aleatoric."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        return self.variance.sqrt()

    @property
    def probabilities(self) -> Tensor:
        """Class probabilities, [B, C, ..]; for Bernoulli the probability of 1, [B, ..]."""
        self._check_labels("probabilities")
        return self.mean

    @property
    def entropy(self) -> Tensor:
        """H[Σ_s w_s p(t | y_s)] of the label in nats: [B, ..]."""
        self._check_labels("entropy")
        return label_entropy(self.mean, isinstance(self.components, Bernoulli))

    @property
    def expected_entropy(self) -> Tensor:
        """Σ_s w_s H[p(t | y_s)], in nats: the aleatoric part of the entropy."""
        self._check_labels("expected_entropy")
        return self._average(self.components.entropy()).clamp(min=0)

    @property
    def mutual_information(self) -> Tensor:
        """I(t; θ) = entropy − expected entropy, in nats: the epistemic part of the entropy."""
        return (self.entropy - self.expected_entropy).clamp(min=0)  # below zero by rounding only

    def log_prob(self, target: Any) -> Tensor:
        """log Σ_s w_s p(t | y_s) of every element of t, or of (t, mask): [B, ..], 0 where t was not observed.

        Class weights of the likelihood take no part: this is a log probability.
        """
        weights, d = (self.weights, self._components) if self.is_function else self.mixture
        return self._log_average(self._log_probs(target, d), weights)

    def joint_log_prob(self, target: Any) -> Tensor:
        """log Σ_s w_s Π_b p(t_b | y_bs): of all observations of the batch together, a scalar.

        It is not the sum of `log_prob`, for the inputs share the unknown weights.
        """
        self._check_together("joint_log_prob")
        return self._log_average(self.log_prob_draws(target).flatten(1).sum(1), self.weights)  # of [S]

    def cdf(self, t: Tensor) -> Tensor:
        """P(T ≤ t) of every element: [B, ..]."""
        weights, d = self.mixture
        self._check_numbers("cdf")
        if isinstance(d, Bernoulli):
            return torch.where(t < 0, 0.0, torch.where(t < 1, 1 - self.mean, 1.0))
        each = poisson_cdf(t, d.rate) if isinstance(d, Poisson) else d.cdf(t)
        return as_probability(torch.tensordot(weights.to(each), each, dims=1))

    def quantile(self, p: float | Sequence[float]) -> Tensor:
        """The smallest t with P(T ≤ t) ≥ p: [B, ..] for one p, [Q, B, ..] for several.

        Of continuous t by bisection on the mixture's distribution function in float64, to 1e-9 of the standard
        deviation.
        """
        self._check_numbers("quantile")
        if not isinstance(p, int | float):
            return torch.stack([self.quantile(float(q)) for q in p])
        if not 0 < p < 1:
            raise ValueError(f"quantile: p must lie inside (0, 1), got {p}")
        d, dtype = self.components, self._means().dtype
        if isinstance(d, Bernoulli):
            return (1 - self.mean < p).to(dtype)
        exact = copy.copy(self)
        exact._components = mapped(d, lambda x: x.double())
        exact._normal = None if self._normal is None else self._normal.double()
        return exact._quantile(p).to(dtype)

    def _quantile(self, p: float) -> Tensor:
        _, d = self.mixture
        if isinstance(d, Poisson):
            return count_quantile(p, self.cdf, (self.mean + 8 * self.std + 8).nan_to_num(torch.inf, torch.inf))
        try:
            bounds = d.icdf(torch.tensor(p, dtype=torch.float64, device=self.weights.device))  # [S, B, ..]
        except NotImplementedError:
            what = type(d).__name__
            raise TypeError(f"torch's {what} has no quantile function, and its mixture none either") from None
        return continuous_quantile(p, self.cdf, bounds.amin(0), bounds.amax(0), 1e-9 * self.std)

    def interval(self, p: float) -> tuple[Tensor, Tensor]:
        """The central interval of t with probability p (at least p for counts): its two ends, [B, ..] each."""
        if not 0 < p < 1:
            raise ValueError(f"interval: p must lie inside (0, 1), got {p}")
        return self.quantile((1 - p) / 2), self.quantile((1 + p) / 2)

    def conformal(self, level: float) -> Any:
        """What holds t with probability ≥ level, for cases exchangeable with those that `calibrate(conformal=)` saw.

        Of labels the set, True for those in it: [B, C]. Of numbers the two ends of an interval, [B, ..] each. Of masks
        where a label is kept, [B, C, ..], or [B, ..] for Bernoulli: the expected share that is missed is ≤ 1 − level.
        """
        found = None if self.calibration is None else self.calibration.conformal
        if found is None:
            raise ValueError(
                "conformal sets come from held-out cases: bayes.calibrate(validation, conformal=other), and predict "
                "without calibrated=False"
            )
        if found.form == "number":
            return conformal.intervals(self.mean, self.std, found, level)
        if found.form == "mask":
            return conformal.masks(self.mean, found, level)
        return conformal.label_sets(self.mean, isinstance(self.components, Bernoulli), found, level)

    def crps(self, t: Tensor) -> Tensor:
        """E|T − t| − ½ E|T − T'| for Gaussian noise, in closed form over all pairs of draws: [B, ..]."""
        weights, d = self.mixture
        if not isinstance(d, Normal):
            raise TypeError(f"crps is closed form for Gaussian noise; this p(t | y) is {type(d).__name__}")
        flat = normal_mixture_crps(d.loc.flatten(1), d.scale.flatten(1), weights, t.flatten())
        return flat.reshape(t.shape)

    def distribution(self) -> MixtureSameFamily:
        """The mixture as a torch distribution with batch shape [B, ..]."""
        weights, d = self.mixture
        last = mapped(d, lambda x: x.movedim(0, len(d.batch_shape) - 1))
        weights = weights.expand(*last.batch_shape)
        return MixtureSameFamily(Categorical(probs=weights, validate_args=False), last, validate_args=False)

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """n samples of t, [n, B, ..]; the observations of one sample share a draw of the weights, as real ones do."""
        self._check_together("sample")
        with borrowed_stream(generator):  # torch's distributions draw from the global stream
            which = torch.multinomial(self.weights, n, replacement=True)
            return mapped(self.components, lambda x: x[which]).sample()

    def _means(self) -> Tensor:
        """E[t | y_s]: [S, B, ..], for a classifier [S, B, C, ..]."""
        d = self.components
        return d.probs.movedim(-1, 2) if isinstance(d, Categorical) else d.mean

    def _average(self, x: Tensor) -> Tensor:
        return torch.tensordot(self.weights.to(x), x, dims=1)

    def _spread(self, x: Tensor) -> Tensor:
        mean = self._average(x)
        deviation = x - mean
        if isinstance(self._components, Poisson):  # a rate beyond all numbers does not differ from itself
            deviation = deviation.masked_fill(x == mean, 0.0)
        return self._average(deviation.square())

    def _log_average(self, log_prob: Tensor, weights: Tensor) -> Tensor:
        """log Σ_s w_s p_s of log p_s [S, ..]."""
        log_weights = weights.to(log_prob).log().reshape(-1, *[1] * (log_prob.ndim - 1))
        return as_log_probability((log_weights + log_prob).logsumexp(0), self.is_discrete)

    def log_prob_draws(self, target: Any) -> Tensor:
        """log p(t | y_s), [S, B, ..]; 0 where t was not observed."""
        return self._log_probs(target, self._components)

    def _log_probs(self, target: Any, d: Any) -> Tensor:
        """The same of distributions [M, B, ..]."""
        if not isinstance(self.likelihood, Likelihood):
            one = [pytree.tree_map(lambda leaf, s=s: leaf[s], self.outputs) for s in range(self.draws)]
            return torch.stack([self.likelihood(output, target) for output in one])
        with torch.no_grad():  # its checks of shapes, dtypes and labels
            self.likelihood(pytree.tree_map(lambda leaf: leaf[0], self.outputs), target)
        t, observed = observed_target(self.likelihood, target)
        if not t.dtype.is_floating_point and not isinstance(d, Categorical):
            t = t.to(self._means().dtype)
        log_prob = d.log_prob(t)
        if isinstance(self.likelihood, likelihoods.Poisson):  # rates that are zero or infinite by rounding
            rounded = (d.rate == 0) | d.rate.isinf()  # pyright: ignore
            y = self.outputs
            log_prob = torch.where(rounded, t * y - y.exp() - (t + 1).lgamma(), log_prob)
        return log_prob if observed is None else log_prob.masked_fill(~observed, 0.0)

    def _check_together(self, what: str) -> None:
        if self.by_input:
            raise ValueError(
                f"{what} is of all inputs together, and these outputs are drawn at every input by itself, in function "
                "space: predict(x, draws=64) draws weights, which the inputs share"
            )

    def _check_labels(self, what: str) -> None:
        if not isinstance(self.components, Categorical | Bernoulli):
            raise TypeError(
                f"{what} is for class labels; this p(t | y) is {type(self.components).__name__}, and mixtures of those "
                "have no closed-form entropy: look at `epistemic` and `aleatoric`, which split the variance"
            )

    def _check_numbers(self, what: str) -> None:
        if isinstance(self.components, Categorical):
            raise TypeError(f"{what}: class labels have no order; look at `probabilities`")


def observed_target(likelihood: Any, target: Any) -> tuple[Tensor, Tensor | None]:
    """t, with 0 where it was not observed, and which elements were: by mask and by the label that is ignored."""
    t, mask = split_mask(target)
    if isinstance(likelihood, likelihoods.Categorical | likelihoods.Bernoulli) and likelihood.ignore_index is not None:
        labelled = t != likelihood.ignore_index
        mask = labelled if mask is None else mask & labelled
    return (t, None) if mask is None else (t.masked_fill(~mask, 0), mask)


def _has_known_noise(likelihood: Likelihood) -> bool:
    return isinstance(likelihood, likelihoods.Gaussian) and isinstance(likelihood.noise, float)
