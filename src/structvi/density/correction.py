"""One correction of a fit towards the posterior, within a budget: weighted draws, some around mass beside the fit."""

from contextlib import suppress
from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from ..families.family import Density, Family
from ..models.target import Target
from .gaussian import Place
from .importance import K_LIMIT, ROUNDS, Unavailable, normals_of, psislw_of_arviz, weigh
from .mixture import COVERED, DENSE, GROUPS, Modes, is_at
from .schedule import Search
from .targets import Counted, Limit

#: evaluations that a correction may spend, relative to the fit's, and at least
TIMES, LEAST = 10, 1000
#: share of these for the search for mass beside the fit
SEARCHING = 0.3
#: evaluations beyond which no further draws are made, unless the user allows more
MOST = 40_000
#: share of q's mass from which on mass beside it counts
COUNTS = 1e-3
#: share of the draws for it, and for q, at least
LEAST_SHARE = 0.05


@dataclass(frozen=True)
class Correction:
    """Draws of θ with importance weights towards the posterior.

    Attributes:
        theta: with tails, [S, P].
        weights: summing to one, [S].
        k: k̂ of the weights.
        beside: normals beside q that were found and drawn from.
        evaluations: of the log density, all in all.
        allowed: how many evaluations were allowed.
    """

    theta: Tensor
    weights: Tensor
    k: float
    beside: int
    evaluations: int
    allowed: int

    @property
    def trusted(self) -> bool:
        """True if k̂ allows to correct by these weights."""
        return self.k < K_LIMIT

    @property
    def effective(self) -> float:
        """The effective number of draws, 1/Σ w²."""
        return 1 / self.weights.square().sum().item()

    def refuse(self, what: str) -> None:
        """Raise if k̂ says that the weights correct nothing."""
        if self.trusted:
            return
        raise Unavailable(
            f"no corrected {what}: k̂ of the importance weights is {self.k:.2f}, and from {K_LIMIT} on they cannot be "
            "trusted, for q misses part of the posterior. Take a family nearer to it (FullNormal(), a Mixture), write "
            "the model in other parameters (theta = mu + tau * z of a hierarchy), use MCMC, or have q led to the "
            'posterior by some of it, corrected="annealed"; corrected=False gives q itself'
        )


@torch.no_grad()
def correct(family: Family, target: Target, evaluations: int, generator: torch.Generator) -> Correction:
    """Return draws of θ with importance weights towards the target; raise `Unavailable` if there are none.

    A part of the evaluations looks for modes and shoulders of p beside q, around which draws are made too. The others
    are draws of q and rounds of draws with tails.

    Args:
        family: q, bound.
        target: the log density.
        evaluations: of the log density, at most.
        generator: of all draws.
    """
    psislw_of_arviz()  # before the searches, not after
    density, space = family(), target.space
    seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
    searched = Counted(target, SEARCHING * evaluations, checked=True)
    around = beside(density, searched, seed)
    drawn = Counted(target, checked=True)
    rounds = 1 + (ROUNDS if around or normals_of(density) else 0)
    draws = max(100, (evaluations - searched.evaluations) // rounds)
    one = weigh(density, space, drawn.log_joint, draws, around=around, generator=generator)
    spent = searched.evaluations + drawn.evaluations
    return Correction(one.theta, one.weights, one.k_weights, one.beside, spent, evaluations)


def beside(density: Density, target: Counted, seed: int) -> list[Place]:
    """Return q's normals and those around what climbs find of p without them, with shares of the mass; [] if none.

    Draws of q, also with tails, do not meet a mode that is far away or narrow, and weights correct nothing without
    draws.

    Args:
        density: q, a mixture of normals of at most 512 numbers; of others nothing is found.
        target: p, with a limit of evaluations.
        seed: of all points.
    """
    own = normals_of(density) if density.P <= DENSE and density.bound else []
    with suppress(Limit), torch.enable_grad():
        return _found(density, own, Search(target, seed, tolerance=1e-3, progress=False)) if own else []
    return []


def _found(density: Density, own: list[Place], run: Search) -> list[Place]:
    with torch.no_grad():
        drawn = density.draw(64, generator=torch.Generator(density.mean.device).manual_seed(run.seed))
        over = run.target.log_joint(drawn.theta) - density.log_prob(drawn.theta)
    weight = drawn.weight.double()
    mass, allowed = (weight @ over.double() / weight.sum()).item(), run.target.limit
    if not abs(mass) < inf:
        return []
    known = [Place(place.normal, place.log_mass + mass) for place in own]
    seen = Modes(run, density.mean.detach(), density.variance.detach().sqrt(), run.generator)
    points, climbers = (int(max(8, min(most, allowed // part))) for most, part in ((GROUPS, 8), (64, 200)))
    with suppress(Limit):
        quiet = 0
        while quiet < (2 if seen.places else 1):
            quiet = 0 if seen.round(known + seen.places, points, climbers) else quiet + 1
    at_modes = [(place, mode.theta) for place, mode in zip(seen.at_modes, seen.modes, strict=True)]
    places = []
    for place, point in at_modes + [(one, one.normal.mean) for one in seen.shoulders]:
        with torch.no_grad():
            point = point.unsqueeze(0).to(density.mean)
            above = run.target.log_joint(point) - density.log_prob(point) - mass
        is_own = any(is_at(one.normal, place.normal) or _is_among(one, place) for one in own)
        if not is_own and place.log_mass - mass > log(COUNTS) and above.item() > COVERED:
            places.append(place)
    if not places:
        return []
    share = torch.tensor([mass, *(place.log_mass for place in places)], dtype=torch.float64).softmax(0)
    share = share.clamp(LEAST_SHARE, 1 - LEAST_SHARE)
    made = [Place(one.normal, one.log_mass + share[0].log().item()) for one in own]
    return made + [Place(one.normal, s.log().item()) for one, s in zip(places, share[1:], strict=True)]


def _is_among(part: Place, mode: Place) -> bool:
    """Return whether draws of a part reach a mode that is no spike among them: skewed posteriors have it aside."""
    P = len(mode.normal.mean)
    wider = (part.normal.root.diagonal().log().sum() - torch.linalg.slogdet(mode.normal.root).logabsdet).item()
    return float(part.normal.distance(mode.normal.mean.unsqueeze(0))) < P**0.5 + 1 and wider < P * log(3)
