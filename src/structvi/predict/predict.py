"""From a posterior to predictions: the mixture over draws of the weights, the same draws at every call."""

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from ..couplings import naive
from ..families.family import Draws
from ..families.normal import LowRank, Triangle
from ..families.point import MAP
from ..networks.call import alone_with
from ..util.checks import check_integer, check_one_of
from ..util.random_streams import seed_from
from .linearised import LinearisedDraws, is_normal
from .one_pass import LastLayerDraws, LearnedDraws, known_layer, ood_scores
from .predictive import CHUNK, DRAWN_NUMBERS, DRAWS, Predictive, PredictiveDraws, on_device, split

if TYPE_CHECKING:
    from ..ensemble.ensemble import Ensemble
    from ..posterior import Posterior

Variance = Literal["auto", "exact", "learned"]


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
    options: Any = {"reference": reference, "generator": generator, "linearise": linearise, "variance": variance}
    return draws_for(posterior, x, draws, calibrated, **options)(x)


def draws_for(
    posterior: "Posterior | Ensemble", inputs: Any, draws: int | None = None, calibrated: bool = True, **options: Any
) -> PredictiveDraws:
    """Return what predicts at inputs like these, with the arguments of `predict`."""
    members, linearise = posterior.posteriors, options.get("linearise")
    is_one = posterior is members[0]
    if is_one and options.get("generator") is None and options.get("reference") is None:
        whole = _kept(members[0], inputs, draws, linearise, options.get("variance", "auto"))
    else:
        found = _sources(members, inputs, draws, **options)
        whole = found[0] if is_one else MemberDraws(posterior, found)  # pyright: ignore
    if is_one and members[0].ood is not None:
        whole.score = partial(ood_scores, members[0])
    if calibrated and posterior.calibration is not None:
        if linearise is None or all((one.model.linearised_at is not None) == linearise for one in members):
            whole.calibration = posterior.calibration
        else:
            whole.note += f"{', ' if whole.note else ''}not calibrated: with linearise= it is another function"
    return whole


def _sources(
    members: Sequence["Posterior"],
    inputs: Any,
    draws: int | None,
    linearise: bool | None = None,
    variance: Variance = "auto",
    reference: Any = None,
    generator: torch.Generator | None = None,
) -> Sequence[PredictiveDraws]:
    """Return what predicts for each member, all of one kind: the first of these kinds that all can have."""
    check_one_of("variance", variance, get_args(Variance))
    if draws is not None:
        check_integer("draws", draws)
    if any(one.fit_status is None and one.warns_unfitted for one in members):
        warnings.warn(
            "this posterior was never fitted, so it predicts from its start: call bayes.fit(loader, epochs=..) or "
            "bayes.laplace(loader) first",
            stacklevel=5,
        )
    for one in members:
        one.warns_unfitted = False  # once is enough
    in_function_space = draws is None and reference is None and linearise is not False
    has_learned = in_function_space and all(one.learned_variance is not None for one in members)
    if variance == "learned" and not has_learned:
        raise ValueError(
            'variance="learned" needs a posterior that `laplace` gave one, as it does if exact ones cost more'
        )
    if has_learned and variance != "exact":
        return [LearnedDraws(one) for one in members]
    if in_function_space and linearise is None and all(known_layer(one, inputs) for one in members):
        return [LastLayerDraws(one, generator) for one in members]
    linearised = linearise or all(one.model.linearised_at is not None for one in members)
    if in_function_space and linearised and all(is_normal(one, inputs) for one in members):
        return [LinearisedDraws(one, generator, len(members)) for one in members]
    enough = DRAWS if not all(map(is_narrow, members)) else len(members)
    each = ceil((enough if draws is None else draws) / len(members))
    return [WeightDraws(one, each, reference=reference, generator=generator, linearise=linearise) for one in members]


class _Kept(NamedTuple):
    """The last predictor, for these arguments and inputs of this form, while the posterior had these values."""

    key: Any
    values: list[Tensor]
    found: PredictiveDraws


_KEPT: "WeakKeyDictionary[Posterior, _Kept]" = WeakKeyDictionary()


def _kept(posterior: "Posterior", inputs: Any, *options: Any) -> PredictiveDraws:
    """Return what predicted last, if the posterior has not changed since and the inputs are alike.

    A small posterior alone is compared, and its draws of the weights are held.
    """
    at = posterior.model.linearised_at
    values = [*posterior.family.state_dict().values(), *([] if at is None else [at])]
    if sum(value.numel() for value in values) * CHUNK > DRAWN_NUMBERS:
        return _sources([posterior], inputs, *options)[0]
    # outputs are known to be normal at inputs of one form; whether rows mix is seen at four of them
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    forms = [(leaf.shape[1:], min(len(leaf), 4), leaf.dtype, leaf.device) for leaf in leaves]
    key = forms, options, posterior.family, posterior.dropout, posterior.batch_norm
    kept = _KEPT.get(posterior)
    if kept is None or kept.key != key or not all(map(torch.equal, values, kept.values)):
        found = _sources([posterior], inputs, *options)[0]
        if isinstance(found, LearnedDraws):
            return found
        if isinstance(found, WeightDraws) and found.draws * found.density.P * CHUNK <= DRAWN_NUMBERS:
            found.hold()
        del found.posterior  # which would never be forgotten
        kept = _KEPT[posterior] = _Kept(key, [value.clone() for value in values], found)
    again = copy.copy(kept.found)
    again.posterior = posterior
    return again


def is_narrow(posterior: "Posterior") -> bool:
    """Return whether all draws predict the same up to rounding, as if `laplace` has selected the network itself.

    Standard deviations are in units of the initialisation's; `laplace` sets 1e-9.
    """
    form = posterior.family.normal()
    if form is None or isinstance(form.root, Triangle) or posterior.dropout == "on":
        return False
    scale, factor = form.root.scale, form.root.factor if isinstance(form.root, LowRank) else None
    widest = float((scale / posterior.space.scale.to(scale)).max())
    return widest <= torch.finfo(torch.float32).eps and (factor is None or not bool(factor.any()))


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
        if (posterior.batch_norm == "reestimated") != (reference is not None):
            raise ValueError(
                'batch_norm="reestimated" takes statistics of a batch: give reference=, inputs of the training data; '
                f"reference= is for that alone, and here it is {posterior.batch_norm!r}"
            )
        self.posterior, self.reference = posterior, reference
        with torch.no_grad():
            self.density = posterior.family()
            self.device = self.density.mean.device
            size = len(self.density.draw(1, naive, torch.Generator(self.device).manual_seed(0)).weight)
        #: θ₀ [P] of the network's tensors at which it is linearised; None where it is not
        self.around = posterior.model.linearised_at if linearise is not False else None
        if linearise and self.around is None:
            if not self.density.centred:
                raise ValueError(f"linearise=True is for one mean; {type(self.density).__name__} has none")
            self.around = self.density.mean.detach()[: posterior.model.net_space.size]
        finite = self.density.finite and posterior.dropout == "off"
        groups = 1 if finite else ceil(draws / size)
        most = max(1, min(CHUNK, DRAWN_NUMBERS // self.density.P) // size)
        self.groups = [min(most, groups - start) for start in range(0, groups, most)]
        self.shares = [count / groups for count in self.groups]
        self.draws = groups * size
        taken = f"the family has {size} states" if finite else f"whole groups of {size} taken"
        self.note = "" if self.draws == draws else f"{draws} asked for, {taken}"
        same = torch.Generator().manual_seed(0)  # in every call, thread and process
        self.seeds = seed_from(same if generator is None else generator, len(self.groups))
        self._held: list[Draws] | None = None

    def hold(self) -> None:
        """Hold all draws, S·P numbers, and make none again."""
        if self._held is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            made = [self.chunk(index) for index in range(len(self.groups))]
            fixed = {name: tensor.detach().clone() for name, tensor in made[0].fixed.items()}  # the same in all draws
            self._held = [Draws(one.theta.clone(), one.weight.clone(), fixed) for one in made]
        del self.density

    def every(self) -> Draws:
        """Return all draws as one, their weights summing to one."""
        chunks = [self.chunk(index) for index in range(len(self.groups))]
        weight = torch.cat([share * one.weight for share, one in zip(self.shares, chunks, strict=True)])
        return Draws(torch.cat([one.theta for one in chunks]), weight, chunks[0].fixed)

    def chunk(self, index: int) -> Draws:
        """Return the draws of one chunk, their weights summing to one."""
        if self._held is not None:
            return self._held[index]
        generator = torch.Generator(self.device).manual_seed(self.seeds[index])
        return self.density.draw(self.groups[index], naive, generator)

    @torch.no_grad()
    def mixture(self, inputs: Any) -> Predictive:
        inputs, rows = on_device(inputs, self.device), 0
        if self.reference is not None:
            above = on_device(self.reference, self.device)
            rows = len(next(leaf for leaf in pytree.tree_leaves(above) if isinstance(leaf, Tensor)))
            inputs = pytree.tree_map(lambda r, x: torch.cat([r, x]) if isinstance(x, Tensor) else x, above, inputs)
        with self.posterior.model.linearised_around(self.around):
            parts = [
                _at(self.posterior, self.chunk(index), inputs, torch.Generator().manual_seed(seed), rows)
                for index, seed in enumerate(self.seeds)
            ]
        return Predictive.joined(parts, self.shares, self.note)


class MemberDraws(PredictiveDraws):
    """The draws of several posteriors, each of a network of its own."""

    def __init__(self, ensemble: "Ensemble", members: Sequence[PredictiveDraws]):
        self.posterior, self.members = ensemble.posteriors[0], members
        self.device, self.shares = members[0].device, [1 / len(members)] * len(members)
        self.draws = sum(one.draws for one in members)
        notes = [] if isinstance(members[0], WeightDraws) else [members[0].note]
        self.note = ", ".join([f"{len(members)} networks", *notes])

    def mixture(self, inputs: Any) -> Predictive:
        return Predictive.joined([one.mixture(inputs) for one in self.members], self.shares, self.note)


@torch.no_grad()
def predictive_at(posterior: "Posterior", draws: Draws, batch: Any) -> tuple[Predictive, Any]:
    """Return p(t | y_s(x)) of a batch at given draws, and the batch's target."""
    inputs, target = split(posterior, batch)
    return _at(posterior, draws, inputs), target


def _at(
    posterior: "Posterior", draws: Draws, inputs: Any, generator: torch.Generator | None = None, rows: int = 0
) -> Predictive:
    """Return the predictive at given draws, of inputs below the first rows; with `forward=` the inputs are a batch.

    The generator is that of dropout.
    """
    model = posterior.model

    def by_user(row: Tensor) -> Any:
        named = {**model.space.without(draws.fixed).unravel(row), **draws.fixed}
        return model.call({name: x for name, x in named.items() if name not in model.likelihood_names}, inputs)[0]

    with posterior.network_mode(generator):
        if model.user_forward is None:
            outputs = model.outputs(draws.theta, inputs, draws.fixed)
        else:
            with model.held(draws.fixed, "prediction") as how:
                outputs = model.evaluation(by_user, draws.theta, batch=inputs, **how)
    outputs = pytree.tree_map(lambda leaf: leaf[:, rows:], outputs)
    values = model.likelihood_values(draws.theta, draws.fixed)
    return Predictive(outputs, draws.weight, model.likelihood, values)


class Predictor:
    """S draws of the weights, made once, and a network of its own: `predictor(x)` is `posterior.predict(x)` at them.

    It does not change where the posterior is fitted on, and the posterior is not needed any more. Threads may call it
    side by side. It holds S·P drawn numbers beside the network: `nbytes`.

    Args:
        drawn: of a posterior, which is copied but for its family.
    """

    def __init__(self, drawn: WeightDraws):
        posterior = drawn.posterior
        with alone_with(posterior.net):  # no call has drawn weights in it
            model = copy.deepcopy(posterior.model).requires_grad_(False)
        drawn.hold()
        drawn.posterior = type(posterior)(model, MAP(), dropout=posterior.dropout, batch_norm=posterior.batch_norm)
        self.drawn, self.draws = drawn, drawn.draws

    @property
    def nbytes(self) -> int:
        """Bytes of the draws and of the network, its held tensors and buffers included."""
        model, every = self.drawn.posterior.model, self.drawn.every()
        held = [*model.parameters(), *model.buffers(), every.theta, every.weight, *every.fixed.values()]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values())

    def predict(self, x: Any) -> Predictive:
        """Return the mixture over the draws: of `posterior.predict` with the same draws, the same bits."""
        return self.drawn(x)

    __call__ = predict


def predictor(posterior: "Posterior", draws: int = 32, **options: Any) -> Predictor:
    """Return the posterior as S drawn networks, for serving: `predictor(x)` is `posterior.predict(x, S)`.

    Args:
        posterior: what `variationalize` returns.
        draws, **options: as in `predict`; the same generator gives the same draws.

    Example:
        >>> import torch
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(torch.nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> served, x = bayes.predictor(draws=4), torch.zeros(5, 3)
        >>> torch.equal(served(x).mean, bayes.predict(x, 4).mean)
        True
    """
    posterior.check_whole()
    found = draws_for(posterior, None, draws, **options)
    assert isinstance(found, WeightDraws)
    return Predictor(found)
