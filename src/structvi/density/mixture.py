"""Modes of a log density, and mixtures with a part at each.

climbs of log p ─▶ a normal at each end ─▶ rounds of climbs from where p is above these normals ─▶ a part at each
       ▲                                                                                                │
       └── for components="auto" also at what the fit leaves of p, while that gains ◀── the mixture on S, 4S, .. draws

A round draws points at 1 to 40 standard deviations of the known normals. Some climb log p. Others climb the rest
of p, without the normals: a mode beside a wider one has a small basin of log p, and a large one of the rest. If such a
climb leads to no new mode of log p, its end is a shoulder: mass that no mode's normal has.
"""

import copy
from contextlib import suppress
from dataclasses import dataclass
from math import exp, inf, log, log1p, pi
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.family import Family
from ..families.mixture import Mixture, mixture_of
from ..models.target import Target
from ..parameters import Parameters
from ..result import Status
from .fixed_draws import fresh_draws
from .gaussian import Normal, Place, Shape, half_log_det, normal_of, set_form
from .lbfgs import RowFunction, ascend
from .schedule import Climbs, Found, Search
from .targets import Limit, View

#: numbers up to which modes are looked for
DENSE = 512
#: first points of each size: 0.1, 0.3, 1, 3 and 10 of the space's scales
EACH = 32
#: points of a round
POINTS = 8192
#: points of a round that climb
CLIMBERS = 128
#: greatest distance of a round's points from known modes, in standard deviations; a fifth goes farther
FAR, FARTHEST = 16.0, 40.0
#: nats that p must have over the known normals at points that climb the rest
LEFT = (1e-9, 0.3)
#: rounds, at most
ROUNDS = 12
#: rounds without a find after which the search ends; more if there are fewer modes than parts
QUIET, LONGER = 2, 6
#: two ends of climbs are one mode within so many standard deviations
NEAR = 0.7
#: and within so many nats
NATS = 0.5
#: standard deviations around an end from which climbs go on, to see whether it is a saddle
JITTER = 0.3
#: ends that a climb of a round looks at
MOST = 24
#: share of the mass from which on a mode is worth another round
COUNTS = 1e-4
#: the same of a shoulder
SHOULDER = 2e-3
#: draws that weigh a shoulder
WEIGHED = 32
#: widths around a part of a fit, relative to it, at which mass may be left
WIDER = (1.5, 2.5, 4.0)
#: Newton's steps of a mode's normal
STEPS = 30
#: fits of a given number of parts, and further parts of "auto", at most
FITS, MORE = 3, 8
#: nats that a further part must gain, and of mass beside a fit whose draws do not go there
GAIN, BESIDE = 0.05, 0.02
#: nats by which p at a mode may be above q
COVERED = 2.0
#: share of the mass at modes without a part from which on a fit has not converged
MISSED = 0.01
#: distance of the halves of a part from its mean, in standard deviations along its longest axis
HALF = 0.7
#: draws of each part that estimate ELBO and evidence
GROUPS = 1024


@dataclass
class Mode:
    """A mode of log p as the searches saw it.

    Attributes:
        theta: where it is, [P].
        log_p: the log density there.
        log_mass: the ELBO of a normal there, its share of the evidence if it is Gaussian.
        reached: searches that ended there.
    """

    theta: Tensor
    log_p: float
    log_mass: float
    reached: int


class Masses:
    """Σ_c m_c N_c, the normals with the masses of places."""

    def __init__(self, places: list[Place]):
        self.mean = torch.stack([place.normal.mean for place in places])  # [C, P]
        self.inverse: Tensor = torch.linalg.inv(torch.stack([place.normal.root for place in places]))  # [C, P, P]
        constant = [place.log_mass - half_log_det(place.normal.root) for place in places]
        self.constant = self.mean.new_tensor(constant) - self.mean.shape[1] / 2 * log(2 * pi)

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return its logarithm and the gradient of that: [n, P] → [n], [n, P]."""
        white = torch.einsum("cij,ncj->nci", self.inverse, theta.unsqueeze(1) - self.mean)
        each = self.constant - white.square().sum(-1) / 2
        return each.logsumexp(-1), -torch.einsum("nc,nci,cij->nj", each.softmax(-1), white, self.inverse)


class Modes:
    """The search for modes: places that were found, and how often.

    Args:
        run: the target and its count.
        centre, scale: where the first points are, and the units of climbs, [P] each.
        generator: of all points.
    """

    def __init__(self, run: Search, centre: Tensor, scale: Tensor, generator: torch.Generator):
        self.run, self.generator = run, generator
        self.view = View(run.target, centre.double(), scale.double())
        self.modes: list[Mode] = []
        self.at_modes: list[Place] = []
        self.shoulders: list[Place] = []
        #: around the parts of a fit, with the mass that it leaves there
        self.wider: list[Place] = []
        #: ends of climbs that are not at a mode of their own: θ, log p and the index of the mode
        self.aliases: list[tuple[Tensor, float, int]] = []

    @property
    def places(self) -> list[Place]:
        """All normals with mass."""
        return self.at_modes + self.shoulders

    def total(self) -> float:
        """Return the log of the mass of all that was found."""
        return torch.tensor([place.log_mass for place in self.places] or [-inf]).logsumexp(0).item()

    def search(self, wanted: int = 1) -> None:
        """Make rounds until some find nothing that counts, more of them with fewer places than are wanted."""
        # not the start itself, which may be a saddle between modes
        self.climb(torch.cat([0.01 * self.noise(1), *(10 ** (k / 2) * self.noise(EACH) for k in range(-2, 3))]))
        quiet = 0
        for _ in range(ROUNDS if self.places else 0):
            quiet = 0 if self.round(self.places) else quiet + 1
            if quiet >= (QUIET if len(self.places) >= wanted else LONGER):
                break

    def round(self, known: list[Place], points: int = POINTS, climbers: int = CLIMBERS, fitted: bool = False) -> bool:
        """Climb from points around these normals, those of a fit or not; return whether what counts was new."""
        masses, before = Masses(known), len(self.modes)
        theta = self.points(known, points)
        z = self.view.z(theta)
        value = self.view.values(z) - self.view.log_det
        over = value - masses(theta)[0]
        self.climb(z[self.chosen(value, over, LEFT[-1], climbers)])
        starts = [z[self.chosen(value, over, least, climbers)] for least in LEFT]
        around = known if fitted else []
        found = [self.climb_residual(masses, z, least, around) for z, least in zip(starts, LEFT, strict=True)]
        total = self.total()
        return any(found) or any(place.log_mass - total > log(COUNTS) for place in self.at_modes[before:])

    def chosen(self, value: Tensor, over: Tensor, least: float, climbers: int) -> Tensor:
        """Return points where p is `least` nats over what is known: most over it, most left, any; and any others."""
        visible = (over > least).nonzero().squeeze(-1)
        left = value + torch.log(-torch.expm1(-over.clamp(min=1e-300)))
        n = climbers // 4
        most = [visible[one[visible].argsort(descending=True)[:n]] for one in (over, left)]
        some = visible[torch.randperm(len(visible), generator=self.generator)[:n]]
        rest = torch.randperm(len(value), generator=self.generator)[:n].to(visible)
        return torch.cat([*most, some, rest]).unique()

    def noise(self, n: int) -> Tensor:
        """Return rows of standard normal numbers, [n, P]."""
        z = torch.randn(n, len(self.view.centre), generator=self.generator, dtype=torch.float64)
        return z.to(self.view.centre)

    def points(self, known: list[Place], n: int) -> Tensor:
        """Return θ around normals, between them and beyond, at distances from 1 to 40 standard deviations: [n, P]."""
        at = torch.stack([place.normal.mean for place in known])
        roots = torch.stack([place.normal.root for place in known])
        which, other, shape = torch.randint(len(at), (3, n), generator=self.generator)
        part, far = torch.rand(2, n, 1, generator=self.generator, dtype=torch.float64).to(at)
        index = torch.arange(n, device=at.device).unsqueeze(-1)
        base = torch.lerp(at[which], at[other], torch.where(index % 8 < 5, 0.0, 2.5 * part - 0.5))
        base = torch.where(index % 4 == 0, self.view.centre, base)
        direction = self.noise(n)
        length = torch.where(index % 5 == 0, FARTHEST, FAR) ** far / direction.norm(dim=-1, keepdim=True)
        return base + torch.einsum("nij,nj->ni", roots[shape], length * direction)

    def ascended(self, function: RowFunction, z: Tensor) -> Climbs | None:
        """Return climbs of a function of coordinates, as far as evaluations allow."""
        path: list[tuple[Tensor, Tensor, Tensor]] = []
        with suppress(Limit):
            ascend(function, z, path=path)
        return Climbs(self.view, path) if path else None

    def climb(self, z: Tensor) -> bool:
        """Climb log p, count each end, and fit a normal at those that are new; return whether there were any."""
        climbs = self.ascended(self.view, z)
        if climbs is None:
            return False
        theta, values = climbs.ends()
        left, new = values.isfinite(), False
        for _ in range(MOST + len(self.modes) + len(self.aliases)):
            if not bool(left.any()):
                break
            row = int(torch.where(left, values, -inf).argmax())
            index = self.known(theta[row], values[row].item())
            if index is None:
                index, is_new = self.add(climbs, row, theta[row], values[row].item())
                new = new or is_new
            left[row] = False
            if index is None:
                continue
            own = left & (self.at_modes[index].normal._replace(mean=theta[row]).distance(theta) < NEAR)
            own &= values > values[row] - NATS
            self.modes[index].reached += 1 + int(own.sum())
            left &= ~own
        return new

    def known(self, theta: Tensor, value: float) -> int | None:
        """Return the mode at which an end is."""
        ends = [(mode.theta, mode.log_p, index) for index, mode in enumerate(self.modes)] + self.aliases
        for at, log_p, index in ends:
            distance = self.at_modes[index].normal._replace(mean=at).distance(theta.unsqueeze(0)).item()
            if distance < NEAR and abs(value - log_p) < NATS:
                return index
        return None

    def add(self, climbs: Climbs, row: int, theta: Tensor, value: float) -> tuple[int | None, bool]:
        """Fit a normal at a new end; return its mode, perhaps one that is known, and whether it is new.

        Climbs from around it go on first: an end may be a saddle between modes.
        """
        start = climbs.normal(row)
        again = self.ascended(self.view, self.view.z(theta + JITTER * self.noise(4) @ start.root.mT))
        if again is not None and again.ends()[1].max() > value + NATS / 5:
            ends, values = again.ends()
            best = int(values.argmax())
            theta, value, start = ends[best], values[best].item(), again.normal(best)
            if (index := self.known(theta, value)) is not None:
                return index, False
        found = self.run.fit_hill(start, value, STEPS)
        if found is None:
            return None, False
        normal, elbo = found[0][-1], found[1]
        for index, place in enumerate(self.at_modes):
            if is_at(place.normal, normal):
                self.aliases.append((theta, value, index))
                return index, False
        self.modes.append(Mode(theta, value, elbo, 0))
        self.at_modes.append(Place(normal, elbo))
        return len(self.modes) - 1, True

    def climb_residual(self, masses: Masses, z: Tensor, least: float, around: list[Place]) -> bool:
        """Climb the rest of p, then log p from the ends; return whether mass that counts was new.

        Mass around one of the normals has no end of a climb: for those in `around` wider normals are weighed.
        """

        def left(z: Tensor) -> tuple[Tensor, Tensor]:
            value, gradient = self.view(z)
            taken, slope = masses(self.view.theta(z))
            over = value - self.view.log_det - taken
            is_left = over > least + 1e-11 * (1 + taken.abs())
            over = torch.where(is_left, over, 1.0)
            rest = gradient - torch.exp(-over).unsqueeze(-1) * self.view.back(slope)
            part = -torch.expm1(-over)
            value = torch.where(is_left, value + part.log(), -inf)
            return value, torch.where(is_left.unsqueeze(-1), rest / part.unsqueeze(-1), 0.0)

        climbs = self.ascended(left, z)
        if climbs is None:
            return False
        theta, values = climbs.ends()
        is_open, own, vain = values.isfinite(), [], 0
        while vain < 6 and len(own) < MOST and bool(is_open.any()):
            row = int(torch.where(is_open, values, -inf).argmax())
            normal = climbs.normal(row)
            is_open &= (normal.distance(theta) >= NEAR) | (values < values[row] - NATS)
            is_open[row] = False
            mass = self.mass_left(left, normal, values[row].item())
            vain += 1
            if mass - self.total() > log(SHOULDER):
                own.append(Place(normal, mass))
                vain = 0
        if around:
            wider = [place.normal._replace(root=times * place.normal.root) for place in around for times in WIDER]
            self.wider = [Place(normal, self.mass_left(left, normal, inf)) for normal in wider]
        new = bool(own) and self.climb(self.view.z(torch.stack([place.normal.mean for place in own])))
        for place in sorted(own, key=lambda one: -one.log_mass):
            if not any(float(one.normal.distance(place.normal.mean.unsqueeze(0))) < 1 for one in self.places):
                self.shoulders.append(place)
                new = True
        return new

    def mass_left(self, left: RowFunction, normal: Normal, value: float) -> float:
        """Return the log mass of the rest of p around a normal, by importance sampling; `value` is at its mean."""
        noise = self.noise(WEIGHED)
        drawn = left(self.view.z(normal.mean + noise @ normal.root.mT))[0] - self.view.log_det
        log_normal = -noise.square().sum(-1) / 2 - noise.shape[1] / 2 * log(2 * pi) - half_log_det(normal.root)
        return min((drawn - log_normal).logsumexp(0).item() - log(WEIGHED), value - log_normal.max().item())

    def found(self) -> list[Mode]:
        """Return the modes, the heaviest first."""
        return sorted(self.modes, key=lambda mode: -mode.log_mass)


def is_at(one: Normal, other: Normal) -> bool:
    """Return whether a normal is at another one, and about as wide."""
    P = len(one.mean)
    if float(one.distance(other.mean.unsqueeze(0))) > max(NEAR, 0.5 * P**0.5):
        return False
    return abs(half_log_det(one.root) - half_log_det(other.root)) < P * log(3)


class Mixed(NamedTuple):
    """The end of a mixture's search, and the modes that it has seen."""

    found: Found
    modes: list[Mode]
    #: share of the mass that is at modes without a part, of all that was seen
    missed: float
    notes: list[str]

    def verdict(self, status: Status, words: str) -> tuple[Status, str]:
        """Return status and words; others if the fit has converged without some of the modes."""
        if status is not Status.CONVERGED or self.missed < MISSED:
            return status, words
        return Status.MISSED_MODES, (
            f"modes are missed: about {100 * self.missed:.0f} % of the mass is at modes that no part has, of the "
            f'{len(self.modes)} that the searches saw; raise components=, or give components="auto". {words}'
        )


def fit_mixture(run: Search, recipe: Mixture, starts: int, draws: int | None) -> Mixed:
    """Return a mixture with a part at each mode, fitted together, after another look for modes."""
    run.stage, auto = "modes", recipe.components == "auto"
    number = None if auto else len(recipe.parts())
    alone = recipe.parts()[0] if auto else recipe
    normals = [part.bind(run.space, torch.Generator()).normal() is not None for part in recipe.parts()]
    if not (run.target.limit > 4 * POINTS and run.space.size <= DENSE and all(normals)):
        what = f"modes are looked for with normal parts, P ≤ {DENSE} and max_evaluations= none or above {4 * POINTS}"
        if auto:
            raise ValueError(f'components="auto" needs modes, and {what}; give the number of parts: components=2')
        return Mixed(run.any(recipe, starts, draws), [], 0.0, [f"no modes were looked for: {what}"])
    seen = Modes(run, run.space.initial, run.space.scale, run.generator)
    with suppress(Limit), run.target.part(0.5):  # the other half is left to the fit
        seen.search(number or 1)
    if not seen.places:
        return Mixed(run.any(alone, starts, draws), [], 0.0, ["no mode was found"])
    notes = []
    if len(seen.places) < (number or 1):
        notes = [f"modes found: {len(seen.modes)}, for {number} parts; if there are more, no search reached them"]
    mixing = _Mixing(run, recipe, seen)
    found = mixing.as_many_as_pay(draws) if number is None else mixing.so_many(number, draws)
    return Mixed(found, seen.found(), mixing.missed(found), notes)


class _Mixing:
    """Fits of a mixture around places, in coordinates in which their widths are about one."""

    def __init__(self, run: Search, recipe: Mixture, seen: Modes):
        self.run, self.recipe, self.seen = run, recipe, seen
        widths = torch.stack([place.normal.root.norm(dim=-1) for place in seen.places])
        centre = torch.stack([place.normal.mean for place in seen.places]).mean(0)
        self.view = View(run.target, centre, widths.log().mean(0).exp())

    def so_many(self, number: int, draws: int | None) -> Found:
        """Return the best fit with this number of parts: another one if the look after it finds a mode that counts."""
        best: Found | None = None
        for _ in range(FITS):
            found = self.fit(self.chosen(number), draws)
            best = found if best is None or found.elbo > best.elbo else best
            if not self.look(found):
                break
        assert best is not None
        return best

    def as_many_as_pay(self, draws: int | None) -> Found:
        """Return a fit with a part for each mode that counts, then for what the fit leaves, as long as that gains."""
        places = self.heavy()
        with suppress(Limit):  # where p is just these normals
            elbo, evidence = self.weighed(self.start(self.seen.places))
            places = self.seen.places if evidence - elbo < BESIDE else places
        found = self.fit(places, draws)
        with suppress(Limit):
            for _ in range(MORE):
                elbo, evidence = self.weighed(found.family)
                modes, shoulders = len(self.seen.modes), list(self.seen.shoulders)
                self.look(found)
                if len(self.heavy()) > len(found.family.parts()) and len(self.seen.modes) > modes:
                    trial, gain = self.fit(self.heavy(), draws), GAIN
                else:
                    left = evidence - elbo
                    beside = self.seen.shoulders + self.seen.wider
                    places = sorted(beside + shoulders, key=lambda place: -place.log_mass)
                    most = max((place.log_mass for place in beside), default=-inf)
                    beside = log1p(exp(min(0.0, most - found.elbo)))
                    if not places or max(left - GAIN, beside - BESIDE) <= 0 or self.run.target.exhausted:
                        break
                    trial = self.fit([*self.places_of(found), places[0]], draws)
                    gain = GAIN if left > GAIN else min(GAIN, beside / 2)
                if self.weighed(trial.family)[0] < elbo + gain:
                    break
                found = trial
        return found

    def heavy(self) -> list[Place]:
        """Return the places at modes that count, the heaviest first."""
        total = self.seen.total()
        heavy = [place for place in self.seen.at_modes if place.log_mass - total > log(COUNTS)]
        return sorted(heavy or self.seen.at_modes[:1], key=lambda place: -place.log_mass)

    def chosen(self, number: int) -> list[Place]:
        """Return so many places: the heaviest modes, then shoulders, then halves of the heaviest."""
        shoulders = sorted(self.seen.shoulders, key=lambda place: -place.log_mass)
        places = [*self.heavy(), *shoulders][:number]
        while len(places) < number:
            places.sort(key=lambda place: -place.log_mass)
            (mean, root, _), mass = places.pop(0)
            u, s, _ = torch.linalg.svd(root)
            step = HALF * s[0] * u[:, 0]
            places += [Place(Normal(mean + side * step, root), mass - log(2)) for side in (1, -1)]
        return places

    def start(self, places: list[Place]) -> Mixture:
        """Return the mixture with a part at each place, in θ."""
        parts, recipes = [], self.recipe.parts()
        for index, place in enumerate(places):
            q = recipes[min(index, len(recipes) - 1)].bind(self.run.space, self.run.generator)
            form = q.normal()
            assert form is not None
            set_form(q, Shape(form, self.run.noise)(place.normal).to_form(), self.run.generator)
            parts.append(q)
        log_weights = self.run.space.initial.new_tensor([place.log_mass for place in places])
        return Mixture.weighted(parts, log_weights)

    def moved(self, mixture: Family, shift: Tensor, root: Tensor, space: Parameters) -> Family:
        """Return a copy with every part in other coordinates."""
        mixture = copy.deepcopy(mixture)
        for part in mixture.parts():
            form, part.space = part.normal(), space
            assert form is not None
            part.set_normal(form.affine(shift.to(form.mean), root.to(form.mean)))
        mixture.space = space
        return mixture

    def fit(self, places: list[Place], draws: int | None) -> Found:
        """Return all parts fitted together; if that gains nothing on fresh draws, they stay as they were."""
        start, centre, scale = self.start(places), self.view.centre, self.view.scale
        inside = self.moved(start, -centre / scale, 1 / scale, self.view.space)
        found = self.run.levels(inside, self.view, draws)
        made = self.moved(found.family, centre, scale, self.run.space)
        with suppress(Limit):
            before, after = self.weighed(start)[0], self.weighed(made)[0]
            if before > after:
                return found._replace(family=start, elbo=before)
        return found._replace(family=made)

    def weighed(self, family: Family) -> tuple[float, float]:
        """Return ELBO and log evidence by importance sampling, on the same fresh draws."""
        return weighted(family, self.run.target, self.run.seed)

    def places_of(self, found: Found) -> list[Place]:
        """Return the normals of a fit, with their masses."""
        mixture = mixture_of(found.family)
        assert mixture is not None
        log_weights, made = mixture.proportions.log().tolist(), []
        for part, log_weight in zip(mixture.parts(), log_weights, strict=True):
            form = part.normal()
            assert form is not None
            made.append(Place(normal_of(form), log_weight + found.elbo))
        return made

    def look(self, found: Found) -> bool:
        """Make a round with the fit taken off p; return whether a mode that counts was new."""
        if self.run.target.exhausted:
            return False
        before, self.seen.shoulders = len(self.seen.modes), []
        self.run.stage = "modes"
        try:
            self.seen.round(self.places_of(found), fitted=True)
        except Limit:
            return False
        total = self.seen.total()
        return any(place.log_mass - total > log(MISSED / 2) for place in self.seen.at_modes[before:])

    @torch.no_grad()
    def missed(self, found: Found) -> float:
        """Return the share of the mass at modes where p is more than seven times q, and that are no part's."""
        modes, at_modes = self.seen.modes, self.seen.at_modes
        total = torch.tensor([mode.log_mass for mode in modes]).logsumexp(0).clamp(min=found.elbo)
        theta = torch.stack([mode.theta for mode in modes]).to(self.run.space.initial)
        log_q, parts = found.family().log_prob(theta).tolist(), self.places_of(found)
        lost = [
            mode.log_mass
            for mode, place, q in zip(modes, at_modes, log_q, strict=True)
            if mode.log_p - total.item() - q > COVERED and not any(is_at(place.normal, one.normal) for one in parts)
        ]
        return (torch.tensor([*lost, -inf]).logsumexp(0) - total).exp().item()


@torch.no_grad()
def weighted(family: Family, target: Target, seed: int, groups: int = GROUPS) -> tuple[float, float]:
    """Return ELBO and log evidence by importance sampling, on the same fresh draws."""
    density = family()
    draws = density.draw(groups, *fresh_draws(seed + 2, target.space.device))
    over = target.log_joint(draws.theta).double() - density.log_prob(draws.theta).double()
    over = torch.where(over.isfinite(), over, -inf)
    return (draws.weight * over).sum().item(), (over + draws.weight.log()).logsumexp(0).item()
