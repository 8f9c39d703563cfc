"""Mass beside a fit: modes and shoulders of a log density that a normal, or a mixture of them, does not have.

Draws of q, also with tails, do not meet a mode that is far away or narrow, and weights of what is not drawn correct
nothing. So some of many points around q climb log p; where they end in a mode that q does not have, whole rounds of the
searches for modes go on from there, and what these find is drawn from too.
"""

from contextlib import suppress
from math import log

import torch

from ..families.density import Density, NormalPart
from ..models.target import Target
from .coordinates import Counted, Limit
from .modes import Modes
from .peaks import WIDER, Peak, is_at, with_mass
from .units import View

#: numbers of which modes are looked for, at most, draws of q that tell its mass, and evaluations in all
MOST, DRAWS, LIMIT = 100, 256, 100_000
#: first points, and how many of them climb; where they find something, rounds and how many of them find nothing
POINTS, CLIMBERS, ROUNDS, QUIET = 2048, 32, 6, 2
#: of the mass of q, from which on what is beside it counts, and the least and the greatest share of draws for it
COUNTS, LEAST, GREATEST = 1e-3, 0.05, 0.95
#: nats by which p must be above q there
OVER = 2.0
#: draws of a normal are within √P and so many standard deviations
AMONG = 1.0


def beside(density: Density, target: Target, seed: int, *, thorough: bool = False) -> list[NormalPart]:
    """q's normals, and those around what searches find of p without them, with shares of the mass.

    None where nothing is found; for more than `MOST` numbers; where q is no mixture of normals, or its draws meet no
    density; where the curvature at modes says nothing of their mass.

    Args:
        density: q.
        target: p.
        seed: of all points.
        thorough: whether a whole round is made, with q taken off p, where the first climbs find nothing.
    """
    own = density.normals() if density.P <= MOST and density.bound else []
    view = View(Counted(target, LIMIT), density.mean.detach(), density.variance.detach().sqrt())
    if not own or not view.is_sound():
        return []
    look = Look(density, view, seed)
    with suppress(Limit), torch.enable_grad():
        look.search(own, thorough)
    found = [] if look.seen.rough else look.found()
    if not found:
        return []
    share = torch.tensor([look.mass, *(peak.log_mass for peak in found)], dtype=torch.float64).softmax(0)
    shares = share.clamp(LEAST, GREATEST).log().tolist()
    made = [one._replace(log_weight=one.log_weight + shares[0]) for one in own]
    for peak, log_weight in zip(found, shares[1:], strict=True):
        root = view.root.unsqueeze(-1) * peak.root
        made.append(NormalPart(log_weight, view.theta(peak.at), root @ root.mT))
    return made


class Look:
    """The searches, in units of q."""

    def __init__(self, density: Density, view: View, seed: int):
        self.density, self.view, self.seed = density, view, seed
        self.seen = Modes(view, torch.Generator().manual_seed(seed))
        #: log of the mass in these units that q has, at least, and its normals
        self.mass: float = torch.inf
        self.parts: list[Peak] = []

    def search(self, own: list[NormalPart], thorough: bool) -> None:
        """Climbs; whole rounds where they find a mode, or one of the thorough."""
        self.mass, unit = self.mass_of_q(), self.view.root
        for part in own:
            root, failed = torch.linalg.cholesky_ex(part.covariance.detach() / torch.outer(unit, unit))
            if failed.item() or self.mass == torch.inf:
                return
            at = (part.mean.detach() - self.view.centre) / unit
            self.parts.append(with_mass(Peak(at, 0.0, root), part.log_weight + self.mass))
        self.seen.some_climb(self.parts, POINTS, CLIMBERS)
        if self.found() and not self.seen.rough:
            self.seen.refine()
            quiet = 0
            for _ in range(ROUNDS):
                quiet = 0 if self.seen.round() else quiet + 1
                if quiet == QUIET:
                    break
        elif thorough and not self.seen.rough:
            self.seen.again(self.parts)

    @torch.no_grad()
    def mass_of_q(self) -> float:
        """The ELBO, in the units of the view; ∞ where log p is not finite at draws."""
        drawn = self.density.draw(DRAWS, generator=torch.Generator(self.view.centre.device).manual_seed(self.seed))
        over = self.view.values(drawn.theta) - self.density.log_prob(drawn.theta)
        if not bool(over.isfinite().all()):
            return torch.inf
        return (drawn.weight @ over / drawn.weight.sum() - self.view.root.log().sum()).item()

    @torch.no_grad()
    def found(self) -> list[Peak]:
        """Where p is far above q and holds mass, but for modes that are q's or that its draws go to."""
        peaks = [peak for peak in self.seen.peaks if not any(_has(part, peak) for part in self.parts)]
        return [peak for peak in peaks + self.seen.shoulders if self.counts(peak)]

    def counts(self, peak: Peak) -> bool:
        log_q = self.density.log_prob(self.view.theta(peak.at).unsqueeze(0)) + self.view.root.log().sum()
        return peak.log_mass - self.mass > log(COUNTS) and peak.value - self.mass - log_q.item() > OVER


def _has(part: Peak, mode: Peak) -> bool:
    """Whether the normal is at the mode, or draws of it are about there and the mode is no spike among them: that of a
    skewed posterior is aside."""
    if is_at(mode, part.at, part.root @ part.root.mT):
        return True
    P, wider = len(mode.at), (part.root.diagonal().log() - mode.root.diagonal().log()).sum().item()
    return part.distance(mode.at.unsqueeze(0)).item() < P**0.5 + AMONG and wider < P * log(WIDER)
