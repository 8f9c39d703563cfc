"""Can the log density be normalised? Rays away from the fit, far beyond what a posterior reaches, and a verdict.

If log p does not fall as θ goes to infinity, neither its integral nor the ELBO has an end: two classes that a plane
separates, a flat direction, a scale without a prior. A search stops somewhere on the way, and its optimum means
nothing. The check after a fit has four steps:

1. Gradients at draws of q give the mean curvature of log p (Stein), and a normal that has it: the units.
2. Every number θ_i is led away from the fit, up and down, to R = 1, 3, 10, .. 10⁶ of that normal's standard deviations,
   and the others follow: of all points with θ_i = mean ± R sd the highest is searched. If the normal is right it has
   that point already, 50 nats down at R = 10: a Gaussian costs two points for each number.
3. A ray on which log p falls by `FALL` nats is closed.
4. A ray that stays open may be a ridge that narrows faster than it rises, such as the neck of a funnel. The ELBO of a
   normal on a plane bounds the mass there from below. If R times the mass does not fall as R grows, the integral has
   no end.

A radius counts where log p is finite and rounding of θ changes it by less than 0.1 nats. The check does
not notice densities that fall along every ray and still have no end, such as (1 + |θ|²)^(−P/2).
"""

from collections.abc import Iterator
from contextlib import suppress
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
from .gaussian import Normal, normal_of
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
#: power of R by which the mass must fall; 1/R itself has no end
POWER = 1.1
#: the same on a ray that cannot be followed to the last radius: a wide prior is still flat there
STILL = 2e-3
#: last radii at which the mass is compared
COMPARED = 3
#: points on from a plane, up to half of the way from the one before, of which the highest is taken
WAVES = 32
#: nats for each number by which a mass can be below the highest point: rounding leaves nothing narrower
LEAST = 20.0
#: nats of a log density that has no end, whatever its mass
HIGH = 1e12
#: open rays that are followed at most, and numbers that are led away at most
FOLLOWED = 128
#: numbers up to which units are dense
DENSE = 256
#: least curvature that is believed, relative to the fit's
FLOOR = 0.1
#: steps to the widths of a plane's normal, and by how much one makes them wider
STEPS, WIDER = 12, 30.0


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
    with suppress(Limit):
        for view in _views(target, family, curvature):
            ways, seen = _open_ways(view)
            for way in sorted(ways, key=lambda way: -way.change[-1]):
                if _has_no_end(view, way):
                    return Runaway(_numbers(target.space, way), way.radii[-1], way.change[-1])
            if seen and converged:
                break
    return None


def _views(target: Target, family: Family, curvature: LowRankMatrix | None) -> Iterator[View]:
    """Yield views around the fit, in units of the curvature, and at the start."""
    space, form = target.space, _form(family, target)
    mean, P = form.mean.double(), space.size
    if P > DENSE and not isinstance(form.root, Triangle):
        root = (LowRankMatrix.precision_of(form.root) if curvature is None else curvature).inverse()
    else:
        normal = normal_of(form)
        noise = FixedDraws(least_draws(P), seed=0)(1, P, 0, dtype=mean.dtype, device=mean.device).diagonal
        at, root = local(target, normal, noise), normal.root
        if at is not None:
            values, vectors = torch.linalg.eigh(at.curvature)
            root = root @ vectors * values.clamp(FLOOR, 1 / FLOOR).rsqrt()
    view = View(target, mean, root)
    least = 1e3 * torch.finfo(space.dtype).eps * view.centre.abs()
    if bool((view.centre.isfinite() & view.scale.isfinite() & (view.scale > least)).all()):
        yield view
    yield View(target, space.initial.double(), LowRankMatrix.diag(space.scale.double().square()))


@torch.no_grad()
def _form(family: Family, target: Target) -> NormalForm:
    """Return the fit as a normal: of a mixture the part whose mean has the highest log p, else the moments of draws."""
    parts = [part for part in family.parts() if part.bound_space().size == target.space.size]
    forms = [form for part in parts or [family] if (form := part.normal()) is not None]
    if forms:
        values = target.log_joint(torch.stack([form.mean for form in forms]))
        return forms[int(values.nan_to_num(nan=-inf).argmax())]
    draws = family().draw(DENSE, *fresh_draws(0, target.space.device))
    weight = (draws.weight / draws.weight.sum()).unsqueeze(-1)
    mean = (weight * draws.theta).sum(0)
    return NormalForm(mean, Diagonal((weight * (draws.theta - mean).square()).sum(0).sqrt()))


def _open_ways(view: View) -> tuple[list[Way], bool]:
    """Return the ways that are not closed, as far as log p can be resolved, and whether it could be on any."""
    P, space = len(view.centre), view.target.space
    base = view.values(torch.zeros_like(view.centre).unsqueeze(0)).item()
    if not isfinite(base):
        return [], False
    grown = torch.maximum(view.scale, (view.centre - space.initial).abs()) / space.scale
    led = min(FOLLOWED, P // 4) if P > DENSE else P
    numbers = grown.topk(led).indices.sort().values
    normal = torch.eye(P, dtype=view.centre.dtype, device=view.centre.device)[numbers]
    normal = view.back(normal) / view.scale[numbers].unsqueeze(-1)
    normal = torch.cat([normal, -normal])
    top = view.values(normal)  # not that of the centre: a fit may be wider than what is high
    ways = [Way(number, [0.0], [view.centre], [0.0]) for number in numbers.tolist() * 2]
    left = _not_closed(view, normal, top)
    seen, z, last, is_open = len(left) < len(ways), normal.clone(), top.clone(), [False] * len(ways)
    for row in left.tolist():
        is_open[row] = True
    for before, radius in pairwise((RADII[0], *RADII)):
        if not len(left):
            break
        points, value, _ = ascend(view, _begin(view, z[left], normal[left], before, radius), normal[left])
        is_seen = _is_resolved(view, points, value)
        top[left] = torch.maximum(top[left], value)
        is_closed = is_seen & (value < top[left] - FALL) & (value < last[left] - STEEP)
        last[left], z[left], seen = value, points, seen or bool(is_seen.any())
        for row in left[is_closed].tolist():
            is_open[row] = False
        on = (is_seen & ~is_closed) | (value > HIGH)
        for row, theta, at in zip(left[on].tolist(), view.theta(points[on]), value[on].tolist(), strict=True):
            ways[row].radii.append(radius)
            ways[row].theta.append(theta)
            ways[row].change.append(at - base)
        left = left[on & (value <= HIGH)]
    ends = [way for way, is_left in zip(ways, is_open, strict=True) if is_left]
    return [way for way in ends if way.change[-1] > HIGH or len(way.radii) >= COMPARED], seen


def _not_closed(view: View, normal: Tensor, top: Tensor) -> Tensor:
    """Return rows of rays that have not fallen at `FIRST`, or might not have if the other numbers followed."""
    value, gradient = view(FIRST * normal)
    slope = tangent(gradient, normal).norm(dim=-1)
    gain = slope * slope.clamp(min=3 * FIRST)  # of two Newton steps; of a way back that is longer than the ray
    above = torch.nan_to_num(value + gain - top, nan=inf) + FALL
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


@torch.no_grad()
def _is_resolved(view: View, z: Tensor, value: Tensor) -> Tensor:
    """Return whether log p is finite, and changes by less than 0.1 nats where θ changes by its rounding: [n]."""
    theta = view.theta(z)
    signs = torch.randint(2, theta.shape, generator=torch.Generator().manual_seed(0)).to(theta) * 2 - 1
    size = view.centre.abs() + view.scale * z.norm(dim=-1, keepdim=True) / z.shape[-1] ** 0.5
    rounding = 2 * torch.finfo(view.space.dtype).eps * torch.maximum(size, theta.abs())
    near = view.target.log_joint((theta + rounding * signs).to(view.space.initial))
    return value.isfinite() & ((near + view.log_det - value).abs() < 0.1)


def _has_no_end(view: View, way: Way) -> bool:
    """Return whether the mass on the last planes falls no faster than R to minus `POWER`; not at all, if not far."""
    if way.change[-1] > HIGH:
        return True
    masses: list[tuple[float, float, bool]] = []
    for radius, (before, theta) in list(zip(way.radii[1:], pairwise(way.theta), strict=True))[-COMPARED:]:
        # the highest of points on from θ: the log density of an angle goes up and down, and its planes are as its tops
        onward = torch.arange(WAVES, dtype=theta.dtype, device=theta.device) / (2 * WAVES)
        tries = theta + onward.unsqueeze(-1) * (theta - before)
        values = view.values(view.z(tries))
        theta, at = tries[values.argmax()], values.max().item()
        mass, settled = plane_mass(view, way.number, theta)
        if mass > at - LEAST * len(theta):  # or the ridge is too narrow for its normal to be found
            masses.append((log(radius), mass, settled))
    # where a search found no optimum its mass is only a lower bound: the next must be as great
    powers = [POWER if settled and way.radii[-1] == RADII[-1] else STILL for _, _, settled in masses]
    pairs = zip(powers, pairwise(masses), strict=False)
    return len(masses) > 1 and all(b - a > power * (near - far) for power, ((near, a, _), (far, b, _)) in pairs)


class Plane:
    """A log density on the plane θ_number = constant, in coordinates z around a point of it: θ + W z, W [P, n]."""

    def __init__(self, target: Target, theta: Tensor, W: Tensor):
        self.target, self.theta, self.W = target, theta, W
        self.space = Parameters({"z": W.new_zeros(W.shape[-1])})

    def log_joint(self, z: Tensor, batch: object = None) -> Tensor:
        """Return the log density: [S, n] → [S]."""
        steps = z @ self.W.mT if self.W.ndim == 2 else z * self.W
        return self.target.log_joint((self.theta + steps).to(self.target.space.initial)).double()


def plane_mass(view: View, number: int, theta: Tensor) -> tuple[float, bool]:
    """Return a lower bound, but for a constant, of the log of p's integral over the plane of a number through θ [P].

    It is the ELBO of a normal there: a full one, or one around θ without correlations if the view's units are low rank.
    The second value tells whether that normal is an optimum.
    """
    if len(theta) == 1:
        return view.values(view.z(theta.unsqueeze(0))).item(), True
    if isinstance(view.root, Tensor):
        covariance = view.root @ view.root.mT if view.root.ndim == 2 else view.root.square().diag()
        along = covariance[number] / covariance[number, number].sqrt()
        values, vectors = torch.linalg.eigh(covariance - torch.outer(along, along))
        W = vectors[:, 1:] * values[1:].clamp(min=1e-12 * float(values[-1])).sqrt()
    else:
        W = view.scale.where(torch.arange(len(theta), device=theta.device) != number, 0.0)
    mass, scale = _widths(Plane(view.target, theta, W))
    if W.ndim == 1 or mass == -inf:
        return mass, True
    plane, n, like = Plane(view.target, theta, W * scale), len(scale), {"dtype": theta.dtype, "device": theta.device}
    noise = FixedDraws(least_draws(n), seed=0)(1, n, 0, **like).diagonal
    at = local(plane, Normal(torch.zeros_like(scale), torch.eye(n, **like)), noise)
    if at is None:
        return mass, False
    ended = ascend_normals(plane, at, noise, full, 1e-3, lambda at: None)
    return ended.at.elbo + scale.log().sum().item(), ended.settled


def _widths(plane: Plane) -> tuple[float, Tensor]:
    """Return the highest mass, and its s, of normals N(0, diag(s²)) whose draws and scores get equal moments."""
    like = plane.space.initial
    noise = torch.randn(DENSE // 8, len(like), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = (noise * (len(like) ** 0.5 / noise.norm(dim=-1, keepdim=True))).to(like)
    best, widths, scale = -inf, like + 1, like + 1
    for _ in range(STEPS):
        z = (scale * noise).requires_grad_()
        values = plane.log_joint(torch.cat([z, -z]))
        (gradient,) = torch.autograd.grad(values.sum(), z)  # g₊ − g₋
        if not bool(values.isfinite().all() and gradient.isfinite().all()):
            scale = scale / WIDER
            continue
        mass = values.mean().item() + scale.log().sum().item()
        if mass > best:
            best, widths = mass, scale
        new = (2 * z.detach().abs().mean(0) / gradient.abs().mean(0).clamp(min=1e-300)).sqrt()
        scale = torch.minimum(new, WIDER * scale)
    return best, widths


def _numbers(space: Parameters, way: Way) -> tuple[str, ...]:
    """Return the numbers that went farthest over the last radii, at most four, and where to."""
    went = (way.theta[-1] - way.theta[-2]) / space.scale
    largest = went.abs().topk(min(4, len(went))).indices.tolist()
    kept = [index for index in largest if went[index].abs() >= 0.1 * went[largest[0]].abs()]
    return tuple(f"{space.label(index)} → {'+' if went[index] > 0 else '−'}∞" for index in kept)
