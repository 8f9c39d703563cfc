"""A mixture where the curvature at a mode says nothing of the mass around it, as with a network's weights.

Normals with such a curvature are no start and no model of what is known: taking them off p tells nothing. So each part
is the part family's own fit, from other starts each time, and the mixture is made of those that gain. More parts
than these are halves of the heaviest: a funnel has one fit, and a mixture around it gains all the same.
"""

import copy
from math import inf, log

import torch
from torch import Tensor

from ..families.family import Coordinates, Family
from ..families.forms import PartsSought
from .approximation import normal_of
from .choosing import Kept, weighted
from .coordinates import Limit
from .fixed_draws import least_draws
from .mixing import Chosen, Mixing
from .peaks import Peak
from .result import Found
from .search import GROWTH, Search

#: parts of "auto", at most
MOST = 4
#: evaluations for each of P numbers that a part must have, where there is a limit
EACH = 2000
#: nats that a further part must gain
GAIN = 0.05


def fit_rough(
    run: Search, recipe: Family, sought: PartsSought, coordinates: Coordinates, starts: int, draws: int | None
) -> Found:
    """The best mixture of fits of the part family, in θ: never less than the best of them by itself.

    With a limit of evaluations there are as many fits as may have 2000 for each number, and each has its share:
    parts at different modes gain log C nats together, which is more than the end of a long fit does. Without one each
    has what it takes.

    Args:
        run: the target and its count.
        recipe: of the mixture.
        sought: its parts, all alike, and how many; None for as many as gain, up to four.
        coordinates: of the parts.
        starts: of each fit.
        draws: a fixed number of them, or None.
    """
    fits, number = [], min(MOST, sought.number or MOST)
    run.release()
    if run.target.limit < inf:
        left = run.target.limit - run.target.evaluations
        number = max(1, min(number, int(left // (EACH * run.space.size))))
    choosing = number * GROWTH * least_draws(2 * run.space.size) if number > 1 else 0
    run.target.limit -= choosing
    for index in range(number):
        with run.target.part(1 / (number - index)):
            run.hold()
            fits.append(run.gaussian(sought.recipes[0], coordinates, starts, draws))
    run.target.limit += choosing
    families, log_weights, elbo = _mixed(run, fits)
    found = fits[0]._replace(elbo=elbo, converged=all(fit.converged for fit in fits))
    if found.converged and not run.target.exhausted:
        if sought.number is None:
            return _grown(run, recipe, sought, found, families, log_weights, draws)
        if sought.number > 1:
            return _polished(run, recipe, sought, families, log_weights, sought.number, draws)
    while len(families) < (sought.number or 1):  # the same density with more parts
        heaviest = int(log_weights.argmax())
        families.append(copy.deepcopy(families[heaviest]))
        log_weights = torch.cat([log_weights, log_weights[heaviest : heaviest + 1]])
        log_weights[[heaviest, -1]] -= log(2)
    return found._replace(family=recipe.of_parts(families, log_weights.to(run.space.initial)))


@torch.no_grad()
def _mixed(run: Search, fits: list[Found]) -> tuple[list[Family], Tensor, float]:
    """Of the fits those that gain, the best first, and their weights and ELBO."""
    fits = sorted(fits, key=lambda fit: -fit.elbo)
    families = [fit.family for fit in fits]
    alone = families[:1], torch.zeros(1, dtype=torch.float64), fits[0].elbo
    if len(families) == 1:
        return alone
    try:
        kept = Kept.of(families, run.target, GROWTH * least_draws(families[0]().noise_size), run.seed - 3)
    except Limit:
        return alone
    members: list[int] = []
    best = -inf
    for number in range(1, len(families) + 1):
        new = kept.greedy(number, members)
        elbo, _ = kept.elbo(new)
        if members and elbo < best + GAIN:
            break
        members, best = new, elbo
    elbo, log_weights = kept.elbo(members)
    return [families[member] for member in members], log_weights.double().cpu(), elbo


def _grown(
    run: Search,
    recipe: Family,
    sought: PartsSought,
    found: Found,
    families: list[Family],
    log_weights: Tensor,
    draws: int | None,
) -> Found:
    """With as many parts as gain: those that there are, then one more each time, the heaviest in two halves."""
    best = found._replace(family=recipe.of_parts(copy.deepcopy(families), log_weights.to(run.space.initial)))
    try:
        value = weighted(best.family, run.target, run.seed)[0]
        for number in range(max(2, len(families)), MOST + 1):
            trial = _polished(run, recipe, sought, families, log_weights, number, draws)
            gained = weighted(trial.family, run.target, run.seed)[0] - value
            if gained < (GAIN if number > len(families) else 0.0):
                break
            best, value = trial, value + gained
    except Limit:  # before the trial could be compared
        pass
    return best


def _polished(
    run: Search,
    recipe: Family,
    sought: PartsSought,
    families: list[Family],
    log_weights: Tensor,
    number: int,
    draws: int | None,
) -> Found:
    """So many parts together, on fixed draws; they stay as they were where that does not gain on fresh ones."""
    places = []
    for family in families:
        normal = normal_of(family)
        places.append(Peak(normal.mean.to(run.space.initial), 0.0, normal.root.to(run.space.initial)))
    masses = [place.log_mass for place in places]
    weights = log_weights.tolist()
    places = [place._replace(value=w - m) for place, m, w in zip(places, masses, weights, strict=True)]
    mixing = Mixing(run, recipe, sought, places)
    chosen = mixing.chosen(places, [], number)
    found = mixing.fit(Chosen(*chosen), draws)
    mixing.to_theta(found.family)
    return found
