"""A log density around a fit of many numbers, in units of the fit: a `View` without a P×P matrix."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..families.forms import RelativeForm
from ..models.target import Target
from .large_member import Member
from .low_rank_matrix import LowRankMatrix
from .units import View

#: numbers that are led away at most, those that moved or grew most, and one of so many
MOST, ONE_OF = 128, 4
#: the mass of a plane: pairs of draws of a round, and rounds
PAIRS, ROUNDS = 32, 12
#: the greatest change of a scale in one round
CHANGE = 30.0


class LowRankView(View):
    """θ = centre + z rootᵀ, with the root of a covariance that is a diagonal plus low rank.

    Example:
        >>> from structvi import LogDensity, Parameters
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> target = LogDensity(lambda p: -p["z"].square().sum(), space)
        >>> view = LowRankView(target, space.initial, LowRankMatrix.diag(torch.tensor([1.0, 4.0])))
        >>> view.theta(torch.ones(1, 2)), view.z(torch.ones(2))
        (tensor([[1., 2.]]), tensor([1.0000, 0.5000]))
    """

    def __init__(self, target: Target, centre: Tensor, covariance: LowRankMatrix):
        super().__init__(target, centre, covariance.diagonal().sqrt())
        self.covariance = covariance
        self.most = min(MOST, max(1, len(centre) // ONE_OF))

    def theta(self, z: Tensor) -> Tensor:
        return self.centre + self.covariance.root(z)

    def size(self, z: Tensor) -> Tensor:
        U, inner = self.covariance.U.abs(), ((1 + self.covariance.v).sqrt() - 1).abs()
        return self.centre.abs() + self.covariance.a.sqrt() * (z.abs() + (z.abs() @ U * inner) @ U.mT)

    def z(self, step: Tensor) -> Tensor:
        return self.covariance.inverse().root_transposed(step.unsqueeze(0)).squeeze(0)

    def normals(self, numbers: Tensor) -> Tensor:
        """Rows of the root, of length one."""
        unit = torch.zeros(len(numbers), len(self.centre), dtype=self.centre.dtype, device=self.centre.device)
        unit[torch.arange(len(numbers), device=numbers.device), numbers] = 1.0
        return self.covariance.root_transposed(unit) / self.scale[numbers].unsqueeze(-1)

    def mass(self, number: int, theta: Tensor) -> float:
        """By a normal without correlations on the plane, around θ."""
        others = torch.arange(len(theta), device=theta.device) != number
        return diagonal_mass(self.log_joint, theta, torch.where(others, self.scale, 0.0))


def diagonal_mass(log_joint: Callable[[Tensor], Tensor], theta: Tensor, scale: Tensor) -> float:
    """But for a constant log ∫ exp log_joint over the numbers whose scale is not zero ≥ this: the highest ELBO of
    normals N(θ, diag(s²)), whose draws and scores get the same moments. The same draws at every θ: [P], [P].

    Example:
        >>> at, scale = torch.zeros(3, dtype=torch.float64), torch.tensor([1.0, 5.0, 0.0], dtype=torch.float64)
        >>> narrow = diagonal_mass(lambda x: -x.square().sum(-1) / 2, at, scale)
        >>> wide = diagonal_mass(lambda x: -x.square().sum(-1) / 200, at, scale)  # two of them ten times as wide
        >>> 4.5 < wide - narrow < 4.7
        True
    """
    free, best = scale > 0, -torch.inf
    noise = torch.randn(PAIRS, len(theta), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(theta)
    noise = noise * (noise.shape[-1] ** 0.5 / noise.norm(dim=-1, keepdim=True))
    for _ in range(ROUNDS):
        steps = (scale * noise).requires_grad_()
        values = log_joint(torch.cat([theta + steps, theta - steps]))
        if not values.requires_grad or not bool(values.isfinite().all()):
            scale = 0.1 * scale
            continue
        best = max(best, values.mean().item() + scale[free].log().sum().item())
        (gradient,) = torch.autograd.grad(values.sum(), steps)  # g₊ − g₋
        steps = steps.detach()
        new = (4 * steps.square().mean(0) / gradient.square().mean(0).clamp(min=1e-300)) ** 0.25
        scale = torch.where(free, torch.clamp(new, scale / CHANGE, scale * CHANGE), 0.0)
    return best


def large_views(target: Target, form: RelativeForm, curvature: LowRankMatrix | None) -> Iterator[list[View]]:
    """Around a fit of this form, in units of the curvature or of the fit, and at the start in units of the space."""
    space, found = target.space, []
    for precision in (Member.of(form).precision(),) if curvature is None else (curvature, Member.of(form).precision()):
        covariance = LowRankMatrix(*(x.to(space.initial) for x in precision.inverse()))
        found.append(LowRankView(target, form.mean.to(space.initial), covariance))
    yield [view for view in found if view.is_sound()]
    yield [LowRankView(target, space.initial, LowRankMatrix.diag(space.scale.square()))]
