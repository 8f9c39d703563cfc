"""A mixture with its parts at the modes that were found: each the part family's best for the normal there."""

from math import log
from typing import NamedTuple

import torch

from ..families.family import Coordinates, Family, PartsSought
from ..models.target import Target
from .coordinates import Limit, Moved, standard, to_theta
from .fixed_draws import least_draws
from .lbfgs import Curvature
from .modes import Mode, Modes
from .peaks import Peak
from .result import Found
from .search import ROUGH, Search
from .units import DENSE, View

#: a split part's halves are so many standard deviations from its mean, along its longest axis
HALF = 0.7


class Mixed(NamedTuple):
    """Where the search of a mixture ended, and what it has seen."""

    found: Found
    modes: list[Mode]
    #: share of the mass at modes that no part has, of all that was seen
    missed: float


def fit_mixture(run: Search, recipe: Family, sought: PartsSought, starts: int, draws: int | None) -> Mixed:
    """Look for modes, place a part at each, then fit all together."""
    run.stage, space = "modes", run.space
    run.target.log_joint(space.initial.detach().clone().unsqueeze(0).requires_grad_())  # errors, before they are caught
    seen = Modes(View(run.target, space.initial, space.scale), run.generator)
    if space.size <= DENSE:
        try:
            seen.search()
        except Limit:
            run.target.exhausted = True
    if not seen.parts:
        return Mixed(run.any(_numbered(recipe, sought), starts, draws), [], 0.0)
    number = sought.number or len(seen.peaks)
    places = chosen(seen, number)
    mixing = Mixing(run, recipe, sought, places)
    found = mixing.fit(places, draws)
    return Mixed(found, seen.found(), 0.0)


def _numbered(recipe: Family, sought: PartsSought) -> Family:
    return recipe if sought.number is not None else sought.recipes[0]


def chosen(seen: Modes, number: int) -> list[Peak]:
    """So many places, in θ: the heaviest modes, then shoulders, then halves of the heaviest."""
    heavy = sorted(seen.parts[: len(seen.peaks)], key=lambda part: -part.log_mass)
    rest = sorted(seen.parts[len(seen.peaks) :], key=lambda part: -part.log_mass)
    places = [in_theta(seen.view, part) for part in (heavy + rest)[:number]]
    while len(places) < number:
        places = split(places, max(range(len(places)), key=lambda index: places[index].log_mass))
    return places


def in_theta(view: View, peak: Peak) -> Peak:
    return Peak(view.theta(peak.at), peak.value, view.root.unsqueeze(-1) * peak.root)


def split(places: list[Peak], index: int) -> list[Peak]:
    """The places with one in two halves, along its longest axis."""
    place = places[index]
    u, s, _ = torch.linalg.svd(place.root)
    step = HALF * s[0] * u[:, 0]
    half = place._replace(value=place.value - log(2))
    return [*places[:index], half._replace(at=place.at + step), half._replace(at=place.at - step), *places[index + 1 :]]


class Mixing:
    """The fit of a mixture around given places, in coordinates in which their widths are about one."""

    def __init__(self, run: Search, recipe: Family, sought: PartsSought, places: list[Peak]):
        self.run, self.recipe, self.sought = run, recipe, sought
        own: list[Coordinates | None] = [one.bind(run.space, torch.Generator()).coordinates for one in sought.recipes]
        self.coordinates = own
        self.place: Moved | None = None
        if None not in own:
            widths = torch.stack([place.root.norm(dim=-1) for place in places])
            centre = torch.stack([place.at for place in places]).mean(0)
            self.place = Moved(run.target, centre, widths.log().mean(0).exp())

    def fit(self, places: list[Peak], draws: int | None) -> Found:
        target: Target = self.run.target if self.place is None else self.place
        parts = [self.part(min(index, len(self.coordinates) - 1), place) for index, place in enumerate(places)]
        log_weights = places[0].at.new_tensor([place.log_mass for place in places])
        found = self.run.levels(self.recipe.of_parts(parts, log_weights), target, Curvature(), draws)
        if self.place is not None:
            to_theta(found.family, self.place)
        return found

    def part(self, index: int, peak: Peak) -> Family:
        """The best approximation of the peak's normal by the part of this index, in the coordinates of the fit."""
        run, recipe = self.run, self.sought.recipes[index]
        if self.place is None:
            q = recipe.bind(run.space.at(peak.at), run.generator)
            return run.maximise(q, run.target, least_draws(q().noise_size), ROUGH).family
        space, shift, scale = self.place.space, self.place.shift, self.place.root
        at, root = (peak.at - shift) / scale, peak.root / scale.unsqueeze(-1)
        if self.coordinates[index] == "full":
            q = standard(recipe, space, run.generator)
            q.change_coordinates(at, root)
            return q
        sd = root.norm(dim=-1)
        precision = torch.cholesky_inverse(root) * sd * sd.unsqueeze(-1)
        q, _ = run.approximate(recipe, space, torch.zeros_like(at), precision)
        q.change_coordinates(at, sd)
        return q
