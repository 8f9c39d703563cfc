"""A normal prior with a scale of its own for every tensor, learned under a hyperprior that holds it."""

from math import lgamma, log, pi

import torch
from torch import Tensor, nn

from ...families.numerics import sum_squares
from ...parameters import Parameters
from ...util.patterns import few
from .separable import Scale, SeparablePrior, StudentTPrior


class HierarchicalNormalPrior(SeparablePrior):
    """θ_t ~ N(0, σ_t² I) for every tensor t, σ_t² ~ InverseGamma(ν/2, ν s²/2), and q(σ_t²) is part of the bound.

    With n numbers in the tensor the best q(σ²) is InverseGamma(a, b), a = (ν + n)/2 and b = (ν s² + E|θ|²)/2. For any b

        log p(θ) ≥ E_q(σ²) log p(θ | σ²) − KL[q(σ²)‖p(σ²)]
                 = −(a/b)(|θ|² + ν s²)/2 + a − a log b + log Γ(a) − log Γ(ν/2) + ν/2 log(ν s²/2) − n/2 log 2π

    with equality at b = (ν s² + |θ|²)/2, where it is `StudentTPrior(per="tensor")`: that is its marginal. The bound is
    quadratic in θ: to a fit it is a normal prior of standard deviation √(b/a). The b are one parameter for each tensor,
    `log_rate`, fitted with the ELBO. Unlike `NormalPrior(learn=True)` it has a hyperprior, so the scale of
    a tensor cannot run to zero, and tensors share no scale.

    A prior belongs to the first network that it is given to, whose tensors it has numbers for.

    Args:
        df: ν > 0: how much the tensors' scales may differ from s. At 1, by a factor of ten either way; the more, the
            nearer to `NormalPrior(scale)`.
        scale: s > 0; or a dict of glob patterns on tensor names and such numbers, as in `NormalPrior`.
        by_fan_in: divide s by √fan_in, as in `NormalPrior`.

    Example:
        >>> space = Parameters({"z": torch.zeros(3)})
        >>> prior, theta = HierarchicalNormalPrior(df=2.0), torch.ones(1, 3)
        >>> marginal = StudentTPrior(2.0, per="tensor")(space, theta)
        >>> bool(prior(space, theta) < marginal)
        True
    """

    shape: Tensor
    first: Tensor

    def __init__(self, df: float = 1.0, scale: Scale = 1.0, by_fan_in: bool = False):
        super().__init__()
        #: the same prior without the scales: what the bound is a bound of
        self.marginal = StudentTPrior(df, scale, per="tensor", by_fan_in=by_fan_in)
        self.df, self.scale, self.by_fan_in = df, scale, by_fan_in
        self.names: tuple[str, ...] = ()
        self.register_buffer("shape", torch.zeros(0), persistent=False)  # a, [tensors]
        self.register_buffer("first", torch.zeros(0), persistent=False)  # ν s²/2, [tensors]
        #: log b, [tensors]; none before the prior knows them
        self.log_rate = nn.Parameter(torch.zeros(0))

    def check(self, parameters: Parameters) -> None:
        if self.names == parameters.names:
            return
        self.marginal.check(parameters)
        if self.names:
            raise ValueError(
                f"this HierarchicalNormalPrior has scales for the tensors {few(self.names)}, and here the random ones "
                f"are {few(parameters.names)}: make another for another network"
            )
        self.names = parameters.names
        scales = torch.tensor(list(self.marginal.scales(parameters).values()), dtype=torch.float64)
        size = torch.tensor(parameters.numels, dtype=torch.float64, device=parameters.device)
        self.shape = 0.5 * (self.df + size)
        self.first = 0.5 * self.df * scales.to(size).square()
        rate = self.first + 0.5 * size * parameters.scales.to(size).square()
        self.log_rate = nn.Parameter(rate.log().to(parameters.dtype))

    def forward(self, parameters: Parameters, theta: Tensor) -> Tensor:
        if not self.names or not {*parameters.names} <= {*self.names}:
            self.check(parameters)
        some = [self.names.index(name) for name in parameters.names]
        rate, shape, first = self.log_rate.double()[some], self.shape.double()[some], self.first.double()[some]
        pieces = torch.split(theta, list(parameters.numels), dim=-1)
        square = torch.stack([sum_squares(x) for x in pieces], -1)  # [S, tensors]
        constant = torch.lgamma(shape) - lgamma(self.df / 2) + 0.5 * self.df * first.log()
        constant = constant - (shape - 0.5 * self.df) * log(2 * pi)
        value = -(shape * (-rate).exp()) * (first + 0.5 * square) + shape * (1 - rate) + constant
        return value.sum(-1).to(theta.dtype)

    def scales(self, parameters: Parameters) -> dict[str, float]:
        """Return √(b/a) of each tensor, the standard deviation of the normal prior that a fit sees at present."""
        self.check(parameters)
        with torch.no_grad():
            scales = (0.5 * (self.log_rate.double() - self.shape.log())).exp().tolist()
        return dict(zip(self.names, scales, strict=True))

    def extra_repr(self) -> str:
        return f"df={self.df}, scale={self.scale!r}" + (", by fan-in" if self.by_fan_in else "")
