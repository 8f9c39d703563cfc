"""A posterior around a trained network without a step: `fit(loader, validation=held_out)`.

The mean is held at the trained weights θ₀, the precision is the curvature's (`warm_start.py`), and what the user left
open is chosen:

- the prior's width c: N(0, (c·rms)²), rms that of each tensor's trained values. Weights before a normalisation can be
  multiplied by any number without a change of the network, and with this unit without a change of its posterior;
- whether the network is linearised at θ₀, or called at drawn weights;
- the family, the precision form: its leading directions are those in which the data say most.

With held-out data the choice is theirs: the *widest* posterior whose log density is within `MARGIN` nats of the best
candidate's, and within half a paired standard error of it, the network itself among the candidates. The widest, since
it costs nothing where data are like the training data, and is what gains where they are not; `keep="best"` takes the
maximum. Without held-out data c = `WIDTH`, linearised.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
from math import inf, log
from typing import Any

import torch
from torch import Tensor

from ..families.family import Family
from ..families.gaussian import Gaussian
from ..families.precision import StructuredPrecision
from ..models.batch import rows, split_batch
from ..models.bayesian_model import BayesianModel
from ..models.likelihoods import Gaussian as GaussianLikelihood
from ..models.likelihoods import Likelihood
from ..models.priors.scale import NormalPrior
from ..objective import Estimate, NonFiniteError, not_finite
from ..posterior import PosteriorBase
from ..result import Status
from .batches import Batches, Reread
from .comparing import elbo_on_seed
from .constant_predictor import Watched
from .held_out import FEW_OUTPUTS, HeldOut, of_network, of_normals, of_posterior, outputs_of
from .options import FitOptions
from .result import FitResult, History, PathPoint
from .temperature_path import temperature_path
from .validation import MARGIN, NETWORK, PREFERRED, as_good, narrowed
from .warm_start import Laplace, curvature_of, prior_precision, trained_values, with_residual_noise

#: widths of the prior that are tried, in units of each tensor's root mean square; the least stands for the network
WIDTHS = (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.45, 0.65, 1.0, 1.5)
#: those where each costs passes of the network: the first in both ways, the next in the better one while it is as good
FEW_WIDTHS = (0.1, 0.3, 1.0)
#: without held-out data
WIDTH = 0.2
#: rank of the default family, and the share of the weights that it is at most
RANK = 32
#: factors of a noise that is a parameter
NOISES = (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 6.0, 10.0)
#: the prior's width on a path of temperatures
PATH_WIDTH = WIDTH
#: groups of draws, and batches, of the ELBO that is reported
GROUPS, BATCHES = 2, 4
#: draws of a candidate that is compared on draws; the passes over the training data that each may take, and the
#: held-out rows that it sees nevertheless
DRAWS, PASSES, FEWEST = 8, 0.5, 64


@dataclass
class Candidate:
    """A posterior that was tried."""

    name: str
    width: float | None  # c; None where the prior is the user's
    linearised: bool
    temperature: float  # λ
    noise: float = 1.0  # of a Gaussian("point"), in units of the network's residuals
    held_out: HeldOut | None = None
    density: float = -inf  # of held-out data, in nats for each element

    @property
    def order(self) -> tuple[float, float, float, bool]:
        """From narrow to wide."""
        return (inf if self.width is None else self.width, self.temperature, self.noise, self.linearised)

    def measured(self, held_out: HeldOut, network: HeldOut) -> HeldOut:
        """Keep what was measured; of some of the rows, the network's own density and what is gained over it there."""
        gain = held_out.gain_over(network)[0]
        self.held_out, self.density = held_out, network.mean + gain if gain == gain else -inf
        return held_out


def fit_around(posterior: PosteriorBase, batches: Batches, options: FitOptions, notes: list[str]) -> FitResult:
    """Place the posterior, choose what is open, and say what came of it."""
    model = posterior.model
    theta = trained_values(posterior)
    with posterior.network_mode(), model.linearised_around(None):
        theta = with_residual_noise(model, theta, batches.everything())
        if "family" in posterior.left_open:
            rank = min(RANK, theta.numel() // 2)
            posterior.family = StructuredPrecision(rank).bind(posterior.space).to(posterior.device)
        if "prior" in posterior.left_open:
            model.prior = relative_prior(model, theta, WIDTH)
        for family in posterior.family.families():
            family.first_stage()  # a factor that the curvature does not give is none
            family.learn_all()
        laplace = curvature_of(posterior, theta, batches, options.seed, posterior.family.precision_columns)
    network, noise = None, _Noise.of(posterior)
    if options.validation is None:
        candidates = _candidates(posterior, options)
        kept = candidates[0]
    else:
        assert not isinstance(options.validation, int | float)
        held_out = Reread(Batches(options.validation, options.seed, posterior.device))
        alone = _network(posterior, theta, held_out)
        network = alone.held_out
        assert network is not None
        candidates = _candidates(posterior, options, float(network.count.mean()))
        _Measuring(posterior, laplace, held_out, options, noise, alone)(candidates)
        candidates = [one for one in candidates if one.held_out is not None]
        kept = _chosen(candidates, alone, options.keep)
    path, at_one = _path(posterior, laplace, candidates, kept, batches, options, noise)
    if kept.name == NETWORK:
        _place(posterior, laplace, replace(kept, width=WIDTHS[0] if "prior" in posterior.left_open else None), noise)
        narrowed(posterior, theta)
        notes = [*notes, PREFERRED]
        candidates = [*candidates, kept]
    else:
        _place(posterior, laplace, kept, noise)
    seen = of_network(posterior, theta, batches.everything(BATCHES))
    trained = seen.mean * float(seen.count.sum()) / len(seen.count) * model.num_data
    result = _result(posterior, batches, options, notes, candidates, kept, network, trained)
    result.path, result.at_one = path, at_one
    return result


def _network(posterior: PosteriorBase, theta: Tensor, held_out: Reread) -> Candidate:
    """The network itself, with the noise that suits it best where there is one to choose."""
    noise, linearised = _Noise.of(posterior), posterior.model.linearised_at is not None
    found = []
    for factor in noise.factors:
        noise.set(factor)
        one = of_network(posterior, theta, held_out)
        found.append(Candidate(NETWORK, None, linearised, 1.0, factor, one, one.mean))
    noise.set(1.0)
    return max(found, key=lambda one: one.density)


class _Noise:
    """The noise of a Gaussian("point") likelihood: residuals of a network on its own data are smaller than it."""

    def __init__(self, parameter: Tensor | None):
        self.parameter = parameter
        self.start = 0.0 if parameter is None else float(parameter.detach())
        self.factors = (1.0,) if parameter is None else NOISES

    @classmethod
    def of(cls, posterior: PosteriorBase) -> "_Noise":
        likelihood = posterior.model.likelihood
        is_point = isinstance(likelihood, GaussianLikelihood) and likelihood.noise == "point"
        return cls(likelihood.log_noise if is_point else None)

    def set(self, factor: float) -> None:
        if self.parameter is not None:
            with torch.no_grad():
                self.parameter.fill_(self.start + log(factor))


def _path(
    posterior: PosteriorBase,
    laplace: Laplace,
    candidates: list[Candidate],
    kept: Candidate,
    batches: Batches,
    options: FitOptions,
    noise: _Noise,
) -> tuple[list[PathPoint], Family | None]:
    """ELBO and held-out density at every λ that was tried, and the family at λ = 1."""
    if options.temperature != "validated":
        return [], None
    path, at_one = [], None
    for one in candidates:
        if (one.linearised, one.noise) == (kept.linearised, kept.noise) and one.held_out is not None:
            _place(posterior, laplace, one, noise)
            if one.temperature == 1.0:
                at_one = copy.deepcopy(posterior.family)
            path.append(PathPoint(one.temperature, _elbo(posterior, batches.everything(BATCHES), options), one.density))
    return path, at_one


def _elbo(posterior: PosteriorBase, batches: Iterable[Any], options: FitOptions) -> Estimate:
    try:
        return elbo_on_seed(posterior, batches, GROUPS, options.seed)
    except NonFiniteError:
        return not_finite(GROUPS)


def relative_prior(model: BayesianModel, theta: Tensor, width: float) -> NormalPrior:
    """N(0, (width·rms)²) for each tensor of the network, rms of its values in θ."""
    named = model.space.unravel(theta)
    scales = dict(zip(model.net_space.names, model.net_space.scales.tolist(), strict=True))
    rms = {name: float(named[name].double().square().mean().sqrt()) for name in scales}
    # a tensor that is zero says nothing of its scale
    return NormalPrior({escape(name): width * max(rms[name], 1e-3 * scales[name]) for name in scales})


def _candidates(posterior: PosteriorBase, options: FitOptions, elements: float = 1.0) -> list[Candidate]:
    """In the order in which they are tried; the first is what is taken without held-out data.

    Args:
        elements: observed numbers in a row, the pixels of an image: λ may go up to it.
    """
    linear = [True, False] if "linearise" in posterior.left_open else [posterior.model.linearised_at is not None]
    widths: tuple[float | None, ...] = (None,)
    if "prior" in posterior.left_open:
        widths = (WIDTH,) if options.validation is None else WIDTHS
    temperatures = (options.temperature,)
    if options.temperature == "validated":
        widths = (None,) if widths == (None,) else (PATH_WIDTH,)
        temperatures = temperature_path(elements)
    noises = (1.0,) if options.validation is None else _Noise.of(posterior).factors
    found = []
    for linearised in linear:
        for width in widths:
            for temperature in temperatures:
                how = "linearised" if linearised else "drawn weights"
                prior = "" if width is None else f", prior {width:g}"
                dial = "" if len(temperatures) == 1 else f", λ = {temperature:g}"
                for noise in noises:
                    own = "" if len(noises) == 1 else f", noise {noise:g}"
                    name = f"{how}{prior}{dial}{own}"
                    found.append(Candidate(name, width, linearised, float(temperature), noise))
    return found


def _place(posterior: PosteriorBase, laplace: Laplace, candidate: Candidate, noise: _Noise) -> None:
    """The posterior of a candidate. A noise c times as large makes the data's curvature smaller by c²."""
    model = posterior.model
    noise.set(candidate.noise)
    if candidate.width is not None:
        model.prior = relative_prior(model, laplace.theta, candidate.width)
    if "linearise" in posterior.left_open:
        model.linearised_at = laplace.theta[: model.net_space.size].clone() if candidate.linearised else None
    curvature = candidate.temperature * candidate.noise**2
    laplace.place(posterior.family, curvature, prior_precision(model, laplace.theta))


class _Measuring:
    """The held-out density of candidates: of linearised ones exactly where outputs are few, of others on draws."""

    def __init__(
        self,
        posterior: PosteriorBase,
        laplace: Laplace,
        held_out: Reread,
        options: FitOptions,
        noise: _Noise,
        network: Candidate,
    ):
        self.posterior, self.laplace, self.held_out = posterior, laplace, held_out
        self.options, self.noise, self.alone = options, noise, network
        assert network.held_out is not None
        self.network = network.held_out

    def __call__(self, candidates: list[Candidate]) -> None:
        linear = [one for one in candidates if one.linearised]
        drawn = [one for one in candidates if not one.linearised]
        if self.options.temperature == "validated" or candidates[0].width is None:  # each is asked for
            self.on_draws(candidates, self.held_out)
        elif linear and isinstance(self.posterior.family(), Gaussian) and self.has_few_outputs():
            self.exactly(linear)
            best = max(linear, key=lambda one: one.density)
            same = [one for one in drawn if (one.width, one.noise) == (best.width, best.noise)]
            self.on_draws(same, self.few(1))
        else:
            self.one_by_one([one for one in candidates if one.noise == self.alone.noise])

    def exactly(self, candidates: list[Candidate]) -> None:
        def normal(one: Candidate) -> Gaussian:
            _place(self.posterior, self.laplace, one, self.noise)
            density = self.posterior.family()
            assert isinstance(density, Gaussian)
            return density

        normals = [partial(normal, one) for one in candidates]
        found = of_normals(self.posterior, self.laplace.theta, normals, self.held_out, self.options.seed)
        for one, held_out in zip(candidates, found, strict=True):
            one.measured(held_out, self.network)

    def on_draws(self, candidates: list[Candidate], held_out: Reread) -> None:
        for one in candidates:
            _place(self.posterior, self.laplace, one, self.noise)
            one.measured(of_posterior(self.posterior, held_out, self.options.seed, DRAWS), self.network)

    def one_by_one(self, candidates: list[Candidate]) -> None:
        """From narrow to wide, in the way that is better at the first width, as long as it is as good as the best."""
        best, few = self.network, self.few(2)
        for width in FEW_WIDTHS:
            tried = [one for one in candidates if one.width == width]
            self.on_draws(tried, few)
            better = max(tried, key=lambda one: one.density)
            candidates = [one for one in candidates if one.linearised == better.linearised]
            assert better.held_out is not None
            if not as_good(better.held_out, best):
                break
            best = max(best, better.held_out, key=lambda one: one.gain_over(self.network)[0])

    def few(self, cost: int) -> Reread:
        """Held-out batches, evenly spread, of which a candidate takes `PASSES`, with draws that cost so many passes."""
        enough = max(FEWEST, int(3 * PASSES * self.posterior.model.num_data / (cost * DRAWS)))
        return Reread(self.held_out.batches, -(-enough // rows(self.first())))

    def first(self) -> Any:
        return next(iter(self.held_out))

    def has_few_outputs(self) -> bool:
        posterior = self.posterior
        if (
            posterior.model.user_forward is not None
            or posterior.batch_norm == "reestimated"
            or posterior.dropout == "on"
        ):
            return False
        return outputs_of(posterior, self.laplace.theta, split_batch(self.first())[0]) <= FEW_OUTPUTS


def _chosen(candidates: list[Candidate], network: Candidate, keep: str) -> Candidate:
    """Of those that were measured; densities of some of the rows are compared on these."""
    best = max(candidates, key=lambda one: one.density)
    if keep == "best":
        return best if best.density >= network.density - MARGIN else network
    best = max(best, network, key=lambda one: one.density).held_out
    assert best is not None
    good = [one for one in candidates if one.held_out is not None and as_good(one.held_out, best)]
    return max(good, key=lambda one: one.order) if good else network


def _result(
    posterior: PosteriorBase,
    batches: Batches,
    options: FitOptions,
    notes: list[str],
    candidates: list[Candidate],
    kept: Candidate,
    network: HeldOut | None,
    trained: float,
) -> FitResult:
    read = Watched(batches.everything(BATCHES), posterior.model)
    elbo = _elbo(posterior, read, options)
    model = posterior.model
    notes = [*notes, _explain(kept, options)]
    if not isinstance(model.likelihood, Likelihood):
        notes.append(
            "the likelihood is a plain function, of which no labels can be drawn: the curvature is that of the "
            "observed ones, too small on a network that fits its data, and the posterior too wide"
        )
    if read.log_likelihood is not None and trained < read.log_likelihood:
        notes.append(
            "the network is worse on its own data than an output that ignores the input: is it trained? give epochs= "
            "to fit it from where it is"
        )
    if kept.temperature != 1:
        notes.append(f"λ = {kept.temperature:g}: a tempered posterior is not the posterior; the ELBO is at λ = 1")
    if options.temperature == "validated":
        notes.append("λ was chosen by held-out density; result.at_one is the family at λ = 1, the posterior itself")
    evaluation = model.evaluation
    return FitResult(
        status=Status.PLACED, verdict=f"placed around the network: {kept.name}", elbo=elbo, kept=kept.name,
        candidates={kept.name: elbo}, comparison=f"{GROUPS} groups of draws", history=History(), steps=0, epochs=0.0,
        temperature=kept.temperature, bound=posterior.family().bound, exact=posterior.device.type == "cpu",
        notes=notes, evaluation=str(evaluation), constant=read.log_likelihood,
        held_out={one.name: one.density for one in candidates if one.held_out is not None},
        network=None if network is None else network.mean,
        against_network=None if network is None or kept.held_out is None else kept.held_out.gain_over(network),
    )  # fmt: skip


def _explain(kept: Candidate, options: FitOptions) -> str:
    text = (
        "the mean is held at the trained weights, which have seen the data, and the precision is the curvature there: "
        "a Laplace approximation. Its ELBO is a bound, but no ELBO was maximised"
    )
    if kept.linearised:
        text += "; it is that of the network linearised at these weights"
    if kept.width is not None:
        how = "by held-out density" if options.validation is not None else "without held-out data"
        text += f". The prior's width, {kept.width:g} of each tensor's root mean square, was chosen {how}"
    if kept.noise != 1.0:
        text += f", and so was the noise, {kept.noise:g} times the residuals on the training data"
    return text
