"""A family: variational parameters in a module, as a recipe, then bound to a space, then called for its density."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from ..parameters import Parameters
from ..util.checks import check_generator, is_positive
from ..util.configuration import configuration
from .density import Density, DistributionDensity
from .normal import NormalForm


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

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments: `bind` and `load` rebuild the family from them."""
        return configuration(self)

    @property
    def is_bound(self) -> bool:
        return self.space is not None or type(self).initialise is Family.initialise

    def bind(self, parameters: Parameters, generator: torch.Generator | None = None) -> Self:
        """Return a new family of this configuration over `parameters`; this one is left as it is."""
        if not isinstance(parameters, Parameters):
            raise TypeError(
                f"bind expects Parameters, got {type(parameters).__name__}; "
                'write Parameters.of(net), or Parameters({"z": tensor})'
            )
        check_generator(generator)
        if self.space is not None:
            raise ValueError(
                f"this {type(self).__name__} is bound already; bind a recipe, such as {type(self).__name__}(...)"
            )
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

    def normal(self) -> NormalForm | None:
        """Return the present normal, without a graph; None if the family is no single normal."""
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
        text = ", ".join(f"{k}={v!r}" for k, v in self.config().items() if not isinstance(v, nn.Module | list | dict))
        return text + ("" if self.is_bound else (", " if text else "") + "unbound")


# --------------------------------------------------------------------------------- initial values that families share


def initial_mean(parameters: Parameters, at: str, generator: torch.Generator | None) -> Tensor:
    """Return [P]: "current" values of the network, a "fresh" draw of its initialisation, or "zero"."""
    starts: dict[str, Callable[[], Tensor]] = {
        "current": lambda: parameters.initial.clone(),
        "fresh": lambda: parameters.fresh(generator),
        "zero": lambda: torch.zeros_like(parameters.initial),
    }
    return starts[at]()


def check_initial_mean(initial_mean: str) -> None:
    """Raise unless `initial_mean` knows this start."""
    if initial_mean not in ("current", "fresh", "zero"):
        raise ValueError(f'initial_mean must be "current", "fresh" or "zero", got {initial_mean!r}')


def check_initial_scale(initial_scale: float) -> None:
    """Raise unless the scale is a positive number."""
    if not is_positive(initial_scale):
        raise ValueError(
            f"initial_scale must be a positive number, a fraction of each tensor's scale, got {initial_scale!r}"
        )


def standard_noise(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return standard normal numbers for initial values: made where the generator is, moved to where they are used."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=device).to(like.device)
