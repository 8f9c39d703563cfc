"""How candidates around a trained network do on held-out data, and what is kept of them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from ..couplings import naive, paired
from ..families.normal_parts import weighted_normals
from ..models.batch import rows
from ..predict.linearised import FEW_OUTPUTS
from .batches import Reread
from .candidates import FEW_WIDTHS, WIDTHS, Around, Candidate, candidates_of, noise_name
from .held_out import HeldOut, of_mixed_normals, of_networks, of_posteriors, outputs_of
from .noise import between, factors_around, network_factor, pull
from .rule import HARM, MIXED, ONE_WIDTH, Rule
from .validation import NETWORK

#: draws of a candidate that is compared on draws; the passes over the training data that each may take, and the
#: held-out rows that it sees nevertheless
DRAWS, PASSES, FEWEST = 8, 0.3, 64
#: independent sets of so many draws, and their passes, for weights that look better drawn than linearised
SETS, SETS_PASSES = 4, 0.4
#: passes that Jacobians of held-out rows may take, and the rows that are seen nevertheless: a row takes a forward pass
#: and a backward pass for each output
EXACT_PASSES, FEWEST_EXACT = 1.0, 300
#: a network is not sure enough where held-out labels say so by this many standard errors
DOUBT = 1.0


def network_alone(arounds: Sequence[Around], held_out: Reread) -> tuple[Candidate, bool]:
    """The network itself, or the average over several, with the noise that suits best; and whether it is not sure
    enough of labels."""
    linearised, factor = arounds[0].posterior.model.linearised_at is not None, 1.0
    networks, noises = [one.network for one in arounds], [one.noise for one in arounds]
    if noises[0].parameter is not None:
        factor = network_factor(networks, noises, held_out)
    for one in noises:
        one.set(factor)
    density, too_sure = of_networks(networks, held_out)
    _check_known(density)
    for one in noises:
        one.set(1.0)
    return Candidate(NETWORK, None, linearised, 1.0, factor, density, density.mean, is_network=True), too_sure < -DOUBT


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


class Measuring:
    """The held-out density of candidates: of linearised ones exactly where outputs are few, of others on draws.

    Args:
        arounds: one, or the members of an equal mixture, each placed as the candidate says.
    """

    def __init__(self, arounds: Sequence[Around], held_out: Reread, options: Any, rule: Rule):
        self.arounds, self.held_out, self.options, self.rule = arounds, held_out, options, rule
        self.network, self.was_exact = rule.network, False
        #: of drawn weights, where linearised candidates were measured exactly, what is better for certain
        self.certain: Candidate | None = None

    def __call__(self, candidates: list[Candidate]) -> None:
        linear = [one for one in candidates if one.linearised]
        drawn = [one for one in candidates if not one.linearised]
        if candidates[0].width is None:  # each is asked for
            self.on_draws(candidates, self.held_out)
        elif linear and all(self.is_exact(one) for one in self.arounds):
            self.was_exact = True
            self.exactly(linear)
            self.near(max(linear, key=lambda one: one.density), drawn)
            self.certain = self.confirmed(self.rule.widest(linear), drawn)
        else:
            self.one_by_one([one for one in candidates if one.noise == self.rule.alone.noise])

    def between(self, kept: Candidate, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Candidates with a noise between that of what is kept and its neighbours, where measuring them is exact."""
        if not self.was_exact or not kept.linearised:
            return []
        tried = [one.noise for one in candidates if one.kind == kept.kind]
        stem = kept.name.removesuffix(noise_name(kept.noise))
        finer = [
            replace(kept, name=stem + noise_name(factor), noise=factor, held_out=None, density=-inf)
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

    def confirmed(self, kept: Candidate, drawn: Sequence[Candidate]) -> Candidate | None:
        """Drawn weights that look better than what would be kept, the best of them, where fresh draws say the same.

        The noise of few draws is the same in all rows, and no standard error over these shows it: of several sets of
        draws it is known.
        """
        known = [one for one in drawn if one.held_out is not None]
        best = max(known, key=lambda one: one.density, default=None)
        if best is None or kept.held_out is None or best.held_out is None:
            return None
        if best.held_out.gain_over(kept.held_out)[0] <= 0:
            return None
        self.on_draws([best], self.few(SETS_PASSES, SETS * DRAWS, FEWEST), self.options.seed + 1, SETS)
        best.measured(best.held_out, self.network, kept.held_out)
        return best if self.rule.is_certain(best, kept) else None

    def on_draws(self, candidates: list[Candidate], held_out: Reread, seed: int | None = None, times: int = 1) -> None:
        """Those of one posterior in mirrored pairs: their mean has no error of first order, so that few are enough."""
        posteriors, seed = [one.posterior for one in self.arounds], self.options.seed if seed is None else seed
        draws, coupling = -(-DRAWS // len(posteriors)), paired if len(posteriors) == 1 else naive
        for one in candidates:
            for around in self.arounds:
                around.place(one)
            one.measured(of_posteriors(posteriors, held_out, seed, draws, coupling, times), self.network)

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

    def is_exact(self, around: Around) -> bool:
        posterior = around.posterior
        if posterior.model.user_forward is not None or not weighted_normals(posterior.family()):
            return False
        if posterior.mixes_rows or posterior.dropout == "on":
            return False
        inputs = posterior.model.split(self.first())[0]
        return outputs_of(*around.network, inputs) <= FEW_OUTPUTS


def chosen(
    arounds: Sequence[Around], held_out: Reread, options: Any, may_temper: bool = True
) -> tuple[Candidate, Candidate, list[Candidate]]:
    """What is kept of the candidates, the network or the average over several, and what was measured.

    Args:
        arounds: one, or the members of an equal mixture.
        held_out: the data that choose.
        options: of the fit.
        may_temper: whether a temperature may be put on top.
    """
    posterior, (alone, is_unsure) = arounds[0].posterior, network_alone(arounds, held_out)
    assert alone.held_out is not None
    noises = (1.0,) if arounds[0].noise.parameter is None else factors_around(alone.noise)
    candidates = candidates_of(arounds, options, float(alone.held_out.count.mean()), noises)
    # with a prior of the user's there is nothing to choose but the network, which must then be clearly better
    open_prior = "prior" in posterior.left_open
    deviations = ONE_WIDTH if posterior.family.scale_count == 1 else MIXED
    several = len(arounds) > 1
    rule = Rule(alone, is_unsure, HARM, deviations, several) if open_prior else Rule(alone, is_unsure=False, harm=inf)
    measuring = Measuring(arounds, held_out, options, rule)
    measuring(candidates)
    candidates = [one for one in candidates if one.held_out is not None]
    kept = rule.best(candidates) if options.keep == "best" else measuring.certain or rule.widest(candidates)
    if len(noises) > 1 and not kept.is_network:
        finer = measuring.between(kept, candidates)
        rows, expected = len(alone.held_out.total), arounds[0].noise.expected
        kept = max([kept, *finer], key=lambda one: one.density + pull(one.noise, rows, expected))
        candidates = [*candidates, *finer]
    if may_temper and open_prior:
        known = [one for one in candidates if one.is_exact or one is measuring.certain] or candidates
        tempered = rule.tempered(known, options.keep)
        if tempered is not None:
            kept, candidates = tempered, [*candidates, tempered]
    return kept, alone, candidates
