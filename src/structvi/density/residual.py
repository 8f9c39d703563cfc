"""What is left of a density when normals that were found are taken off it: log (p − Σ_c m_c N_c)."""

from math import inf, log, pi

import torch
from torch import Tensor

from .peaks import Peak
from .rows import RowFunction

#: relative error of the normals' curvature
ROUNDING = 1e-12


class Masses:
    """Σ_c m_c N(z; at_c, root_c root_cᵀ), with m the mass of the peaks."""

    def __init__(self, peaks: list[Peak]):
        self.at = torch.stack([peak.at for peak in peaks])  # [C, P]
        root = torch.stack([peak.root for peak in peaks])
        identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
        self.inverse: Tensor = torch.linalg.solve_triangular(root, identity.expand_as(root), upper=False)  # [C, P, P]
        mass = torch.tensor([peak.log_mass for peak in peaks], dtype=root.dtype, device=root.device)
        log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        self.constant = mass - log_det - root.shape[-1] / 2 * log(2 * pi)

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Its logarithm, gradient and the rounding error that the logarithm may have: [n, P] → [n], [n, P], [n]."""
        white = torch.einsum("cij,ncj->nci", self.inverse, z.unsqueeze(1) - self.at)
        each = self.constant - white.square().sum(-1) / 2
        log_sum = each.logsumexp(-1)
        share = (each - log_sum.unsqueeze(-1)).exp()
        gradient = -torch.einsum("nc,nci,cij->nj", share, white, self.inverse)
        return log_sum, gradient, ROUNDING * (10 + white.square().sum(-1).amin(-1))


def residual(function: RowFunction, peaks: list[Peak], least: float = 0.0) -> RowFunction:
    """log (exp f − Σ m N) and its gradient; no value (−∞) where f is within `least` nats, and rounding, of log Σ m N.

    Example:
        >>> def two(z):  # ½ N(0, 1) + ½ N(2, 1), but for a constant: no minimum between
        ...     each = torch.cat([-0.5 * z.square(), -0.5 * (z - 2).square()], dim=-1)
        ...     return each.logsumexp(-1), -(each.softmax(-1) * torch.cat([z, z - 2], dim=-1)).sum(-1, keepdim=True)
        >>> first = Peak(torch.zeros(1, dtype=torch.float64), 0.0, torch.eye(1, dtype=torch.float64))
        >>> left = residual(two, [first])
        >>> left(torch.tensor([[2.0]], dtype=torch.float64))[0].abs() < 1e-12  # the other part alone
        tensor([True])
    """
    masses = Masses(peaks)

    def left(z: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = function(z)
        taken, slope, rounding = masses(z)
        over = value - taken
        sound = over > least + rounding
        over = torch.where(sound, over, 1.0)
        part = -torch.expm1(-over)  # of p that is left
        rest = (gradient - torch.exp(-over).unsqueeze(-1) * slope) / part.unsqueeze(-1)
        return torch.where(sound, value + part.log(), -inf), torch.where(sound.unsqueeze(-1), rest, 0.0)

    return left
