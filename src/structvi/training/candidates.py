"""What may be placed around a trained network, how each candidate does on held-out data, and which is kept."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from glob import escape
from math import inf
from typing import Any

import torch
from torch import Tensor

from ..couplings import naive, paired
from ..families.gaussian import Gaussian
from ..families.normal_parts import weighted_normals
from ..models.batch import rows
from ..models.bayesian_model import BayesianModel
from ..models.priors.base import MixturePrior
from ..models.priors.scale import NormalPrior
from ..posterior import PosteriorBase
from ..predicting.function_space import FEW_OUTPUTS
from .batches import Reread
from .held_out import HeldOut, of_mixed_normals, of_networks, of_posteriors, outputs_of
from .noise import Noise, between, factors_around, network_factor
from .options import FitOptions
from .temperature_path import temperature_path
from .validation import MARGIN, NETWORK, as_good, narrowed
from .warm_start import Laplace, prior_precision

#: the prior's width is not known but for its largest value c: PARTS widths, equally likely, each 1/RATIO of the one
#: before
PARTS, RATIO = 4, 2.5
#: widths that are tried, in units of each tensor's root mean square, two of them for each RATIO; the least stands for
#: the network
WIDTHS = tuple(round(1.5 * RATIO ** (k / 2), 9) for k in range(-8, 1))
#: those where each costs passes of the network: the first in both ways, the next in the better one while it is as good
FEW_WIDTHS = WIDTHS[2], WIDTHS[5], WIDTHS[8]
#: without held-out data
WIDTH = WIDTHS[4]
#: rank of the default family, and the share of the weights that it is at most
RANK = 32
#: the prior's width on a path of temperatures
PATH_WIDTH = WIDTH
#: draws of a candidate that is compared on draws; the passes over the training data that each may take, and the
#: held-out rows that it sees nevertheless
DRAWS, PASSES, FEWEST = 8, 0.4, 64
#: passes that Jacobians of held-out rows may take, and the rows that are seen nevertheless: a row takes a forward pass
#: and a backward pass for each output
EXACT_PASSES, FEWEST_EXACT = 1.0, 300
#: nats by which what is kept may be worse than the network, but for a chance: standard deviations that a normal exceeds
#: with 95 %, of one width, and with 80 %, of a width that is not known, whose narrow parts bound the harm
HARM, ONE_WIDTH, MIXED = 0.01, 1.6449, 0.8416
#: numbers of normals that are kept once they are made
KEPT_NUMBERS = 2**28


@dataclass
class Candidate:
    """A posterior that was tried."""

    name: str
    width: float | None  # c, the largest; None where the prior is the user's
    linearised: bool
    temperature: float  # λ
    noise: float = 1.0  # of a Gaussian("point"), in units of the network's residuals
    held_out: HeldOut | None = None
    density: float = -inf  # of held-out data, in nats for each element
    is_exact: bool = False  # measured without draws

    @property
    def kind(self) -> tuple[Any, ...]:
        """What it is but for its noise."""
        return (self.width, self.temperature, self.linearised)

    def parts(self, count: int) -> "list[Candidate]":
        """Of so many widths, the largest first, what it is with each alone."""
        if self.width is None:
            return [self]
        return [replace(self, width=round(self.width / RATIO**k, 7)) for k in range(count)]

    @property
    def spread(self) -> tuple[float, float, bool, float]:
        """From narrow to wide; of one width the noise that suits it best, for noise is no doubt about the network."""
        return (inf if self.width is None else self.width, self.temperature, self.linearised, self.density)

    def measured(self, held_out: HeldOut, network: HeldOut) -> HeldOut:
        """Keep what was measured; of some of the rows, the network's own density and what is gained over it there."""
        gain = held_out.gain_over(network)[0]
        self.held_out, self.density = held_out, network.mean + gain if gain == gain else -inf
        return held_out


def relative_prior(model: BayesianModel, theta: Tensor, width: float) -> NormalPrior:
    """N(0, (width·rms)²) for each tensor of the network, rms of its values in θ."""
    named, names = model.space.unravel(theta), model.net_space.names
    rms = torch.stack([named[name].double().square().mean().sqrt() for name in names]).tolist()  # a GPU waits once
    # a tensor that is zero says nothing of its scale
    scales = [max(own, 1e-3 * scale) for own, scale in zip(rms, model.net_space.scales.tolist(), strict=True)]
    return NormalPrior({escape(name): width * scale for name, scale in zip(names, scales, strict=True)})


def candidates_of(
    posterior: PosteriorBase, options: FitOptions, elements: float = 1.0, noises: Sequence[float] = (1.0,)
) -> list[Candidate]:
    """In the order in which they are tried; the first is what is taken without held-out data.

    Args:
        elements: observed numbers in a row, the pixels of an image: λ may go up to it.
        noises: factors of the noise.
    """
    linear = [True, False] if "linearise" in posterior.left_open else [posterior.model.linearised_at is not None]
    widths: tuple[float | None, ...] = (None,)
    if "prior" in posterior.left_open:
        widths = (WIDTH,) if options.validation is None else WIDTHS
    temperatures = (options.temperature,)
    if options.temperature == "validated":
        widths = (None,) if widths == (None,) else (PATH_WIDTH,)
        temperatures = temperature_path(elements)
    found, several = [], posterior.family.scale_count > 1
    for linearised in linear:
        for width in widths:
            for temperature in temperatures:
                how = "linearised" if linearised else "drawn weights"
                prior = "" if width is None else f", prior {'up to ' if several else ''}{width:.3g}"
                dial = "" if len(temperatures) == 1 else f", λ = {temperature:g}"
                for noise in noises:
                    own = "" if len(noises) == 1 else _noise(noise)
                    name = f"{how}{prior}{dial}{own}"
                    found.append(Candidate(name, width, linearised, float(temperature), noise))
    return found


def _noise(factor: float) -> str:
    return f", noise {factor:.4g}"


@dataclass
class Around:
    """A posterior, and what is known of the weights around which it is placed."""

    posterior: PosteriorBase
    laplace: Laplace
    noise: Noise
    #: by the kind of their candidate and its noise
    made: dict[tuple[Any, ...], Gaussian] = field(default_factory=dict[tuple[Any, ...], Gaussian])

    @property
    def network(self) -> tuple[PosteriorBase, Tensor]:
        return self.posterior, self.laplace.theta

    def place(self, candidate: Candidate) -> None:
        """The posterior of a candidate. A noise c times as large makes the data's curvature smaller by c²."""
        posterior, laplace, model = self.posterior, self.laplace, self.posterior.model
        self.noise.set(candidate.noise)
        if "linearise" in posterior.left_open:
            model.linearised_at = laplace.theta[: model.net_space.size].clone() if candidate.linearised else None
        curvature = candidate.temperature * candidate.noise**2
        parts = candidate.parts(posterior.family.scale_count)
        priors, scales = [], []
        for part in reversed(parts):  # the widest is placed last
            if part.width is not None:
                model.prior = relative_prior(model, laplace.theta, part.width)
                priors.insert(0, model.prior)
            precision = prior_precision(model, laplace.theta)
            scales.insert(0, laplace.scales(posterior.family, curvature, precision))
        laplace.place(posterior.family, curvature, precision)
        if len(parts) > 1:
            posterior.family.place_scales(torch.stack(scales))
            model.prior = MixturePrior(priors)

    def place_kept(self, kept: Candidate, batches: Iterable[Any]) -> None:
        """What is kept: the network as a normal so narrow that its predictions, of a batch, are the network's own."""
        if kept.name != NETWORK:
            self.place(kept)
            return
        self.place(replace(kept, width=WIDTHS[0] if "prior" in self.posterior.left_open else None))
        narrowed(*self.network, batches)

    def normal(self, one: Candidate) -> Gaussian:
        """That of one width, kept if there is room, and the noise that goes with it set."""
        key = (*one.kind, one.noise)
        if (made := self.made.get(key)) is not None:
            self.noise.set(one.noise)
            return made
        posterior, laplace, model = self.posterior, self.laplace, self.posterior.model
        self.noise.set(one.noise)
        if one.width is not None:
            model.prior = relative_prior(model, laplace.theta, one.width)
        precision = prior_precision(model, laplace.theta)
        laplace.place(posterior.family, one.temperature * one.noise**2, precision)
        numbers = sum(tensor.numel() for tensor in posterior.family.state_dict().values())
        room = (1 + len(self.made)) * numbers <= KEPT_NUMBERS
        density = weighted_normals((copy.deepcopy(posterior.family) if room else posterior.family)())[0].normal
        if room:
            self.made[key] = density
        return density


def network_alone(arounds: Sequence[Around], held_out: Reread) -> tuple[Candidate, bool]:
    """The network itself, or the average over several, with the noise that suits best; and whether it is too sure."""
    linearised, factor = arounds[0].posterior.model.linearised_at is not None, 1.0
    networks, noises = [one.network for one in arounds], [one.noise for one in arounds]
    if noises[0].parameter is not None:
        factor = network_factor(networks, noises, held_out)
    for one in noises:
        one.set(factor)
    density, is_too_sure = of_networks(networks, held_out)
    _check_known(density)
    for one in noises:
        one.set(1.0)
    return Candidate(NETWORK, None, linearised, 1.0, factor, density, density.mean), is_too_sure


def _check_known(density: HeldOut) -> None:
    """ValueError where held-out data say nothing of a network."""
    if not float(density.count.sum()):
        raise ValueError(
            "validation= has no observation: every label is masked or ignored. Give held-out data with labels"
        )
    if unknown := int(density.total.isnan().sum()):
        raise ValueError(
            f"the network's log density is NaN for {unknown} of the {len(density.total)} rows of validation=, and "
            "nothing can be chosen by it. Is there NaN in their inputs or targets? Leave these rows out, or mask them"
        )


class Rule:
    """Which candidates are as good as the best, the network among them.

    Spread makes predictions less sure. A network that is too sure gains by it, and the widest posterior that is as good
    as the best is taken. One that is not sure enough loses, by how much is hard to see on few data: there a
    posterior is taken only where it gains two standard errors over the network.

    Of few held-out rows chance makes the best, and the widest within a margin of it may be a bad one. So a posterior is
    as good only if held-out data say that it is not more than `harm` nats worse than the network, with so many standard
    deviations.
    """

    def __init__(self, network: Candidate, is_too_sure: bool, harm: float, deviations: float = ONE_WIDTH):
        self.alone, self.is_too_sure, self.harm, self.deviations = network, is_too_sure, harm, deviations
        assert network.held_out is not None
        self.network = network.held_out

    def is_good(self, one: Candidate, best: HeldOut) -> bool:
        if one.held_out is None or one.held_out.least_gain_over(self.network, self.deviations) < -self.harm:
            return False
        gain, error = one.held_out.gain_over(self.network)
        if not self.is_too_sure:
            return gain > 2 * error
        # or more is gained over the network, and not by chance alone, than is lost against the best
        return as_good(one.held_out, best) or (gain > error and best.gain_over(one.held_out)[0] <= min(MARGIN, gain))

    def widest(self, candidates: list[Candidate]) -> Candidate:
        """Of those that were measured exactly, if some were; the best on draws where it gains two standard errors over
        that: the noise of few draws is the same in all rows, and no standard error over these shows it."""
        exact, on_draws = ([one for one in candidates if one.is_exact is kind] for kind in (True, False))
        exact, on_draws = (exact, on_draws) if exact else (on_draws, [])
        best = max(*exact, self.alone, key=lambda one: one.density).held_out
        assert best is not None
        good = [one for one in exact if self.is_good(one, best)]
        kept = max(good, key=lambda one: one.spread) if good else self.alone
        better = [one for one in on_draws if self.is_certain(one, kept)]
        return max(better, key=lambda one: one.density, default=kept)

    def is_certain(self, one: Candidate, kept: Candidate) -> bool:
        if one.held_out is None or kept.held_out is None or not self.is_good(one, one.held_out):
            return False
        gain, error = one.held_out.gain_over(kept.held_out)
        return gain > 2 * error

    def best(self, candidates: list[Candidate]) -> Candidate:
        best = max(candidates, key=lambda one: one.density)
        return best if best.density >= self.alone.density - MARGIN else self.alone


class Measuring:
    """The held-out density of candidates: of linearised ones exactly where outputs are few, of others on draws.

    Args:
        arounds: one, or the members of an equal mixture, each placed as the candidate says.
    """

    def __init__(self, arounds: Sequence[Around], held_out: Reread, options: FitOptions, rule: Rule):
        self.arounds, self.held_out, self.options, self.rule = arounds, held_out, options, rule
        self.network, self.was_exact = rule.network, False

    def __call__(self, candidates: list[Candidate]) -> None:
        linear = [one for one in candidates if one.linearised]
        drawn = [one for one in candidates if not one.linearised]
        if self.options.temperature == "validated" or candidates[0].width is None:  # each is asked for
            self.on_draws(candidates, self.held_out)
        elif linear and all(self.is_exact(one.posterior) for one in self.arounds):
            self.was_exact = True
            self.exactly(linear)
            self.near(max(linear, key=lambda one: one.density), drawn)
        else:
            self.one_by_one([one for one in candidates if one.noise == self.rule.alone.noise])

    def between(self, kept: Candidate, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Candidates with a noise between that of what is kept and its neighbours, where measuring them is exact."""
        if not self.was_exact or not kept.linearised:
            return []
        tried = [one.noise for one in candidates if one.kind == kept.kind]
        stem = kept.name.removesuffix(_noise(kept.noise))
        finer = [
            replace(kept, name=stem + _noise(factor), noise=factor, held_out=None, density=-inf)
            for factor in between(kept.noise, tried)
        ]
        self.exactly(finer)
        is_best = self.options.keep == "best"
        return [one for one in finer if one.held_out and (is_best or self.rule.is_good(one, one.held_out))]

    def exactly(self, candidates: list[Candidate]) -> None:
        count = self.arounds[0].posterior.family.scale_count
        parts = [one.parts(count) for one in candidates]
        each = {(*part.kind, part.noise): part for own in parts for part in own}  # candidates share their normals
        places = {key: place for place, key in enumerate(each)}
        mixed = [[places[*part.kind, part.noise] for part in own] for own in parts]
        normals = [[partial(around.normal, one) for one in each.values()] for around in self.arounds]
        networks = [one.network for one in self.arounds]
        outputs = outputs_of(*networks[0], networks[0][0].model.split(self.first())[0])
        few = self.few(EXACT_PASSES, 1 + 2 * int(outputs), FEWEST_EXACT)
        found = of_mixed_normals(networks, normals, few, self.options.seed, mixed)
        for one, density in zip(candidates, found, strict=True):
            one.measured(density, self.network)
            one.is_exact = True

    def near(self, best: Candidate, drawn: Sequence[Candidate]) -> None:
        """Weights drawn at two widths: a network bears less than its linearisation, and so first narrower than the best
        of those by `RATIO`; where that is better, then as wide, else narrower once more."""
        same = {one.width: one for one in drawn if one.noise == best.noise}
        if not same or best.width is None or best.held_out is None:
            return
        few, widths = self.few(PASSES, DRAWS, FEWEST), [width for width in WIDTHS[::-1] if width <= best.width][::2]
        first = same[widths[min(1, len(widths) - 1)]]
        self.on_draws([first], few)
        is_better = first.held_out is not None and first.held_out.gain_over(best.held_out)[0] > 0
        then = [same[width] for width in (widths[:1] if is_better else widths[2:3])]
        self.on_draws([one for one in then if one is not first], few)

    def on_draws(self, candidates: list[Candidate], held_out: Reread) -> None:
        """Those of one posterior in mirrored pairs: their mean has no error of first order, so that few are enough."""
        posteriors = [one.posterior for one in self.arounds]
        draws, coupling = -(-DRAWS // len(posteriors)), paired if len(posteriors) == 1 else naive
        for one in candidates:
            for around in self.arounds:
                around.place(one)
            one.measured(of_posteriors(posteriors, held_out, self.options.seed, draws, coupling), self.network)

    def one_by_one(self, candidates: list[Candidate]) -> None:
        """From narrow to wide, in the way that is better at the first width, as long as it is as good as the best."""
        best, few = self.network, self.few(PASSES, 2 * DRAWS, FEWEST)
        for width in FEW_WIDTHS:
            tried = [one for one in candidates if one.width == width]
            self.on_draws(tried, few)
            better = max(tried, key=lambda one: one.density)
            candidates = [one for one in candidates if one.linearised == better.linearised]
            if better.held_out is None or not self.rule.is_good(better, best):
                break
            best = max(best, better.held_out, key=lambda one: one.gain_over(self.network)[0])

    def few(self, passes: float, forwards: int, fewest: int) -> Reread:
        """Held-out batches, evenly spread, as many as fit into so many passes where a row takes so many forwards."""
        enough = max(fewest, int(3 * passes * self.arounds[0].posterior.model.num_data / forwards))
        return Reread(self.held_out.batches, -(-enough // rows(self.first())))

    def first(self) -> Any:
        return next(iter(self.held_out))

    def is_exact(self, posterior: PosteriorBase) -> bool:
        if posterior.model.user_forward is not None or not weighted_normals(posterior.family()):
            return False
        if posterior.mixes_rows or posterior.dropout == "on":
            return False
        inputs = posterior.model.split(self.first())[0]
        return outputs_of(posterior, self.arounds[0].laplace.theta, inputs) <= FEW_OUTPUTS


def chosen(
    arounds: Sequence[Around], held_out: Reread, options: FitOptions
) -> tuple[Candidate, Candidate, list[Candidate]]:
    """What is kept of the candidates, the network or the average over several, and what was measured."""
    posterior, (alone, is_too_sure) = arounds[0].posterior, network_alone(arounds, held_out)
    assert alone.held_out is not None
    noises = (1.0,) if arounds[0].noise.parameter is None else factors_around(alone.noise)
    candidates = candidates_of(posterior, options, float(alone.held_out.count.mean()), noises)
    # with a prior of the user's there is nothing to choose but the network, which must then be clearly better
    open_prior = "prior" in posterior.left_open
    deviations = ONE_WIDTH if posterior.family.scale_count == 1 else MIXED
    rule = Rule(alone, is_too_sure, HARM, deviations) if open_prior else Rule(alone, is_too_sure=True, harm=inf)
    measuring = Measuring(arounds, held_out, options, rule)
    measuring(candidates)
    candidates = [one for one in candidates if one.held_out is not None]
    kept = rule.best(candidates) if options.keep == "best" else rule.widest(candidates)
    if len(noises) > 1 and kept.name != NETWORK:
        finer = measuring.between(kept, candidates)
        kept, candidates = max([kept, *finer], key=lambda one: one.density), [*candidates, *finer]
    return kept, alone, candidates
