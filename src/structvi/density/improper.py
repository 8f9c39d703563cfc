"""Is the log density one that can be normalised? A walk away from the fit, far beyond what a posterior reaches.

Where log p does not fall as θ goes to infinity, neither its integral nor the ELBO has an end: two classes that a plane
separates, a flat direction, a scale without a prior. A search stops somewhere on the way, and what it calls an
optimum means nothing. So, after the fit:

1. The units. Gradients at draws of q give the mean curvature of log p (Stein), and a normal that has it.
2. Every number θ_i is led away from the fit, up and down, to R = 10, 32, 100, .. 10⁶ of that normal's standard
   deviations, and the others follow: of all points with θ_i = mean ± R sd the highest is searched. Where the normal is
   right it has that point already, at the first radius, 50 nats down: a Gaussian costs two points for each number.
3. A way on which log p falls by `FALL` nats is closed.
4. A way that stays open may be a ridge that narrows faster than it rises, such as the neck of a funnel. So the mass on
   the planes is bounded from below (`plane_mass.py`). Where R times the mass does not fall as R grows, the integral
   has no end.

A radius counts where log p is finite and rounding of θ changes it by less than a nat. What falls along every way and
still has no end, for there are so many ways, is not noticed: (1 + |θ|²)^(−P/2).
"""

from collections.abc import Iterator
from itertools import pairwise
from math import inf, isfinite, log
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.family import Family
from ..models.target import Target
from ..parameters import Parameters
from .coordinates import Limit
from .large_member import large_form
from .large_view import large_views
from .low_rank_matrix import LowRankMatrix
from .rows import ascend, tangent
from .units import NARROW, View, curved, place

#: standard deviations to which numbers are led away; at the third a Gaussian's ways are closed
RADII = tuple(10.0 ** (k / 2) for k in range(13))
FIRST = RADII[2]
#: nats by which the log density must fall for a way to be closed, and since the radius before: R^−1.45 over all radii
FALL = 20.0
STEEP = FALL / (len(RADII) - 1)
#: nats above the centre that make a point one of a spike: a way that leaves it falls at once, and is closed by the next
SPIKE = 10.0
#: nats by which it falls at one standard deviation where the units are wrong; half a nat for a Gaussian
WRONG = 5.0
#: the mass must fall faster than R to minus this; 1/R itself has no end
POWER = 1.1
#: and faster than R to minus this on a way that cannot be followed to the last radius: a wide prior is still flat there
STILL = 2e-3
#: the last radii at which the mass is compared
COMPARED = 3
#: points on from a plane, up to half of the way from the one before, of which the highest is taken
WAVES = 32
#: nats for each number by which a mass can be below the highest point: rounding leaves nothing narrower
LEAST = 50.0
#: open ways that are measured, the highest first
WAYS = 4
#: nats of a log density that has no end, whatever its mass
HIGH = 1e12
#: of more ways so many are followed
FOLLOWED = 128


class Runaway(NamedTuple):
    """A way to infinity: the numbers that go there, how far it was followed, and what log p did on it."""

    numbers: tuple[str, ...]
    radius: float
    change: float

    def words(self) -> str:
        """The verdict."""
        change = "as high as here"
        if abs(self.change) >= 0.05:
            change = f"{abs(self.change):.3g} nats {'higher' if self.change > 0 else 'lower'}"
        return (
            "not sound: the log density cannot be normalised, and the ELBO grows without bound: nothing stops "
            f"{', '.join(self.numbers)}. {self.radius:,.0f} standard deviations away the log density is {change}, and "
            "its mass has no end. Where this fit stopped means nothing; give these numbers a prior"
        )


class Way(NamedTuple):
    """Of θ_number: radii, from zero, the highest points found, θ [k, P], and their log p less that of the first."""

    number: int
    radii: list[float]
    theta: list[Tensor]
    change: list[float]


def runaway(
    target: Target, family: Family, converged: bool = True, curvature: LowRankMatrix | None = None
) -> Runaway | None:
    """A way on which the mass of the log density has no end; None where every way that was tried is closed.

    Args:
        target: the log density.
        family: the fit, bound.
        converged: whether the fit says so; where not, ways from the start are tried too: a search may have gone all
            the way to where numbers end.
        curvature: that of log p around a fit of many numbers; its units are used in place of the fit's.
    """
    space = target.space
    try:
        for views in _views(target, family, curvature):
            if (rays := _rays(views)) is None:
                continue
            ways, seen = _open_ways(rays)
            for way in sorted(ways, key=lambda way: -way.change[-1])[:WAYS]:
                if _has_no_end(rays.view, way):
                    return Runaway(_numbers(space, way), way.radii[-1], way.change[-1])
            if seen and converged:
                return None
    except Limit:
        pass
    return None


def _views(target: Target, family: Family, curvature: LowRankMatrix | None) -> Iterator[list[View]]:
    """Around the fit, in units of the curvature, and at the start."""
    if (form := large_form(family)) is not None:
        yield from large_views(target, form, curvature)
        return
    view = View(target, *place(family, target))
    if bool((view.scale > NARROW * target.space.scale).all()):  # or it has fallen onto an edge, and sees nothing else
        yield curved(view)
    yield [View(target, target.space.initial, target.space.scale)]


class Rays(NamedTuple):
    """Where ways begin: log p at the centre and at one standard deviation along the normals of numbers, up and down."""

    view: View
    numbers: list[int]  # n
    normal: Tensor  # [n, P]
    base: float
    unit: Tensor  # [n]


def _rays(views: list[View]) -> Rays | None:
    """Of the first view whose units are right, or the last; None where log p is not finite."""
    rays = None
    for view in views:
        base = view.values(view.centre.unsqueeze(0)).item()
        if not isfinite(base):
            return None
        numbers = _led_away(view)
        normal = view.normals(numbers)
        normal = torch.cat([normal, -normal])
        rays = Rays(view, numbers.tolist() * 2, normal, base, view.values(view.theta(normal)))
        if bool((rays.unit > base - WRONG).all()):
            break
    return rays


def _open_ways(rays: Rays) -> tuple[list[Way], bool]:
    """The ways that are not closed, as far as log p can be resolved, and whether it could be on any."""
    view, numbers, normal, base, highest = rays  # not that of the centre: a fit may be wider than what is high
    ways = [Way(number, [0.0], [view.centre], [0.0]) for number in numbers]
    left = _not_closed(view, normal, highest)
    closed, seen = set(range(len(ways))) - set(left.tolist()), len(left) < len(ways)
    z, before, last, falls = RADII[0] * normal, RADII[0], highest.clone(), torch.zeros_like(highest)
    for radius in RADII:
        if not len(left):
            break
        points, value = ascend(view, _begin(view, z[left], normal[left], before, radius), normal[left])
        sound = _resolved(view, points, value)
        highest[left] = top = torch.maximum(highest[left], value)
        falling = (value < top - FALL) & (value < last[left] - STEEP)
        last[left], falls[left] = value, torch.where(falling, falls[left] + 1, 0.0)
        low, high = falls[left] > (top > base + SPIKE), value > HIGH
        closed |= set(left[sound & low].tolist())
        on = (sound & ~low) | high
        for row, theta, at in zip(left[on].tolist(), view.theta(points[on]), value[on].tolist(), strict=True):
            ways[row].radii.append(radius)
            ways[row].theta.append(theta)
            ways[row].change.append(at - base)
        z[left], seen = points, seen or bool(sound.any())
        left, before = left[on & ~high], radius
    ends = [way for row, way in enumerate(ways) if row not in closed]
    return [way for way in ends if way.change[-1] > HIGH or len(way.radii) >= COMPARED], seen


def _not_closed(view: View, normal: Tensor, highest: Tensor) -> Tensor:
    """Rows of rays that have not fallen at `FIRST`, or might not have if the other numbers followed."""
    value, gradient = view(FIRST * normal)
    slope = tangent(gradient, normal).norm(dim=-1)
    gain = slope * slope.clamp(min=3 * FIRST)  # of two Newton steps; of a way back that is longer than the ray
    above = torch.nan_to_num(value + gain - highest, nan=inf) + FALL
    most = above.topk(min(FOLLOWED, len(above)))
    return most.indices[most.values >= 0].sort().values


def _led_away(view: View) -> Tensor:
    """Which numbers: all, or those that moved or grew most."""
    space = view.target.space
    if space.size <= view.most:
        return torch.arange(space.size, device=space.device)
    grown = torch.maximum(view.scale, (view.centre - space.initial).abs()) / space.scale
    return grown.topk(view.most).indices


def _begin(view: View, z: Tensor, normal: Tensor, before: float, radius: float) -> Tensor:
    """Where to start at a radius: on from the point before, on the ray through it, or the way that the mean went."""
    tries = [z + (radius - before) * normal]
    if radius > before:
        tries.append(z * (radius / before))
    went = view.centre - view.target.space.initial
    if bool((went != 0).any()):
        along = view.z(went)
        share = (normal @ along).unsqueeze(-1)  # [n, 1]
        forward = share > 1e-3 * along.norm()
        tries.append(torch.where(forward, radius * along / torch.where(forward, share, 1.0), tries[0]))
    if len(tries) == 1:
        return tries[0]
    stacked = torch.stack(tries)  # [tries, n, P]
    values = view.values(view.theta(stacked.flatten(0, 1))).reshape(len(tries), -1)
    return stacked[values.argmax(0), torch.arange(len(z), device=z.device)]


def _resolved(view: View, z: Tensor, value: Tensor) -> Tensor:
    """Whether log p is finite and changes by less than a nat where θ changes by the rounding of its sum: [n]."""
    theta = view.theta(z)
    signs = torch.randint(2, theta.shape, generator=torch.Generator().manual_seed(0)).to(theta) * 2 - 1
    near = view.values(theta + 2 * torch.finfo(theta.dtype).eps * signs * view.size(z))
    return value.isfinite() & ((near - value).abs() < 1)


def _has_no_end(view: View, way: Way) -> bool:
    """Whether the mass on the last planes falls no faster than R to minus `POWER`; not at all, if they are not far."""
    if way.change[-1] > HIGH:
        return True
    masses, befores = {}, [*way.theta[:1], *way.theta][-COMPARED - 1 : -1]
    for radius, theta, before in zip(way.radii[-COMPARED:], way.theta[-COMPARED:], befores, strict=True):
        theta = _highest(view, theta, before)
        mass, at = view.mass(way.number, theta), view.values(theta.unsqueeze(0)).item()
        if radius and mass > at - LEAST * len(theta):  # or the ridge is too narrow for its normal to be found
            masses[radius] = mass
    if len(masses) < 2:
        return False
    power = POWER if way.radii[-1] == RADII[-1] else STILL
    return all(masses[far] - masses[near] > -power * log(far / near) for near, far in pairwise(masses))


def _highest(view: View, theta: Tensor, before: Tensor) -> Tensor:
    """The highest of points on from θ: the log density of an angle goes up and down, and its planes are as its tops."""
    onward = torch.arange(WAVES, dtype=theta.dtype, device=theta.device) / (2 * WAVES)
    tries = theta + onward.unsqueeze(-1) * (theta - before)
    return tries[view.values(tries).argmax()]


def _numbers(space: Parameters, way: Way) -> tuple[str, ...]:
    """The numbers that went farthest over the last radii, at most four, and where to."""
    went = (way.theta[-1] - way.theta[-2]) / space.scale
    largest = went.abs().topk(min(4, len(went))).indices.tolist()
    kept = [index for index in largest if went[index].abs() >= 0.1 * went[largest[0]].abs()]
    return tuple(f"{space.label(index)} → {'+' if went[index] > 0 else '−'}∞" for index in kept)
