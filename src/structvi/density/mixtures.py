"""The search of `vi.fit_density` for a mixture.

modes ─▶ a part at each ─▶ the mixture on S, 4S, .. draws ─▶ a round of searches with the fit taken off p
              ▲                                                 │ a mode that is new; for components="auto" also what
              └─────────────────────────────────────────────────┘ any mode's normal leaves, while that gains
"""

from contextlib import suppress
from math import exp, inf, log1p
from typing import NamedTuple

import torch

from ..families.family import Family
from ..families.forms import PartsSought
from ..families.gaussian import Gaussian
from ..result import Status
from .choosing import weighted
from .coordinates import Limit
from .mixing import Chosen, Mixing, in_theta
from .modes import POINTS, Mode, Modes
from .peaks import Peak, is_at, with_mass
from .result import FRESH, Found
from .rough_modes import fit_rough
from .search import Search
from .units import DENSE, View
from .wider import wider

#: with a lower limit of evaluations no modes are looked for
LEAST = 4 * POINTS
#: fits, at most, of a given number of parts; of "auto", at most so many parts more than modes
FITS, MORE = 3, 8
#: nats that a further part must gain
GAIN = 0.05
#: nats that a shoulder must hold beside a fit, whose draws may never go there
BESIDE = 0.02
#: nats by which p at a mode may be above q
COVERED = 2.0
#: share of the mass at modes without a part from which on a fit has not converged
MISSED = 0.01

ROUGH = (
    "the curvature at the first mode says nothing of the mass around it: parts are fits from several starts, and no "
    "further modes were looked for"
)


class Mixed(NamedTuple):
    """Where the search of a mixture ended, and what it has seen."""

    found: Found
    modes: list[Mode]
    #: share of the mass that is at modes without a part, of all that was seen
    missed: float
    notes: list[str]

    def verdict(self, status: Status, words: str) -> tuple[Status, str]:
        """As it is, but for a fit that has converged without some of the modes."""
        if status is not Status.CONVERGED or self.missed < MISSED:
            return status, words
        return Status.MISSED_MODES, (
            f"modes are missed: about {100 * self.missed:.0f} % of the mass is at modes that no part has, of the "
            f'{len(self.modes)} that the searches saw; raise components=, or give components="auto". {words}'
        )


def fit_mixture(run: Search, recipe: Family, sought: PartsSought, starts: int, draws: int | None) -> Mixed:
    """Look for modes, place a part at each, fit all together, and look again."""
    run.stage, space = "modes", run.space
    run.target.log_joint(space.initial.detach().clone().unsqueeze(0).requires_grad_())  # errors, before they are caught
    alone = sought.recipes[0] if sought.number is None else recipe
    if not (run.target.limit > LEAST and space.size <= DENSE):
        what = f"modes are looked for where P ≤ {DENSE} and max_evaluations= is none or above {LEAST + FRESH}"
        if sought.number is None:
            raise ValueError(f'components="auto" needs modes, and {what}; give the number of parts: components=2')
        return Mixed(run.any(recipe, starts, draws), [], 0.0, [f"no modes were looked for: {what}"])
    seen = Modes(View(run.target, space.initial, space.scale), run.generator)
    with suppress(Limit), run.target.half():  # the other half is left to the fit
        seen.search(sought.number or 1)
    if seen.rough or not seen.parts:
        coordinates = sought.recipes[0].bind(space, torch.Generator()).coordinates
        notes = [ROUGH] if seen.rough else ["no mode was found: parts are fits from several starts"]
        if coordinates is not None and len({repr(one) for one in sought.recipes}) == 1:
            return Mixed(fit_rough(run, recipe, sought, coordinates, starts, draws), seen.found(), 0.0, notes)
        if not seen.parts:
            return Mixed(run.any(alone, starts, draws), [], 0.0, ["no mode was found"])
    notes = []
    if len(seen.parts) < (sought.number or 1):
        notes = [
            f"modes found: {len(seen.peaks)}, for {sought.number} parts; if there are more, no search reached them"
        ]
    mixing = Mixing(run, recipe, sought, [in_theta(seen.view, part) for part in seen.parts])
    if sought.number is None:
        found = _as_many_as_pay(mixing, seen, draws)
    else:
        found = _so_many(mixing, seen, sought.number, draws)
    mixing.to_theta(found.family)
    return Mixed(found, seen.found(), missed(found, [in_theta(seen.view, peak) for peak in seen.peaks]), notes)


def _so_many(mixing: Mixing, seen: Modes, number: int, draws: int | None) -> Found:
    """The best fit with this number of parts: another one where the look after it finds a mode that counts."""
    best: Found | None = None
    for _ in range(FITS):
        found = mixing.fit(mixing.chosen(*mixing.places(seen), number), draws)
        best = found if best is None or found.elbo > best.elbo else best
        try:
            if not look(mixing, seen, found):
                break
            seen.refine()
        except Limit:
            break
    assert best is not None
    return best


def _as_many_as_pay(mixing: Mixing, seen: Modes, draws: int | None) -> Found:
    """A part for each mode that counts, then one for what the fit leaves, as long as that gains."""
    modes, before = mixing.places(seen)
    heavy = mixing.heavy(modes, modes)
    found = mixing.fit(_exact(mixing, heavy, before) or mixing.worth(mixing.chosen(heavy, [], len(heavy))), draws)
    for _ in range(MORE):
        try:
            elbo, evidence = weighted(found.family, mixing.target, mixing.run.seed)
            trial, gain = _another(mixing, seen, found, before, evidence - elbo, draws)
            if trial is None or weighted(trial.family, mixing.target, mixing.run.seed)[0] < elbo + gain:
                break
        except Limit:  # before the trial could be compared
            break
        found = trial
    return found


def _exact(mixing: Mixing, modes: list[Peak], shoulders: list[Peak]) -> Chosen | None:
    """Parts at all of them, where p is just these normals: with fewer a part would stretch over two modes."""
    if not shoulders:
        return None
    chosen = mixing.worth(mixing.chosen(modes, shoulders, len(modes) + len(shoulders)))
    try:
        elbo, evidence = weighted(mixing.recipe.of_parts(*chosen), mixing.target, mixing.run.seed)
    except Limit:
        return None
    return chosen if evidence - elbo < BESIDE else None


def _another(
    mixing: Mixing, seen: Modes, found: Found, before: list[Peak], left: float, draws: int | None
) -> tuple[Found | None, float]:
    """A fit with parts at modes that a look has found or, where the fit leaves some, at what it leaves; and the nats
    that it must gain.

    Its own draws tell what it leaves where they go, `left` nats; the mass of shoulders tells what it leaves elsewhere.
    Shoulders from `before` the fit are places for a part too: a fit that has stretched over one hides it.
    """
    if look(mixing, seen, found):
        seen.refine()
        modes, _ = mixing.places(seen)
        return mixing.fit(mixing.worth(mixing.chosen(modes, [], len(modes))), draws), GAIN
    around = wider(found.family, mixing.target, found.elbo, mixing.run.seed + 3)
    places = [in_theta(seen.view, shoulder) for shoulder in seen.shoulders]
    places += [with_mass(mixing.from_fit(one), one.log_mass) for one in around]
    beside = log1p(exp(min(0.0, max((place.log_mass for place in places), default=-inf) - found.elbo)))
    if places and max(left - GAIN, beside - BESIDE) > 0 and not mixing.run.target.exhausted:
        gain = GAIN if left > GAIN else min(GAIN, beside / 2)
        return mixing.fit(mixing.added(found.family, places + before), draws), gain
    return None, GAIN


def look(mixing: Mixing, seen: Modes, found: Found) -> bool:
    """A round of searches with the fit taken off p, where its parts are normals; whether a mode was new."""
    run = mixing.run
    if run.target.exhausted:
        return False
    stage, run.stage = run.stage, "modes"
    try:
        return seen.again(_normals(mixing, seen, found) or seen.parts)
    except Limit:
        run.target.exhausted = True
        return False
    finally:
        run.stage = stage


@torch.no_grad()
def _normals(mixing: Mixing, seen: Modes, found: Found) -> list[Peak]:
    """Of the parts of the fit, in the coordinates of the searches; none where a part is no normal."""
    parts, weights = found.family.mixture_parts()
    made = []
    for part, weight in zip(parts, weights.log().tolist(), strict=True):
        density = part()
        if not isinstance(density, Gaussian):
            return []
        root, failed = torch.linalg.cholesky_ex(density.covariance())
        if failed.item():
            return []
        peak = mixing.from_fit(Peak(density.mean, 0.0, root))
        at = (peak.at - seen.view.centre) / seen.view.root
        mass = weight + found.elbo - seen.view.root.log().sum().item()
        made.append(with_mass(Peak(at, 0.0, peak.root / seen.view.root.unsqueeze(-1)), mass))
    return made


@torch.no_grad()
def missed(found: Found, modes: list[Peak]) -> float:
    """The share of the mass that is at modes where p is more than seven times q, and that are no part's."""
    total = torch.tensor([mode.log_mass for mode in modes]).logsumexp(0).clamp(min=found.elbo)
    log_q = found.family().log_prob(torch.stack([mode.at for mode in modes])).tolist()
    over = [mode for mode, q in zip(modes, log_q, strict=True) if mode.value - total.item() - q > COVERED]
    parts = [part() for part in found.family.mixture_parts()[0]] if over else []
    normals = [(part.mean, part.covariance()) for part in parts if isinstance(part, Gaussian)]
    lost = [mode.log_mass for mode in over if not any(is_at(mode, *normal) for normal in normals)]
    return (torch.tensor([*lost, -inf]).logsumexp(0) - total).exp().item()
