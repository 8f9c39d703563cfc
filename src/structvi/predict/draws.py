"""Draws of a posterior's weights, the same at every call, and the predictive of the network at them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..couplings import naive
from ..families.family import Density, Draws
from ..models.calibration import Calibration
from ..util.checks import check_generator, check_integer
from ..util.random_streams import seed_from
from .predictive import Predictive

if TYPE_CHECKING:
    from ..ensemble.ensemble import Ensemble
    from ..posterior import Posterior

#: numbers of drawn weights that are held at once
DRAWN_NUMBERS = 2**26
#: draws at which the network is evaluated at once
CHUNK = 16


class PredictiveDraws(ABC):
    """Draws at which a posterior, or several, predict: called with inputs they give the predictive."""

    posterior: "Posterior"
    #: S
    draws: int
    device: torch.device
    note: str
    #: whether outputs are known at each input by itself only
    by_input: bool = False
    #: what the prediction is calibrated by
    calibration: Calibration | None = None

    def __call__(self, inputs: Any) -> Predictive:
        """Return the mixture over all draws, calibrated where that is asked for."""
        return self.mixture(inputs).calibrated(self.calibration)

    @abstractmethod
    def mixture(self, inputs: Any) -> Predictive:
        """Return the mixture over all draws, not calibrated."""

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return what `mixture` takes of a batch, and its target."""
        model = self.posterior.model
        return model.split(batch) if model.user_forward is None else (batch, target_of(self.posterior, batch))


class WeightDraws(PredictiveDraws):
    """S weighted draws of the weights; each chunk of them is made from a kept seed, as often as asked.

    Args:
        posterior: what to draw from.
        draws: at least so many: S is the next whole number of the density's groups. Families with finitely many
            states (MAP, enumerated masks) give each of them once, with its weight.
        reference: inputs whose statistics batch norm uses, with batch_norm="reestimated".
        generator: of the seeds; the same ones at every call if None.
        linearise: whether the network is linearised, around θ₀ of the model or, where it has none, around the mean;
            None for as the model is.
        calibrated: whether the posterior's calibration is used, where the function is the one that was fitted.
    """

    def __init__(
        self,
        posterior: "Posterior",
        draws: int,
        *,
        reference: Any = None,
        generator: torch.Generator | None = None,
        linearise: bool | None = None,
        calibrated: bool = False,
    ):
        check_integer("draws", draws)
        check_generator(generator)
        if posterior.batch_norm == "reestimated" and reference is None:
            raise ValueError(
                'batch_norm="reestimated" takes the statistics of a batch, for every draw anew, and the inputs to be '
                "predicted are not to be their own reference: give reference=, inputs of the training data"
            )
        if posterior.batch_norm != "reestimated" and reference is not None:
            raise ValueError(f'reference= is for batch_norm="reestimated"; here it is {posterior.batch_norm!r}')
        self.posterior, self.reference = posterior, reference
        with torch.no_grad():
            self.density = posterior.family()
            self.device = self.density.mean.device
            probe = self.density.draw(1, naive, torch.Generator(self.device).manual_seed(0))
        self.around = _linearised_at(posterior, self.density, linearise)
        size = probe.weight.shape[0]
        finite = self.density.finite and posterior.dropout == "off"
        groups = 1 if finite else ceil(draws / size)
        most = max(1, min(CHUNK, DRAWN_NUMBERS // self.density.P) // size)
        self.groups = [min(most, groups - start) for start in range(0, groups, most)]
        self.draws = groups * size
        self.note = f"{draws} asked for, whole groups of {size} taken" if self.draws != draws else ""
        if finite:
            self.note = f"{draws} asked for, the family has {size} states" if size != draws else ""
        if calibrated and (self.around is None) == (posterior.model.linearised_at is None):
            self.calibration = posterior.calibration
        elif calibrated and posterior.calibration is not None:
            self.note += f"{', ' if self.note else ''}not calibrated: with linearise= it is another function"
        self.seeds = seed_from(torch.Generator().manual_seed(0) if generator is None else generator, len(self.groups))
        self._kept: list[Draws] | None = None

    def keep(self, posterior: "Posterior") -> None:
        """Hold all draws, S·P numbers, and make none again; the network is from now on that of another posterior."""
        with torch.no_grad():
            made = [self.chunk(index) for index in range(len(self.groups))]
        fixed = {name: tensor.detach().clone() for name, tensor in made[0].fixed.items()}  # the same in all draws
        self._kept = [Draws(one.theta.detach().clone(), one.weight.detach().clone(), fixed) for one in made]
        self.posterior = posterior
        del self.density

    def every(self) -> Draws:
        """Return all draws as one, their weights summing to one."""
        chunks = [self.chunk(index) for index in range(len(self.groups))]
        shares = [groups / sum(self.groups) for groups in self.groups]
        weight = torch.cat([share * one.weight for share, one in zip(shares, chunks, strict=True)])
        return Draws(torch.cat([one.theta for one in chunks]), weight, chunks[0].fixed)

    def chunk(self, index: int) -> Draws:
        """Return the draws of one chunk, their weights summing to one."""
        if self._kept is not None:
            return self._kept[index]
        generator = torch.Generator(self.device).manual_seed(self.seeds[index])
        return self.density.draw(self.groups[index], naive, generator)

    def mixture(self, inputs: Any) -> Predictive:
        model = self.posterior.model
        joined, rows = self._with_reference(inputs)
        outputs, values, weights = [], [], []
        with torch.no_grad(), model.linearised_around(self.around):
            for index, seed in enumerate(self.seeds):
                draws = self.chunk(index)
                found = outputs_at(self.posterior, draws, joined, torch.Generator().manual_seed(seed))
                outputs.append(pytree.tree_map(lambda leaf: leaf[:, rows:], found))
                values.append(model.likelihood_values(draws.theta, draws.fixed))
                weights.append(draws.weight * (self.groups[index] / sum(self.groups)))
            return Predictive(
                pytree.tree_map(lambda *leaves: torch.cat(leaves), *outputs),
                torch.cat(weights),
                model.likelihood,
                {name: torch.cat([value[name] for value in values]) for name in values[0]},
                self.note,
            )

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


class MemberDraws(PredictiveDraws):
    """The draws of several posteriors, each of a network of its own, with the weights of their ensemble."""

    def __init__(self, ensemble: "Ensemble", members: Sequence[PredictiveDraws], calibrated: bool):
        self.posterior, self.members = ensemble.posteriors[0], members
        self.weights: list[float] = ensemble.weights.tolist()
        self.device = members[0].device
        self.draws = sum(one.draws for one in members)
        own = {one.note for one in members} if all(one.by_input for one in members) else set()
        self.note = ", ".join([f"{len(members)} networks", *own])
        self.calibration = ensemble.calibration if calibrated else None

    def mixture(self, inputs: Any) -> Predictive:
        return Predictive.joined([one.mixture(inputs) for one in self.members], self.weights, self.note)


def outputs_at(posterior: "Posterior", draws: Draws, inputs: Any, generator: torch.Generator | None = None) -> Any:
    """Return the network's outputs [S, B, ..] at given draws; with `forward=` the inputs are a batch.

    The generator is that of dropout.
    """
    model = posterior.model
    with torch.no_grad(), posterior.network_mode(generator):
        if model.user_forward is None:
            return model.outputs(draws.theta, inputs, draws.fixed)

        def call(row: Tensor) -> Any:
            named = {**model.space.without(draws.fixed).unravel(row), **draws.fixed}
            return model.call({name: x for name, x in named.items() if name not in model.likelihood_names}, inputs)[0]

        return model.at_draws(call, draws.theta, inputs, draws.fixed, "prediction")


def predictive_at(posterior: "Posterior", draws: Draws, batch: Any) -> tuple[Predictive, Any]:
    """Return p(t | y_s(x)) of a batch at given draws, and the batch's target."""
    model = posterior.model
    inputs, target = (batch, target_of(posterior, batch)) if model.user_forward is not None else model.split(batch)
    values = model.likelihood_values(draws.theta, draws.fixed)
    return Predictive(outputs_at(posterior, draws, inputs), draws.weight, model.likelihood, values), target


def target_of(posterior: "Posterior", batch: Any) -> Any:
    """Return the target of a batch; a user's `forward` takes a pass of the network to tell it."""
    model = posterior.model
    if model.user_forward is None:
        return model.split(batch)[1]
    with torch.no_grad(), posterior.network_mode(torch.Generator().manual_seed(0)):
        return model.call(model.net_space.unravel(posterior.family().mean[: model.net_space.size]), batch)[1]


def _linearised_at(posterior: "Posterior", density: Density, linearise: bool | None) -> Tensor | None:
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
    draws = density.draw(count, naive, generator)
    S = draws.weight.shape[0]
    if count == S:
        return draws
    within = torch.multinomial(draws.weight.reshape(count, -1), 1, generator=generator).squeeze(-1)
    which = torch.arange(count, device=within.device) * (S // count) + within
    return Draws(draws.theta[which], draws.weight.new_full((count,), 1 / count), draws.fixed)


def on_device(tensors: Any, device: torch.device) -> Any:
    """Return the structure with its tensors on a device."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tensors)
