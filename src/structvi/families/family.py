"""The protocol: a family holds variational parameters in a module; calling it builds its density, a value.

A density is q at one value of its parameters: it draws, scores and measures itself, and lives for one step.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, MultivariateNormal

from ..couplings import Coupling, naive
from ..parameters import Parameters
from ..util.checks import check_generator, check_integer, check_theta
from ..util.configuration import configuration
from ..util.random_streams import borrowed_stream
from .normal import NormalForm

#: `covariance()` builds a dense P×P matrix up to this P.
MAX_DENSE = 8192


class Draws(NamedTuple):
    """S weighted draws; the weights sum to one and carry gradients where the family learns them.

    `fixed` holds, by name, tensors that are the same in every draw (the point-estimated blocks of a network): they
    carry gradients and stay out of `theta`, whose P then counts the others alone.
    """

    theta: Tensor  # [S, P]
    weight: Tensor  # [S]
    fixed: Mapping[str, Tensor] = MappingProxyType({})


class Density(ABC):
    """q at one value of its parameters: it can draw, score and measure itself, and lives for one step.

    Write `draw` and at least one of `log_prob` and `entropy`; the estimators that `elbo` can use follow from that.
    `P` is the number of weights; `space` is set by the family that builds the density.
    """

    space: Parameters | None = None
    #: False for point masses
    has_density: bool = True
    #: whether draws are made of the coupling's noise; where not, they are independent whatever the coupling
    coupled: bool = True
    #: whether draws lie around `mean`, the one centre; False for mixtures and masks
    centred: bool = True
    #: whether one group of draws has every state, with its probability
    finite: bool = False

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """[P]"""

    @property
    def variance(self) -> Tensor:
        """[P]"""
        raise self._refusal("variance")

    @property
    def P(self) -> int:
        return self.mean.shape[-1]

    @property
    def noise_size(self) -> int:
        """The number of normal numbers that make one draw."""
        return self.P

    @property
    def accurate(self) -> bool:
        """True if rounding leaves the algebra enough digits at the present parameters."""
        return True

    @property
    def bound(self) -> bool:
        """True if the ELBO is a lower bound; False if part of q is a point mass, whose entropy is dropped."""
        return self.has_density

    @abstractmethod
    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        """Draw `groups` independent groups of coupled weights, reparametrised: gradients flow through the draws."""

    def draw_scored(
        self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None
    ) -> tuple[Draws, Tensor | None]:
        """`draw`, and log q at the draws [S] with the gradient through the draws alone; None where `log_prob` and
        `score` have to be asked. For densities that can do both at once for less."""
        return self.draw(groups, coupling, generator), None

    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(θ): [S, P] → [S]."""
        raise self._refusal("log_prob")

    def entropy(self) -> Tensor:
        """−E_q log q(θ), in nats."""
        raise self._refusal("entropy")

    def score(self, theta: Tensor) -> Tensor:
        """∇_θ log q(θ): [S, P] → [S, P], without a graph. By automatic differentiation unless overridden."""
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            (score,) = torch.autograd.grad(self.log_prob(theta).sum(), theta)
        return score

    def covariance(self, *names: str) -> Tensor:
        """The covariance of θ [P, P], or the block between two named tensors, raveled: [numel, numel].

        `covariance("a.weight")` is the block of one tensor with itself. The dense matrix is refused beyond
        P = `MAX_DENSE`.
        """
        if len(names) > 2:
            raise ValueError(f"covariance takes no name, one or two, got {names}")
        if not names:
            self._check_dense("covariance()")
            everything = slice(0, self.P)
            return self.covariance_block(everything, everything)
        space = self.named_space()
        return self.covariance_block(space.slice(names[0]), space.slice(names[-1]))

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        """The covariance between two stretches of θ."""
        raise self._refusal("covariance_block")

    def offers(self, method: str) -> bool:
        """Return True if this density has its own `log_prob` or `entropy`."""
        return getattr(type(self), method) is not getattr(Density, method)

    def _refusal(self, what: str) -> NotImplementedError:
        why = "offers no" if self.has_density else "is made of point masses: no density, and so no"
        return NotImplementedError(f"{type(self).__name__} {why} {what}")

    def named_space(self) -> Parameters:
        """The named tensors; an error where the density has none."""
        if self.space is None:
            raise ValueError(f"this {type(self).__name__} has no named tensors: call a family bound to Parameters")
        return self.space

    def _check_dense(self, what: str) -> None:
        if self.P > MAX_DENSE:
            raise ValueError(
                f"{what} is dense and P = {self.P} is beyond {MAX_DENSE}; ask for the block between named tensors"
            )


def check_draw(groups: int, generator: torch.Generator | None = None) -> None:
    """The arguments of `draw`, before any noise is made."""
    check_integer("groups", groups)
    check_generator(generator)


class DistributionDensity(Density):
    """A density over [P] from a `torch.distributions.Distribution`; draws are independent whatever the coupling."""

    coupled = False

    def __init__(self, distribution: Distribution):
        if distribution.batch_shape or len(distribution.event_shape) != 1:
            raise ValueError(
                "a family's forward must return a distribution with event shape [P] and no batch shape, got event "
                f"{tuple(distribution.event_shape)} and batch {tuple(distribution.batch_shape)}; "
                "wrap it: torch.distributions.Independent(d, 1)"
            )
        self.distribution = distribution

    @property
    def mean(self) -> Tensor:
        return self.distribution.mean

    @property
    def variance(self) -> Tensor:
        return self.distribution.variance

    @property
    def P(self) -> int:
        return self.distribution.event_shape[0]

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        check_draw(groups, generator)
        with borrowed_stream(generator):  # torch's distributions draw from the global stream
            theta = self.distribution.rsample((groups,))
        return Draws(theta, theta.new_full((groups,), 1 / groups))

    def log_prob(self, theta: Tensor) -> Tensor:
        return self.distribution.log_prob(check_theta(theta, self.P))

    def entropy(self) -> Tensor:
        return self.distribution.entropy()

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        if isinstance(self.distribution, Independent):
            return torch.diag(self.variance)[rows, columns]
        if isinstance(self.distribution, MultivariateNormal):
            return self.distribution.covariance_matrix[rows, columns]
        raise self._refusal("covariance_block")


class Family(nn.Module, ABC):
    """Variational parameters in a module; calling it builds the density at their present value.

    A family is first a *recipe*: configuration only, the constructor's arguments kept as attributes of the same names.
    `bind(parameters)` returns a new family of the same configuration whose variational parameters exist: they are made
    by `initialise`. A family that makes them in its constructor needs no `initialise` and is always bound.

    To write one, return from `forward` a `Density`, or a `torch.distributions.Distribution` over [P]. A Gaussian family
    that also writes `normal` and `set_normal` can be placed, searched and grown as the built-in ones are.

    Example:
        >>> class Heavy(Family):
        ...     def initialise(self, parameters, generator):
        ...         self.loc = nn.Parameter(parameters.initial.clone())
        ...         self.log_scale = nn.Parameter((0.1 * parameters.scale).log())
        ...     def forward(self):
        ...         return torch.distributions.Independent(
        ...             torch.distributions.StudentT(5.0, self.loc, self.log_scale.exp()), 1)
        >>> q = Heavy().bind(Parameters({"z": torch.zeros(3)}))
        >>> q().draw(groups=4).theta.shape
        torch.Size([4, 3])
    """

    #: K, the columns of a low-rank factor
    rank: int = 0

    def __init__(self) -> None:
        super().__init__()
        self.space: Parameters | None = None

    @abstractmethod
    def forward(self) -> Density | Distribution:
        """Return the density at the present variational parameters."""

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        """Create the variational parameters, as `nn.Parameter` attributes, for this space."""

    @property
    def is_bound(self) -> bool:
        return self.space is not None or type(self).initialise is Family.initialise

    def bind(self, parameters: Parameters, generator: torch.Generator | None = None) -> Self:
        """Return a new family of this configuration over `parameters`; do not change this one."""
        if not isinstance(parameters, Parameters):
            raise TypeError(f"bind expects Parameters, such as Parameters.of(net), got {type(parameters).__name__}")
        check_generator(generator)
        if self.space is not None:
            raise ValueError(f"this {type(self).__name__} is bound already: bind a recipe")
        bound = copy.deepcopy(self)
        bound.space = parameters
        bound.initialise(parameters, generator)
        return bound

    def bound_space(self) -> Parameters:
        """Return the space; raise if the family is a recipe."""
        if self.space is None:
            raise ValueError(f"this {type(self).__name__} is not bound to Parameters: call .bind(parameters) first")
        return self.space

    def __call__(self) -> Density:
        if not self.is_bound:
            raise ValueError(f"this {type(self).__name__} is a recipe: call .bind(parameters) first")
        density = super().__call__()
        if isinstance(density, Distribution):
            density = DistributionDensity(density)
        if not isinstance(density, Density):
            raise TypeError(f"{type(self).__name__}.forward must return a Density or a Distribution, got {density!r}")
        if self.space is not None:
            if density.P != self.space.size:
                raise ValueError(f"{type(self).__name__}.forward gave P = {density.P}, expected {self.space.size}")
            density.space = self.space
        return density

    def normal(self) -> NormalForm | None:
        """Return the present normal, without a graph; or None for other families."""
        return None

    def set_normal(self, form: NormalForm) -> None:
        """Become this normal, in place: what the family's shape cannot hold is left out.

        A covariance or precision that does not fit is replaced by the diagonal of the precision.
        """
        raise TypeError(f"{type(self).__name__} cannot be set to a normal: write its `set_normal(form)`")

    def parts(self) -> "list[Family]":
        """Return the components of a mixture, or the blocks; an empty list if there are none."""
        return []

    def extra_repr(self) -> str:
        shown = [f"{k}={v!r}" for k, v in configuration(self).items() if not isinstance(v, nn.Module | list | dict)]
        return ", ".join(shown if self.is_bound else [*shown, "unbound"])


# --------------------------------------------------------------------------------- initial values that families share


#: what means can start at
STARTS = ("current", "fresh", "zero")


def initial_mean(parameters: Parameters, at: str, generator: torch.Generator | None) -> Tensor:
    """Return [P]: "current" values of the network, a "fresh" draw of its initialisation, or "zero"."""
    if at == "fresh":
        return parameters.fresh(generator)
    return parameters.initial.clone() if at == "current" else torch.zeros_like(parameters.initial)


def standard_noise(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return standard normal numbers for initial values: made where the generator is, moved to where they are used."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=device).to(like.device)
