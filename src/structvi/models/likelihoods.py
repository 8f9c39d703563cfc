"""log p(t | y): from a network's output y and the observed target t to log probabilities, one per observation.

Every likelihood is over outputs of any trailing shape: one number, a picture, a volume. Where some elements of the
target were not observed the target is a pair (t, mask) with a boolean mask of t's shape: an element whose mask is
False contributes exactly 0, whatever t holds there. A minibatch is scaled to the whole data set by N/B with B the
number of observations (rows of t), masked or not: N counts rows too.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import isfinite, log, nan, pi
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, LogNormal, Normal
from torch.distributions import Poisson as PoissonDistribution
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from ..basics.checks import is_positive
from ..basics.configuration import configuration
from ..basics.host_reads import reads

NO_VALUES: Mapping[str, Tensor] = MappingProxyType({})


class Likelihood(nn.Module, ABC):
    """Called with (output [B, ..], target [B, ..] or (target, mask)) it gives log p(t | y), [B, ..]; 0 where masked.

    To write one, give `log_prob` and `distribution`. One with random numbers of its own (an unknown noise) also gives
    `random_tensors` and `log_prior`, and keeps each as a buffer of that name: a `BayesianModel` appends them to θ as
    "likelihood.<name>" and calls the likelihood with the buffer replaced by the draw.

    Example:
        >>> class Laplace(Likelihood):
        ...     def log_prob(self, output, target):
        ...         return self.distribution(output).log_prob(target)
        ...     def distribution(self, output, values=NO_VALUES):
        ...         return torch.distributions.Laplace(output, 1.0)
        >>> t, mask = torch.zeros(2, 1), torch.tensor([[True], [False]])
        >>> Laplace()(torch.zeros(2, 1), (t, mask)).squeeze(-1)
        tensor([-0.6931,  0.0000])
    """

    #: False where `log_prob` is no log probability of the data (class weights): the ELBO is then that of a weighted
    #: objective, no bound on the evidence, and not to be compared with that of another likelihood or other weights.
    exact: bool = True

    def __init__(self) -> None:
        super().__init__()

    def forward(self, output: Any, target: Any) -> Tensor:
        target, mask = split_mask(target)
        if mask is None:
            return self.log_prob(output, target)
        # 0 is a possible observation of all of them: NaN and out-of-range labels under the mask do no harm
        return self.log_prob(output, target.masked_fill(~mask, 0)).masked_fill(~mask, 0.0)

    @abstractmethod
    def log_prob(self, output: Any, target: Tensor) -> Tensor:
        """log p(t | y) at one draw: output [B, ..], target [B, ..] → [B, ..]."""

    @abstractmethod
    def distribution(self, output: Any, values: Mapping[str, Tensor] = NO_VALUES) -> Distribution:
        """p(t | y) at S draws, a torch distribution with batch shape [S, B, ..].

        Args:
            output: the network's, [S, B, ..]: always with the axis of the draws, [1, B, ..] for one.
            values: the likelihood's random tensors at the draws, [S, *shape] each.
        """

    def random_tensors(self) -> dict[str, Tensor]:
        """What of the likelihood is random, at its initial values; nothing by default."""
        return {}

    def log_prior(self, values: Mapping[str, Tensor]) -> Tensor:
        """log p of the random tensors [S, *shape], a density in just these coordinates: [S]."""
        raise NotImplementedError(f"{type(self).__name__} has random tensors but no prior: write `log_prior(values)`")

    def config(self) -> dict[str, Any]:
        """The constructor's arguments: what the likelihood can be rebuilt from."""
        return configuration(self)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.config().items())


class Gaussian(Likelihood):
    """t ~ N(y, σ²), independently for every element of the output.

    Args:
        noise: the standard deviation σ:

            a number   known, > 0;
            "point"    one learned number, the parameter `log_noise`, optimised with the variational parameters;
            "random"   one random number with a prior: log σ is appended to θ as "likelihood.log_noise";
            "head"     one per element, from the network: y is (mean, log σ), each of the target's shape, as a pair,
                       as a dict with the keys "mean" and "log_scale", or as the two halves along dim 1 of an
                       output [B, 2C, ..], the mean first, for a target [B, C, ..].

        initial: where σ starts for "point" and "random".
        noise_prior: for "random" a distribution of one positive number, the *variance* σ². θ holds log σ, whose
            density is p(log σ) = p_{σ²}(σ²)·2σ². By default σ² ~ LogNormal(2 log initial, 2²), which is
            log σ ~ N(log initial, 1); InverseGamma(a, b) is the conjugate choice, informative for σ² ≪ b.

    Example:
        >>> Gaussian(noise=0.25)(torch.zeros(5, 1), torch.zeros(5, 1)).shape
        torch.Size([5, 1])
        >>> Gaussian("head")(torch.zeros(5, 2), torch.zeros(5, 1)).shape
        torch.Size([5, 1])
        >>> Gaussian("random", noise_prior=torch.distributions.InverseGamma(2.0, 1.0)).random_tensors()
        {'log_noise': tensor(0.)}
    """

    log_noise: Tensor

    def __init__(self, noise: float | str, initial: float = 1.0, noise_prior: Distribution | None = None):
        super().__init__()
        if isinstance(noise, str):
            if noise not in ("point", "random", "head"):
                raise ValueError(f'noise must be a number, "point", "random" or "head", got {noise!r}')
        elif not is_positive(noise):
            raise ValueError(f"noise must be a positive standard deviation, got {noise!r}")
        if not is_positive(initial):
            raise ValueError(f"initial must be a positive standard deviation, got {initial!r}")
        if initial != 1.0 and noise not in ("point", "random"):
            raise ValueError(
                f'initial is where the noise starts for "point" and "random"; drop it with noise={noise!r}'
            )
        if noise_prior is not None:
            if noise != "random":
                raise ValueError(f'noise_prior needs noise="random"; with noise={noise!r} nothing has a prior')
            _check_noise_prior(noise_prior)
        self.noise: float | str = noise if isinstance(noise, str) else float(noise)
        self.initial, self.noise_prior = float(initial), noise_prior
        if noise == "point":
            self.log_noise = nn.Parameter(torch.tensor(log(initial)))
        elif noise == "random":
            self.register_buffer("log_noise", torch.tensor(log(initial)), persistent=False)

    def log_prob(self, output: Any, target: Tensor) -> Tensor:
        mean, log_noise = self._mean_and_log_noise(output, 1)
        _check_same_shape("Gaussian", mean, target)
        if not target.dtype.is_floating_point:
            raise TypeError(f"Gaussian: the target must be floating, got {target.dtype}; for classes use Categorical")
        return -0.5 * ((target - mean) * (-log_noise).exp()).square() - log_noise - 0.5 * log(2 * pi)

    def distribution(self, output: Any, values: Mapping[str, Tensor] = NO_VALUES) -> Distribution:
        mean, log_noise = self._mean_and_log_noise(output, 2)
        if self.noise == "random":
            if "log_noise" not in values or values["log_noise"].shape != mean.shape[:1]:
                came = {name: tuple(value.shape) for name, value in values.items()}
                raise ValueError(
                    'Gaussian("random") has another noise at every draw: for an output [S, B, ..] = '
                    f"{tuple(mean.shape)} give values={{'log_noise': tensor [S]}}, got {came}"
                )
            log_noise = values["log_noise"].reshape(-1, *[1] * (mean.ndim - 1))
        return Normal(mean, log_noise.to(mean).exp(), validate_args=False)

    def random_tensors(self) -> dict[str, Tensor]:
        return {"log_noise": self.log_noise} if self.noise == "random" else {}

    def log_prior(self, values: Mapping[str, Tensor]) -> Tensor:
        log_noise = values["log_noise"]
        prior = self.noise_prior or LogNormal(2 * log(self.initial), 2.0)
        return prior.log_prob((2 * log_noise).exp()) + log(2) + 2 * log_noise  # + log |dσ² / dlog σ|

    def _mean_and_log_noise(self, output: Any, channel: int) -> tuple[Tensor, Tensor]:
        """A mean, and the log σ that goes with it as far as it does not depend on the draw."""
        if self.noise == "head":
            return _heads(output, channel)
        _check_output("Gaussian", output)
        if isinstance(self.noise, float):
            return output, torch.tensor(log(self.noise), dtype=torch.float64)  # 0-dim: takes part as a number
        return output, self.log_noise


class _Classes(Likelihood):
    """What classes share: the label that is not counted, and weights."""

    def __init__(self, ignore_index: int | None = None, class_weights: Sequence[float] | Tensor | None = None):
        super().__init__()
        if ignore_index is not None and (not isinstance(ignore_index, int) or isinstance(ignore_index, bool)):
            raise TypeError(f"ignore_index must be None or an integer label, got {ignore_index!r}")
        if class_weights is not None:
            class_weights = tuple(float(weight) for weight in class_weights)
            if not all(isfinite(w) and w >= 0 for w in class_weights) or not any(class_weights):
                raise ValueError(f"class_weights must be numbers ≥ 0, one per class and not all 0, got {class_weights}")
        self.ignore_index = ignore_index
        self.class_weights: tuple[float, ...] | None = class_weights
        self.exact = class_weights is None

    def log_prob(self, output: Any, target: Tensor) -> Tensor:
        classes = self._check(output, target)
        if self.class_weights is not None and len(self.class_weights) != classes:
            raise ValueError(f"{type(self).__name__}: {len(self.class_weights)} class_weights for {classes} classes")
        ignored = None if self.ignore_index is None else target == self.ignore_index
        labels = target if ignored is None else target.masked_fill(ignored, 0)
        wrong = None
        if reads():
            self._check_labels(labels, classes)
        else:
            wrong = (labels < 0) | (labels >= classes)
            if labels.dtype.is_floating_point:
                wrong = wrong | (labels != labels.floor())
            labels = labels.masked_fill(wrong, 0)
        log_prob = self._log_prob(output, labels)
        if wrong is not None:
            log_prob = log_prob.masked_fill(wrong, nan)
        if self.class_weights is not None:
            weights = torch.tensor(self.class_weights, dtype=log_prob.dtype, device=log_prob.device)
            log_prob = weights[labels.long()] * log_prob
        return log_prob if ignored is None else log_prob.masked_fill(ignored, 0.0)

    def _check_labels(self, labels: Tensor, classes: int) -> None:
        if labels.dtype.is_floating_point and bool((labels != labels.floor()).any()):
            raise ValueError(f"{type(self).__name__}: labels must be whole numbers, got fractions or NaN")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise ValueError(
                f"{type(self).__name__}: labels run from {low} to {high}, but there are {classes} classes: labels must "
                f"lie in 0 … {classes - 1}; for pixels without a label give ignore_index= or a mask"
            )

    @abstractmethod
    def _check(self, output: Any, target: Tensor) -> int:
        """Shapes and dtypes; the number of classes."""

    @abstractmethod
    def _log_prob(self, output: Tensor, labels: Tensor) -> Tensor:
        """Of labels that are all in range."""


class Categorical(_Classes):
    """t ~ softmax(y): output [B, C, ..] of logits, target [B, ..] of class labels 0 … C−1.

    Args:
        ignore_index: a label that was not observed: it contributes 0.
        class_weights: C numbers w ≥ 0, used as they are: the result is w_t · log p(t | y). That is no likelihood of
            the data (p^w does not sum to one over t): what is fitted is a weighted objective, the posterior of data
            in which class c counts w_c times, `exact` is False, and `distribution` stays the unweighted softmax.
            Weights that do not average to one over the data change how much the data count against the prior.

    Example:
        >>> Categorical()(torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)).shape
        torch.Size([5])
        >>> Categorical(ignore_index=255)(torch.zeros(1, 2, 2), torch.tensor([[1, 255]]))
        tensor([[-0.6931,  0.0000]])
    """

    def _check(self, output: Any, target: Tensor) -> int:
        _check_output("Categorical", output)
        if output.ndim < 2 or target.shape != output.shape[:1] + output.shape[2:]:
            raise ValueError(
                "Categorical expects logits [B, C, ..] and labels [B, ..], "
                f"got {tuple(output.shape)} and {tuple(target.shape)}; one-hot labels: .argmax(1), [B, 1]: .squeeze(1)"
            )
        if target.dtype.is_floating_point or target.dtype == torch.bool:
            raise TypeError(f"Categorical: labels must be integers, got {target.dtype}; convert them with .long()")
        return output.shape[1]

    def _log_prob(self, output: Tensor, labels: Tensor) -> Tensor:
        return -cross_entropy(output, labels.long(), reduction="none")

    def distribution(self, output: Tensor, values: Mapping[str, Tensor] = NO_VALUES) -> Distribution:
        if output.ndim < 3:
            raise ValueError(
                f"Categorical expects logits [S, B, C, ..] of S draws, got {tuple(output.shape)}; for one input add a "
                "batch axis: x.unsqueeze(0)"
            )
        return CategoricalDistribution(logits=output.movedim(2, -1), validate_args=False)


class Bernoulli(_Classes):
    """t ~ Bernoulli(sigmoid(y)), independently for every element: output of logits, target of 0 and 1, equal shapes.

    Args:
        ignore_index: a label that was not observed: it contributes 0.
        class_weights: the weights of t = 0 and t = 1, used as they are; as in `Categorical` the result is then the
            logarithm of no likelihood and `exact` is False.

    Example:
        >>> Bernoulli()(torch.zeros(2, 1), torch.tensor([[0.0], [1.0]])).squeeze(-1)
        tensor([-0.6931, -0.6931])
    """

    def _check(self, output: Any, target: Tensor) -> int:
        _check_same_shape("Bernoulli", output, target)
        return 2

    def _log_prob(self, output: Tensor, labels: Tensor) -> Tensor:
        return -binary_cross_entropy_with_logits(output, labels.to(output.dtype), reduction="none")

    def distribution(self, output: Tensor, values: Mapping[str, Tensor] = NO_VALUES) -> Distribution:
        return BernoulliDistribution(logits=output, validate_args=False)


class Poisson(Likelihood):
    """t ~ Poisson(exp y), log p(t | y) = t·y − exp y − log t!: output of log rates, target of counts, equal shapes.

    Example:
        >>> Poisson()(torch.zeros(2, 1), torch.tensor([[0], [1]])).squeeze(-1)
        tensor([-1., -1.])
    """

    def log_prob(self, output: Any, target: Tensor) -> Tensor:
        _check_same_shape("Poisson", output, target)
        count = target.to(output.dtype)
        wrong = (count < 0) | (count != count.floor())
        if not reads():
            count = count.masked_fill(wrong, nan)
        elif bool(wrong.any()):
            raise ValueError("Poisson: the target must hold counts 0, 1, 2, …, got negative numbers, fractions or NaN")
        return count * output - output.exp() - (count + 1).lgamma()

    def distribution(self, output: Tensor, values: Mapping[str, Tensor] = NO_VALUES) -> Distribution:
        return PoissonDistribution(output.exp(), validate_args=False)


def split_mask(target: Any) -> tuple[Tensor, Tensor | None]:
    """A target t, or a pair (t, mask), as t and mask."""
    if isinstance(target, Tensor):
        return target, None
    if not isinstance(target, tuple | list) or len(target) != 2 or not all(isinstance(x, Tensor) for x in target):
        came = f"{type(target).__name__} of {len(target)}" if isinstance(target, Sequence) else type(target).__name__
        raise TypeError(f"the target must be a tensor t or a pair of tensors (t, mask), got {came}")
    t, mask = target
    if mask.dtype != torch.bool or mask.shape != t.shape:
        raise ValueError(
            f"a mask must be boolean and of the target's shape {tuple(t.shape)}, True where t was observed; "
            f"got {mask.dtype} of {tuple(mask.shape)}"
        )
    return t, mask


def _heads(output: Any, channel: int) -> tuple[Tensor, Tensor]:
    """(mean, log σ) from the output of a network with two heads, or with twice the channels."""
    if isinstance(output, Tensor):
        if output.ndim <= channel or output.shape[channel] % 2:
            raise ValueError(
                'Gaussian("head"): the output must have an even number of channels on the axis after the batch, first '
                f"the means and then the log scales, got {tuple(output.shape)}"
            )
        mean, log_noise = output.chunk(2, dim=channel)
    elif isinstance(output, Mapping) and {"mean", "log_scale"} <= output.keys():
        mean, log_noise = output["mean"], output["log_scale"]
    elif isinstance(output, tuple | list) and len(output) == 2:
        mean, log_noise = output
    else:
        raise TypeError(
            'Gaussian("head"): the output must be a tensor [B, 2C, ..], a pair (mean, log_scale) or a dict with these '
            f"keys, got {type(output).__name__}"
        )
    if mean.shape != log_noise.shape:
        raise ValueError(
            f'Gaussian("head"): mean {tuple(mean.shape)} and log scale {tuple(log_noise.shape)} differ in shape'
        )
    return mean, log_noise


def _check_output(name: str, output: Any) -> None:
    if not isinstance(output, Tensor):
        raise TypeError(f"{name}: the network's output must be a tensor, got {type(output).__name__}")


def _check_same_shape(name: str, output: Any, target: Tensor) -> None:
    _check_output(name, output)
    if output.shape != target.shape:
        raise ValueError(
            f"{name}: the network's output has shape {tuple(output.shape)} and the target {tuple(target.shape)}; "
            "they must be equal (broadcasting would silently compare every output with every target)"
        )


def _check_noise_prior(prior: Distribution) -> None:
    if not isinstance(prior, Distribution):
        raise TypeError(f"noise_prior must be a torch distribution of the variance σ², got {type(prior).__name__}")
    if prior.batch_shape + prior.event_shape:
        raise ValueError(
            f"noise_prior must be of one number, got batch shape {tuple(prior.batch_shape)} and event shape "
            f"{tuple(prior.event_shape)}"
        )
    inside = prior.support.check(torch.tensor([-1.0, 1e-6, 1.0, 1e6]))  # pyright: ignore[reportOptionalMemberAccess]
    if inside.tolist() != [False, True, True, True]:
        raise ValueError(
            f"noise_prior is of the variance σ² and needs all positive numbers as its support, got {prior}; take "
            "InverseGamma, LogNormal or Gamma, for example"
        )
