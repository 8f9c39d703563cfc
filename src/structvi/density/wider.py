"""Mass around the parts of a mixture, wider than they are: one around the same centre has no mode, and no shoulder."""

from math import inf, log

import torch

from ..families.family import Family
from ..families.gaussian import Gaussian
from ..models.target import Target
from .coordinates import Limit
from .fresh_draws import fresh_draws
from .peaks import Peak, with_mass

#: times as wide as a part, and draws of each
TIMES, DRAWS = (1.5, 2.5, 4.0), 64


@torch.no_grad()
def wider(family: Family, target: Target, elbo: float, seed: int) -> list[Peak]:
    """Normals around the parts, wider than they are, with the mass of p there that the mixture does not have.

    ∫ (p − e^ELBO q)₊ by importance sampling from each; parts that are no normals have none.

    Example:
        >>> from structvi import FullNormal, LogDensity, Mixture, Parameters
        >>> space = Parameters({"z": torch.zeros(2, dtype=torch.float64)})
        >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum() / 9, space)  # a normal with deviation 3
        >>> parts = [FullNormal(initial_scale=1.2).bind(space) for _ in range(2)]  # and narrower ones
        >>> made = wider(Mixture(parts), target, elbo=0.0, seed=0)
        >>> max(peak.log_mass for peak in made) > 3  # log 18π = 4.0 in all
        True
    """
    q, made, (_, generator) = family(), [], fresh_draws(seed, target.space.device)
    for part in family.mixture_parts()[0]:
        density = part()
        if not isinstance(density, Gaussian):
            return []
        root, failed = torch.linalg.cholesky_ex(density.covariance())
        if failed.item():
            continue
        P = len(density.mean)
        for times in TIMES:
            noise = torch.randn(DRAWS, P, generator=generator, dtype=root.dtype, device=root.device)
            theta = density.mean + times * noise @ root.mT
            peak = Peak(density.mean, 0.0, times * root)
            try:
                log_p = target.log_joint(theta).double()
            except Limit:
                return made
            known = elbo + q.log_prob(theta).double() - log_p
            left = torch.where(log_p.isfinite() & (known < 0), log_p + torch.log(-torch.expm1(known)), -inf)
            log_normal = -noise.double().square().sum(-1) / 2 - peak.log_mass
            mass = (left - log_normal).logsumexp(0).item() - log(DRAWS)
            if mass > -inf:
                made.append(with_mass(peak, mass))
    return made
