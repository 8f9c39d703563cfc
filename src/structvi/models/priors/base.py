"""log p(θ): a prior is any callable (parameters, theta [S, P]) → [S]; one that learns is an `nn.Module`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ...parameters import Parameters

Prior = Callable[[Parameters, Tensor], Tensor]


class PriorModule(nn.Module, ABC):
    """What the library's priors share: they can be added, and say whether they are normalised."""

    #: False where log p(θ) is known up to a constant only: so is then the ELBO
    normalised: bool = True

    @abstractmethod
    def forward(self, parameters: Parameters, theta: Tensor) -> Tensor:
        """log p(θ): [S, P] → [S]."""

    def __add__(self, other: Prior) -> "SumPrior":
        return SumPrior([self, other])

    def __radd__(self, other: Prior) -> "SumPrior":
        return SumPrior([other, self])


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
        if not isinstance(priors, Sequence) or not priors:
            raise ValueError(f"SumPrior expects a list of priors, got {priors!r}")
        for prior in priors:
            if not callable(prior) or isinstance(prior, type):
                raise TypeError(f"SumPrior: expected a prior (parameters, theta) → [S], got {prior!r}")
            if learns(prior):
                raise ValueError(
                    "a sum of priors is not normalised, and its constant depends on the scale that "
                    f"{type(prior).__name__} learns: fit it alone, or give the scale as a number (learn=False)"
                )
        self.priors = list(priors)
        self.modules_of_sum = nn.ModuleList(prior for prior in priors if isinstance(prior, nn.Module))

    def forward(self, parameters: Parameters, theta: Tensor) -> Tensor:
        return torch.stack([prior(parameters, theta) for prior in self.priors]).sum(0)


def learns(prior: Prior) -> bool:
    """Whether the prior has parameters that are fitted with the ELBO."""
    return isinstance(prior, nn.Module) and any(p.requires_grad for p in prior.parameters())


def log_prior(prior: Prior, parameters: Parameters, theta: Tensor, fixed: Mapping[str, Tensor]) -> Tensor:
    """Any prior at draws θ [S, P'] of some tensors and the values of the others, which all draws share: [S]."""
    S = theta.shape[0]
    if fixed and isinstance(prior, SumPrior):
        return torch.stack([log_prior(one, parameters, theta, fixed) for one in prior.priors]).sum(0)
    if fixed and isinstance(prior, SeparablePrior):
        prior.check(parameters)
        shared = parameters.subset(fixed)
        value = prior.terms(shared, shared.ravel(fixed).unsqueeze(0)).expand(S)
        return value if len(fixed) == len(parameters) else value + prior.terms(parameters.without(fixed), theta)
    whole = len(fixed) == len(parameters)
    return prior(parameters, parameters.ravel(fixed).expand(S, -1) if whole else parameters.join(theta, fixed))
