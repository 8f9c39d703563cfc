"""Easier versions of a target, for the first part of a fit: p(θ)^(1/T), flat at high temperature T."""

from typing import Any

from torch import Tensor

from ..parameters import Parameters
from .target import Target


class Tempered:
    """The target p(θ)^(1/T): its log joint over T.

    Args:
        target: `BayesianModel`, `LogDensity`, or anything with `space` and `log_joint`.
        temperature: T > 0; above one the target is flatter than it is, below one sharper.

    Example:
        >>> import torch
        >>> from structvi import LogDensity
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
        >>> Tempered(target, 10.0).log_joint(torch.ones(1, 2))
        tensor([-0.1000])
    """

    def __init__(self, target: Target, temperature: float):
        if not isinstance(temperature, int | float) or not 0 < temperature < float("inf"):
            raise ValueError(f"the temperature must be a positive number, got {temperature!r}")
        self.target, self.temperature = target, temperature
        self.space: Parameters = target.space

    def log_joint(self, theta: Tensor, batch: Any = None) -> Tensor:
        return self.target.log_joint(theta, batch) / self.temperature


def annealed(target: Target, progress: float, hottest: float = 11.0) -> Target:
    """The target at T = 1 + (hottest − 1)·(1 − 2·progress) in the first half of a fit, itself in the second.

    The ELBO of a hot target wants q wide: the parts of a `Mixture` see all modes, divide them among themselves, and
    keep to theirs as the target cools. `benchmarks/mixture_noise.py` measures it.

    Args:
        target: what is to be fitted.
        progress: the fraction of the steps that are done, from 0 to 1.
        hottest: the temperature of the first step, at least 1.

    Example:
        >>> import torch
        >>> from structvi import LogDensity, MeanField, Mixture, elbo
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> log_p = lambda p: torch.logaddexp(*(-0.5 * (p["z"] - mode).square().sum() for mode in (3, -3)))
        >>> target = LogDensity(log_p, space)
        >>> q = Mixture(MeanField(), components=2).bind(space)
        >>> optimizer = torch.optim.Adam(q.parameters(), lr=0.1)
        >>> for step in range(3):
        ...     optimizer.zero_grad()
        ...     loss = -elbo(q, annealed(target, step / 3))
        ...     loss.backward()
        ...     optimizer.step()
    """
    if not 0 <= progress <= 1:
        raise ValueError(f"progress is the fraction of the fit that is done, from 0 to 1, got {progress!r}")
    if not isinstance(hottest, int | float) or not 1 <= hottest < float("inf"):
        raise ValueError(f"the hottest temperature must be a number ≥ 1, got {hottest!r}")
    temperature = 1 + (hottest - 1) * max(0.0, 1 - 2 * progress)
    return target if temperature == 1 else Tempered(target, temperature)
