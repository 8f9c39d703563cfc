"""Which candidate is kept: the widest that is as good as the best, the network among them; and its temperature."""

from collections.abc import Sequence
from dataclasses import replace

from ..models.calibration import ERRORS
from ..predict.temperature import FEWEST, adjust
from .candidates import Candidate
from .held_out import HeldOut
from .validation import MARGIN, as_good

#: nats by which what is kept may be worse than the network, but for a chance: standard deviations that a normal exceeds
#: with 95 %, of one width, and with 80 %, of a width that is not known, whose narrow parts bound the harm
HARM, ONE_WIDTH, MIXED = 0.01, 1.6449, 0.8416


class Rule:
    """Which candidates are as good as the best, the network among them.

    Spread makes predictions less sure. A network that is too sure gains by it, and the widest posterior that is as good
    as the best is taken. One that is not sure enough loses, by how much is hard to see on few data: there a
    posterior is taken only where it gains two standard errors over the network.

    Of few held-out rows chance makes the best, and the widest within a margin of it may be a bad one. So a posterior is
    as good only if held-out data say that it is not more than `harm` nats worse than the network, with so many standard
    deviations.

    Several networks differ from each other already, and their average is less sure than each of them: around them a
    posterior is as good only if it is not below the average.
    """

    def __init__(
        self, network: Candidate, is_unsure: bool, harm: float, deviations: float = ONE_WIDTH, several: bool = False
    ):
        self.alone, self.is_unsure, self.harm, self.deviations = network, is_unsure, harm, deviations
        self.several = several
        assert network.held_out is not None
        self.network = network.held_out

    def is_good(self, one: Candidate, best: HeldOut) -> bool:
        if not self.is_unsure:
            return self.is_near(one, best)
        if not self._is_safe(one) or one.held_out is None:
            return False
        gain, error = one.held_out.gain_over(self.network)
        return gain > 2 * error

    def is_near(self, one: Candidate, best: HeldOut) -> bool:
        """As good as the best, or more is gained over the network, and not by chance alone, than is lost against it."""
        if not self._is_safe(one) or one.held_out is None:
            return False
        gain, error = one.held_out.gain_over(self.network)
        if self.several and gain < 0:
            return False
        return as_good(one.held_out, best) or (gain > error and best.gain_over(one.held_out)[0] <= min(MARGIN, gain))

    def _is_safe(self, one: Candidate) -> bool:
        known = one.held_out
        return known is not None and known.least_gain_over(self.network, self.deviations) >= -self.harm

    def widest(self, candidates: Sequence[Candidate]) -> Candidate:
        """Of those that were measured exactly, if some were; else of those on draws."""
        exact = [one for one in candidates if one.is_exact] or list(candidates)
        best = max(*exact, self.alone, key=lambda one: one.density).held_out
        assert best is not None
        good = [one for one in exact if self.is_good(one, best)]
        return max(good, key=lambda one: one.spread) if good else self.alone

    def is_certain(self, one: Candidate, kept: Candidate) -> bool:
        """Whether weights that were drawn are better than what was measured exactly, and than the network: by two
        standard errors on the rows that they have seen.

        Better than the first alone is not enough. A wide posterior gains on few rows more than it loses on the others,
        and where none of those few was seen all that is narrow looks better than it.
        """
        if one.held_out is None or kept.held_out is None or not self.is_good(one, one.held_out):
            return False
        gains = [one.held_out.gain_over(known) for known in (kept.held_out, self.network)]
        return all(gain > 2 * error for gain, error in gains)

    def best(self, candidates: Sequence[Candidate]) -> Candidate:
        best = max(candidates, key=lambda one: one.density)
        return best if best.density >= self.alone.density - MARGIN else self.alone

    def tempered(self, candidates: Sequence[Candidate], keep: str) -> Candidate | None:
        """What is kept with a temperature on top; None where none gains two standard errors over all without.

        Spread makes strange inputs less sure than others. Where a network is too sure of all inputs alike a temperature
        above one mends it. Each candidate, the network among them, has its own, if that gains for it, and the widest
        that is as good as the best is kept. The gain is on rows that took no part in the fit of the temperature (five
        folds). A temperature below one would make strange inputs surer too, and is left to `bayes.calibrate`.
        """
        every = [*candidates, self.alone]
        plain = max(every, key=lambda one: one.density).held_out
        assert plain is not None
        own = [with_temperature(one, self.network) for one in every]
        before, best = max(zip(every, own, strict=True), key=lambda pair: pair[1].density)
        if best.adjustment is None or best.held_out is None or before.held_out is None:
            return None
        gain, error = before.held_out.left_out().gain_over(plain)
        if gain <= ERRORS * error:
            return None
        good = [one for one in own if one.width is not None and self.is_near(one, best.held_out)]
        return best if keep == "best" else max(good, key=lambda one: one.spread, default=best)


def with_temperature(one: Candidate, network: HeldOut) -> Candidate:
    """With the temperature above one that suits the held-out rows best, if that gains for certain, or as it is."""
    known = one.held_out
    if known is None or known.losses is None or len(known.total) < FEWEST or not bool(known.losses.isfinite().all()):
        return one
    found = adjust("temperature", known.losses, known.count)
    if not found.is_applied or found.value <= 1:
        return one
    new = replace(one, name=f"{one.name}, temperature {found.value:.3g}", adjustment=found, plain=one)
    new.measured(known.at(found.value), network, one.beside)
    return new
