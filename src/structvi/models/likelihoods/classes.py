"""Class labels: one of C, or 0 and 1."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution
from torch.nn.functional import binary_cross_entropy_with_logits

from ...families.numerics import reads
from .base import NO_VALUES, Likelihood, check_output, check_same_shape


class _Classes(Likelihood):
    """The base of class labels: the label that is not counted, and weights."""

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

    def observed(self, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.ignore_index is not None:
            counts = target != self.ignore_index
            mask = counts if mask is None else mask & counts
        t, weight = super().observed(target, mask)
        if self.class_weights is None:
            return t, weight
        # labels out of range are told where the classes are known
        of_class = torch.tensor(self.class_weights, dtype=torch.float64, device=t.device)[
            t.long().clamp(0, len(self.class_weights) - 1)
        ]
        return t, of_class if weight is None else of_class * weight

    def log_prob(self, output: Any, target: Tensor) -> Tensor:
        check_output(type(self).__name__, output)
        classes = self._classes(output, target)
        if self.class_weights is not None and len(self.class_weights) != classes:
            raise ValueError(f"{type(self).__name__}: {len(self.class_weights)} class_weights for {classes} classes")
        wrong = (target < 0) | (target >= classes)
        if target.dtype.is_floating_point:
            wrong = wrong | (target != target.floor())
        if not reads():
            return self._log_prob(output, target.masked_fill(wrong, 0)).masked_fill(wrong, nan)
        if bool(wrong.any()):
            raise ValueError(
                f"{type(self).__name__}: labels must lie in 0 … {classes - 1} and be whole numbers, got "
                f"{target[wrong].unique()[:8].tolist()}; for pixels without a label give ignore_index= or a mask"
            )
        return self._log_prob(output, target)

    def sums(self, target: Tensor, mask: Tensor | None) -> Tensor:
        """Return the count of each observed label, [the largest + 1]."""
        labels = target.detach()[... if mask is None else mask]
        labels = labels[labels != self.ignore_index] if self.ignore_index is not None else labels.reshape(-1)
        return torch.bincount(labels.long().clamp(min=0)).double()

    def best_constant(self, sums: Tensor) -> float:
        counts = sums if self.class_weights is None else sums * sums.new_tensor(self.class_weights)[: len(sums)]
        return float(torch.xlogy(counts, counts / counts.sum().clamp(min=1.0)).sum())

    @abstractmethod
    def _classes(self, output: Any, target: Tensor) -> int:
        """Return the number of classes; raise if shapes or dtypes do not fit."""

    @abstractmethod
    def _log_prob(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return log p of labels that are all in range."""


class Categorical(_Classes):
    """t ~ softmax(y): output [B, C, ..] of logits, target [B, ..] of class labels 0 … C−1.

    Args:
        ignore_index: a label that was not observed: it contributes 0.
        class_weights: C numbers w ≥ 0: the result is w_t · log p(t | y). It is no likelihood of the data, for p^w does
            not sum to one over t. A fit then maximises a weighted objective, as of data in which class c counts w_c
            times. `exact` is False, and `distribution` stays the unweighted softmax.
            Weights that do not average to one over the data change how much the data count against the prior.

    Example:
        >>> Categorical()(torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)).shape
        torch.Size([5])
        >>> Categorical(ignore_index=255)(torch.zeros(1, 2, 2), torch.tensor([[1, 255]]))
        tensor([[-0.6931,  0.0000]])
    """

    def _classes(self, output: Any, target: Tensor) -> int:
        if output.ndim < 2 or output.shape[1] == 1 or target.shape != output.shape[:1] + output.shape[2:]:
            raise ValueError(
                "Categorical expects a logit for each class, logits [B, C, ..] and labels [B, ..], got "
                f"{tuple(output.shape)} and {tuple(target.shape)}; one-hot labels: .argmax(1), [B, 1]: .squeeze(1), of "
                'MONAI: variationalize(.., keys=("image", "label")). One channel is the logit of a yes or no: '
                "likelihoods.Bernoulli()"
            )
        if target.dtype.is_floating_point or target.dtype == torch.bool:
            raise TypeError(f"Categorical: labels must be integers, got {target.dtype}; convert them with .long()")
        return output.shape[1]

    def _log_prob(self, output: Tensor, labels: Tensor) -> Tensor:
        # torch's cross entropy is a dozen operations more under vmap, for labels that are to be left out
        return output.log_softmax(1).gather(1, labels.long().unsqueeze(1)).squeeze(1)

    def distribution(self, output: Tensor, values: Mapping[str, Tensor] = NO_VALUES) -> Distribution:
        check_output("Categorical", output)
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
        class_weights: the weights of t = 0 and t = 1. As in `Categorical`, the result is then no log likelihood, and
            `exact` is False.

    Example:
        >>> Bernoulli()(torch.zeros(2, 1), torch.tensor([[0.0], [1.0]])).squeeze(-1)
        tensor([-0.6931, -0.6931])
    """

    def _classes(self, output: Any, target: Tensor) -> int:
        check_same_shape("Bernoulli", output, target)
        return 2

    def _log_prob(self, output: Tensor, labels: Tensor) -> Tensor:
        return -binary_cross_entropy_with_logits(output, labels.to(output.dtype), reduction="none")

    def distribution(self, output: Tensor, values: Mapping[str, Tensor] = NO_VALUES) -> Distribution:
        return BernoulliDistribution(logits=output, validate_args=False)
