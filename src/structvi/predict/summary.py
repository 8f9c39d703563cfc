"""What the metrics need to know of a predictive over some of the draws: everything merges into that over all."""

from dataclasses import dataclass
from math import log
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical

from .predictive import Predictive, observed_target
from .probabilities import as_log_probability, as_probability, label_entropy

Score = Literal[
    "entropy", "mutual_information", "expected_entropy", "max_probability", "variance", "epistemic", "function_variance"
]


@dataclass
class Summary:
    """A predictive over some of the draws, of this weight.

    Example:
        >>> from structvi import likelihoods
        >>> halves = [Predictive(torch.tensor([[[y]]]), torch.ones(1), likelihoods.Gaussian(1.0)) for y in (0.0, 2.0)]
        >>> first, second = (Summary.of(half, None, 0.5) for half in halves)
        >>> first.merge(second).mean.item(), first.merge(second).epistemic.item()
        (1.0, 1.0)
    """

    weight: float
    log_prob: Tensor
    labels: bool = False
    discrete: bool = False
    mean: Tensor | None = None
    epistemic: Tensor | None = None
    aleatoric: Tensor | None = None
    expected_entropy: Tensor | None = None
    cdf: Tensor | None = None
    cdf_below: Tensor | None = None
    function_mean: Tensor | None = None
    function_variance: Tensor | None = None

    @classmethod
    def of(cls, predictive: Predictive, target: Any, weight: float) -> "Summary":
        """`target` None: no log probability is asked for, and the function's moments may be."""
        log_prob = torch.tensor(0.0) if target is None else predictive.log_prob(target)
        if predictive.is_function:
            return cls(weight, log_prob)
        labels = isinstance(predictive.components, Categorical | Bernoulli)
        moments = (predictive.mean, predictive.epistemic, predictive.aleatoric)
        kind = (labels, predictive.is_discrete)
        expected = predictive.expected_entropy if labels else None
        if target is None:
            function = (predictive.function_mean, predictive.function_variance)
            if not isinstance(function[0], Tensor):  # a tuple or dict of outputs
                function = (None, None)
            return cls(weight, log_prob, *kind, *moments, expected, None, None, *function)
        if labels:
            return cls(weight, log_prob, *kind, *moments, expected)
        t, _ = observed_target(predictive.likelihood, target)
        try:
            cdf = predictive.cdf(t)
        except NotImplementedError:  # torch gives a Student t none
            return cls(weight, log_prob, *kind, *moments)
        below = predictive.cdf(t - 1) if predictive.components.support.is_discrete else cdf  # pyright: ignore
        return cls(weight, log_prob, *kind, *moments, cdf=cdf, cdf_below=below)

    def merge(self, other: "Summary") -> "Summary":
        total = self.weight + other.weight
        a, b = self.weight / total, other.weight / total

        def mixed(x: Tensor | None, y: Tensor | None) -> Tensor | None:
            return None if x is None or y is None else a * x + b * y

        def probability(x: Tensor | None, y: Tensor | None) -> Tensor | None:
            p = mixed(x, y)
            return None if p is None else as_probability(p)

        epistemic = mixed(self.epistemic, other.epistemic)
        if epistemic is not None and self.mean is not None and other.mean is not None:
            apart = self.mean - other.mean
            if self.discrete:  # rates beyond all numbers do not differ
                apart = apart.masked_fill(self.mean == other.mean, 0.0)
            epistemic = epistemic + a * b * apart.square()
        function = mixed(self.function_variance, other.function_variance)
        if function is not None and self.function_mean is not None and other.function_mean is not None:
            function = function + a * b * (self.function_mean - other.function_mean).square()
        log_prob = torch.logaddexp(self.log_prob + log(a), other.log_prob + log(b))
        return Summary(
            total,
            as_log_probability(log_prob, self.discrete),
            self.labels,
            self.discrete,
            (probability if self.labels else mixed)(self.mean, other.mean),
            epistemic,
            mixed(self.aleatoric, other.aleatoric),
            mixed(self.expected_entropy, other.expected_entropy),
            probability(self.cdf, other.cdf),
            probability(self.cdf_below, other.cdf_below),
            mixed(self.function_mean, other.function_mean),
            function,
        )

    def score(self, score: Score) -> Tensor:
        """The uncertainty of every input, the mean over its elements: [B]."""
        if self.mean is None or self.epistemic is None or self.aleatoric is None:
            raise TypeError("the likelihood is a plain function: no uncertainty of t is known; write a Likelihood")
        if score == "function_variance":
            if self.function_variance is None:
                raise TypeError('score="function_variance" is for a network whose output is one tensor')
            return self.function_variance.reshape(len(self.function_variance), -1).mean(1)
        if score in ("variance", "epistemic"):
            value = self.epistemic if score == "epistemic" else self.epistemic + self.aleatoric
            return value.reshape(len(value), -1).mean(1)
        if self.expected_entropy is None:
            raise TypeError(f'score={score!r} is for class labels; for numbers take "epistemic" or "variance"')
        p = self.mean
        binary = p.shape == self.expected_entropy.shape  # Bernoulli
        entropy = label_entropy(p, binary)
        value = {
            "entropy": entropy,
            "expected_entropy": self.expected_entropy,
            "mutual_information": (entropy - self.expected_entropy).clamp(min=0),  # below zero by rounding only
            "max_probability": torch.minimum(p, 1 - p) if binary else 1 - p.max(1).values,
        }[score]
        return value.reshape(len(value), -1).mean(1)
