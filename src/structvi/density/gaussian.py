"""Normals of a search: mean and any root of the covariance, from a family's form and back to it."""

from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.family import Family
from ..families.normal import Diagonal, LowRank, NormalForm, Triangle
from ..parameters import Parameters
from .lowrank import Approximation, between_scales

#: scales of its space that a normal may be wide or away: it is followed no further
FAR = 1e8
#: width of a direction, relative to the others or to its space, below which rounding loses it
SINGULAR = 1e-14


class Normal(NamedTuple):
    """N(mean, root rootᵀ) in float64; `form` is the family's own form of it, for families that are not full."""

    mean: Tensor  # [P]
    root: Tensor  # [P, P]
    form: NormalForm | None = None

    def entropy(self) -> float:
        """Return the entropy in nats."""
        return half_log_det(self.root) + 0.5 * len(self.mean) * (1 + log(2 * pi))

    def precision(self) -> Tensor:
        """Return the precision, [P, P]."""
        half = torch.linalg.inv(self.root)
        return half.mT @ half

    def to_form(self) -> NormalForm:
        """Return the value that a family takes."""
        return self.form or NormalForm(self.mean, Triangle(triangular(self.root)))

    def distance(self, theta: Tensor) -> Tensor:
        """Return standard deviations from the mean: [n, P] → [n]."""
        return torch.linalg.solve(self.root, (theta - self.mean).mT).norm(dim=0)


class Place(NamedTuple):
    """A normal with a mass: a part of a mixture but for a constant."""

    normal: Normal
    log_mass: float


def normal_of(form: NormalForm) -> Normal:
    """Return the normal with a root of its covariance, also where that is nearly singular."""
    mean, root = form.mean.double(), form.root
    if isinstance(root, Triangle):
        return Normal(mean, root.lower.double(), form)
    scale = root.scale.double()
    if isinstance(root, Diagonal):
        return Normal(mean, torch.diag(scale), form)
    U, size, _ = torch.linalg.svd(root.factor.double(), full_matrices=False)
    width = (1 + size.square()) ** (-0.5 if root.of_precision else 0.5)
    matrix = torch.eye(len(scale), dtype=scale.dtype, device=scale.device) + U * (width - 1) @ U.mT
    return Normal(mean, scale.unsqueeze(-1) * matrix, form)


def half_log_det(root: Tensor) -> float:
    """Return ½ log det of root rootᵀ."""
    return torch.linalg.slogdet(root).logabsdet.item()


def triangular(root: Tensor) -> Tensor:
    """Return the lower triangular L with LLᵀ = root rootᵀ and a positive diagonal: [P, n] → [P, P]."""
    R = torch.linalg.qr(root.mT).R
    return (R * torch.where(R.diagonal() < 0, -1.0, 1.0).unsqueeze(-1)).mT


def is_singular(root: Tensor) -> bool:
    """Return whether rounding leaves nothing of some direction."""
    rows = root.norm(dim=-1, keepdim=True)
    if bool((rows == 0).any()) or not bool(rows.isfinite().all()):
        return True
    factors, _, failed = torch.linalg.lu_factor_ex(root / rows)
    pivots = factors.diagonal().abs()
    return bool(failed) or float(pivots.min()) < SINGULAR * float(pivots.max())


def is_far(normal: Normal, space: Parameters) -> bool:
    """Return whether a normal has left or outgrown the space by more than a posterior does, or shrunk to a point."""
    scale, wide = space.scale.double(), normal.root.norm(dim=-1)
    reach = torch.maximum((normal.mean - space.initial.double()).abs(), wide) / scale
    return not bool((reach < FAR).all()) or bool((wide < SINGULAR * scale).any())


class Shape:
    """The normals that a family can be: the best of them for a normal, which costs no evaluation.

    Args:
        form: what the family says of itself; its root has the kind and the rank.
    """

    def __init__(self, form: NormalForm):
        self.root = form.root
        self.approximation = Approximation(form.rank, isinstance(form.root, LowRank) and form.root.of_precision)
        self._scale: Tensor | None = None  # [P], of the best so far

    def __call__(self, normal: Normal) -> Normal:
        """Return the best normal of this shape; its scales are searched from the last ones, at first from several."""
        if isinstance(self.root, Triangle):
            return Normal(normal.mean, normal.root)
        precision = normal.precision()
        units = precision.diagonal().rsqrt()  # conditional standard deviations
        if isinstance(self.root, Diagonal):
            return normal_of(NormalForm(normal.mean, Diagonal(units)))
        values, vectors = torch.linalg.eigh(units.unsqueeze(-1) * precision * units)
        values = values.clamp(min=1e2 * SINGULAR * float(values[-1]))  # rounding may have left it indefinite
        relative = (vectors * values) @ vectors.mT
        last = [] if self._scale is None else [(self._scale / units).unsqueeze(0)]
        marginal = (vectors.square() / values).sum(-1).sqrt()
        for starts in [*last, between_scales(torch.ones_like(units), marginal)]:
            root, kl = self.approximation.best(relative, starts)
            if kl < float("inf"):  # or rounding spoils the last scales for another normal
                break
        self._scale = units * root.scale
        return normal_of(NormalForm(normal.mean, root._replace(scale=self._scale)))


def set_form(family: Family, form: NormalForm) -> None:
    """Set a bound family to a form, in its own dtype."""
    like = family.bound_space().initial
    made = {name: part.to(like) for name, part in form.root._asdict().items() if isinstance(part, Tensor)}
    family.set_normal(NormalForm(form.mean.to(like), form.root._replace(**made)))
