"""From a posterior to predictions: the mixture over draws of the weights, the same draws at every call."""

import warnings
from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from ..couplings import naive
from ..families.family import Density, Draws
from ..families.normal import LowRank, Triangle
from ..util.checks import check_integer, check_one_of
from ..util.random_streams import seed_from
from .last_layer import LastLayerDraws, known_layer
from .learned import ExactDraws, LearnedDraws, ood_scores
from .linearised import POINTS, LinearisedDraws, is_normal
from .predictive import Predictive, PredictiveDraws, on_device, split

if TYPE_CHECKING:
    from ..ensemble.ensemble import Ensemble
    from ..posterior import Posterior

Variance = Literal["auto", "exact", "learned"]
#: draws of weights where no number is asked for
DRAWS = 64
#: standard deviations, in units of the initialisation's, below which draws are equal up to rounding; `laplace` sets
#: 1e-9 if it selects the network itself
NEGLIGIBLE = 1e-8
#: numbers of drawn weights that are held at once
DRAWN_NUMBERS = 2**26
#: draws at which the network is evaluated at once
CHUNK = 16


def predict(
    posterior: "Posterior | Ensemble",
    x: Any,
    draws: int | None = None,
    *,
    reference: Any = None,
    generator: torch.Generator | None = None,
    linearise: bool | None = None,
    variance: Variance = "auto",
    calibrated: bool = True,
) -> Predictive:
    """Return the mixture over draws, Σ_s w_s p(t | y_s(x)), without gradients and with the network's mode as it was.

    Args:
        posterior: what `variationalize` returns.
        x: a tensor [B, ..]; a tuple is passed to the network as several arguments, a dict as keywords. With
            `variationalize(forward=)` the batch as your function sees it: what it returns as target is not used.
        draws: of the weights, how many; S is rounded up to whole groups, and families with finitely many states give
            each once: see `note`. None: where the outputs of an input are known to be normal, over the last layer
            alone, or few and those of a linearised network, there are no draws of weights. Every input is then exact,
            but how inputs go together is not told (`sample` and `joint_log_prob` want draws of weights). Elsewhere 64.
        reference: for batch_norm="reestimated", inputs of the training data: the network sees them above x in one
            batch, and only x's rows are kept.
        generator: of draws and dropout. None: the same draws in every call, thread and process.
        linearise: True for y = f(x; θ₀) + J(x)(θ − θ₀), θ₀ the posterior's mean (of a linearised posterior its own);
            False for the network at the drawn weights; None for what the posterior was fitted with. The other one is
            not the predictive of the posterior that was fitted, and often the better prediction.
        variance: of the outputs of a linearised posterior: "learned" from the features of one forward pass, "exact", or
            "auto" for the learned one if `laplace` has learned it. If outputs are many, "exact" draws weights.
        calibrated: False for the mixture without what `calibrate` put on top of it; `note` tells which.

    Example:
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(torch.nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> pred = predict(bayes, torch.zeros(5, 3), draws=8)
        >>> pred.mean.shape, pred.mutual_information.shape
        (torch.Size([5, 2]), torch.Size([5]))
    """
    if isinstance(x, np.ndarray | DataLoader | Dataset):
        raise TypeError(
            f"predict expects the network's inputs as tensors, got {type(x).__name__}; of an array make one with "
            "torch.as_tensor, of a loader give the inputs of its batches one by one, or use evaluate"
        )
    return draws_for(
        posterior, x, draws, reference=reference, generator=generator, linearise=linearise, variance=variance,
        calibrated=calibrated,
    )(x)  # fmt: skip


def draws_for(
    posterior: "Posterior | Ensemble",
    inputs: Any,
    draws: int | None,
    *,
    reference: Any = None,
    generator: torch.Generator | None = None,
    linearise: bool | None = None,
    variance: Variance = "auto",
    calibrated: bool = True,
) -> PredictiveDraws:
    """Return what predicts at inputs like these, with the arguments of `predict`."""
    members = posterior.posteriors
    if any(one.fit_status is None and one.warns_unfitted for one in members):
        warnings.warn(
            "this posterior was never fitted, so it predicts from its start: call bayes.fit(loader, epochs=..) or "
            "bayes.laplace(loader) first",
            stacklevel=3,
        )
    for one in members:
        one.warns_unfitted = False  # once is enough
    if linearise not in (None, True, False):
        raise ValueError(f"linearise must be True, False or None, got {linearise!r}")
    check_one_of("variance", variance, get_args(Variance))
    if draws is not None:
        check_integer("draws", draws)
    as_fitted = [one.model.linearised_at is not None for one in members]
    linearised = as_fitted if linearise is None else [linearise] * len(members)
    found: list[PredictiveDraws]
    in_function_space = draws is None and reference is None and linearise is not False
    has_learned = in_function_space and all(one.learned_variance is not None for one in members)
    if variance == "learned" and not has_learned:
        raise ValueError(
            'variance="learned" needs a posterior that `laplace` has linearised and whose exact variances cost more '
            'than eight forward passes, and no draws=: leave it out, variance="auto"'
        )
    if has_learned and variance != "exact":
        found = [LearnedDraws(one) for one in members]
    elif has_learned and all(is_normal(one, inputs) for one in members):
        found = [ExactDraws(one) for one in members]
    elif in_function_space and linearise is None and all(known_layer(one, inputs) for one in members):
        found = [LastLayerDraws(one, generator) for one in members]
    elif in_function_space and all(linearised) and all(is_normal(one, inputs) for one in members):
        points = max(64, POINTS // 2 ** (len(members) - 1).bit_length())
        found = [LinearisedDraws(one, generator, points) for one in members]
    else:
        enough = DRAWS if not all(map(is_narrow, members)) else len(members)
        each = ceil((enough if draws is None else draws) / len(members))
        options: Any = {"reference": reference, "generator": generator, "linearise": linearise}
        found = [WeightDraws(one, each, **options) for one in members]
    whole = found[0] if posterior is members[0] else MemberDraws(posterior, found)  # pyright: ignore
    if len(members) == 1 and members[0].ood is not None:
        whole.score = partial(ood_scores, members[0])
    if calibrated and posterior.calibration is not None:
        if linearised == as_fitted:
            whole.calibration = posterior.calibration
        else:
            whole.note += f"{', ' if whole.note else ''}not calibrated: with linearise= it is another function"
    return whole


def is_narrow(posterior: "Posterior") -> bool:
    """Return whether all draws predict the same up to rounding, as if `laplace` has selected the network itself."""
    form = posterior.family.normal()
    if form is None or isinstance(form.root, Triangle) or posterior.dropout == "on":
        return False
    widest = float((form.root.scale / posterior.space.scale.to(form.root.scale)).max())
    return widest <= NEGLIGIBLE and not (isinstance(form.root, LowRank) and bool(form.root.factor.any()))


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
    """

    def __init__(
        self,
        posterior: "Posterior",
        draws: int,
        *,
        reference: Any = None,
        generator: torch.Generator | None = None,
        linearise: bool | None = None,
    ):
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
        #: θ₀ [P] of the network's tensors at which it is linearised; None where it is not
        self.around = posterior.model.linearised_at if linearise is not False else None
        if linearise and self.around is None:
            self.around = _centre(posterior, self.density)
        size = probe.weight.shape[0]
        finite = self.density.finite and posterior.dropout == "off"
        groups = 1 if finite else ceil(draws / size)
        most = max(1, min(CHUNK, DRAWN_NUMBERS // self.density.P) // size)
        self.groups = [min(most, groups - start) for start in range(0, groups, most)]
        self.draws = groups * size
        taken = f"the family has {size} states" if finite else f"whole groups of {size} taken"
        self.note = "" if self.draws == draws else f"{draws} asked for, {taken}"
        if generator is None:
            own = torch.Generator().manual_seed(0)
            self.seeds: list[int] = torch.randint(2**62, (len(self.groups),), generator=own).tolist()
        else:
            self.seeds = seed_from(generator, len(self.groups))
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
        weight = torch.cat([self._share(index) * one.weight for index, one in enumerate(chunks)])
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
                found = _outputs_at(self.posterior, draws, joined, torch.Generator().manual_seed(seed))
                outputs.append(pytree.tree_map(lambda leaf: leaf[:, rows:], found))
                values.append(model.likelihood_values(draws.theta, draws.fixed))
                weights.append(draws.weight * self._share(index))
            return Predictive(
                pytree.tree_map(lambda *leaves: torch.cat(leaves), *outputs),
                torch.cat(weights),
                model.likelihood,
                {name: torch.cat([value[name] for value in values]) for name in values[0]},
                self.note,
            )

    def _share(self, index: int) -> float:
        return self.groups[index] / sum(self.groups)

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

    def __init__(self, ensemble: "Ensemble", members: Sequence[PredictiveDraws]):
        self.posterior, self.members = ensemble.posteriors[0], members
        self.weights: list[float] = ensemble.weights.tolist()
        self.device = members[0].device
        self.draws = sum(one.draws for one in members)
        drawn = any(isinstance(one, WeightDraws) for one in members)
        own = set() if drawn else {one.note for one in members}
        self.note = ", ".join([f"{len(members)} networks", *own])

    def mixture(self, inputs: Any) -> Predictive:
        return Predictive.joined([one.mixture(inputs) for one in self.members], self.weights, self.note)


def predictive_at(posterior: "Posterior", draws: Draws, batch: Any) -> tuple[Predictive, Any]:
    """Return p(t | y_s(x)) of a batch at given draws, and the batch's target."""
    model = posterior.model
    inputs, target = split(posterior, batch)
    values = model.likelihood_values(draws.theta, draws.fixed)
    return Predictive(_outputs_at(posterior, draws, inputs), draws.weight, model.likelihood, values), target


def _outputs_at(posterior: "Posterior", draws: Draws, inputs: Any, generator: torch.Generator | None = None) -> Any:
    """The network's outputs [S, B, ..] at given draws; with `forward=` the inputs are a batch.

    The generator is that of dropout.
    """
    model = posterior.model
    with torch.no_grad(), posterior.network_mode(generator):
        if model.user_forward is None:
            return model.outputs(draws.theta, inputs, draws.fixed)

        def call(row: Tensor) -> Any:
            named = {**model.space.without(draws.fixed).unravel(row), **draws.fixed}
            return model.call({name: x for name, x in named.items() if name not in model.likelihood_names}, inputs)[0]

        try:
            return model.at_draws(call, draws.theta, inputs, draws.fixed, "prediction")
        except Exception as error:  # whatever the user's function raises goes on its way, with what it was given
            error.add_note(
                "with forward= predict gives your function its argument as it is: a whole batch, with a target in its "
                "place, which is not used. If forward takes (x, age, t), then write predict((x, age, t))"
            )
            raise


def _centre(posterior: "Posterior", density: Density) -> Tensor:
    """The mean [P] of the network's tensors."""
    if not density.centred:
        raise ValueError(
            f"linearise=True is for a posterior around one mean; {type(density).__name__} has none: use linearise=False"
        )
    return density.mean.detach()[: posterior.model.net_space.size]
