"""Where on a climb does a fit begin?"""

from math import inf, isfinite

import torch
from torch import Tensor

from ..models.target import Target
from .climb import Climbed
from .coordinates import Limit
from .newton import Normal

#: draws that choose between points of a climb
HANDFUL = 8
#: times that a normal around the end of a climb is made ten times narrower, while log p falls by so much a number
NARROWER, FALL = 12, 20.0


def most_mass(target: Target, points: list[Climbed], half: Tensor) -> Normal:
    """Of normals around a climb's end and points before it the one with the highest ELBO, on a handful of draws.

    Around the end it is made narrower where log p falls much more than that of a normal, by P/2.

    Args:
        target: its log density is asked for, without gradients.
        points: the end first.
        half: standard normal numbers [n, P], used with both signs and at the radius √P.
    """
    z = torch.cat([half, -half]) * (half.shape[-1] ** 0.5 / half.norm(dim=-1)).repeat(2).unsqueeze(-1)

    def value(normal: Normal) -> float:
        with torch.no_grad():
            at = target.log_joint((normal.mean + z @ normal.root.mT).to(target.space.initial))
        return torch.nan_to_num(at.double(), nan=-inf).mean().item()

    end = points[0]
    best, highest = Normal(end.theta, end.root), -inf
    try:
        for _ in range(NARROWER):
            if (found := value(best)) > end.value - FALL * len(end.theta):
                highest = found + best.entropy()
                break
            best = best._replace(root=0.1 * best.root)
        for point in points[1:]:
            normal = Normal(point.theta, point.root)
            if (elbo := value(normal) + normal.entropy()) > highest and isfinite(elbo):
                best, highest = normal, elbo
    except Limit:
        pass
    return best
