"""The base of every likelihood, and checks of targets and outputs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves, tree_map

from ...util.configuration import configuration
from ...util.random_streams import borrowed_stream

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

    #: False if `log_prob` is no log probability of the data (class weights). The ELBO is then a weighted objective and
    #: no bound on the evidence: compare it with no other likelihood and no other weights.
    exact: bool = True

    def __init__(self) -> None:
        super().__init__()

    def forward(self, output: Any, target: Any) -> Tensor:
        t, weight = self.observed(*split_mask(target))
        log_prob = self.log_prob(output, t)
        return log_prob if weight is None else (weight.to(log_prob) * log_prob).masked_fill(weight == 0, 0.0)

    def observed(self, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return t, with 0 in place of what was not observed, and how much each element counts; None if all count once.

        0 is a possible observation of all likelihoods: NaN and labels out of range under the mask do no harm.
        """
        return target if mask is None else target.masked_fill(~mask, 0), mask

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

    def simulated(
        self, output: Any, target: Any, values: Mapping[str, Tensor], generator: torch.Generator | None = None
    ) -> Tensor:
        """log p(t' | y) of observations t' drawn from p(t | y) itself, 0 where `target` is masked: [B, ..].

        Its gradients g by the weights have E ggᵀ = Σ JᵀHJ, the generalised Gauss–Newton matrix, H the information of
        t about y.

        Args:
            output, target: as in a call; of the target only shape, mask and what is ignored are used, and the weight
                of its class where classes have weights.
            values: the likelihood's random tensors, [1, *shape] each.
            generator: of the observations.
        """
        t, weight = self.observed(*split_mask(target))
        with torch.no_grad(), borrowed_stream(generator):  # torch's distributions draw from the global stream
            drawn = self.distribution(tree_map(lambda y: y.unsqueeze(0), output), values).sample().squeeze(0).to(t)
        log_prob = self.log_prob(output, drawn)
        if weight is None:
            return log_prob
        # the weight belongs to the observed label, and a gradient's square has it once
        return (weight.to(log_prob).sqrt() * log_prob).masked_fill(weight == 0, 0.0)

    def random_tensors(self) -> dict[str, Tensor]:
        """Return the random tensors of the likelihood at their initial values; none by default."""
        return {}

    def log_prior(self, values: Mapping[str, Tensor]) -> Tensor:
        """log p of the random tensors [S, *shape], a density in just these coordinates: [S]."""
        raise NotImplementedError(f"{type(self).__name__} has random tensors but no prior: write `log_prior(values)`")

    def sums(self, target: Tensor, mask: Tensor | None) -> Tensor | None:
        """Sums over the observed elements of a batch that `best_constant` needs, float64; None where it is unknown."""
        return None

    def best_constant(self, sums: Tensor) -> float:
        """Σ log p(t | y) at the best output y that ignores the input, from the `sums` over all batches."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in configuration(self).items())


def split_mask(target: Any) -> tuple[Tensor, Tensor | None]:
    """A target t, or a pair (t, mask), as t and mask."""
    if isinstance(target, Tensor):
        return target, None
    if not isinstance(target, tuple | list) or len(target) != 2:
        raise TypeError(f"the target must be a tensor t or a pair (t, mask), got {type(target).__name__}")
    t, mask = target
    if mask.dtype != torch.bool or mask.shape != t.shape:
        raise ValueError(
            f"a mask must be boolean and of the target's shape {tuple(t.shape)}, True where t was observed; "
            f"got {mask.dtype} of {tuple(mask.shape)}"
        )
    return t, mask


def check_log_prob(log_prob: Any, output: Any, target: Any, B: int) -> None:
    """ValueError where it is not log p(t | y) of each of B observations."""
    if not isinstance(log_prob, Tensor) or log_prob.shape[:1] != (B,):
        came = tuple(log_prob.shape) if isinstance(log_prob, Tensor) else type(log_prob).__name__
        raise ValueError(
            f"the likelihood must return log p(t | y) of each observation, [{B}, ..], got {came}; one number "
            "for the batch is a loss, and Dice losses are the logarithm of no probability: take Categorical()"
        )
    if isinstance(output, Tensor) and log_prob.numel() <= output.numel():
        return  # nearly always, and asked for at every draw
    leaves = [leaf for leaf in tree_leaves((output, target)) if isinstance(leaf, Tensor)]
    if log_prob.numel() > max(leaf.numel() for leaf in leaves):
        raise ValueError(
            f"the likelihood returns {tuple(log_prob.shape)}, more numbers than output and target have, "
            f"{' and '.join(str(tuple(leaf.shape)) for leaf in leaves)}: broadcasting has compared every output with "
            "every target; give both the same shape"
        )


def check_output(name: str, output: Any) -> None:
    if not isinstance(output, Tensor):
        raise TypeError(f"{name}: the network's output must be a tensor, got {type(output).__name__}")


def check_same_shape(name: str, output: Any, target: Tensor) -> None:
    check_output(name, output)
    if output.shape != target.shape:
        raise ValueError(
            f"{name}: the network's output has shape {tuple(output.shape)} and the target {tuple(target.shape)}; they "
            "must be equal (broadcasting would silently compare every output with every target): give targets as "
            "t.unsqueeze(1) or t.squeeze(1)"
        )
