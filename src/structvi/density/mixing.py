"""A mixture with its parts at given places: each the part family's best for the normal there, then all together."""

import copy
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.family import Coordinates, Family
from ..families.forms import PartsSought
from ..models.target import Target
from .choosing import Kept, weighted
from .coordinates import Limit, Moved, standard, to_theta
from .fixed_draws import least_draws
from .lbfgs import Curvature
from .modes import COUNTS, Modes
from .newton import Normal
from .peaks import Peak
from .result import FRESH, Found
from .search import GROWTH, ROUGH, Search
from .units import View

#: a split part's halves are so many standard deviations from its mean, along its longest axis
HALF = 0.7
#: nats for which a part of "auto" is left out
NOTHING = 5e-3


class Chosen(NamedTuple):
    """Parts in the coordinates of the fit, and the logarithms of their weights but for a constant."""

    parts: list[Family]
    log_weights: Tensor


def in_theta(view: View, peak: Peak) -> Peak:
    return Peak(view.theta(peak.at), peak.value, view.root.unsqueeze(-1) * peak.root)


def halves(places: list[Peak]) -> list[Peak]:
    """The places with the heaviest in two halves, along its longest axis."""
    heaviest = max(range(len(places)), key=lambda index: places[index].log_mass)
    place = places[heaviest]
    u, s, _ = torch.linalg.svd(place.root)
    step = HALF * s[0] * u[:, 0]
    half = place._replace(value=place.value - log(2))
    rest = places[:heaviest] + places[heaviest + 1 :]
    return [*rest, half._replace(at=place.at + step), half._replace(at=place.at - step)]


class Mixing:
    """The fit of a mixture around given places, in coordinates in which their widths are about one."""

    def __init__(self, run: Search, recipe: Family, sought: PartsSought, places: list[Peak]):
        self.run, self.recipe, self.recipes = run, recipe, sought.recipes
        self.alike = len({repr(one) for one in sought.recipes}) == 1
        own: list[Coordinates | None] = [one.bind(run.space, torch.Generator()).coordinates for one in sought.recipes]
        self.coordinates = own
        self.place: Moved | None = None
        if None not in own:
            widths = torch.stack([place.root.norm(dim=-1) for place in places])
            centre = torch.stack([place.at for place in places]).mean(0)
            self.place = Moved(run.target, centre, widths.log().mean(0).exp())
        self.target: Target = run.target if self.place is None else self.place

    def fit(self, chosen: Chosen, draws: int | None) -> Found:
        """All parts together; where that only fits the draws better, and not fresh ones, they stay as they were."""
        mixture, run = self.recipe.of_parts(*chosen), self.run
        start = copy.deepcopy(mixture)
        found = run.levels(mixture, self.target, Curvature(), draws)
        groups = FRESH
        for _ in range(2):
            try:
                before, after = (weighted(one, self.target, run.seed, groups)[0] for one in (start, found.family))
                return found._replace(family=start, elbo=before) if before > after else found
            except Limit:
                groups = run.release() // (2 * len(chosen.parts))
        return found

    def to_theta(self, family: Family) -> None:
        if self.place is not None:
            to_theta(family, self.place)

    def from_fit(self, peak: Peak) -> Peak:
        """From the coordinates of the fit to θ."""
        if self.place is None:
            return peak
        return Peak(self.place.theta(peak.at), peak.value, self.place.root.unsqueeze(-1) * peak.root)

    def places(self, seen: Modes) -> tuple[list[Peak], list[Peak]]:
        """In θ, the modes, the heaviest first, and the shoulders."""
        every = [in_theta(seen.view, part) for part in seen.parts]
        modes, shoulders = every[: len(seen.peaks)], every[len(seen.peaks) :]
        return sorted(modes, key=lambda one: -one.log_mass), sorted(shoulders, key=lambda one: -one.log_mass)

    def heavy(self, modes: list[Peak], every: list[Peak]) -> list[Peak]:
        """The modes that count."""
        total = torch.tensor([one.log_mass for one in every]).logsumexp(0).item()
        return [one for one in modes if one.log_mass - total > log(COUNTS)] or modes[:1]

    def chosen(self, modes: list[Peak], shoulders: list[Peak], number: int) -> Chosen:
        """So many parts: at modes first, then at what they leave, then at halves of the heaviest.

        Of more modes than parts, or shoulders than are wanted, those whose mixture has the highest ELBO.
        """
        heavy = self.heavy(modes, modes + shoulders)
        if len(heavy) > number and self.alike:
            return self.best(self.each_alone([self.part(0, place) for place in heavy]), number)
        if len(heavy) + len(shoulders) > number > len(heavy) and self.alike:
            return self.best([self.part(0, place) for place in heavy + shoulders], number, len(heavy))
        places = [*heavy, *shoulders][:number]
        while len(places) < number:
            places = halves(places)
        parts = [self.part(index, place) for index, place in enumerate(places)]
        return Chosen(parts, places[0].at.new_tensor([place.log_mass for place in places]))

    def kept(self, parts: list[Family]) -> Kept:
        return Kept.of(parts, self.target, GROWTH * least_draws(parts[0]().noise_size), self.run.seed)

    def best(self, parts: list[Family], number: int, first: int = 0) -> Chosen:
        """So many of the parts, the `first` of them in any case, by the ELBO."""
        try:
            kept = self.kept(parts)
        except Limit:  # the heaviest are first
            return Chosen(parts[:number], self.run.space.initial.new_zeros(min(number, len(parts))))
        members = kept.greedy(number, list(range(first)))
        return Chosen([parts[member] for member in members], kept.elbo(members)[1].to(self.run.space.initial))

    def worth(self, chosen: Chosen) -> Chosen:
        """Without parts whose loss costs next to nothing."""
        try:
            kept, members = self.kept(chosen.parts), list(range(len(chosen.parts)))
        except Limit:
            return chosen
        whole = kept.elbo(members)[0]
        for member in sorted(members, key=lambda index: chosen.log_weights[index].item()):
            rest = [one for one in members if one != member]
            if rest and kept.elbo(rest)[0] > whole - NOTHING:
                members = rest
        return Chosen([chosen.parts[member] for member in members], chosen.log_weights[members])

    def added(self, family: Family, places: list[Peak]) -> Chosen:
        """The parts of a fit and one more, at the place that gains most."""
        parts, _ = copy.deepcopy(family).mixture_parts()
        return self.best([*parts, *(self.part(0, place) for place in places)], len(parts) + 1, len(parts))

    def each_alone(self, parts: list[Family]) -> list[Family]:
        """Each fitted by itself; with half of the evaluations that are left, the heaviest first."""
        with self.run.target.half():
            return [part if self.run.target.exhausted else self.alone(part) for part in parts]

    def alone(self, part: Family) -> Family:
        """The part fitted by itself."""
        return self.run.maximise(part, self.target, least_draws(part().noise_size), ROUGH).family

    def part(self, index: int, peak: Peak) -> Family:
        """The best approximation of the peak's normal by the part of this index, in the coordinates of the fit."""
        run, index = self.run, min(index, len(self.recipes) - 1)
        recipe = self.recipes[index]
        if self.place is None:
            return self.alone(recipe.bind(run.space.at(peak.at), run.generator))
        space, shift, scale = self.place.space, self.place.shift, self.place.root
        at, root = (peak.at - shift) / scale, peak.root / scale.unsqueeze(-1)
        if self.coordinates[index] == "full":
            q = standard(recipe, space, run.generator)
            q.change_coordinates(at, root)
            return q
        normal = Normal(peak.at.double(), peak.root.double())
        shape = run.approximation(recipe, normal)
        shape(normal)
        shape.q.change_coordinates((shape.place.shift - shift) / scale, shape.place.root / scale)
        return shape.q
