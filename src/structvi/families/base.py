"""The protocols: a family (state, an `nn.Module`) is called and gives a density (mathematics, a value)."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent

from ..configurable import configuration
from ..couplings import Coupling, naive
from ..parameters import Parameters
from ..random import borrowed_stream

#: `covariance()` builds a dense P×P matrix up to this P.
MAX_DENSE = 8192


class Draws(NamedTuple):
    """S weighted draws; the weights sum to one and carry gradients where the family learns them.

    `fixed` holds, by name, tensors that are the same in every draw (the point-estimated blocks of a network): they
    carry gradients and stay out of `theta`, whose P then counts the others alone. `latent` is set by families that
    change the model (fitted dropout): the likelihood is taken at `theta`, prior and log q at `latent`.
    """

    theta: Tensor  # [S, P]
    weight: Tensor  # [S]
    fixed: Mapping[str, Tensor] = MappingProxyType({})
    latent: Tensor | None = None  # [S, P]


class Density(ABC):
    """q at one value of its parameters: it can draw, score and measure itself, and lives for one step.

    Write `draw` and at least one of `log_prob` and `entropy`; the estimators that `elbo` can use follow from that.
    `P` is the number of weights; `space` is set by the family that builds the density.
    """

    space: Parameters | None = None
    #: False for point masses, which have no density: their `log_prob` is the log probability of the point.
    has_density: bool = True
    #: True where `draw` gives every state with its probability: nothing is left to chance and groups are one.
    enumerates: bool = False

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """[P]"""

    @property
    def variance(self) -> Tensor:
        """[P]"""
        raise self._refusal("variance", "a `variance` property")

    @property
    def P(self) -> int:
        return self.mean.shape[-1]

    @property
    def bound(self) -> bool:
        """Whether the ELBO is a lower bound: False where part of q is a point mass, whose entropy is dropped."""
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
        raise self._refusal("log_prob", "`log_prob`")

    def entropy(self) -> Tensor:
        """−E_q log q(θ), in nats."""
        raise self._refusal("entropy", "`entropy`")

    def score(self, theta: Tensor) -> Tensor:
        """∇_θ log q(θ): [S, P] → [S, P], without a graph. By automatic differentiation unless overridden."""
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            (score,) = torch.autograd.grad(self.log_prob(theta).sum(), theta)
        return score

    def latent_kl(self) -> Tensor | float:
        """KL in nats between latent variables that the family adds to the model (dropout masks) and their prior."""
        return 0.0

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
            return self._covariance_block(everything, everything)
        space = self._space()
        rows, columns = space.slice(names[0]), space.slice(names[-1])
        sides = (rows.stop - rows.start, columns.stop - columns.start)
        if sides[0] * sides[1] > MAX_DENSE**2:
            raise ValueError(f"the block {names} has {sides[0]} × {sides[1]} elements, more than {MAX_DENSE}²")
        return self._covariance_block(rows, columns)

    def _covariance_block(self, rows: slice, columns: slice) -> Tensor:
        raise self._refusal("covariance", "`_covariance_block(rows, columns)`")

    def to_distribution(self) -> Distribution:
        """The equal `torch.distributions` object, where one exists."""
        raise NotImplementedError(f"no torch distribution equals {type(self).__name__}")

    def offers(self, method: str) -> bool:
        """Whether this density has its own `log_prob` or `entropy`."""
        return getattr(type(self), method) is not getattr(Density, method)

    def _refusal(self, what: str, write: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} offers no {what}; to have it, write {write}")

    def _space(self) -> Parameters:
        if self.space is None:
            raise ValueError(f"this {type(self).__name__} has no named tensors: call a family bound to Parameters")
        return self.space

    def _check_dense(self, what: str) -> None:
        if self.P > MAX_DENSE:
            raise ValueError(
                f"{what} is dense and P = {self.P} is beyond {MAX_DENSE}; ask for the block between named tensors"
            )

    def _check_theta(self, theta: Tensor) -> Tensor:
        if not isinstance(theta, Tensor) or theta.ndim != 2 or theta.shape[-1] != self.P:
            came = tuple(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
            raise ValueError(
                f"expected theta of shape [S, P] with P = {self.P}, got {came}; for one point add a row axis"
            )
        return theta


def check_draw(
    groups: int, coupling: Coupling, generator: torch.Generator | None = None, device: torch.device | None = None
) -> None:
    """The arguments of `draw`, before any noise is made."""
    if not isinstance(groups, int) or isinstance(groups, bool) or groups < 1:
        raise ValueError(f"groups must be an integer ≥ 1, got {groups!r}")
    if not callable(coupling):
        raise TypeError(f"coupling must be a callable such as naive, paired or unscented, got {coupling!r}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    if generator is not None and device is not None and generator.device.type != device.type:
        raise ValueError(
            f"the generator is on {generator.device}, the weights on {device}; "
            f'make one there: torch.Generator("{device.type}").manual_seed(seed)'
        )


class DistributionDensity(Density):
    """A density over [P] from a `torch.distributions.Distribution`; draws are independent whatever the coupling."""

    def __init__(self, distribution: Distribution):
        shape = distribution.batch_shape + distribution.event_shape
        if len(distribution.batch_shape) or len(distribution.event_shape) != 1:
            raise ValueError(
                "a family's forward must return a distribution with event shape [P] and no batch shape, got event "
                f"{tuple(distribution.event_shape)} and batch {tuple(distribution.batch_shape)}"
                + ("; wrap it: torch.distributions.Independent(d, 1)" if len(shape) == 1 else "")
            )
        if not distribution.has_rsample:
            raise ValueError(
                f"{type(distribution).__name__} has no rsample: gradients cannot pass through its draws; "
                "bring a reparametrised distribution, or write a Density"
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

    def draw(self, groups=1, coupling=naive, generator=None) -> Draws:
        check_draw(groups, coupling, generator)
        with borrowed_stream(generator):  # torch's distributions draw from the global stream
            theta = self.distribution.rsample((groups,))
        return Draws(theta, theta.new_full((groups,), 1 / groups))

    def log_prob(self, theta: Tensor) -> Tensor:
        return self.distribution.log_prob(self._check_theta(theta))

    def entropy(self) -> Tensor:
        try:
            return self.distribution.entropy()
        except NotImplementedError:
            raise NotImplementedError(
                f"{type(self.distribution).__name__} offers no entropy; use estimator='path' or 'log_q'"
            ) from None

    def _covariance_block(self, rows: slice, columns: slice) -> Tensor:
        if isinstance(self.distribution, Independent):
            dense = torch.diag(self.variance)
        else:
            dense = getattr(self.distribution, "covariance_matrix", None)
        if dense is None:
            raise NotImplementedError(f"{type(self.distribution).__name__} offers no covariance")
        return dense[rows, columns]

    def to_distribution(self) -> Distribution:
        return self.distribution


class Family(nn.Module, ABC):
    """Variational parameters in a module; calling it builds the density at their present value.

    A family is first a *recipe*: configuration only, the constructor's arguments kept as attributes of the same names.
    `bind(parameters)` returns a new family of the same configuration whose variational parameters exist: they are made
    by `initialise`. A family that makes them in its constructor needs no `initialise` and is always bound.

    To write one, return from `forward` a `Density`, or a `torch.distributions.Distribution` over [P]:

    Example:
        >>> class Heavy(Family):
        ...     def initialise(self, parameters, generator):
        ...         self.loc = nn.Parameter(parameters.initial.clone())
        ...         self.log_scale = nn.Parameter((0.1 * parameters.scale).log())
        ...     def forward(self):
        ...         return Independent(torch.distributions.StudentT(5.0, self.loc, self.log_scale.exp()), 1)
        >>> q = Heavy().bind(Parameters({"z": torch.zeros(3)}))
        >>> q().draw(groups=4).theta.shape
        torch.Size([4, 3])
    """

    def __init__(self) -> None:
        super().__init__()
        self.space: Parameters | None = None

    @abstractmethod
    def forward(self) -> Density | Distribution:
        """The density at the present variational parameters."""

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        """Create the variational parameters, as `nn.Parameter` attributes, for this space."""

    def config(self) -> dict[str, Any]:
        """The constructor's arguments: what `bind` and `load` rebuild the family from."""
        return configuration(self)

    @property
    def is_bound(self) -> bool:
        return self.space is not None or type(self).initialise is Family.initialise

    def bind(self, parameters: Parameters, generator: torch.Generator | None = None) -> Self:
        """A new family of this configuration over `parameters`; this one is left as it is."""
        if not isinstance(parameters, Parameters):
            raise TypeError(
                f"bind expects Parameters, got {type(parameters).__name__}; "
                'write Parameters.of(net), or Parameters({"z": tensor})'
            )
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
        if self.space is not None:
            raise ValueError(
                f"this {type(self).__name__} is bound already; bind a recipe, such as {type(self).__name__}(...)"
            )
        bound = copy.deepcopy(self)
        bound.space = parameters
        bound.initialise(parameters, generator)
        return bound

    def __call__(self) -> Density:
        if not self.is_bound:
            raise ValueError(
                f"this {type(self).__name__} is a recipe without variational parameters: "
                "call .bind(parameters) first and use the family that it returns"
            )
        density = super().__call__()
        if isinstance(density, Distribution):
            density = DistributionDensity(density)
        if not isinstance(density, Density):
            raise TypeError(
                f"{type(self).__name__}.forward must return a Density or a torch.distributions.Distribution, "
                f"got {type(density).__name__}"
            )
        if self.space is not None:
            if density.P != self.space.size:
                raise ValueError(
                    f"{type(self).__name__}.forward gave a density over {density.P} numbers; "
                    f"its parameters have P = {self.space.size}"
                )
            density.space = self.space
        return density

    def extra_repr(self) -> str:
        text = ", ".join(f"{k}={v!r}" for k, v in self.config().items() if not isinstance(v, nn.Module | list | dict))
        return text + ("" if self.is_bound else (", " if text else "") + "unbound")


def initial_mean(parameters: Parameters, at: str, generator: torch.Generator | None) -> Tensor:
    """[P]: where a mean starts: "current" values of the network, a "fresh" draw of its initialisation, or "zero"."""
    starts: dict[str, Callable[[], Tensor]] = {
        "current": lambda: parameters.initial.clone(),
        "fresh": lambda: parameters.fresh(generator),
        "zero": lambda: torch.zeros_like(parameters.initial),
    }
    return starts[at]()


def check_start(initial_mean: str, initial_scale: float) -> None:
    """The constructor arguments that the families share."""
    if initial_mean not in ("current", "fresh", "zero"):
        raise ValueError(f'initial_mean must be "current", "fresh" or "zero", got {initial_mean!r}')
    if not isinstance(initial_scale, int | float) or isinstance(initial_scale, bool) or not 0 < initial_scale < inf:
        raise ValueError(
            f"initial_scale must be a positive number, a fraction of each tensor's scale, got {initial_scale!r}"
        )


def check_factor(rank: int, initial_factor: float) -> None:
    """The constructor arguments of a low-rank factor."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise ValueError(f"rank must be an integer ≥ 0, got {rank!r}")
    if not isinstance(initial_factor, int | float) or isinstance(initial_factor, bool) or not 0 <= initial_factor < inf:
        raise ValueError(f"initial_factor must be a number ≥ 0, got {initial_factor!r}")


def check_rank_fits(rank: int, P: int) -> None:
    if rank > P:
        raise ValueError(f"rank {rank} is larger than the number of weights P = {P}; take at most {P}")
