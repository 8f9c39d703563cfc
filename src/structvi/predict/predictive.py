"""The predictive distribution: a weighted mixture over draws, Σ_s w_s p(t | y_s), and everything to ask of it."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from math import pi, prod, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal, Poisson
from torch.nn.functional import logsigmoid
from torch.quasirandom import SobolEngine
from torch.utils import _pytree as pytree

from ..models import likelihoods
from ..models.calibration import Adjustment, Calibration
from ..models.likelihoods import NO_VALUES, Likelihood, split_mask
from ..util.random_streams import borrowed_stream
from . import conformal

if TYPE_CHECKING:
    from ..posterior import Posterior

#: draws of the weights where no number is asked for, and points of y where a few do
DRAWS = 64
#: numbers of drawn weights, or of Jacobians, that are held at once: 2²⁶
DRAWN_NUMBERS = 67_108_864
#: draws at which the network is evaluated at once
CHUNK = 16


class Predictive:
    """p(t | x) = Σ_s w_s p(t | y_s): the network's outputs y at S draws, their weights, and what follows from them.

    y is the noise-free function (for a classifier the logits), t the observation. Everything is per element of the
    target: per observation, per pixel. A classifier's label counts as the indicator of its class: `mean` is the class
    probabilities, [B, C, ..], and `variance` p(1 − p).

    Args:
        outputs: [S, B, ..], or a tuple or dict of such.
        weights: [S], they sum to one.
        likelihood: p(t | y). A plain function has `log_prob` alone.
        values: the likelihood's random tensors at the draws, [S, *shape] each.
        note: how the number of draws came about, and how the predictive is calibrated.
        by_input: whether outputs are known at each input by itself only, as for a linearised network.
        within: the variance v [S, B, ..] of y around each output, if y is a mixture of normals with means `outputs`.
            With Gaussian noise that does not depend on y everything is then in closed form. Classes share one variance,
            and have the probabilities softmax(y/√(1 + πv/8)), the probit approximation.

    Example:
        >>> from structvi import likelihoods
        >>> pred = Predictive(torch.tensor([[[0.0]], [[2.0]]]), torch.tensor([0.5, 0.5]), likelihoods.Gaussian(1.0))
        >>> pred.mean.item(), pred.epistemic.item(), pred.aleatoric.item(), pred.variance.item()
        (1.0, 1.0, 1.0, 2.0)
    """

    #: the scale that is applied to normals
    _stretch = 1.0

    def __init__(
        self,
        outputs: Any,
        weights: Tensor,
        likelihood: Callable[[Any, Any], Tensor],
        values: Mapping[str, Tensor] = NO_VALUES,
        note: str = "",
        by_input: bool = False,
        within: Tensor | None = None,
    ):
        for leaf in pytree.tree_leaves(outputs):
            if not isinstance(leaf, Tensor) or leaf.ndim < 2 or weights.shape != leaf.shape[:1]:
                came = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                raise ValueError(f"expected outputs [S, B, ..] and weights [S], got {came} and {tuple(weights.shape)}")
        self.outputs = pytree.tree_map(_at_least_float32, outputs)
        if weights.dtype != (wide := _at_least_float32(weights)).dtype:  # three of 1/3 make 1.002 in bfloat16
            weights = wide / wide.sum()
        self.weights, self.likelihood, self.values, self.note = weights, likelihood, values, note
        self.by_input, self.within = by_input, within
        self.calibration: Calibration | None = None
        self.scored: Callable[[], tuple[Tensor, Tensor]] | None = None
        #: y at the draws, [S, B, ..]: the network's output, without the log scales of a Gaussian("head")
        self.function = self.outputs
        self._components: Distribution | None = None
        if not isinstance(likelihood, Likelihood):
            return
        with torch.no_grad():  # now: learned noise may change later
            y = self.outputs
            if within is not None and isinstance(likelihood, likelihoods.Categorical | likelihoods.Bernoulli):
                y = y * (1 + pi / 8 * within).rsqrt()
            self._components = d = likelihood.distribution(y, values)
            if isinstance(likelihood, likelihoods.Gaussian):
                assert isinstance(d, Normal)
                self.function, self._noise = d.loc, d.scale
                if within is not None:
                    self._components = Normal(d.loc, d.scale.hypot(within.sqrt()), validate_args=False)

    @classmethod
    def joined(cls, parts: "Sequence[Predictive]", shares: Sequence[float], note: str = "") -> "Predictive":
        """Return the mixture of predictives of one input, each with its share."""
        whole = copy.copy(parts[0])
        whole.note = note
        if len(parts) == 1:
            return whole
        for name in ("outputs", "function", "values", "within", "_noise"):
            if getattr(whole, name, None) is not None:
                own = [getattr(part, name) for part in parts]
                setattr(whole, name, pytree.tree_map(lambda *leaves: torch.cat(leaves), *own))
        whole.weights = torch.cat([share * part.weights for share, part in zip(shares, parts, strict=True)])
        if not whole.is_function:
            whole._components = _mapped(lambda *leaves: torch.cat(leaves), *[part.components for part in parts])
        return whole

    def calibrated(self, calibration: Calibration | None) -> "Predictive":
        """Return it with the temperature or scale of a calibration where that is applied, and its conformal sets.

        Everything that follows agrees with it but `outputs` and `function`: those are the network's. With a temperature
        `mean` is p̄^(1/T), normalised.
        """
        if calibration is None:
            return self
        changed = copy.copy(self)
        changed.calibration, applied = calibration, calibration.applied
        if applied is not None and self._components is not None:
            with torch.no_grad():
                changed._components = _adjusted(self._components, self.weights, applied)
            changed._stretch = applied.value
            changed.note = f"{self.note}{', ' if self.note else ''}{applied.kind} {applied.value:.3g}"
        return changed

    @property
    def draws(self) -> int:
        """S."""
        return self.weights.shape[0]

    @property
    def is_function(self) -> bool:
        """True if the likelihood is a plain function (output, target) → log p, of which no distribution is known."""
        return self._components is None

    @property
    def is_of_labels(self) -> bool:
        """True if t is a class label."""
        return isinstance(self._components, Bernoulli | Categorical)

    def __repr__(self) -> str:
        shapes = pytree.tree_map(lambda leaf: tuple(leaf.shape), self.outputs)
        return f"Predictive(draws={self.draws}, outputs={shapes}{', ' if self.note else ''}{self.note})"

    @property
    def components(self) -> Distribution:
        """p(t | y_s), a torch distribution with batch shape [S, B, ..]."""
        if self._components is None:
            raise TypeError(
                "the likelihood is a plain function, which gives log p(t | y) and no more: write a Likelihood, whose "
                "distribution(output, values) is p(t | y)"
            )
        return self._components

    # y: the function

    @property
    def function_mean(self) -> Any:
        """Σ_s w_s y_s: [B, ..]."""
        return pytree.tree_map(self._average, self.function)

    @property
    def function_variance(self) -> Any:
        """Σ_s w_s (y_s − ȳ)²: [B, ..]."""
        spread = pytree.tree_map(self._spread, self.function)
        return spread if self.within is None else spread + self._average(self.within)

    # t: the observation

    @property
    def mean(self) -> Tensor:
        """E t; of a classifier the class probabilities, [B, C, ..]."""
        mean = self._average(self._means())
        return mean.clamp(0.0, 1.0) if self.is_of_labels else mean

    @property
    def epistemic(self) -> Tensor:
        """Var_s E[t | y_s]: what more data could remove."""
        if self._at_points is not None:
            return torch.minimum(self._at_points.epistemic, self.mean * (1 - self.mean))
        spread = self._spread(self._means())
        return spread if self.within is None else spread + self._stretch**2 * self._average(self.within)

    @property
    def aleatoric(self) -> Tensor:
        """E_s Var[t | y_s]: the noise of the observations."""
        if self._at_points is not None:
            return self.mean * (1 - self.mean) - self.epistemic
        if self.within is not None:
            return self._stretch**2 * self._average(self._noise.square().expand_as(self.within))
        if self.is_of_labels:
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
        p = self.mean
        if isinstance(self.components, Bernoulli):
            return torch.special.entr(p) + torch.special.entr(1 - p)
        return torch.special.entr(p).sum(1)

    @property
    def expected_entropy(self) -> Tensor:
        """Σ_s w_s H[p(t | y_s)], in nats: the aleatoric part of the entropy."""
        self._check_labels("expected_entropy")
        if self._at_points is not None:
            return (self.entropy - self._at_points.mutual_information).clamp(min=0)
        return self._average(self.components.entropy()).clamp(min=0)

    @property
    def mutual_information(self) -> Tensor:
        """I(t; θ) = entropy − expected entropy, in nats: the epistemic part of the entropy."""
        return (self.entropy - self.expected_entropy).clamp(min=0)  # below zero by rounding only

    @property
    def ood_score(self) -> Tensor:
        """The distance of an input from the data, [B]: the largest are out of distribution, see `OutOfDistribution`.

        It costs a forward pass of the network. `bayes.laplace(train, validation=held_out)` learns it.
        """
        return self._scored()[0]

    @property
    def is_ood(self) -> Tensor:
        """True where the score is above that of 95 % of the validation inputs: [B]."""
        score, threshold = self._scored()
        return score > threshold

    def log_prob(self, target: Any) -> Tensor:
        """Return log Σ_s w_s p(t | y_s) of every element of t, or of (t, mask): [B, ..], 0 where t was not observed.

        Class weights of the likelihood take no part: this is a log probability.
        """
        return self._log_average(self.log_prob_draws(target))

    def joint_log_prob(self, target: Any) -> Tensor:
        """Return log Σ_s w_s Π_b p(t_b | y_bs): of all observations of the batch together, a scalar.

        It is not the sum of `log_prob`, for the inputs share the unknown weights.
        """
        self._check_joint("joint_log_prob")
        return self._log_average(self.log_prob_draws(target).flatten(1).sum(1))

    def log_prob_draws(self, target: Any) -> Tensor:
        """Return log p(t | y_s), [S, B, ..]; 0 where t was not observed."""
        if not isinstance(self.likelihood, Likelihood):
            one = [pytree.tree_map(lambda leaf, s=s: leaf[s], self.outputs) for s in range(self.draws)]
            return torch.stack([self.likelihood(output, target) for output in one])
        with torch.no_grad():  # its checks of shapes, dtypes and labels
            self.likelihood(pytree.tree_map(lambda leaf: leaf[0], self.outputs), target)
        t, observed = observed_target(self.likelihood, target)
        if not t.dtype.is_floating_point and not isinstance(self.components, Categorical):
            t = t.to(self._means().dtype)
        d: Any = self.components
        log_prob = d.log_prob(t)
        if isinstance(self.likelihood, likelihoods.Poisson):  # a rate may be zero or infinite by rounding
            log_prob = t * self.outputs - d.rate - (t + 1).lgamma()
        return log_prob if observed is None else log_prob.masked_fill(~observed, 0.0)

    def cdf(self, t: Tensor) -> Tensor:
        """Return P(T ≤ t) of every element: [B, ..]."""
        d = self.components
        if isinstance(d, Bernoulli):
            return torch.where(t < 0, 0.0, torch.where(t < 1, 1 - self.mean, 1.0))
        if isinstance(d, Poisson):  # Γ(⌊t⌋ + 1, rate)/Γ(⌊t⌋ + 1)
            k = t.to(d.rate.dtype).floor()
            each = torch.where(k < 0, 0.0, torch.special.gammaincc(k.clamp(min=0) + 1, d.rate))
        else:
            each = d.cdf(t)
        return self._average(each).clamp(0.0, 1.0)

    def quantile(self, p: float | Sequence[float]) -> Tensor:
        """Return the smallest t with P(T ≤ t) ≥ p: [B, ..] for one p, [Q, B, ..] for several.

        Continuous t are found by bisection in float64, to 1e-9 of the standard deviation.
        """
        if not isinstance(p, int | float):
            return torch.stack([self.quantile(float(q)) for q in p])
        if not 0 < p < 1:
            raise ValueError(f"quantile: p must lie inside (0, 1), got {p}")
        d, dtype = self.components, self._means().dtype
        if isinstance(d, Bernoulli):
            return (1 - self.mean < p).to(dtype)
        exact = copy.copy(self)
        exact._components, exact.within = _mapped(torch.Tensor.double, d), None
        if isinstance(d, Poisson):
            high = exact.mean + exact.std * sqrt(p / (1 - p)) + 1  # by Cantelli's inequality P(T < high) ≥ p
            return _bisected(p, exact.cdf, torch.full_like(high, -1.0), high, high.new_tensor(0.5))[1].floor().to(dtype)
        try:
            bounds = exact.components.icdf(torch.tensor(p, dtype=torch.float64, device=self.weights.device))
        except NotImplementedError:
            what = type(d).__name__
            raise TypeError(f"torch's {what} has no quantile function, and its mixture none either") from None
        low, high = _bisected(p, exact.cdf, bounds.amin(0), bounds.amax(0), 1e-9 * exact.std)
        return ((low + high) / 2).to(dtype)

    def interval(self, p: float) -> tuple[Tensor, Tensor]:
        """Return both ends of the central interval of t with probability p (at least p for counts): [B, ..] each."""
        return self.quantile((1 - p) / 2), self.quantile((1 + p) / 2)

    def conformal(self, level: float) -> Any:
        """Return what holds t with probability ≥ level, for cases like those that `calibrate(conformal=)` saw.

        Labels have a set, True for those in it: [B, C]. Numbers have the two ends of an interval, [B, ..] each. Masks
        have the kept labels, [B, C, ..], or [B, ..] for Bernoulli: the expected share that is missed is ≤ 1 − level.
        """
        found = None if self.calibration is None else self.calibration.conformal
        if found is None:
            raise ValueError("conformal sets come from held-out cases: bayes.calibrate(validation, conformal=other)")
        if found.form == "number":
            return conformal.intervals(self.mean, self.std, found, level)
        if found.form == "mask":
            return conformal.masks(self.mean, found, level)
        return conformal.label_sets(self.mean, isinstance(self.components, Bernoulli), found, level)

    def crps(self, t: Tensor) -> Tensor:
        """Return E|T − t| − ½ E|T − T'| for Gaussian noise, in closed form over all pairs of draws: [B, ..]."""
        d = self.components
        if not isinstance(d, Normal):
            raise TypeError(f"crps is closed form for Gaussian noise; this p(t | y) is {type(d).__name__}")
        loc, scale, weights = d.loc, d.scale.expand_as(d.loc), self.weights.to(d.loc)
        crps = self._average(_absolute_moment(loc - t, scale))
        for s in range(self.draws):  # all pairs, each once
            pairs = _absolute_moment(loc[s] - loc[s:], scale[s].hypot(scale[s:]))
            own = weights[s] * weights[s:]
            own[0] /= 2
            crps = crps - torch.tensordot(own, pairs, dims=1)
        return crps

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Return n samples of t, [n, B, ..]; the observations of one sample share a draw of the weights."""
        self._check_joint("sample")
        with borrowed_stream(generator):  # torch's distributions draw from the global stream
            which = torch.multinomial(self.weights, n, replacement=True)
            return _mapped(lambda x: x[which], self.components).sample()

    @cached_property
    def _at_points(self) -> "Predictive | None":
        """The same with y at evenly spread points, for what a probit approximation does not tell of labels."""
        if self.within is None or not self.is_of_labels:
            return None
        shape = [1] * (self.outputs.ndim - 2)
        if isinstance(self.components, Categorical):
            shape[0] = self.outputs.shape[2]
        z = evenly_spread(DRAWS, prod(shape), 0).to(self.outputs).reshape(-1, 1, 1, *shape)
        drawn = (self.outputs + self.within.sqrt() * z).flatten(0, 1)
        return Predictive(drawn, self.weights.repeat(DRAWS) / DRAWS, self.likelihood)

    def _scored(self) -> tuple[Tensor, Tensor]:
        if self.scored is None:
            raise ValueError("what is unlike the data is learned by bayes.laplace(train, validation=held_out)")
        return self.scored()

    def _means(self) -> Tensor:
        """E[t | y_s]: [S, B, ..], for a classifier [S, B, C, ..]."""
        d = self.components
        return d.probs.movedim(-1, 2) if isinstance(d, Categorical) else d.mean

    def _average(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return x[0]
        if not self.is_of_labels:
            return torch.tensordot(self.weights.to(x), x, dims=1)
        # in float64, or rounding of certain labels would look like uncertainty
        return torch.tensordot(self.weights.double(), x.double(), dims=1).to(x)

    def _spread(self, x: Tensor) -> Tensor:
        return self._average((x - self._average(x)).square())

    def _log_average(self, log_prob: Tensor) -> Tensor:
        """log Σ_s w_s p_s of log p_s [S, ..]; of probabilities at most 0."""
        average = log_average(log_prob, self.weights)
        return average.clamp(max=0.0) if isinstance(self._components, Bernoulli | Poisson | Categorical) else average

    def _check_joint(self, what: str) -> None:
        if self.by_input:
            raise ValueError(f"{what} is of all inputs together: predict(x, draws=64) draws weights, which they share")

    def _check_labels(self, what: str) -> None:
        if not isinstance(self.components, Categorical | Bernoulli):
            raise TypeError(f"{what} is for class labels, and `epistemic` and `aleatoric` are for other targets")


class PredictiveDraws(ABC):
    """Draws at which a posterior, or several, predict: called with inputs they give the predictive."""

    posterior: "Posterior"
    #: S
    draws: int
    device: torch.device
    note: str
    #: what the prediction is calibrated by
    calibration: Calibration | None = None
    #: scores and their threshold for inputs that may be unlike the data, if they were learned
    score: Callable[[Any], tuple[Tensor, Tensor]] | None = None

    def __call__(self, inputs: Any) -> Predictive:
        """Return the mixture over all draws, calibrated where that is asked for."""
        found = self.mixture(inputs).calibrated(self.calibration)
        found.scored = None if self.score is None else partial(self.score, inputs)
        return found

    @abstractmethod
    def mixture(self, inputs: Any) -> Predictive:
        """Return the mixture over all draws, not calibrated."""

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return what `mixture` takes of a batch, on the draws' device, and its target."""
        return split(self.posterior, on_device(batch, self.device))


def split(posterior: "Posterior", batch: Any) -> tuple[Any, Any]:
    """Return what the posterior predicts of a batch, and its target, which a user's `forward` takes a pass to tell."""
    model = posterior.model
    if model.user_forward is None:
        return model.split(batch)
    with torch.no_grad(), posterior.network_mode(torch.Generator().manual_seed(0)):
        mean = posterior.family().mean[: model.net_space.size]
        return batch, model.call(model.net_space.unravel(mean), batch)[1]


def on_device(tensors: Any, device: torch.device) -> Any:
    """Return the structure with its tensors on a device."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tensors)


def observed_target(likelihood: Any, target: Any) -> tuple[Tensor, Tensor | None]:
    """Return t, 0 where it was not observed, and which elements were observed: by mask and by the ignored label."""
    t, mask = split_mask(target)
    if isinstance(likelihood, likelihoods.Categorical | likelihoods.Bernoulli) and likelihood.ignore_index is not None:
        labelled = t != likelihood.ignore_index
        mask = labelled if mask is None else mask & labelled
    return (t, None) if mask is None else (t.masked_fill(~mask, 0), mask)


def is_closed(likelihood: Any) -> bool:
    """Return whether t is normal where y is: its noise is Gaussian and does not depend on y."""
    return type(likelihood) is likelihoods.Gaussian and likelihood.noise not in ("head", "random")


def log_average(log_p: Tensor, weights: Tensor) -> Tensor:
    """Return log Σ_s w_s p_s of log p_s [S, ..]."""
    return (weights.to(log_p).log().reshape(-1, *[1] * (log_p.ndim - 1)) + log_p).logsumexp(0)


def log_probabilities(d: Any) -> Tensor:
    """Return log p(c | y_s) with the classes last, [S, B, .., C]; of 0 and 1 for Bernoulli."""
    if isinstance(d, Bernoulli):
        return torch.stack([logsigmoid(-d.logits), logsigmoid(d.logits)], -1)
    return d.logits


@lru_cache(maxsize=16)
def evenly_spread(points: int, size: int, seed: int) -> Tensor:
    """Return normal noise [points, size], evenly spread: its error is a fifth of that of independent draws.

    Example:
        >>> z = evenly_spread(256, 2, seed=0)
        >>> bool(z.mean().abs() < 0.01), bool((z.square().mean() - 1).abs() < 0.01)
        (True, True)
    """
    with torch.inference_mode(False):  # it is kept
        uniform = SobolEngine(size, scramble=True, seed=seed).draw(points, dtype=torch.float64)
        return torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9))


def _mapped(function: Callable[..., Tensor], *parts: Any) -> Distribution:
    """The distribution with a function of the parts' parameters, the parts all of one type."""
    d = parts[0]
    if isinstance(d, Independent):
        inner = _mapped(function, *[part.base_dist for part in parts])
        return Independent(inner, d.reinterpreted_batch_ndims, validate_args=False)
    names = d.arg_constraints.keys() - {"probs"}  # one of two ways to say the same
    each = {name: function(*[getattr(part, name) for part in parts]) for name in names}
    return type(d)(**each, validate_args=False)


def _adjusted(d: Any, weights: Tensor, adjustment: Adjustment) -> Distribution:
    """The components [S, B, ..] after a temperature of their average, or a scale around it."""
    if isinstance(d, Normal):
        mean = torch.tensordot(weights.to(d.loc), d.loc, dims=1)
        loc = mean + adjustment.value * (d.loc - mean)
        return Normal(loc, (adjustment.value * d.scale).expand_as(loc), validate_args=False)
    log_p = log_probabilities(d)
    changed = _tempered(log_p.double().exp(), weights.double(), adjustment.value).log().to(log_p)
    if isinstance(d, Categorical):
        return Categorical(logits=changed, validate_args=False)
    most = torch.finfo(changed.dtype).max
    return Bernoulli(logits=(changed[..., 1] - changed[..., 0]).clamp(-most, most), validate_args=False)


def _tempered(p: Tensor, weights: Tensor, temperature: float) -> Tensor:
    """Probabilities [S, B, .., C] whose average is q ∝ p̄^(1/T), of p_s.

    One channel, the same for all draws, takes p̄ to q and moves no more probability than it must: of class c the share
    (1 − q_c/p̄_c)₊ is taken, and given to the classes with q > p̄ in proportion to q − p̄. It is linear, so
    Σ_s w_s p'_s = q; and the mutual information is at most that of the draws.
    """
    mean = torch.tensordot(weights, p, dims=1)
    q = (mean.log() / temperature).softmax(-1)
    kept = torch.where(mean > 0, q / mean, 1.0).clamp(max=1.0)
    gained = (q - mean).clamp(min=0.0)
    given = gained.sum(-1, keepdim=True)
    taken = ((1 - kept) * p).sum(-1, keepdim=True)
    # as much is taken as is given; of a label that is nearly certain rounding knows only the latter
    average = torch.tensordot(weights, taken, dims=1)
    taken = torch.where(average > 0, taken * given / average, given)
    return kept * p + taken * (gained / given).nan_to_num(0.0)


def _absolute_moment(mean: Tensor, scale: Tensor) -> Tensor:
    """E|N(m, σ²)| = σ √(2/π) exp(−m²/2σ²) + m erf(m/σ√2)."""
    ratio = mean / scale
    return scale * sqrt(2 / pi) * (-0.5 * ratio.square()).exp() + mean * torch.erf(ratio / sqrt(2))


def _bisected(
    p: float, cdf: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, tolerance: Tensor
) -> tuple[Tensor, Tensor]:
    """Bounds [B, ..] within the tolerance of each other, of the smallest t with P(T ≤ t) ≥ p."""
    for _ in range(200):  # rounding may stop it short of the tolerance
        if not bool((high - low > tolerance).any()):
            break
        middle = (low + high) / 2
        below = cdf(middle) < p
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low, high


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
