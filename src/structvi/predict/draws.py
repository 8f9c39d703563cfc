"""Draws of a posterior that can be made again from their seeds, chunk by chunk, and the network at them."""

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..couplings import Coupling, naive
from ..families.density import Density, Draws, check_draw
from ..models.calibration import Calibration
from ..util.checks import check_integer
from ..util.random_streams import seed_from
from .predictive import Predictive

if TYPE_CHECKING:
    from ..posterior import Posterior

#: So many numbers of drawn weights are held at once.
DRAWN_NUMBERS = 2**26


class DrawChunks:
    """The same S weighted draws of a posterior, chunk by chunk and as often as asked: each is made from a kept seed.

    Args:
        posterior: what to draw from.
        draws: at least so many: S is the next whole number of the coupling's groups. Families with finitely many
            states (MAP, ensembles, enumerated masks) give each of them once, with its weight.
        coupling: how the draws of a group share noise.
        chunk: how many draws are held at once, rounded to whole groups.
        reference: inputs whose statistics batch norm uses, with batch_norm="reestimated".
        generator: of the seeds.
        linearise: whether the network is linearised, around θ₀ of the model or, where it has none, around the mean;
            None for as the model is.
        calibrated: whether `whole` gives what the posterior's calibration makes of the mixture.
    """

    def __init__(
        self,
        posterior: "Posterior",
        draws: int,
        coupling: Coupling,
        chunk: int,
        reference: Any = None,
        generator: torch.Generator | None = None,
        linearise: bool | None = None,
        calibrated: bool = False,
    ):
        check_integer("draws", draws)
        check_integer("chunk", chunk)
        check_draw(1, coupling, generator)
        if posterior.batch_norm == "reestimated" and reference is None:
            raise ValueError(
                'batch_norm="reestimated" takes the statistics of a batch, for every draw anew, and the inputs to be '
                "predicted are not to be their own reference: give reference=, inputs of the training data"
            )
        if posterior.batch_norm != "reestimated" and reference is not None:
            raise ValueError(f'reference= is for batch_norm="reestimated"; here it is {posterior.batch_norm!r}')
        self.posterior, self.coupling, self.reference = posterior, coupling, reference
        with torch.no_grad():
            self.density = posterior.family()
            self.device = self.density.mean.device
            # how many draws a group has shows in drawing one
            probe = self.density.draw(1, coupling, torch.Generator(self.device).manual_seed(0))
        self.linearise = linearise
        self.around = _around(posterior, self.density, linearise)
        #: whether the function is the one that was fitted
        self.is_as_fitted = as_fitted = (self.around is None) == (posterior.model.linearised_at is None)
        #: None too where it is another function that is asked for than was calibrated
        self.calibration: Calibration | None = posterior.calibration if calibrated and as_fitted else None
        size = probe.weight.shape[0]
        finite = self.density.finite and posterior.dropout == "off"
        groups = 1 if finite else ceil(draws / size)
        most = 1 if self.density.enumerates else max(1, chunk // size)
        self.groups = [min(most, groups - start) for start in range(0, groups, most)]
        self.draws = groups * size
        self.note = f"{draws} asked for, whole groups of {size} taken" if self.draws != draws else ""
        if finite:
            self.note = f"{draws} asked for, the family has {size} states" if size != draws else ""
        if calibrated and not as_fitted and posterior.calibration is not None:
            self.note += f"{', ' if self.note else ''}not calibrated: with linearise= it is another function"
        self.seeds = seed_from(generator, len(self.groups))
        self._kept: list[tuple[Draws, Tensor]] = []

    def __len__(self) -> int:
        return len(self.groups)

    def keep(self, posterior: "Posterior") -> None:
        """Hold all draws, S·P numbers, and make none again; the network is from now on that of another posterior."""
        made = [self.draw(index) for index in range(len(self))]
        # points are the family's own tensors, and what is fixed is the same in all draws
        fixed = {name: tensor.detach().clone() for name, tensor in made[0][0].fixed.items()}
        self._kept = [
            (Draws(one.theta.detach().clone(), one.weight.detach().clone(), fixed), generator.get_state())
            for one, generator in made
        ]
        self.posterior = posterior
        del self.density  # the family may go

    def move(self, device: torch.device) -> None:
        """Kept draws to another device; of another kind of device dropout has another stream."""
        self.device = device
        moved = []
        fixed = {name: tensor.to(device) for name, tensor in self._kept[0][0].fixed.items()}
        for (draws, state), seed in zip(self._kept, self.seeds, strict=True):
            own = torch.Generator(device).manual_seed(seed).get_state()
            kept = Draws(draws.theta.to(device), draws.weight.to(device), fixed)
            moved.append((kept, state if state.shape == own.shape else own))
        self._kept = moved
        self.around = None if self.around is None else self.around.to(device)
        if self.reference is not None:
            self.reference = on_device(self.reference, device)

    def share(self, index: int) -> float:
        """The weight of all draws of a chunk together."""
        return self.groups[index] / sum(self.groups)

    def predictive(self, index: int, inputs: Any) -> Predictive:
        """The mixture over the draws of one chunk, its weights summing to one."""
        model = self.posterior.model
        around = model.linearised_around(self.around)
        draws, generator = self.draw(index)
        with torch.no_grad(), around, self.posterior.network_mode(generator):
            joined, rows = self._with_reference(inputs)

            if model.user_forward is None:
                outputs = model.outputs(draws.theta, joined, draws.fixed)
            else:
                call = self._call
                outputs = model.at_draws(
                    lambda row: call(draws, row, joined)[0], draws.theta, joined, draws.fixed, "prediction"
                )
            outputs = pytree.tree_map(lambda leaf: leaf[:, rows:], outputs)
            return Predictive(
                outputs, draws.weight, model.likelihood, model.likelihood_values(draws.theta, draws.fixed), self.note
            )

    def whole(self, inputs: Any) -> Predictive:
        """The mixture over all draws; the calibrated one, where that is asked for."""
        return self.uncalibrated(inputs).calibrated(self.calibration)

    def uncalibrated(self, inputs: Any) -> Predictive:
        """The mixture over all draws, as it is."""
        parts = [self.predictive(index, inputs) for index in range(len(self))]
        outputs = [part.outputs for part in parts]
        values = [part.values for part in parts]
        return Predictive(
            pytree.tree_map(lambda *leaves: torch.cat(leaves), outputs[0], *outputs[1:]),
            torch.cat([self.share(index) * part.weights for index, part in enumerate(parts)]),
            self.posterior.model.likelihood,
            {name: torch.cat([value[name] for value in values]) for name in values[0]},
            self.note,
        )

    def split(self, batch: Any) -> tuple[Any, Any]:
        """The inputs of a batch, and its target."""
        model = self.posterior.model
        return model.split(batch) if model.user_forward is None else (batch, self.target(batch))

    def target(self, batch: Any) -> Any:
        """The target that a user's `forward` makes of a batch; it takes a pass of the network."""
        draws, generator = self.draw(0)
        with torch.no_grad(), self.posterior.network_mode(generator):
            return self._call(draws, draws.theta[0], batch)[1]

    @torch.no_grad()
    def draw(self, index: int) -> tuple[Draws, torch.Generator]:
        """The draws of one chunk, and the stream of whatever else is random in it."""
        generator = torch.Generator(self.device)
        if self._kept:
            draws, state = self._kept[index]
            generator.set_state(state)
            return draws, generator
        generator.manual_seed(self.seeds[index])
        return self.density.draw(self.groups[index], self.coupling, generator), generator

    def _call(self, draws: Draws, row: Tensor, batch: Any) -> tuple[Any, Any]:
        model = self.posterior.model
        named = {**model.space.without(draws.fixed).unravel(row), **draws.fixed}
        return model.call({name: x for name, x in named.items() if name not in model.likelihood_names}, batch)

    def _with_reference(self, inputs: Any) -> tuple[Any, int]:
        """The inputs below the reference's rows, and how many those are."""
        inputs = on_device(inputs, self.device)
        if self.reference is None:
            return inputs, 0
        reference, layout = pytree.tree_flatten(on_device(self.reference, self.device))
        own, own_layout = pytree.tree_flatten(inputs)
        if layout != own_layout:
            raise ValueError(f"reference must be built as the inputs are, {own_layout}, got {layout}")
        joined = [torch.cat([r, x]) if isinstance(x, Tensor) else x for r, x in zip(reference, own, strict=True)]
        rows = next(r.shape[0] for r in reference if isinstance(r, Tensor))
        return pytree.tree_unflatten(joined, layout), rows


def _around(posterior: "Posterior", density: Density, linearise: bool | None) -> Tensor | None:
    """θ₀ [P] of the network's tensors at which it is to be linearised; None where it is not."""
    model = posterior.model
    if linearise not in (None, True, False):
        raise ValueError(f"linearise must be True, False or None, got {linearise!r}")
    if linearise is False or (linearise is None and model.linearised_at is None):
        return None
    if model.linearised_at is not None:
        return model.linearised_at
    if not density.centred:
        raise ValueError(
            f"linearise=True is for a posterior around one mean; {type(density).__name__} has none: use linearise=False"
        )
    return density.mean.detach()[: model.net_space.size]


class IndependentDraws:
    """S independent draws of q with equal weights, made again from their seeds as often as asked, chunk by chunk.

    Of a density whose groups hold several draws (the parts of a mixture, masks) one of each group is taken, with the
    probability of its weight.

    Example:
        >>> from structvi import MeanField, Parameters
        >>> q = MeanField().bind(Parameters({"z": torch.zeros(2)}))()
        >>> [draws.theta.shape for draws in IndependentDraws(q, 5, torch.Generator().manual_seed(0))]
        [torch.Size([5, 2])]
    """

    def __init__(
        self, density: Density, count: int, generator: torch.Generator | None = None, chunk: int | None = None
    ):
        check_integer("draws", count)
        self.density, self.count = density, count
        size = max(1, DRAWN_NUMBERS // density.P) if chunk is None else chunk
        self.sizes = [min(size, count - start) for start in range(0, count, size)]
        self.seeds = seed_from(generator, len(self.sizes))

    def __iter__(self) -> Iterator[Draws]:
        for size, seed in zip(self.sizes, self.seeds, strict=True):
            yield _one_of_each(self.density, size, torch.Generator(self.density.mean.device).manual_seed(seed))


@torch.no_grad()
def _one_of_each(density: Density, count: int, generator: torch.Generator) -> Draws:
    draws = density.draw(1 if density.enumerates else count, naive, generator)
    S = draws.weight.shape[0]
    if density.enumerates:  # all states with their probabilities
        which = torch.multinomial(draws.weight, count, replacement=True, generator=generator)
    elif count == S:
        return draws
    else:
        within = torch.multinomial(draws.weight.reshape(count, -1), 1, generator=generator).squeeze(-1)
        which = torch.arange(count, device=within.device) * (S // count) + within
    latent = None if draws.latent is None else draws.latent[which]
    return Draws(draws.theta[which], draws.weight.new_full((count,), 1 / count), draws.fixed, latent)


def predictive_at(posterior: "Posterior", draws: Draws, batch: Any) -> tuple[Predictive, Any]:
    """p(t | y_s(x)) of a batch at given draws, and the batch's target."""
    model = posterior.model
    space = model.space.without(draws.fixed)

    def call(row: Tensor) -> tuple[Any, Any]:
        named = {**space.unravel(row), **draws.fixed}
        return model.call({name: x for name, x in named.items() if name not in model.likelihood_names}, batch)

    with torch.no_grad(), posterior.network_mode():
        outputs = model.at_draws(lambda row: call(row)[0], draws.theta, batch, draws.fixed, "diagnostics")
        values = model.likelihood_values(draws.theta, draws.fixed)
        return Predictive(outputs, draws.weight, model.likelihood, values), target_of(posterior, batch)


def target_of(posterior: "Posterior", batch: Any) -> Any:
    """The target of a batch, which a user's `forward` takes a pass of the network to tell."""
    model = posterior.model
    if model.user_forward is None:
        return model.split(batch)[1]
    with torch.no_grad(), posterior.network_mode():
        return model.call(model.net_space.unravel(posterior.family().mean[: model.net_space.size]), batch)[1]


def on_device(tensors: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tensors)
