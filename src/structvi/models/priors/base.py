"""log p(θ): a prior is any callable (parameters, theta [S, P]) → [S]; one that learns is an `nn.Module`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...parameters import Parameters

Prior = Callable[[Parameters, Tensor], Tensor]


class ByHand(NamedTuple):
    """log p(θ) without a graph, and its gradient in closed form."""

    value: Tensor  # [S], in float64
    #: (gradients [S, P], coefficients [S]): adds the coefficients times ∇ log p to the gradients, in place
    add: Callable[[Tensor, Tensor], None]
    #: where ∇ log p is a number times θ, that number
    slope: float | None = None


class PriorModule(nn.Module, ABC):
    """What the library's priors share: they can be added, and say whether they are normalised."""

    #: False where log p(θ) is known up to a constant only: so is then the ELBO
    normalised: bool = True

    @abstractmethod
    def forward(self, parameters: Parameters, theta: Tensor) -> Tensor:
        """log p(θ): [S, P] → [S]."""

    def with_fixed(self, parameters: Parameters, theta: Tensor, fixed: Mapping[str, Tensor]) -> Tensor:
        """log p at draws θ [S, P'] of some tensors and the values of the others, which all draws share: [S]."""
        return self(parameters, _join(parameters, theta, fixed))

    def by_hand(self, parameters: Parameters, theta: Tensor, squares: Tensor | None = None) -> ByHand | None:
        """log p and its gradient at draws [S, P], for a step without a graph; None: by automatic differentiation.

        Args:
            parameters: the space of θ.
            theta: the draws.
            squares: θ·θ [S] in float64, where it is known.
        """
        return None

    def __add__(self, other: Prior) -> "SumPrior":
        return SumPrior([self, other])

    def __radd__(self, other: Prior) -> "SumPrior":
        return SumPrior([other, self])


def log_prior(prior: Prior, parameters: Parameters, theta: Tensor, fixed: Mapping[str, Tensor]) -> Tensor:
    """Any prior at draws θ [S, P'] of some tensors and the values of the others, which all draws share: [S]."""
    if fixed and isinstance(prior, PriorModule):
        return prior.with_fixed(parameters, theta, fixed)
    return prior(parameters, _join(parameters, theta, fixed))


def learns(prior: Prior) -> bool:
    """Whether the prior has parameters that are fitted with the ELBO."""
    return isinstance(prior, nn.Module) and any(p.requires_grad for p in prior.parameters())


class SeparablePrior(PriorModule):
    """Tensors independent of each other, p(θ) = ∏ p(tensor): those that all draws share are evaluated once."""

    @abstractmethod
    def check(self, parameters: Parameters) -> None:
        """Raise where the prior does not fit the space."""

    @abstractmethod
    def terms(self, parameters: Parameters, theta: Tensor) -> Tensor:
        """log p of the tensors of a subspace that `check` has passed: [S, P] → [S]."""

    def forward(self, parameters: Parameters, theta: Tensor) -> Tensor:
        self.check(parameters)
        return self.terms(parameters, theta)

    def with_fixed(self, parameters: Parameters, theta: Tensor, fixed: Mapping[str, Tensor]) -> Tensor:
        self.check(parameters)
        shared = parameters.subset(fixed)
        value = self.terms(shared, shared.ravel(fixed).unsqueeze(0))  # [1]
        if len(fixed) == len(parameters):
            return value.expand(theta.shape[0])
        return value + self.terms(parameters.without(fixed), theta)


class SumPrior(PriorModule):
    """log p(θ) = Σ_i log p_i(θ) + constant: the product of densities, which is not normalised.

    Priors that learn are refused: the missing constant depends on what they learn.

    Args:
        priors: a list of them; `prior1 + prior2` makes a sum too.

    Example:
        >>> from structvi.models.priors import LaplacePrior, NormalPrior
        >>> prior = NormalPrior(1.0) + LaplacePrior(0.5)
        >>> prior(Parameters({"z": torch.zeros(2)}), torch.zeros(1, 2)), prior.normalised
        (tensor([-1.8379]), False)
    """

    normalised = False

    def __init__(self, priors: Sequence[Prior]):
        super().__init__()
        _check(type(self).__name__, priors)
        for prior in priors:
            if learns(prior):
                raise ValueError(
                    "a sum of priors is not normalised, and its constant depends on the scale that "
                    f"{type(prior).__name__} learns: fit it alone, or give the scale as a number (learn=False)"
                )
        self.priors = list(priors)
        self.modules_of_sum = nn.ModuleList(prior for prior in priors if isinstance(prior, nn.Module))

    def forward(self, parameters: Parameters, theta: Tensor) -> Tensor:
        return torch.stack([prior(parameters, theta) for prior in self.priors]).sum(0)

    def with_fixed(self, parameters: Parameters, theta: Tensor, fixed: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([log_prior(prior, parameters, theta, fixed) for prior in self.priors]).sum(0)


class MixturePrior(PriorModule):
    """p(θ) = 1/C Σ_c p_c(θ): one of several priors is right, and nobody knows which; a width that is not known.

    Args:
        priors: a list of them, all of them normalised.

    Example:
        >>> from structvi.models.priors import NormalPrior
        >>> prior = MixturePrior([NormalPrior(1.0), NormalPrior(0.1)])
        >>> prior(Parameters({"z": torch.zeros(1)}), torch.zeros(1, 1))  # log of the mean of 0.399 and 3.99
        tensor([0.7858])
    """

    def __init__(self, priors: Sequence[Prior]):
        super().__init__()
        _check(type(self).__name__, priors)
        for prior in priors:
            if isinstance(prior, PriorModule) and not prior.normalised:
                raise ValueError(
                    f"{type(prior).__name__} is known up to a constant, and how it compares with the other priors of "
                    "a mixture is not known: give priors that are normalised"
                )
        self.priors = list(priors)
        self.modules_of_mixture = nn.ModuleList(prior for prior in priors if isinstance(prior, nn.Module))

    def forward(self, parameters: Parameters, theta: Tensor) -> Tensor:
        return self._mean([prior(parameters, theta) for prior in self.priors])

    def with_fixed(self, parameters: Parameters, theta: Tensor, fixed: Mapping[str, Tensor]) -> Tensor:
        return self._mean([log_prior(prior, parameters, theta, fixed) for prior in self.priors])

    def _mean(self, values: list[Tensor]) -> Tensor:
        return torch.stack(values).logsumexp(0) - log(len(values))


def _check(name: str, priors: Sequence[Prior]) -> None:
    if not isinstance(priors, Sequence) or not priors:
        raise ValueError(f"{name} expects a list of priors, got {priors!r}")
    for prior in priors:
        if not callable(prior) or isinstance(prior, type):
            raise TypeError(f"{name}: expected a prior (parameters, theta) → [S], got {prior!r}")


def _join(parameters: Parameters, theta: Tensor, fixed: Mapping[str, Tensor]) -> Tensor:
    if len(fixed) == len(parameters):
        return parameters.ravel(fixed).expand(theta.shape[0], -1)
    return parameters.join(theta, fixed)
