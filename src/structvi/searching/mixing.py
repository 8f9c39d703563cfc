"""A mixture with its parts at the modes that were found: each the part family's best for the normal there."""

from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.family import Coordinates, Family, PartsSought
from ..models.target import Target
from .choosing import Kept
from .coordinates import Limit, Moved, standard, to_theta
from .fixed_draws import least_draws
from .lbfgs import Curvature
from .modes import COUNTS, Mode, Modes
from .peaks import Peak
from .result import Found
from .search import GROWTH, ROUGH, Search
from .units import DENSE, View

#: a split part's halves are so many standard deviations from its mean, along its longest axis
HALF = 0.7
#: nats by which p at a mode may be above q
COVERED = 2.0


class Mixed(NamedTuple):
    """Where the search of a mixture ended, and what it has seen."""

    found: Found
    modes: list[Mode]
    #: share of the mass at modes that no part has, of all that was seen
    missed: float


class Chosen(NamedTuple):
    """Parts in the coordinates of the fit, and the logarithms of their weights but for a constant."""

    parts: list[Family]
    log_weights: Tensor


def fit_mixture(run: Search, recipe: Family, sought: PartsSought, starts: int, draws: int | None) -> Mixed:
    """Look for modes, place a part at each, then fit all together."""
    run.stage, space = "modes", run.space
    run.target.log_joint(space.initial.detach().clone().unsqueeze(0).requires_grad_())  # errors, before they are caught
    seen = Modes(View(run.target, space.initial, space.scale), run.generator)
    if space.size <= DENSE:
        try:
            with run.target.half():
                seen.search()
        except Limit:
            run.target.exhausted = True
    places = [in_theta(seen.view, part) for part in seen.parts]
    if not places:
        return Mixed(run.any(recipe if sought.number else sought.recipes[0], starts, draws), [], 0.0)
    mixing = Mixing(run, recipe, sought, places)
    modes = len(seen.peaks)
    found = mixing.fit(mixing.chosen(places[:modes], places[modes:], sought.number or modes), draws)
    mixing.to_theta(found.family)
    return Mixed(found, seen.found(), missed(found, places[:modes]))


def in_theta(view: View, peak: Peak) -> Peak:
    return Peak(view.theta(peak.at), peak.value, view.root.unsqueeze(-1) * peak.root)


@torch.no_grad()
def missed(found: Found, modes: list[Peak]) -> float:
    """The share of the mass that is at modes where p is more than seven times q."""
    total = torch.tensor([*(mode.log_mass for mode in modes), found.elbo]).logsumexp(0)
    log_q = found.family().log_prob(torch.stack([mode.at for mode in modes])).tolist()
    lost = [mode.log_mass for mode, q in zip(modes, log_q, strict=True) if mode.value - total.item() - q > COVERED]
    return (torch.tensor([*lost, -inf]).logsumexp(0) - total).exp().item()


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
        mixture = self.recipe.of_parts(*chosen)
        return self.run.levels(mixture, self.target, Curvature(), draws)

    def to_theta(self, family: Family) -> None:
        if self.place is not None:
            to_theta(family, self.place)

    def chosen(self, modes: list[Peak], shoulders: list[Peak], number: int) -> Chosen:
        """So many parts: at modes first, then at what they leave, then at halves of the heaviest.

        Of more modes than parts, or shoulders than are wanted, those whose mixture has the highest ELBO.
        """
        modes = sorted(modes, key=lambda one: -one.log_mass)
        total = torch.tensor([one.log_mass for one in modes + shoulders]).logsumexp(0).item()
        heavy = [one for one in modes if one.log_mass - total > log(COUNTS)] or modes[:1]
        if len(heavy) > number and self.alike:
            return self.best(heavy, number, alone=True)
        if len(heavy) + len(shoulders) > number > len(heavy) and self.alike:
            return self.best([*heavy, *shoulders], number, first=len(heavy))
        places = [*heavy, *sorted(shoulders, key=lambda one: -one.log_mass)][:number]
        while len(places) < number:
            places = halves(places)
        parts = [self.part(index, place) for index, place in enumerate(places)]
        return Chosen(parts, places[0].at.new_tensor([place.log_mass for place in places]))

    def best(self, places: list[Peak], number: int, first: int = 0, alone: bool = False) -> Chosen:
        """So many of the places, the `first` of them in any case, by the ELBO; each fitted by itself if `alone`."""
        parts = [self.part(0, place) for place in places]
        few = least_draws(parts[0]().noise_size)
        if alone:
            parts = [self.run.maximise(part, self.target, few, ROUGH).family for part in parts]
        kept = Kept.of(parts, self.target, GROWTH * few, self.run.seed)
        members, _ = kept.greedy(number, list(range(first)))
        _, log_weights = kept.elbo(members)
        return Chosen([parts[member] for member in members], log_weights.to(places[0].at))

    def part(self, index: int, peak: Peak) -> Family:
        """The best approximation of the peak's normal by the part of this index, in the coordinates of the fit."""
        run, index = self.run, min(index, len(self.recipes) - 1)
        recipe = self.recipes[index]
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
