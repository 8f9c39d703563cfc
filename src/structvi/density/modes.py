"""The modes of a log density: many searches from dispersed points, until whole rounds end in none that is new.

A round draws points at 1 to 40 standard deviations of the modes known so far, from those modes and from points between
and beyond them, and compares log p there with the normals of what is known. Some climb log p. Others climb what is
left of p when those normals are taken off it (`residual.py`): a mode beside a wider one has a small basin of log p, and
a large one there. Where such a search ends below a mode of log p that is new, that is one; where not, it is a
*shoulder*: mass that no mode's normal has.
"""

from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from .peaks import Peak, settle
from .residual import Masses, residual
from .rows import RowFunction, ascend
from .units import View

#: standard deviations of the first points, in units of the space's scale, and points of each
FIRST, EACH = (0.1, 0.3, 1.0, 3.0, 10.0), 32
#: points of a round, and how many of them climb log p and what is left of it
POINTS, CLIMBERS = 8192, 128
#: nats that p must have over what is known: as few as rounding lets one see, and so many that errors of the normals
#: that are taken off do not matter, where a wide mode lies in the tail of a narrow one
LEFT = (0.0, 0.3)
#: rounds, at most; and without anything new, at least: the second with fewer modes and shoulders than parts
ROUNDS, QUIET, LONGER = 12, 2, 6
#: distances of points from known modes, in standard deviations: to the first for most of them
NEAREST, FAR, FARTHEST = 1.0, 16.0, 40.0
#: two ends of a search are one mode within so many standard deviations and nats
NEAR, NATS = 0.7, 0.5
#: new peaks that a half round looks at, and how many in vain, one after the other, of what is left of p
MOST, VAIN = 24, 6
#: shares of the mass from which on a mode, or a shoulder, is worth another round
COUNTS, SHOULDER = 1e-4, 2e-3
#: share of the mass of a mode that a fit must not be without
NEW = 5e-3
#: draws that weigh a shoulder, and shoulders that are kept
WEIGHED, SHOULDERS = 32, 6
#: nats, and nats a number, that log p falls below the parabola of its curvature where that says nothing of the mass
ROUGH = 10.0, 2.0
#: sweeps in which every normal is fitted to what the others leave
SWEEPS = 2


@dataclass
class Mode:
    """A mode of log p as the searches saw it.

    Attributes:
        theta: where it is, [P].
        log_p: the log density there.
        log_mass: of the normal with its curvature, log ∫: its share of the evidence where it is Gaussian.
        reached: searches that ended there.
    """

    theta: Tensor
    log_p: float
    log_mass: float
    reached: int


class Modes:
    """The search: a target in units of its space, what was found, and how often.

    Args:
        view: the target, at the start and in units of the space.
        generator: of all points.
    """

    def __init__(self, view: View, generator: torch.Generator):
        self.view, self.generator = view, generator
        self.peaks: list[Peak] = []
        self.reached: list[int] = []
        self.shoulders: list[Peak] = []
        #: the normals of peaks, then of shoulders, each fitted to what the others leave
        self.parts: list[Peak] = []
        self.searches = 0
        #: whether the curvature at the first mode says nothing of the mass around it
        self.rough = False

    def search(self, wanted: int = 1) -> None:
        """Rounds until some find nothing that counts, more of them with less than is wanted.

        Evaluations may end it (`Limit`); what was found stays. Where normals with the curvature of modes are none of
        their mass, taking them off tells nothing, and there are no rounds.
        """
        start = torch.zeros_like(self.view.centre)
        self.climb(torch.cat([start.unsqueeze(0), *(size * self.noise(EACH) for size in FIRST)]))
        if self.rough:
            self.parts = list(self.peaks)
            return
        self.refine()
        quiet = 0
        for _ in range(ROUNDS if self.peaks else 0):
            quiet = 0 if self.round() else quiet + 1
            if quiet >= (QUIET if len(self.parts) >= wanted else LONGER):
                break

    def round(self) -> bool:
        """Both halves; whether anything was new."""
        z = self.points(POINTS)
        taken, _, rounding = Masses(self.parts)(z)
        value = self.view.values(self.view.theta(z))
        over = value - taken - rounding
        new = self.climb(self.chosen(z, value, over, LEFT[-1]))
        found = any([self.climb_residual(self.chosen(z, value, over, least), least) for least in LEFT])
        if new or found:
            self.refine()
        total = self.total()
        return found or any(peak.log_mass - total > log(COUNTS) for peak in new)

    def some_climb(self, parts: list[Peak], points: int, climbers: int) -> None:
        """Of so many points around these normals some climb log p, those first where it is far above them."""
        self.parts = parts
        z = self.points(points)
        taken, _, rounding = Masses(parts)(z)
        value = self.view.values(self.view.theta(z))
        self.climb(self.chosen(z, value, value - taken - rounding, LEFT[-1], climbers))

    def again(self, parts: list[Peak]) -> bool:
        """A round with other normals taken off, those of a fit; whether a mode was new that counts."""
        self.parts, before = parts, len(self.peaks)
        self.shoulders = []
        self.round()
        total = self.total()
        return any(peak.log_mass - total > log(NEW) for peak in self.peaks[before:])

    def chosen(self, z: Tensor, value: Tensor, over: Tensor, least: float, climbers: int = CLIMBERS) -> Tensor:
        """Points where p is `least` nats over what is known: with most over it, most left, any; and any others."""
        visible = (over > least).nonzero().squeeze(-1)
        left = value + torch.log(
            -torch.expm1(-over.clamp(min=torch.finfo(over.dtype).tiny))
        )  # log of what is left of p
        n = climbers // 4
        most = [visible[one[visible].argsort(descending=True)[:n]] for one in (over, left)]
        some = visible[torch.randperm(len(visible), generator=self.generator)[:n]]
        rest = torch.randperm(len(z), generator=self.generator)[:n].to(z.device)
        return z[torch.cat([*most, some, rest]).unique()]

    def total(self) -> float:
        """log of the mass of all that was found."""
        return torch.tensor([peak.log_mass for peak in self.parts]).logsumexp(0).item()

    def noise(self, n: int) -> Tensor:
        return torch.randn(n, len(self.view.centre), generator=self.generator, dtype=torch.float64).to(self.view.centre)

    def points(self, n: int) -> Tensor:
        """Around modes, between them and beyond, at distances from 1 to 40 standard deviations: [n, P]."""
        at = torch.stack([peak.at for peak in self.parts])
        roots = torch.stack([peak.root for peak in self.parts])
        which, other, shape = torch.randint(len(at), (3, n), generator=self.generator)
        part = torch.rand(n, 1, generator=self.generator, dtype=torch.float64).to(at)
        turn = torch.arange(n, device=at.device).unsqueeze(-1)
        base = torch.lerp(at[which], at[other], torch.where(turn % 8 < 5, 0.0, 2.5 * part - 0.5))
        base = torch.where(turn % 4 == 0, torch.zeros_like(base), base)  # the start itself
        direction = self.noise(n)
        direction = direction / direction.norm(dim=-1, keepdim=True)
        far = torch.rand(n, 1, generator=self.generator, dtype=torch.float64).to(at)
        length = NEAREST * (torch.where(turn % 5 == 0, FARTHEST, FAR) / NEAREST) ** far
        return base + torch.einsum("nij,nj->ni", roots[shape], length * direction)

    def climb(self, z: Tensor) -> list[Peak]:
        """Searches of log p, each counted where it ends; returns the new peaks."""
        ends, values = ascend(self.view, z, torch.zeros_like(z))
        self.searches += len(z)
        left, new = values.isfinite(), []
        for index in range(len(self.peaks)):
            left = self.take(index, ends, values, left)
        for _ in range(MOST):
            if not bool(left.any()):
                break
            highest = int(torch.where(left, values, -inf).argmax())
            left[highest] = False
            peak = settle(self.view, ends[highest], self.unit())
            if peak is None:
                continue
            known = self.known(peak)
            if known is None:
                self.peaks.append(peak)
                self.reached.append(0)
                new.append(peak)
                known = len(self.peaks) - 1
                if known == 0 and self.is_rough(peak):
                    self.rough = True
                    break
            self.reached[known] += 1
            left = self.take(known, ends, values, left)
        return new

    def take(self, index: int, ends: Tensor, values: Tensor, left: Tensor) -> Tensor:
        """Count the ends that are this mode; returns those that are left."""
        peak = self.peaks[index]
        own = left & (peak.distance(ends) < NEAR) & (values > peak.value - NATS)
        self.reached[index] += int(own.sum())
        return left & ~own

    def known(self, peak: Peak) -> int | None:
        for index, other in enumerate(self.peaks):
            if float(other.distance(peak.at.unsqueeze(0))) < NEAR and abs(other.value - peak.value) < NATS:
                return index
        return None

    def unit(self) -> Tensor:
        """[P, P], of first differences."""
        if self.peaks:
            return torch.stack([peak.root for peak in self.peaks]).diagonal(dim1=-2, dim2=-1).log().mean(0).exp().diag()
        return 0.1 * torch.eye(len(self.view.centre), dtype=self.view.centre.dtype, device=self.view.centre.device)

    def climb_residual(self, z: Tensor, least: float) -> bool:
        """Searches of what the parts leave, then of log p above their ends; whether mass that counts was new."""
        left = residual(self.view, self.parts, least)
        ends, values = ascend(left, z, torch.zeros_like(z))
        open_ends, own, vain = values.isfinite(), [], 0
        while vain < VAIN and len(own) < MOST and bool(open_ends.any()):
            vain += 1
            highest = int(torch.where(open_ends, values, -inf).argmax())
            open_ends[highest] = False
            peak = settle(left, ends[highest], self.unit())
            if peak is None:
                continue
            open_ends &= ~((peak.distance(ends) < NEAR) & (values > peak.value - NATS))
            peak = self.weighed(left, peak)
            if peak.log_mass - self.total() > log(SHOULDER):
                own.append(peak)
                vain = 0
        if not own:
            return False
        new = bool(self.climb(torch.stack([peak.at for peak in own])))
        for peak in sorted(own, key=lambda one: -one.log_mass):
            inside = any(float(one.distance(peak.at.unsqueeze(0))) < 1 for one in self.peaks + self.shoulders)
            if not inside and len(self.shoulders) < SHOULDERS:
                self.shoulders.append(peak)
                new = True
        return new

    def weighed(self, function: RowFunction, peak: Peak) -> Peak:
        """The peak with its mass by importance sampling where that is less: curvature says little at an edge."""
        noise = self.noise(WEIGHED)
        value = function(peak.at + noise @ peak.root.mT)[0]
        ratio = (value - peak.value + noise.square().sum(-1) / 2).logsumexp(0).item() - log(WEIGHED)
        return peak._replace(value=peak.value + min(0.0, ratio))

    def is_rough(self, peak: Peak) -> bool:
        """Whether log p at draws of the peak's normal is far below its parabola, which falls by P/2."""
        P = len(peak.at)
        z = self.noise(max(WEIGHED, P))
        z = torch.cat([z, -z])
        value = self.view.values(self.view.theta(peak.at + z @ peak.root.mT))
        fall = peak.value - value.double().nan_to_num(nan=-inf).clamp(min=-1e300).mean().item()
        return fall - P / 2 > ROUGH[0] + ROUGH[1] * P

    def refine(self) -> None:
        """Fit the normal of every part to what the others leave: exact for a mixture of normals."""
        self.parts = parts = self.peaks + self.shoulders
        for _ in range(SWEEPS if len(parts) > 1 else 0):
            for index, part in enumerate(parts):
                others = parts[:index] + parts[index + 1 :]
                new = settle(residual(self.view, others), part.at, part.root)
                if new is not None and float(part.distance(new.at.unsqueeze(0))) < 1:
                    parts[index] = self.weighed(self.view, new)

    def found(self) -> list[Mode]:
        """In θ, the heaviest first."""
        shift = self.view.root.log().sum().item()
        made = [
            Mode(self.view.theta(peak.at), peak.value, peak.log_mass + shift, reached)
            for peak, reached in zip(self.peaks, self.reached, strict=True)
        ]
        return sorted(made, key=lambda mode: -mode.log_mass)
