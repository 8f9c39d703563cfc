"""log p(θ): a prior is any callable (parameters, theta [S, P]) → [S].

Here are priors of independent tensors, and sums of priors. One that learns is an `nn.Module`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import lgamma, log, pi, prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from ...families.numerics import sum_squares, sum_weights
from ...parameters import Parameters
from ...util.checks import check_positive
from ...util.patterns import REST, assign, check_patterns

Prior = Callable[[Parameters, Tensor], Tensor]
Scale = float | Mapping[str, float]


class PriorModule(nn.Module, ABC):
    """The base of the library's priors: they can be added, and say if they are normalised."""

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
    """Tensors independent of each other, p(θ) = ∏ p(tensor): `forward` takes any part of the space.

    Tensors that all draws share are then evaluated once.
    """

    @abstractmethod
    def check(self, parameters: Parameters) -> None:
        """Raise if the prior does not fit the whole space."""


class SumPrior(PriorModule):
    """log p(θ) = Σ_i log p_i(θ) + constant: the product of densities, which is not normalised.

    Priors that learn are refused: the missing constant depends on their scales.

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
        for prior in priors:
            if not callable(prior) or learns(prior):
                raise ValueError(
                    "a sum is of priors (parameters, theta) → [S], and it is not normalised: its constant would depend "
                    f"on the scale that a prior learns, and here is {prior!r}: fit it alone, or with learn=False"
                )
        self.priors = list(priors)
        self.modules_of_sum = nn.ModuleList(prior for prior in priors if isinstance(prior, nn.Module))

    def forward(self, parameters: Parameters, theta: Tensor) -> Tensor:
        return torch.stack([prior(parameters, theta) for prior in self.priors]).sum(0)


def learns(prior: Prior) -> bool:
    """Return True if the prior has parameters that are fitted with the ELBO."""
    return isinstance(prior, nn.Module) and any(p.requires_grad for p in prior.parameters())


def log_prior(prior: Prior, parameters: Parameters, theta: Tensor, fixed: Mapping[str, Tensor]) -> Tensor:
    """Return any prior at draws θ [S, P'] of some tensors and the values of the others, which all draws share: [S]."""
    S, some_drawn = theta.shape[0], len(fixed) < len(parameters)
    if not fixed:
        return prior(parameters, theta)
    if isinstance(prior, SumPrior):
        return torch.stack([log_prior(one, parameters, theta, fixed) for one in prior.priors]).sum(0)
    if isinstance(prior, SeparablePrior):
        prior.check(parameters)
        shared = parameters.subset(fixed)
        value = prior(shared, shared.ravel(fixed).unsqueeze(0)).expand(S)
        return value + prior(parameters.without(fixed), theta) if some_drawn else value
    return prior(parameters, parameters.join(theta, fixed) if some_drawn else parameters.ravel(fixed).expand(S, -1))


class Run(NamedTuple):
    """Neighbouring tensors in θ whose scale is the same."""

    pattern: int
    divisor: float  # of the pattern's scale
    size: int


@lru_cache(maxsize=64)  # a prior asks at every step
def _runs(
    names: tuple[str, ...], shapes: tuple[torch.Size, ...], patterns: tuple[str, ...], what: str, by_fan_in: bool,
    joined: bool,
) -> list[Run]:  # fmt: skip
    """Return a run for each tensor, or, if they are joined, for neighbours with one scale."""
    runs: list[Run] = []
    for owner, shape in zip(assign(names, patterns, what, partial=True), shapes, strict=True):
        divisor = prod(shape[1:]) ** 0.5 if by_fan_in and len(shape) > 1 else 1.0
        before = runs.pop().size if joined and runs and runs[-1][:2] == (owner, divisor) else 0
        runs.append(Run(owner, divisor, before + shape.numel()))
    return runs


class ScalePrior(SeparablePrior):
    """Centred priors with a scale: one for all weights, or one for each pattern of names.

    With `learn=True` the logarithms of the scales are a parameter, `log_scale`, one for each pattern, fitted with the
    ELBO (empirical Bayes). The posterior must have a density everywhere. At a point estimate the prior's density
    grows without bound as weights and scale go to zero: `elbo` refuses it.
    """

    #: whether a tensor is one random vector, not many independent numbers
    grouped: bool = False

    def __init__(self, scale: Scale = 1.0, learn: bool = False, by_fan_in: bool = False):
        super().__init__()
        name = type(self).__name__
        by_pattern = scale if isinstance(scale, Mapping) else {REST: scale}
        self.patterns, self.values = tuple(by_pattern), tuple(by_pattern.values())
        check_patterns(self.patterns, name)
        for value in self.values:
            check_positive(value, f"the scale of a {name}", "or a dict of patterns and such numbers")
        self.scale, self.learn, self.by_fan_in = scale, learn, by_fan_in
        if learn:
            self.log_scale = nn.Parameter(torch.tensor([log(value) for value in self.values]))

    @abstractmethod
    def log_density(self, x: Tensor, scale: Tensor | float, log_scale: Tensor | float) -> Tensor:
        """Return log p of weights that share a scale: [S, n] → [S], in float64."""

    def check(self, parameters: Parameters) -> None:
        assign(parameters.names, self.patterns, type(self).__name__)

    def forward(self, parameters: Parameters, theta: Tensor) -> Tensor:
        total = theta.new_zeros(theta.shape[0], dtype=torch.float64)
        runs = self._runs(parameters, joined=not self.grouped)
        for x, run in zip(torch.split(theta, [run.size for run in runs], dim=-1), runs, strict=True):
            total = total + self.log_density(x, *self._scale(run))
        return total.to(theta.dtype)

    def scales(self, parameters: Parameters) -> dict[str, float]:
        """Return the present scale of each tensor, by name."""
        runs = self._runs(parameters, joined=False)
        with torch.no_grad():
            return {name: float(self._scale(run)[0]) for name, run in zip(parameters.names, runs, strict=True)}

    def _runs(self, parameters: Parameters, joined: bool) -> list[Run]:
        kind = type(self).__name__
        return _runs(parameters.names, parameters.shapes, self.patterns, kind, self.by_fan_in, joined)

    def _scale(self, run: Run) -> tuple[Tensor | float, Tensor | float]:
        """Return a scale and its logarithm."""
        if self.learn:
            log_scale = self.log_scale[run.pattern] - log(run.divisor)
            return log_scale.exp(), log_scale
        value = self.values[run.pattern] / run.divisor
        return value, log(value)

    def extra_repr(self) -> str:
        text = repr(self.scale) + (", by fan-in" if self.by_fan_in else "")
        return text + (", learn=True" if self.learn else "")


class NormalPrior(ScalePrior):
    """Independent normals, θ_i ~ N(0, scale²): l2 regularisation with its normalising constant.

    Args:
        scale: the standard deviation, > 0; or a dict of glob patterns on tensor names and such numbers, where every
            tensor must match exactly one pattern and "*" stands for what no other matches.
        learn: fit the scale, one for each pattern, with the ELBO.
        by_fan_in: divide the scale by √fan_in, fan_in = numel/shape[0], for tensors of two and more axes. The variance
            of a layer's output is then the same at every width.

    Example:
        >>> NormalPrior(1.0)(Parameters({"z": torch.zeros(2)}), torch.zeros(1, 2))
        tensor([-1.8379])
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        >>> NormalPrior(2.0, by_fan_in=True).scales(Parameters.of(net, "0.*"))
        {'0.weight': 1.0, '0.bias': 2.0}
        >>> NormalPrior({"1.*": 0.1, "*": 1.0}, learn=True).log_scale.shape
        torch.Size([2])
    """

    def log_density(self, x: Tensor, scale: Tensor | float, log_scale: Tensor | float) -> Tensor:
        return sum_squares(x) * (-0.5 / scale**2) - x.shape[-1] * (log_scale + 0.5 * log(2 * pi))


class LaplacePrior(ScalePrior):
    """Independent Laplace distributions, p(θ_i) = exp(−|θ_i|/scale)/(2 scale): l1 regularisation.

    The standard deviation is √2 scale.

    Args:
        scale: > 0; or a dict of patterns and scales, as in `NormalPrior`.
        learn: fit the scale, one for each pattern, with the ELBO.
        by_fan_in: divide the scale by √fan_in, as in `NormalPrior`.

    Example:
        >>> LaplacePrior(0.5)(Parameters({"z": torch.zeros(2)}), torch.ones(1, 2))
        tensor([-4.])
    """

    def log_density(self, x: Tensor, scale: Tensor | float, log_scale: Tensor | float) -> Tensor:
        return -sum_weights(x.abs()) / scale - x.shape[-1] * (log_scale + log(2))


class StudentTPrior(ScalePrior):
    """Student's t with ν = df degrees of freedom: most weights small, some as large as the data ask.

    Per weight, independent t's; per tensor, its n weights as one multivariate t,

        log p(x) = log Γ((ν+n)/2) − log Γ(ν/2) − n/2 log(νπ) − n log scale − (ν+n)/2 log(1 + |x|²/(ν scale²)),

    which is a normal with an inverse-gamma variance that the whole tensor shares. As ν → 0 the density goes to
    |x|^−n (per weight: 1/|θ_i|), which does not change its form when x is rescaled: small ν, such as 0.01, is the quasi
    scale-invariant prior, and still proper.

    Args:
        df: ν > 0.
        scale: > 0; or a dict of patterns and scales, as in `NormalPrior`. For ν > 2 the standard deviation is
            scale √(ν/(ν−2)).
        per: "weight" or "tensor".
        learn: fit the scale, one for each pattern, with the ELBO.
        by_fan_in: divide the scale by √fan_in, as in `NormalPrior`.

    Example:
        >>> StudentTPrior(df=1.0, scale=1.0)(Parameters({"z": torch.zeros(1)}), torch.zeros(1, 1))  # Cauchy: −log π
        tensor([-1.1447])
    """

    def __init__(
        self, df: float, scale: Scale = 1.0, per: str = "weight", learn: bool = False, by_fan_in: bool = False
    ):
        super().__init__(scale, learn, by_fan_in)
        check_positive(df, "df of a StudentTPrior")
        if per not in ("weight", "tensor"):
            raise ValueError(f'per must be "weight" or "tensor", got {per!r}')
        self.df, self.per = df, per
        self.grouped = per == "tensor"

    def log_density(self, x: Tensor, scale: Tensor | float, log_scale: Tensor | float) -> Tensor:
        n = x.shape[-1]
        vectors, size = (1, n) if self.grouped else (n, 1)
        constant = lgamma((self.df + size) / 2) - lgamma(self.df / 2) - 0.5 * size * log(self.df * pi)
        if self.grouped:
            spread = torch.log1p(sum_weights(x.square()) / scale**2 / self.df)
        else:
            spread = sum_weights(torch.log1p((x / scale).square() / self.df))
        return vectors * constant - n * log_scale - 0.5 * (self.df + size) * spread

    def extra_repr(self) -> str:
        return f"df={self.df}, scale={super().extra_repr()}, per={self.per!r}"


class DistributionPrior(SeparablePrior):
    """Any torch distribution, by patterns on tensor names.

    Args:
        distributions: glob pattern → distribution. A scalar distribution holds for every weight; otherwise
            its batch and event shapes together must be the tensor's. Every tensor must match exactly one pattern, and
            "*" stands for what no other matches.

    Example:
        >>> from torch.distributions import Cauchy, Normal
        >>> prior = DistributionPrior({"w": Normal(0.0, 1.0), "*": Cauchy(0.0, 1.0)})
        >>> prior(Parameters({"w": torch.zeros(2, 2), "b": torch.zeros(1)}), torch.zeros(1, 5))
        tensor([-4.8205])
    """

    def __init__(self, distributions: Mapping[str, Distribution]):
        super().__init__()
        check_patterns(distributions, "DistributionPrior")
        self.distributions = dict(distributions)

    def check(self, parameters: Parameters) -> None:
        for name, shape, own in zip(parameters.names, parameters.shapes, self._each(parameters, False), strict=True):
            if own.batch_shape + own.event_shape not in ((), shape):
                raise ValueError(
                    f"DistributionPrior: {name} has shape {tuple(shape)}, its {type(own).__name__} "
                    f"{tuple(own.batch_shape + own.event_shape)}; give a scalar distribution or one of the tensor's "
                    "shape"
                )

    def _each(self, parameters: Parameters, partial: bool) -> list[Distribution]:
        every = list(self.distributions.values())
        owners = assign(parameters.names, tuple(self.distributions), "DistributionPrior", partial)
        return [every[owner] for owner in owners]

    def forward(self, parameters: Parameters, theta: Tensor) -> Tensor:
        tensors, total = parameters.unravel(theta).values(), theta.new_zeros(theta.shape[0], dtype=torch.float64)
        for own, x in zip(self._each(parameters, True), tensors, strict=True):
            total = total + sum_weights(own.log_prob(x).reshape(theta.shape[0], -1))
        return total.to(theta.dtype)
