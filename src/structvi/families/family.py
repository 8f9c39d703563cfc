"""A family: variational parameters in a module, and what it knows about itself.

The first half is the protocol, recipe → bound family → density. The second is what fits ask of a family: to start at a
mean, to learn in stages, to grow, to change coordinates, to be cut into rows. Each has a default: a normal of your own
with `mean` [P] and `log_scale` [P] alone has all that applies to it; the rest is refused with what to write.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import log, pi
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from ..parameters import Parameters
from ..util.checks import check_generator
from ..util.configuration import configuration
from .density import Density, DistributionDensity
from .forms import Factor, LowRankForm, MeanAndScale, PartsSought, Profile, RelativeForm
from .normal import Diagonal, NormalForm
from .rows import Shard

#: nats a weight within which a density's entropy is that of a normal; a Laplace of equal variance has 0.07 less
ENTROPY_PER_WEIGHT = 1e-3
#: coordinates θ = shift + root z from which a family can be brought back: root a diagonal, or any lower triangle
Coordinates = Literal["diagonal", "full"]


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
        ...         return torch.distributions.Independent(
        ...             torch.distributions.StudentT(5.0, self.loc, self.log_scale.exp()), 1)
        >>> q = Heavy().bind(Parameters({"z": torch.zeros(3)}))
        >>> q().draw(groups=4).theta.shape
        torch.Size([4, 3])
    """

    #: K, the columns of a low-rank factor
    rank: int = 0
    #: the tensors with a row for each weight, of which ranks may hold some each; none where it cannot be cut
    row_tensors: tuple[str, ...] = ()
    #: of the parameter [P] that is a mean of the weights, in their order, or a point
    mean_name: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.space: Parameters | None = None
        #: this rank's rows, where ranks share the weights
        self.shard: Shard | None = None

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
        check_generator(generator)
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
        if self.shard is not None:
            density = self.shard.join(density)
        if self.space is not None:
            if density.P != self.space.size:
                raise ValueError(
                    f"{type(self).__name__}.forward gave a density over {density.P} numbers; "
                    f"its parameters have P = {self.space.size}"
                )
            density.space = self.space
        return density

    def families(self) -> "Iterator[Family]":
        """This family and all that it is made of: parts of a mixture, blocks, the weights under a mask."""
        return (module for module in self.modules() if isinstance(module, Family))

    def bound_space(self) -> Parameters:
        """The space; an error where the family is a recipe."""
        if self.space is None:
            raise ValueError(f"this {type(self).__name__} is not bound to Parameters: call .bind(parameters) first")
        return self.space

    def own_rows(self, x: Tensor) -> Tensor:
        """Of a tensor with a row for each weight what this rank holds."""
        return x if self.shard is None else x[self.shard.rows.slice]

    # ------------------------------------------------------------------------------------------- one value for a normal

    @torch.no_grad()
    def normal(self) -> NormalForm | None:
        """Return the present normal, without a graph; None if the family is no single normal."""
        own = self.mean_and_scale()
        return None if own is None else NormalForm(own.mean.clone(), Diagonal(own.log_scale.exp()))

    @torch.no_grad()
    def set_normal(self, form: NormalForm) -> None:
        """Become this normal, in place: what the family's shape cannot hold is left out.

        A covariance or precision that does not fit is replaced by the diagonal of the precision.
        """
        own = self.mean_and_scale()
        if own is None:
            raise TypeError(f"{type(self).__name__} cannot be set to a normal: write its `set_normal(form)`")
        own.mean.copy_(self.own_rows(form.mean))
        own.log_scale.copy_(self.own_rows(form.diagonal().scale).log())

    def parts(self) -> "list[Family]":
        """Return the components of a mixture, or the blocks; an empty list if there are none."""
        return []

    # ------------------------------------------------------------------------------------- what it knows of itself

    @torch.no_grad()
    def mean_and_scale(self) -> MeanAndScale | None:
        """`mean` and `log_scale`, where they are [P], all that it has, and its density is N(mean, exp(log_scale)²).

        That it is normal shows in its entropy: of all densities with these variances only this normal has as much.
        """
        own = dict(self.named_parameters())
        if self.space is None or own.keys() != {"mean", "log_scale"} or next(self.buffers(), None) is not None:
            return None
        mean, log_scale = own["mean"], own["log_scale"]
        if self.shard is None:
            if not mean.shape == log_scale.shape == (self.space.size,):
                return None
            density = self()
            try:
                moments, entropy = (density.mean, density.variance), density.entropy()
            except NotImplementedError:
                return None
            if not (torch.allclose(moments[0], mean) and torch.allclose(moments[1], (2 * log_scale).exp())):
                return None
            normal = log_scale.double().sum() + 0.5 * len(mean) * (1 + log(2 * pi))
            if not abs(float(entropy - normal)) < ENTROPY_PER_WEIGHT * len(mean):
                return None
        return MeanAndScale(mean, log_scale)

    #: how many columns of a precision diag(1/scale²) + WWᵀ it can start with, see `place`
    precision_columns: int = 0

    def place(
        self, mean: Mapping[str, Tensor], scale: Mapping[str, Tensor], columns: Mapping[str, Tensor] | None = None
    ) -> None:
        """Start at N(mean, (diag(1/scale²) + WWᵀ)⁻¹), W [.., K] the columns, all by name: `fit(start="trained")`.

        Scales and columns are along the family's own axes (`to_axes`). Where it has no room for columns, its precision
        has the same diagonal.
        """
        space = self.bound_space()
        flat = [self.own_rows(space.ravel({name: x[name] for name in space.names})) for x in (mean, scale)]
        if columns is not None:
            sizes = zip(space.names, space.numels, strict=True)
            W = self.own_rows(torch.cat([columns[name].reshape(n, columns[name].shape[-1]) for name, n in sizes]))
            own, rest = W[:, : self.precision_columns], W[:, self.precision_columns :]
            flat[1] = (flat[1].double() ** -2 + rest.double().square().sum(1)).rsqrt().to(flat[1])
        with torch.no_grad():
            self.place_at(*flat)
            if columns is not None and self.precision_columns:
                self.place_columns(own)

    #: the scales of a weight: several in a scale mixture, whose parts have one each
    scale_count: int = 1

    def place_scales(self, scales: Tensor) -> None:
        """Of each part, [`scale_count`, P], after `place`."""
        raise NotImplementedError(f"{type(self).__name__} has one scale for each weight")

    def place_at(self, mean: Tensor, scale: Tensor) -> None:
        """`place` with vectors [P]: what a family of its own shape overrides."""
        own = self.mean_and_scale()
        if own is None:
            raise TypeError(
                f'start="trained" is for normal families, MAP and blocks of them, not for {type(self).__name__}; '
                "a mixture starts at several trained networks: Mixture.from_networks. A family of your own has it with "
                "the parameters `mean` and `log_scale` [P] of a normal and no others, or writes `place_at(mean, scale)`"
            )
        own.mean.copy_(mean)
        own.log_scale.copy_(scale.log())

    def place_columns(self, columns: Tensor) -> None:
        """Add WWᵀ to the precision, W [P, `precision_columns`]."""
        raise NotImplementedError(f"{type(self).__name__} says that it has room for columns: write `place_columns`")

    def move_to(self, theta: Tensor) -> None:
        """The mean to θ [P], the shape as it is: `grow(components=)`."""
        own = self.mean_and_scale()
        if own is None:
            raise TypeError(
                f"grow(components=) is for normal families and mixtures of them, not for {type(self).__name__}; a "
                "family of your own writes `move_to(theta)`"
            )
        with torch.no_grad():
            own.mean.copy_(theta)

    def hold_mean(self) -> None:
        """Keep the mean where it is while all else learns; of families made of others, those keep theirs."""
        if next(self.parameters(recurse=False), None) is None or self.mixture_parts()[0] != [self]:
            return
        own = self.mean_and_scale()
        if own is None:
            raise TypeError(
                f'mean="held" is for normal families, not for {type(self).__name__}; a family of your own writes '
                "`hold_mean()`"
            )
        own.mean.requires_grad_(False)

    def is_fresh(self) -> bool | None:
        """Whether its scales are still those it starts with; None where it has none, or cannot tell."""
        own = self.mean_and_scale()
        if own is None or self.shard is not None:
            return None
        start = copy.deepcopy(self)
        start.initialise(self.bound_space(), torch.Generator().manual_seed(0))
        started = start.mean_and_scale()
        return started is not None and torch.allclose(own.log_scale, started.log_scale.to(own.log_scale), 0, 1e-6)

    def begin_again(self, generator: torch.Generator) -> None:
        """Start at a fresh draw of the network's initialisation; nothing where that is not known how."""
        if self.mean_and_scale() is not None:
            space = self.bound_space()
            self.initialise(space.at(space.fresh(generator)), generator)

    # ---- coordinates: the axes along which its scales are

    def change_basis(self, turn: Callable[[Tensor], Tensor], squares: Callable[[Tensor], Tensor]) -> None:
        """What it is in ξ, in ξ' = Rᵀξ: the mean and factors exactly, of the precision its diagonal.

        Args:
            turn: Rᵀx of rows [.., P].
            squares: the diagonal [P] of Rᵀ diag(x) R.
        """
        own = self._diagonal("change_basis")
        with torch.no_grad():
            own.mean.copy_(turn(own.mean))
            own.log_scale.copy_(-0.5 * squares((-2 * own.log_scale).exp()).log())

    def to_axes(self, x: Tensor) -> Tensor:
        """Rows [.., P] of θ along its axes."""
        return x

    def diagonal_to_axes(self, diagonal: Tensor) -> Tensor:
        """The diagonal, along its axes, of a matrix that is diagonal in θ: [P]."""
        return diagonal

    @property
    def wants_gradients(self) -> bool:
        """Whether its axes are chosen from gradients."""
        return False

    def take_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Choose the axes, of gradients [P] at one θ, with labels drawn from the model."""

    # ---- stages: mean and scales first, then what has to know them

    @property
    def has_stages(self) -> bool:
        """Whether a part of it can wait; of families made of others, those have stages."""
        return False

    def is_untouched(self) -> bool:
        """Whether nothing has been learned yet, so that it pays to begin with stage one."""
        return False

    def first_stage(self) -> None:
        """Hold back what has to wait."""

    def second_stage(self, generator: torch.Generator | None = None) -> None:
        """Let all of it learn, at the scales that stage one has found."""

    def learn_all(self) -> None:
        """After a fit, whatever stage it ended in."""

    def factors(self) -> "list[Factor]":
        """The low-rank factors among its parameters, its parts' too: an optimizer moves them at their own rate."""
        every = [factor for part in self.families() if part is not self for factor in part.factors()]
        return list({id(factor.parameter): factor for factor in every}.values())  # parts of parts are asked twice

    # ---- growth

    def low_rank_form(self) -> LowRankForm | None:
        """What columns can be added to; None where there is no such thing."""
        own = self.mean_and_scale()
        if own is None:
            return None
        return LowRankForm(*own, own.log_scale.exp(), own.mean.new_empty(len(own.mean), 0), None)

    def mixture_parts(self) -> "tuple[list[Family], Tensor]":
        """The parts of the mixture that it is, itself alone unless it is one, and their weights."""
        return [self], self().mean.new_ones(1)

    # ---- a search of `vi.fit_density`: a mixture's parts at modes; normals in coordinates of its choice

    def parts_sought(self) -> PartsSought | None:
        """Of a recipe that is a mixture, its parts, which start at modes that are looked for; None of all others."""
        return None

    def of_parts(self, parts: "Sequence[Family]", log_weights: Tensor) -> "Family":
        """This mixture, of parts that are bound, and with these weights [C] but for a constant."""
        raise NotImplementedError(f"{type(self).__name__} says that it is a mixture: write `of_parts` too")

    @property
    def coordinates(self) -> Coordinates | None:
        """From which coordinates it can be brought back to θ; None: it is searched for where it stands."""
        return None if self.mean_and_scale() is None else "diagonal"

    def standardise(self, generator: torch.Generator | None) -> None:
        """To N(0, I) or, where it has a factor, near it."""
        own = self._diagonal("standardise")
        with torch.no_grad():
            own.mean.zero_()
            own.log_scale.zero_()

    def change_coordinates(self, shift: Tensor, root: Tensor) -> None:
        """What it is in z, in θ = shift + root z: [P], and [P] for a diagonal or [P, P]."""
        own = self._diagonal("change_coordinates")
        with torch.no_grad():
            own.mean.copy_(shift + own.mean * root)
            own.log_scale.add_(root.log())

    @property
    def starts(self) -> int:
        """From how many points its approximation of a normal is sought: its optima may be many."""
        return 1

    def start_at(self, index: int, mean: Tensor, precision: Tensor, noise: Callable[[], Tensor]) -> None:
        """The start of this index in a search for the best approximation of N(mean, precision⁻¹).

        Of a normal without correlations it is the best: s² = 1/Λ_ii.
        """
        own = self._diagonal("start_at")
        with torch.no_grad():
            own.mean.copy_(mean)
            own.log_scale.copy_(-0.5 * precision.diagonal().log())

    def profile(self, log_scale: Tensor, precision: Tensor) -> Profile | None:
        """The KL to N(·, precision⁻¹) at these scales and the best of all else; None where that is not known."""
        return None

    def take_scales(self, log_scale: Tensor, precision: Tensor) -> None:
        """These scales, and the best of all else for N(·, precision⁻¹), where `profile` knows it."""
        raise NotImplementedError(f"{type(self).__name__} has a `profile`: write `take_scales` too")

    def relative_form(self) -> RelativeForm | None:
        """It as a diagonal plus low rank, for searches without a P×P matrix; None where it is none."""
        own = self.mean_and_scale()
        if own is None:
            return None
        mean, log_scale = (x.detach() for x in own)
        return RelativeForm(mean, log_scale.exp(), mean.new_empty(len(mean), 0), False)

    def take_relative_form(self, form: RelativeForm) -> None:
        """Be that normal, of its own rank and form."""
        own = self._diagonal("take_relative_form")
        with torch.no_grad():
            own.mean.copy_(form.mean)
            own.log_scale.copy_(form.scale.log())

    def _diagonal(self, what: str) -> MeanAndScale:
        own = self.mean_and_scale()
        if own is None:
            raise TypeError(
                f"{type(self).__name__} says that it can be searched for in other coordinates, and is no normal with "
                f"the parameters `mean` and `log_scale` alone: write its `{what}` too"
            )
        return own

    def ridge(self) -> Tensor | float:
        """How far scales are from where they started, squared, of a family whose optimum may lie at 0 or ∞."""
        return 0.0

    def extra_repr(self) -> str:
        text = ", ".join(f"{k}={v!r}" for k, v in self.config().items() if not isinstance(v, nn.Module | list | dict))
        return text + ("" if self.is_bound else (", " if text else "") + "unbound")
