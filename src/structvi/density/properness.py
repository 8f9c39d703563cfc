"""Can the log density be normalised? Rays away from the fit, far beyond what a posterior reaches, and a verdict.

If log p does not fall as θ goes to infinity, neither its integral nor the ELBO has an end: two classes that a plane
separates, a flat direction, a scale without a prior. A search stops somewhere on the way, and its optimum means
nothing. The check after a fit has four steps:

1. Gradients at draws of q give the mean curvature of log p (Stein), and a normal that has it: the units.
2. Every number θ_i is led away from the fit, up and down, to R = 10, 32, 100, .. 10⁶ of that normal's standard
   deviations, and the others follow: of all points with θ_i = mean ± R sd the highest is searched. If the normal is
   right it has that point already, at the first radius, 50 nats down: a Gaussian costs two points for each number.
3. A ray on which log p falls by `FALL` nats is closed.
4. A ray that stays open may be a ridge that narrows faster than it rises, such as the neck of a funnel. The ELBO of a
   normal on a plane bounds the mass there from below. If R times the mass does not fall as R grows, the integral has
   no end.

A radius counts where log p is finite and rounding of θ changes it by less than a nat. The check does
not notice densities that fall along every ray and still have no end, such as (1 + |θ|²)^(−P/2).
"""

from collections.abc import Iterator
from itertools import pairwise
from math import inf, isfinite, log
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.family import Family
from ..families.normal import Diagonal, NormalForm, Triangle
from ..models.target import Target
from ..parameters import Parameters
from .fixed_draws import FixedDraws, fresh_draws, least_draws
from .gaussian import SINGULAR, Normal, normal_of, triangular
from .lbfgs import ascend, tangent
from .lowrank import LowRankMatrix
from .newton import ascend_normals, full, local
from .targets import Limit, View

#: standard deviations to which numbers are led away; at the third a Gaussian's rays are closed
RADII = tuple(10.0 ** (k / 2) for k in range(13))
FIRST = RADII[2]
#: nats by which the log density must fall for a ray to be closed, and since the radius before: R^−1.45 over all radii
FALL = 20.0
STEEP = FALL / (len(RADII) - 1)
#: nats above the centre that make a point one of a spike: a ray that leaves it falls at once, and is closed by the next
SPIKE = 10.0
#: nats by which log p falls at one standard deviation where the units are wrong; half a nat for a Gaussian
WRONG = 5.0
#: power of R by which the mass must fall; 1/R itself has no end
POWER = 1.1
#: the same on a ray that cannot be followed to the last radius: a wide prior is still flat there
STILL = 2e-3
#: last radii at which the mass is compared
COMPARED = 3
#: points on from a plane, up to half of the way from the one before, of which the highest is taken
WAVES = 32
#: nats for each number by which a mass can be below the highest point: rounding leaves nothing narrower
LEAST = 50.0
#: open rays that are measured, the highest first
MEASURED = 4
#: nats of a log density that has no end, whatever its mass
HIGH = 1e12
#: open rays that are followed at most, and numbers that are led away at most
FOLLOWED = 128
#: numbers up to which units are dense
DENSE = 256
#: least curvature that is believed, relative to the fit's; the second if the first is wrong
FLOORS = (1e-4, 1e-1)
#: widths of a normal that is fitted to the mass of a plane, to begin with
WIDTHS = (1.0, 1e-2, 1e-4, 1e-8, 1e-12, 1e-16, 1e-20)


class Runaway(NamedTuple):
    """A way to infinity: the numbers that go there, how far it was followed, and what log p did on it."""

    numbers: tuple[str, ...]
    radius: float
    change: float

    def words(self) -> str:
        """Return the verdict."""
        change = "as high as here"
        if abs(self.change) >= 0.05:
            change = f"{abs(self.change):.3g} nats {'higher' if self.change > 0 else 'lower'}"
        return (
            "not sound: the log density cannot be normalised, and the ELBO grows without bound: nothing stops "
            f"{', '.join(self.numbers)}. {self.radius:,.0f} standard deviations away the log density is {change}, and "
            "its mass has no end. Where this fit stopped means nothing; give these numbers a prior"
        )


class Way(NamedTuple):
    """A ray of θ_number: radii, from zero, the highest points found, θ [k, P], and their log p less the centre's."""

    number: int
    radii: list[float]
    theta: list[Tensor]
    change: list[float]


def runaway(
    target: Target, family: Family, converged: bool = True, curvature: LowRankMatrix | None = None
) -> Runaway | None:
    """Return a way on which the mass of the log density has no end; None if every ray that was tried is closed.

    Args:
        target: the log density.
        family: the fit, bound.
        converged: whether the fit says so; if not, rays from the start are tried too: a search may have gone all
            the way to where numbers end.
        curvature: that of log p around a fit of many numbers; its units are used in place of the fit's.
    """
    try:
        for views in _views(target, family, curvature):
            if (rays := _rays(views)) is None:
                continue
            ways, seen = _open_ways(rays)
            for way in sorted(ways, key=lambda way: -way.change[-1])[:MEASURED]:
                if _has_no_end(rays.view, way):
                    return Runaway(_numbers(target.space, way), way.radii[-1], way.change[-1])
            if seen and converged:
                return None
    except Limit:
        pass
    return None


def _views(target: Target, family: Family, curvature: LowRankMatrix | None) -> Iterator[list[View]]:
    """Yield views around the fit, in units of the curvature, and at the start."""
    space, form = target.space, _form(family, target)
    mean, made = form.mean.double(), []
    if not isinstance(form.root, Triangle) and space.size > DENSE:
        own = LowRankMatrix.precision_of(form.root).inverse()
        made = [View(target, mean, one) for one in ([] if curvature is None else [curvature.inverse()]) + [own]]
    elif bool((form.variance.sqrt() > SINGULAR * space.scale).all()):  # or it has fallen onto an edge, and sees nothing
        normal, P = normal_of(form), space.size
        noise = FixedDraws(least_draws(P), seed=0)(1, P, 0, dtype=mean.dtype, device=mean.device).diagonal
        at = local(target, normal, noise)
        if at is not None:
            values, vectors = torch.linalg.eigh(at.curvature)
            roots = [normal.root @ vectors * values.clamp(floor, 1 / floor).rsqrt() for floor in FLOORS]
            made = [View(target, mean, root) for root in roots]
        made = [view for view in made if _is_sound(view)] or [View(target, mean, normal.root)]
    yield [view for view in made if _is_sound(view)]
    yield [View(target, space.initial.double(), LowRankMatrix.diag(space.scale.double().square()))]


@torch.no_grad()
def _form(family: Family, target: Target) -> NormalForm:
    """Return the fit as a normal: of a mixture the part whose mean has the highest log p, else the moments of draws."""
    parts = [part for part in family.parts() if part.bound_space().size == target.space.size]
    forms = [form for part in parts or [family] if (form := part.normal()) is not None]
    if len(forms) == 1:
        return forms[0]
    if forms:
        values = target.log_joint(torch.stack([form.mean for form in forms]))
        return forms[int(values.nan_to_num(nan=-inf).argmax())]
    draws = family().draw(DENSE, *fresh_draws(0, target.space.device))
    weight = (draws.weight / draws.weight.sum()).unsqueeze(-1)
    mean = (weight * draws.theta).sum(0)
    return NormalForm(mean, Diagonal((weight * (draws.theta - mean).square()).sum(0).sqrt()))


def _is_sound(view: View) -> bool:
    """Return whether all is finite, and standard deviations are well above rounding."""
    least = 1e3 * torch.finfo(view.space.dtype).eps * view.centre.abs()
    return bool(view.centre.isfinite().all() and view.scale.isfinite().all() and (view.scale > least).all())


class Rays(NamedTuple):
    """The starts of ways: log p at the centre, and at one standard deviation along each normal, up and down."""

    view: View
    numbers: list[int]  # n
    normal: Tensor  # [n, P]
    base: float
    unit: Tensor  # [n]


def _rays(views: list[View]) -> Rays | None:
    """Return rays of the first view whose units are right, or of the last; None if log p is not finite."""
    rays = None
    for view in views:
        P, space = len(view.centre), view.target.space
        base = view.values(torch.zeros_like(view.centre).unsqueeze(0)).item()
        if not isfinite(base):
            return None
        grown = torch.maximum(view.scale, (view.centre - space.initial).abs()) / space.scale
        led = min(FOLLOWED, max(1, P // 4)) if isinstance(view.root, LowRankMatrix) and P > DENSE else P
        numbers = grown.topk(led).indices.sort().values
        units = torch.zeros(len(numbers), P, dtype=view.centre.dtype, device=view.centre.device)
        units[torch.arange(len(numbers)), numbers] = 1.0
        normal = view.back(units) / view.scale[numbers].unsqueeze(-1)
        normal = torch.cat([normal, -normal])
        rays = Rays(view, numbers.tolist() * 2, normal, base, view.values(normal))
        if bool((rays.unit > base - WRONG).all()):
            break
    return rays


def _open_ways(rays: Rays) -> tuple[list[Way], bool]:
    """Return the ways that are not closed, as far as log p can be resolved, and whether it could be on any."""
    view, numbers, normal, base, highest = rays  # not that of the centre: a fit may be wider than what is high
    ways = [Way(number, [0.0], [view.centre], [0.0]) for number in numbers]
    left = _not_closed(view, normal, highest)
    closed, seen = set(range(len(ways))) - set(left.tolist()), len(left) < len(ways)
    z, before, last, falls = RADII[0] * normal, RADII[0], highest.clone(), torch.zeros_like(highest)
    for radius in RADII:
        if not len(left):
            break
        points, value, _ = ascend(view, _begin(view, z[left], normal[left], before, radius), normal[left])
        is_seen = _is_resolved(view, points, value)
        highest[left] = top = torch.maximum(highest[left], value)
        falling = (value < top - FALL) & (value < last[left] - STEEP)
        last[left], falls[left] = value, torch.where(falling, falls[left] + 1, 0.0)
        low, high = falls[left] > (top > base + SPIKE), value > HIGH
        closed |= set(left[is_seen & low].tolist())
        on = (is_seen & ~low) | high
        for row, theta, at in zip(left[on].tolist(), view.theta(points[on]), value[on].tolist(), strict=True):
            ways[row].radii.append(radius)
            ways[row].theta.append(theta)
            ways[row].change.append(at - base)
        z[left], seen = points, seen or bool(is_seen.any())
        left, before = left[on & ~high], radius
    ends = [way for row, way in enumerate(ways) if row not in closed]
    return [way for way in ends if way.change[-1] > HIGH or len(way.radii) >= COMPARED], seen


def _not_closed(view: View, normal: Tensor, highest: Tensor) -> Tensor:
    """Return rows of rays that have not fallen at `FIRST`, or might not have if the other numbers followed."""
    value, gradient = view(FIRST * normal)
    slope = tangent(gradient, normal).norm(dim=-1)
    gain = slope * slope.clamp(min=3 * FIRST)  # of two Newton steps; of a way back that is longer than the ray
    above = torch.nan_to_num(value + gain - highest, nan=inf) + FALL
    most = above.topk(min(FOLLOWED, len(above)))
    return most.indices[most.values >= 0].sort().values


def _begin(view: View, z: Tensor, normal: Tensor, before: float, radius: float) -> Tensor:
    """Return starts at a radius: on from the point before, on the ray through it, or where the mean went."""
    tries = [z + (radius - before) * normal, z * (radius / before)]
    along = view.z((2 * view.centre - view.target.space.initial).unsqueeze(0)).squeeze(0)
    share = (normal @ along).unsqueeze(-1)  # [n, 1]
    forward = share > 1e-3 * along.norm()
    tries.append(torch.where(forward, radius * along / torch.where(forward, share, 1.0), tries[0]))
    stacked = torch.stack(tries)  # [tries, n, P]
    values = view.values(stacked.flatten(0, 1)).reshape(len(tries), -1)
    return stacked[values.argmax(0), torch.arange(len(z), device=z.device)]


def _is_resolved(view: View, z: Tensor, value: Tensor) -> Tensor:
    """Return whether log p is finite and changes by less than a nat where θ changes by the rounding of its sum: [n]."""
    theta = view.theta(z)
    signs = torch.randint(2, theta.shape, generator=torch.Generator().manual_seed(0)).to(theta) * 2 - 1
    eps = torch.finfo(view.space.dtype).eps
    size = view.centre.abs() + view.scale * z.norm(dim=-1, keepdim=True) / z.shape[-1] ** 0.5
    with torch.no_grad():
        near = view.target.log_joint(
            (theta + 2 * eps * signs * torch.maximum(size, theta.abs())).to(view.space.initial)
        )
    return value.isfinite() & ((near + view.log_det - value).abs() < 1)


def _has_no_end(view: View, way: Way) -> bool:
    """Return whether the mass on the last planes falls no faster than R to minus `POWER`; not at all, if not far."""
    if way.change[-1] > HIGH:
        return True
    masses, befores = {}, [*way.theta[:1], *way.theta][-COMPARED - 1 : -1]
    for radius, theta, before in zip(way.radii[-COMPARED:], way.theta[-COMPARED:], befores, strict=True):
        # the highest of points on from θ: the log density of an angle goes up and down, and its planes are as its tops
        onward = torch.arange(WAVES, dtype=theta.dtype, device=theta.device) / (2 * WAVES)
        tries = theta + onward.unsqueeze(-1) * (theta - before)
        values = view.values(view.z(tries))
        theta, at = tries[values.argmax()], values.max().item()
        mass, settled = plane_mass(view, way.number, theta)
        if radius and mass > at - LEAST * len(theta):  # or the ridge is too narrow for its normal to be found
            masses[radius] = mass, settled
    if len(masses) < 2:
        return False
    power = POWER if way.radii[-1] == RADII[-1] else STILL
    # where a search found no optimum its mass is only a lower bound: the next must be greater
    return all(
        masses[far][0] - masses[near][0] > (-power * log(far / near) if masses[near][1] else 0.0)
        for near, far in pairwise(masses)
    )


class Plane:
    """A log density on the plane θ_number = value, times a normal law of θ_number itself, whose mass is constant."""

    def __init__(self, target: Target, number: int, theta: Tensor, scale: Tensor):
        self.target, self.value, self.scale = target, theta[number], scale[number]
        self.space = target.space.at(theta.to(target.space.initial))
        self.number = torch.arange(len(theta), device=theta.device) == number

    def log_joint(self, theta: Tensor, batch: object = None) -> Tensor:
        """Return the log density: [S, P] → [S]."""
        away = ((theta[:, self.number] - self.value) / self.scale).squeeze(-1)
        return self.target.log_joint(torch.where(self.number, self.value, theta).to(theta.dtype)) - away.square() / 2


def plane_mass(view: View, number: int, theta: Tensor) -> tuple[float, bool]:
    """Return a lower bound, but for a constant, of the log of p's integral over the plane of a number through θ [P].

    It is the ELBO of a normal there: a full one, or one without correlations if the view's units are low rank. The
    second value tells whether that normal is an optimum.
    """
    plane = Plane(view.target, number, theta, view.scale)
    if isinstance(view.root, LowRankMatrix):
        return diagonal_mass(plane, theta, view.scale), True
    covariance = view.root @ view.root.mT
    along = covariance[number] / covariance[number, number].sqrt()
    values, vectors = torch.linalg.eigh(covariance - torch.outer(along, along))
    own = torch.zeros_like(along)
    own[number] = view.scale[number]
    width = (vectors * values.clamp(min=1e-12 * float(values[-1])).sqrt()) * (~plane.number).unsqueeze(-1)
    root = triangular(torch.cat([width, own.unsqueeze(-1)], dim=-1))
    P, like, best = len(theta), {"dtype": theta.dtype, "device": theta.device}, None
    noise = FixedDraws(least_draws(P), seed=0)(1, P, 0, **like).diagonal
    for width in WIDTHS:  # narrower as long as that is better
        at = local(plane, Normal(theta, torch.where(plane.number.unsqueeze(-1), 1.0, width) * root), noise)
        if best is not None and (at is None or at.elbo <= best.elbo):
            break
        best = best if at is None else at
    if best is None:
        return -inf, False
    ended = ascend_normals(plane, best, noise, full, 0.01, lambda at: None, steps=40)
    normal = ended.at.normal
    fresh = FixedDraws(max(64, least_draws(P)), seed=1)(1, P, 0, **like).diagonal
    found = [local(plane, normal._replace(root=shrink * normal.root), fresh) for shrink in (1.0, 0.3, 0.1, 0.03)]
    return max((at.elbo for at in found if at is not None), default=-inf), ended.settled


def diagonal_mass(target: Target, theta: Tensor, scale: Tensor) -> float:
    """Return the highest ELBO, but for a constant, of normals N(θ, diag(s²)) whose draws and scores get equal moments.

    Example:
        >>> from structvi import LogDensity, Parameters
        >>> space = Parameters({"z": torch.zeros(2, dtype=torch.float64)})
        >>> masses = [
        ...     diagonal_mass(LogDensity(lambda p: -p["z"].square().sum() / v, space), space.initial, space.scale)
        ...     for v in (2.0, 200.0)]  # the second is ten times as wide
        >>> 4.5 < masses[1] - masses[0] < 4.7
        True
    """
    best, P = -inf, len(theta)
    noise = torch.randn(DENSE // 8, P, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(theta)
    noise = noise * (P**0.5 / noise.norm(dim=-1, keepdim=True))
    for _ in range(12):
        steps = (scale * noise).requires_grad_()
        values = target.log_joint(torch.cat([theta + steps, theta - steps]).to(target.space.initial))
        (gradient,) = torch.autograd.grad(values.sum(), steps)  # g₊ − g₋
        if not bool(values.isfinite().all() and gradient.isfinite().all()):
            scale = 0.1 * scale
            continue
        best = max(best, values.mean().item() + scale.log().sum().item())
        new = (4 * steps.detach().square().mean(0) / gradient.square().mean(0).clamp(min=1e-300)) ** 0.25
        scale = torch.clamp(new, scale / 30, scale * 30)
    return best


def _numbers(space: Parameters, way: Way) -> tuple[str, ...]:
    """Return the numbers that went farthest over the last radii, at most four, and where to."""
    went = (way.theta[-1] - way.theta[-2]) / space.scale
    largest = went.abs().topk(min(4, len(went))).indices.tolist()
    kept = [index for index in largest if went[index].abs() >= 0.1 * went[largest[0]].abs()]
    return tuple(f"{space.label(index)} → {'+' if went[index] > 0 else '−'}∞" for index in kept)
