"""Modes of a log density, and mixtures with a part at each.

climbs of log p ─▶ a normal at each end ─▶ a mixture with a part at each, fitted ─▶ the end, if nothing is missed
                            ▲                                │
                            └── climbs of p without the fit ◀┘

A round draws points at 1 to 40 standard deviations of the known normals. Some climb log p, and then the rest of p,
without the normals: a mode beside a wider one has a small basin of log p, and a large one of the rest. If such a climb
leads to no new mode of log p, its end is a shoulder: mass that no mode's normal has.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import exp, inf, log, log1p, pi
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.family import Density, Family
from ..families.mixture import Mixture, mixture_of
from ..models.target import Target
from ..parameters import Parameters
from ..result import Status
from .fixed_draws import fresh_draws
from .gaussian import Normal, Place, Shape, half_log_det, normal_of, set_form, triangular
from .lbfgs import RowFunction, ascend
from .schedule import Climbs, Found, Search
from .targets import Counted, Limit, View

#: numbers up to which modes are looked for
DENSE = 512
#: first points of each size: 0.1, 0.3, 1, 3 and 10 of the space's scales
EACH = 32
#: points of a round at most, and how many there are for each one that climbs
POINTS, FOR_EACH = 8192, 64
#: greatest distance of a round's points from known modes, in standard deviations
FARTHEST = 40.0
#: rounds without a new mode after which the search ends; more if there are fewer modes than parts
QUIET, LONGER = 2, 6
#: two ends of climbs are one mode within so many standard deviations, and nats
NEAR = 0.7
#: standard deviations around an end from which climbs gain more than so many nats if it is a saddle
NUDGE = 0.2
#: new ends that a climb of a round looks at
MOST = 24
#: share of the mass from which on a mode counts, and a shoulder
COUNTS, SHOULDER = 1e-4, 2e-3
#: draws that weigh a shoulder
WEIGHED = 32
#: widths around a part of a fit, relative to it, at which mass may be left
WIDER = (1.5, 2.5, 4.0)
#: further fits, at most, and nats that a further part must gain
FITS, GAIN = 8, 0.05
#: nats by which p at a mode may be above q
COVERED = 2.0
#: share of the mass at modes without a part from which on a fit has not converged
MISSED = 0.01
#: share of the draws around mass beside q, and around q, at least
LEAST = 0.05
#: draws of each part that estimate ELBO and evidence
GROUPS = 1024


class Mode(NamedTuple):
    """A mode of log p as the searches saw it.

    Attributes:
        theta: where it is, [P].
        log_p: the log density there.
        log_mass: the ELBO of a normal there, its share of the evidence if it is Gaussian.
    """

    theta: Tensor
    log_p: float
    log_mass: float


class Hill(NamedTuple):
    """A mode of log p, or a point where p is above known normals, and a normal with mass there."""

    theta: Tensor  # [P]
    log_p: float
    place: Place


class Modes:
    """The search for modes of a target, and for mass that normals leave.

    Args:
        run: the target and its count.
        centre, scale: where the first points are, and the units of climbs, [P] each.
    """

    def __init__(self, run: Search, centre: Tensor, scale: Tensor):
        self.run, self.view = run, View(run.target, centre.double(), scale.double())
        self.modes: list[Hill] = []
        self.shoulders: list[Hill] = []

    @property
    def places(self) -> list[Place]:
        """All normals with mass."""
        return [hill.place for hill in self.modes + self.shoulders]

    def total(self) -> float:
        """Return the log of the mass at all modes."""
        return log_sum(hill.place.log_mass for hill in self.modes)

    def search(self, wanted: int = 1) -> None:
        """Make rounds until some find no mode that counts, more of them with fewer places than are wanted."""
        self.climb(torch.cat([10 ** (k / 2) * self.noise(EACH) for k in range(-2, 3)]))
        quiet = 0 if self.places else LONGER
        while quiet < (QUIET if len(self.places) >= wanted else LONGER):
            quiet = 0 if self.round(self.places) else quiet + 1

    def round(self, known: list[Place], points: int = POINTS) -> bool:
        """Climb p, and p without these normals, from points around them; return whether a mode that counts is new."""
        modes, taken = len(self.modes), log_density_of(known)
        z = self.view.z(self.points(known, points))
        value = self.view.values(z) - self.view.log_det
        over = (value - taken(self.view.theta(z))).clamp(min=1e-300)
        left = value + torch.log(-torch.expm1(-over))
        n = max(8, points // FOR_EACH) // 4
        most = [one.topk(min(n, len(z))).indices for one in (over, left)]
        any_of_them = torch.randperm(len(z), generator=self.run.generator)[: 2 * n].to(z.device)
        starts = z[torch.cat([*most, any_of_them]).unique()]
        self.climb(starts)
        self.climb_rest(starts, taken)
        counts = self.total() + log(COUNTS)
        return any(hill.place.log_mass > counts for hill in self.modes[modes:])

    def noise(self, n: int) -> Tensor:
        """Return rows of standard normal numbers, [n, P]."""
        return self.run.noise(n).to(self.view.centre)

    def points(self, known: list[Place], n: int) -> Tensor:
        """Return θ around normals, between them and beyond, at distances from 1 to 40 standard deviations: [n, P]."""
        at = torch.stack([place.normal.mean for place in known])
        roots = torch.stack([place.normal.root for place in known])
        which, other, shape = torch.randint(len(at), (3, n), generator=self.run.generator)
        part, far = torch.rand(2, n, 1, generator=self.run.generator, dtype=torch.float64).to(at)
        is_between = torch.arange(n, device=at.device).unsqueeze(-1) % 2 == 0
        base = torch.lerp(at[which], at[other], torch.where(is_between, 2.5 * part - 0.5, 0.0))
        direction = self.noise(n)
        length = FARTHEST**far / direction.norm(dim=-1, keepdim=True)
        return base + torch.einsum("nij,nj->ni", roots[shape], length * direction)

    def ascended(self, function: RowFunction, z: Tensor) -> Climbs | None:
        """Return climbs of a function of coordinates, as far as evaluations allow."""
        path: list[tuple[Tensor, Tensor, Tensor]] = []
        with suppress(Limit):
            ascend(function, z, path=path)
        return Climbs(self.view, path) if path else None

    def climb(self, z: Tensor) -> None:
        """Climb log p, and fit a normal at each new end."""
        climbs = self.ascended(self.view, z)
        if climbs is None:
            return
        theta, values = climbs.ends()
        is_new = values.isfinite()

        def is_end_of(hill: Hill) -> Tensor:
            near = hill.place.normal._replace(mean=hill.theta).distance(theta) < NEAR
            return near & ((values - hill.log_p).abs() < NEAR)

        for hill in self.modes:
            is_new &= ~is_end_of(hill)
        for _ in range(MOST):
            if not bool(is_new.any()):
                break
            row = int(torch.where(is_new, values, -inf).argmax())
            is_new[row] = False
            start = climbs.normal(row)
            found = self.run.fit_hill(start, values[row].item(), MOST)
            around = self.ascended(self.view, self.view.z(theta[row] + NUDGE * self.noise(4) @ start.root.mT))
            is_saddle = around is not None and around.ends()[1].max() > values[row] + NUDGE
            if found is None or is_saddle:
                continue
            hill = Hill(theta[row], values[row].item(), Place(found[0][-1], found[1]))
            is_new &= ~is_end_of(hill)
            if not any(is_at(one.place.normal, hill.place.normal) for one in self.modes):
                self.modes.append(hill)

    def climb_rest(self, z: Tensor, taken: Callable[[Tensor], Tensor]) -> None:
        """Climb the rest of p, then log p from the ends; what is no mode and has mass is a shoulder."""
        rest = self.rest(taken)
        climbs = self.ascended(rest, z)
        if climbs is None:
            return
        theta, values = climbs.ends()
        is_open, found = values.isfinite(), []
        for _ in range(MOST):
            if not bool(is_open.any()):
                break
            row = int(torch.where(is_open, values, -inf).argmax())
            normal = climbs.normal(row)
            is_open &= normal.distance(theta) >= NEAR
            is_open[row] = False
            mass = self.mass_left(rest, normal, values[row].item())
            if mass - self.total() > log(SHOULDER):
                found.append(Place(normal, mass))
        if found:
            self.climb(self.view.z(torch.stack([place.normal.mean for place in found])))
        for place in sorted(found, key=lambda one: -one.log_mass):
            theta = place.normal.mean.unsqueeze(0)
            if not any(float(one.normal.distance(theta)) < 1 for one in self.places):
                log_p = self.view.values(self.view.z(theta)).item() - self.view.log_det
                self.shoulders.append(Hill(theta[0], log_p, place))

    def rest(self, taken: Callable[[Tensor], Tensor]) -> RowFunction:
        """Return the logarithm of p less what is taken of it, and its gradient, by rows of coordinates."""

        def function(z: Tensor) -> tuple[Tensor, Tensor]:
            z = z.detach().requires_grad_()
            value = self.view.log_joint(z).double()
            over = value - self.view.log_det - taken(self.view.theta(z))
            is_left = over > 1e-9
            left = torch.where(is_left, value + torch.log(-torch.expm1(-torch.where(is_left, over, 1.0))), -inf)
            (gradient,) = torch.autograd.grad(left[is_left].sum(), z)
            return left.detach(), gradient

        return function

    def mass_left(self, rest: RowFunction, normal: Normal, value: float = inf) -> float:
        """Return the log mass of the rest of p around a normal, by importance sampling; `value` is at its mean."""
        noise = self.noise(WEIGHED)
        drawn = rest(self.view.z(normal.mean + noise @ normal.root.mT))[0] - self.view.log_det
        log_normal = -noise.square().sum(-1) / 2 - noise.shape[1] / 2 * log(2 * pi) - half_log_det(normal.root)
        return min((drawn - log_normal).logsumexp(0).item() - log(WEIGHED), value - log_normal.max().item())

    def beside(self, parts: list[Place]) -> list[Place]:
        """Return the shoulder of p, and then the place around a part of a fit, at which the fit leaves most mass."""
        rest = self.rest(log_density_of(parts))
        shoulders = [hill.place.normal for hill in self.shoulders]
        wider = [place.normal._replace(root=times * place.normal.root) for place in parts for times in WIDER]
        weighed = [[Place(one, self.mass_left(rest, one)) for one in normals] for normals in (shoulders, wider)]
        return [max(places, key=lambda place: place.log_mass) for places in weighed if places]

    def heavy(self) -> list[Place]:
        """Return the places at modes that count, the heaviest first."""
        counts = self.total() + log(COUNTS)
        heavy = [hill.place for hill in self.modes if hill.place.log_mass > counts]
        return sorted(heavy, key=lambda place: -place.log_mass)


@torch.no_grad()
def without_part(hills: list[Hill], density: Density, parts: list[Place], log_evidence: float) -> list[Place]:
    """Return the places where p is more than seven times q, and that are no part's."""
    if not hills:
        return []
    theta = torch.stack([hill.theta for hill in hills]).to(density.mean)
    over = (
        torch.tensor([hill.log_p for hill in hills], dtype=torch.float64) - density.log_prob(theta).cpu() - log_evidence
    )
    return [
        hill.place
        for hill, above in zip(hills, over.tolist(), strict=True)
        if above > COVERED and not any(is_at(hill.place.normal, part.normal) for part in parts)
    ]


def log_density_of(places: list[Place]) -> Callable[[Tensor], Tensor]:
    """Return log Σ_c m_c N_c, of the normals with the masses of places, as a function of rows: [n, P] → [n]."""
    mean = torch.stack([place.normal.mean for place in places])  # [C, P]
    inverse = torch.linalg.inv(torch.stack([place.normal.root for place in places]))  # [C, P, P]
    constant = mean.new_tensor([place.log_mass - half_log_det(place.normal.root) for place in places])
    constant = constant - mean.shape[1] / 2 * log(2 * pi)

    def function(theta: Tensor) -> Tensor:
        white = torch.einsum("cij,ncj->nci", inverse, theta.unsqueeze(1) - mean)
        return (constant - white.square().sum(-1) / 2).logsumexp(-1)

    return function


def log_sum(values: Iterable[float]) -> float:
    """Return log Σ exp of numbers, −∞ of none."""
    return torch.tensor([*values, -inf], dtype=torch.float64).logsumexp(0).item()


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
    run.stage = "modes"
    number = None if recipe.components == "auto" else len(recipe.parts())
    alone = recipe.parts()[0] if number is None else recipe
    normals = [part.bind(run.space, torch.Generator()).normal() is not None for part in recipe.parts()]
    if not (run.target.limit > 4 * POINTS and run.space.size <= DENSE and all(normals)):
        what = f"modes are looked for with normal parts, P ≤ {DENSE} and max_evaluations= none or above {4 * POINTS}"
        if number is None:
            raise ValueError(f'components="auto" needs modes, and {what}; give the number of parts: components=2')
        return Mixed(run.any(recipe, starts, draws), [], 0.0, [f"no modes were looked for: {what}"])
    seen = Modes(run, run.space.initial, run.space.scale)
    with suppress(Limit), run.target.part(0.5):  # the other half is left to the fit
        seen.search(number or 1)
    if not seen.places:
        return Mixed(run.any(alone, starts, draws), [], 0.0, ["no mode was found"])
    notes = []
    if len(seen.places) < (number or 1):
        notes = [f"modes found: {len(seen.modes)}, for {number} parts; if there are more, no search reached them"]
    found, missed = _fit_parts(run, recipe, seen, number, draws)
    modes = [Mode(theta, log_p, place.log_mass) for theta, log_p, place in seen.modes]
    return Mixed(found, sorted(modes, key=lambda mode: -mode.log_mass), missed, notes)


def _fit_parts(run: Search, recipe: Mixture, seen: Modes, number: int | None, draws: int | None) -> tuple[Found, float]:
    """Return the best fit, and the share of the mass at modes without a part.

    After each fit a round looks where p is above it. For a given number of parts another fit is made if the round finds
    a mode that counts. Else there is one more part for what is missed, as long as that gains.
    """
    view = _view(run, seen.places)
    found, missed = _fitted(run, recipe, view, seen.heavy() if number is None else _chosen(seen, number), draws), []
    with suppress(Limit):
        for _ in range(FITS):
            elbo, log_evidence = weighted(found.family, run.target, run.seed)
            parts, modes = places_of(found.family, elbo), len(seen.heavy())
            run.stage = "modes"
            with suppress(Limit):
                seen.round(parts)
            missed = without_part(seen.modes, found.family(), parts, max(elbo, seen.total()))
            if number is not None:
                tries = [_chosen(seen, number)] if len(seen.heavy()) > modes else []
            elif missed:
                tries = [[*parts, *missed]]
            else:
                left = [(place, max(log_evidence - elbo, _gain(place.log_mass - elbo))) for place in seen.beside(parts)]
                tries = [[*parts, place] for place, gain in left if gain > GAIN]
            for places in tries:
                trial = _fitted(run, recipe, view, places, draws)
                if weighted(trial.family, run.target, run.seed)[0] > elbo + (GAIN if number is None else 0.0):
                    found = trial
                    break
            else:
                break
    total = max(found.elbo, seen.total())
    return found, exp(log_sum(place.log_mass for place in missed) - total)


def _gain(log_share: float) -> float:
    """Return the nats that a part gains whose mass was not in the fit: log(1 + share)."""
    return log1p(exp(min(0.0, log_share)))


def _chosen(seen: Modes, number: int) -> list[Place]:
    """Return so many places: the heaviest modes, then shoulders, then halves of the heaviest."""
    shoulders = sorted((hill.place for hill in seen.shoulders), key=lambda place: -place.log_mass)
    places = [*seen.heavy(), *shoulders][:number]
    while len(places) < number:
        places.sort(key=lambda place: -place.log_mass)
        (mean, root, _), mass = places.pop(0)
        u, s, _ = torch.linalg.svd(root)
        step = NEAR * s[0] * u[:, 0]
        places += [Place(Normal(mean + side * step, root), mass - log(2)) for side in (1, -1)]
    return places


def _view(run: Search, places: list[Place]) -> View:
    """Return coordinates in which the widths of places are about one."""
    widths = torch.stack([place.normal.root.norm(dim=-1) for place in places])
    centre = torch.stack([place.normal.mean for place in places]).mean(0)
    return View(run.target, centre, widths.log().mean(0).exp())


def _fitted(run: Search, recipe: Mixture, view: View, places: list[Place], draws: int | None) -> Found:
    """Return a mixture with a part at each place, fitted; if that gains nothing on fresh draws, as it was."""
    parts, recipes, scale = [], recipe.parts(), view.scale
    for index, place in enumerate(places):
        q = recipes[min(index, len(recipes) - 1)].bind(run.space, run.generator)
        form = q.normal()
        assert form is not None
        set_form(q, Shape(form)(place.normal).to_form())
        parts.append(q)
    start = Mixture.weighted(parts, run.space.initial.new_tensor([place.log_mass for place in places]))
    found = run.levels(_moved(start, -view.centre / scale, 1 / scale, view.space), view, draws)
    made = _moved(found.family, view.centre, scale, run.space)
    with suppress(Limit):
        before, after = (weighted(one, run.target, run.seed)[0] for one in (start, made))
        if before > after:
            return found._replace(family=start, elbo=before)
    return found._replace(family=made)


def _moved(mixture: Family, shift: Tensor, scale: Tensor, space: Parameters) -> Family:
    """Return a copy with every part in other coordinates."""
    mixture = copy.deepcopy(mixture)
    for part in mixture.parts():
        form, part.space = part.normal(), space
        assert form is not None
        part.set_normal(form.affine(shift.to(form.mean), scale.to(form.mean)))
    mixture.space = space
    return mixture


def places_of(family: Family, log_mass: float) -> list[Place]:
    """Return the normals of a fitted mixture, with their shares of a mass."""
    mixture = mixture_of(family)
    assert mixture is not None
    forms = [part.normal() for part in mixture.parts()]
    shares = mixture.proportions.log().tolist()
    return [Place(normal_of(form), share + log_mass) for form, share in zip(forms, shares, strict=True) if form]


@torch.no_grad()
def weighted(family: Family, target: Target, seed: int, groups: int = GROUPS) -> tuple[float, float]:
    """Return ELBO and log evidence by importance sampling, on the same fresh draws."""
    density = family()
    draws = density.draw(groups, *fresh_draws(seed + 2, target.space.device))
    over = target.log_joint(draws.theta).double() - density.log_prob(draws.theta).double()
    over = torch.where(over.isfinite(), over, -inf)
    return (draws.weight * over).sum().item(), (over + draws.weight.log()).logsumexp(0).item()


def mass_beside(density: Density, own: list[Place], target: Counted, seed: int) -> list[Place]:
    """Return q's normals and those around what climbs find of p without them, with shares of the mass; [] if none.

    Draws of q, also with tails, do not meet a mode that is far away or narrow, and weights correct nothing without
    draws.

    Args:
        density: q.
        own: the normals that q is a mixture of, with their log shares; of others nothing is found.
        target: p, with a limit of evaluations.
        seed: of all points.
    """
    if not own or density.P > DENSE:
        return []
    run = Search(target, seed, tolerance=1e-3, progress=False)
    draws = density.draw(64, *fresh_draws(seed, target.space.device))
    over = target.log_joint(draws.theta).double() - density.log_prob(draws.theta).double()
    mass, allowed = (draws.weight.double() @ over).item(), target.limit
    if not abs(mass) < inf:
        return []
    known = [Place(place.normal, place.log_mass + mass) for place in own]
    seen = Modes(run, density.mean.detach(), density.variance.detach().sqrt())
    with suppress(Limit), torch.enable_grad():
        while seen.round(known + seen.places, int(min(POINTS, max(8, allowed // 8)))):
            pass
    found = without_part(seen.modes + seen.shoulders, density, own, mass)
    found = [
        place
        for place in found
        if place.log_mass - mass > log(SHOULDER) and not any(_is_among(part.normal, place.normal) for part in own)
    ]
    if not found:
        return []
    masses = torch.tensor([mass, *(place.log_mass for place in found)], dtype=torch.float64)
    share = masses.softmax(0).clamp(LEAST, 1 - LEAST).log().tolist()
    made = [Place(one.normal, one.log_mass + share[0]) for one in own]
    for (normal, _), own_share in zip(found, share[1:], strict=True):
        made.append(Place(Normal(normal.mean, triangular(normal.root)), own_share))
    return made


def _is_among(part: Normal, other: Normal) -> bool:
    """Return whether draws of a part reach a normal that is no spike among them: skewed posteriors have it aside."""
    P = len(other.mean)
    is_near = float(part.distance(other.mean.unsqueeze(0))) < P**0.5 + 1
    return is_near and half_log_det(part.root) - half_log_det(other.root) < P * log(3)
