"""A log density around a fit, in units of its own curvature."""

from math import inf

import torch
from torch import Tensor

from ..families.family import Family
from ..models.target import Target
from ..parameters import Parameters
from .fixed_draws import FixedDraws, least_draws
from .fresh_draws import fresh_draws
from .plane_mass import mass_bound

#: covariances and curvatures are diagonal beyond so many numbers
DENSE = 512
#: of the scales of a space: a fit this narrow has fallen onto an edge, beside which there is no density
NARROW = 1e-14
#: numbers that a check leads away at most
MOST = 512
#: least curvature that is believed, relative to the fit's, and where that was wrong; their inverses the greatest
FLOORS = (1e-4, 1e-1)


class View:
    """A target around a place: θ = centre + z rootᵀ, with root [P, P], or [P] for a diagonal."""

    def __init__(self, target: Target, centre: Tensor, root: Tensor):
        self.target, self.centre, self.root = target, centre, root
        self.scale: Tensor = root.abs() if root.ndim == 1 else root.norm(dim=-1)  # of each number, [P]
        #: of more numbers so many are led away
        self.most = MOST

    def theta(self, z: Tensor) -> Tensor:
        return self.centre + (z * self.root if self.root.ndim == 1 else z @ self.root.mT)

    def size(self, z: Tensor) -> Tensor:
        """The sum of θ with all signs left out."""
        return self.centre.abs() + (z * self.root if self.root.ndim == 1 else z.abs() @ self.root.abs().mT).abs()

    def z(self, step: Tensor) -> Tensor:
        """The z of a step in θ: [P] → [P]."""
        if self.root.ndim == 1:
            return step / self.root
        return torch.linalg.solve(self.root, step)

    def log_joint(self, theta: Tensor) -> Tensor:
        """log p, NaN at rows where it raises an error, as distributions do that check their arguments."""
        try:
            return self.target.log_joint(theta)
        except (ValueError, ArithmeticError, RuntimeError):
            if len(theta) == 1:
                return theta.new_full((1,), torch.nan)
        half = len(theta) // 2
        return torch.cat([self.log_joint(theta[:half]), self.log_joint(theta[half:])])

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """log p and its gradient by z: [n, P] → [n], [n, P]."""
        z = z.detach().requires_grad_()
        value = self.log_joint(self.theta(z))
        if not value.requires_grad:  # an error at every row
            return value, torch.full_like(z, torch.nan)
        (gradient,) = torch.autograd.grad(value.sum(), z)
        return value.detach(), gradient

    @torch.no_grad()
    def values(self, theta: Tensor) -> Tensor:
        """log p, −∞ where it is no number: [n, P] → [n]."""
        value = self.log_joint(theta)
        return torch.where(value.isfinite(), value, -inf)

    def normals(self, numbers: Tensor) -> Tensor:
        """In z, of the planes on which one θ_i is constant: [n] → [n, P]."""
        if self.root.ndim == 2:
            return (self.root / self.scale.unsqueeze(-1))[numbers]
        normals = torch.zeros(len(numbers), len(self.root), dtype=self.root.dtype, device=self.root.device)
        normals[torch.arange(len(numbers)), numbers] = 1.0
        return normals

    def plane(self, number: int) -> Tensor:
        """Steps in θ on the planes of one number, standard under its normal, in columns: [P, P − 1]."""
        normal = self.normals(torch.tensor([number], device=self.root.device))
        across = torch.linalg.svd(normal).Vh[1:].mT  # in z, orthonormal
        steps = self.root @ across if self.root.ndim == 2 else self.root.unsqueeze(-1) * across
        steps[number] = 0.0  # but for rounding it is
        return steps

    def mass(self, number: int, theta: Tensor) -> float:
        """A lower bound, but for a constant, of the log of p's integral over the plane of one number through θ [P]."""
        if len(theta) == 1:
            return self.values(theta.unsqueeze(0)).item()
        steps = self.plane(number)  # [P, P − 1]
        return mass_bound(lambda u: self.log_joint(theta + u @ steps.mT), torch.zeros_like(theta[1:]))

    def is_sound(self) -> bool:
        """Whether all is finite, and standard deviations are well above rounding."""
        if not bool(self.centre.isfinite().all() and self.root.isfinite().all()):
            return False
        least = 1e3 * torch.finfo(self.scale.dtype).eps * self.centre.abs()
        return bool((self.scale > least).all())


def curved(view: View) -> list[View]:
    """The view in units of log p's mean curvature under its normal, by how much of it is believed; none if not sound.

    E ∇² log p = E ∇log p(ε) εᵀ, exact on fixed draws for a quadratic.
    """
    if not view.is_sound():
        return []
    P = len(view.centre)
    if P > DENSE:
        return [view]
    like = {"dtype": view.centre.dtype, "device": view.centre.device}
    noise = FixedDraws(least_draws(P), seed=0)(1, P, 0, **like).diagonal
    hessian = view(noise)[1].mT @ noise / len(noise)
    if not bool(hessian.isfinite().all()):
        return [view]
    values, vectors = torch.linalg.eigh(-(hessian + hessian.mT) / 2)
    root = (torch.diag(view.root) if view.root.ndim == 1 else view.root) @ vectors
    made = [View(view.target, view.centre, root * values.clamp(floor, 1 / floor).rsqrt()) for floor in FLOORS]
    return [new for new in made if new.is_sound()] or [view]


@torch.no_grad()
def place(family: Family, target: Target) -> tuple[Tensor, Tensor]:
    """`moments` of the fit; of a mixture those of the part whose mean has the highest log p."""
    P = target.space.size
    parts = [one for one in family.families() if len(list(one.families())) == 1 and one.bound_space().size == P]
    places = [moments(one, target.space) for one in parts or [family]]
    if len(places) == 1:
        return places[0]
    values = View(target, *places[0]).values(torch.stack([mean for mean, _ in places]))
    return places[int(values.argmax())]


@torch.no_grad()
def moments(family: Family, space: Parameters) -> tuple[Tensor, Tensor]:
    """Mean [P] and a root of the covariance, [P, P] or of its diagonal [P]; exact for normals that are not large."""
    density = family()
    large = density.noise_size > DENSE
    draws = 256 if large else 4 * least_draws(density.noise_size)
    try:
        if density.coupled and not large:
            drawn = density.draw(1, FixedDraws(draws, seed=0))
        else:
            drawn = density.draw(draws, *fresh_draws(0, space.device))
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        nowhere = torch.full_like(space.initial, torch.nan)
        return nowhere, nowhere
    theta = space.join(drawn.theta, drawn.fixed)
    weight = (drawn.weight / drawn.weight.sum()).unsqueeze(-1)
    mean = (weight * theta).sum(0)
    deviations = weight.sqrt() * (theta - mean)
    scale = deviations.square().sum(0).sqrt()
    relative = deviations / scale
    if large or not bool(relative.isfinite().all()):
        return mean, scale
    values, vectors = torch.linalg.eigh(relative.mT @ relative)
    return mean, scale.unsqueeze(-1) * vectors * values.clamp(min=1e-12).sqrt()
