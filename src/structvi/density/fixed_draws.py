"""A fixed set of standard normal draws with exact second moments, and the ELBO on it."""

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from ..couplings import Coupling, Noise, naive
from ..families.family import Family
from ..families.gaussian import Gaussian
from ..models.target import Target
from ..objective import Estimator, NonFiniteError, check_spaces, elbo, terms_at


class FixedDraws:
    """A coupling whose S rows are the same at every call, with mean zero and covariance one *exactly*: S ≥ 2(P + K).

    Half of the rows are scrambled Sobol points, mapped to normals, then moved as little as possible to the covariance
    I; the others are their mirror images. The ELBO of a quadratic log density is exact on them, and bounded for
    every Gaussian family; with few more rows than dimensions they are √(P + K) times a rotation, sigma points.

    Example:
        >>> rows = torch.cat(FixedDraws(16, seed=0)(1, P=3, K=2, dtype=torch.float64), dim=-1)
        >>> bool(torch.allclose(rows.mT @ rows / 16, torch.eye(5, dtype=torch.float64)))
        True
    """

    def __init__(self, draws: int, seed: int):
        self.draws, self.seed = draws, seed
        self._made: dict[tuple[int, int], Noise] = {}

    def __call__(
        self,
        groups: int,
        P: int,
        K: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Noise:
        if (P, K) not in self._made:
            rows = _points(self.draws // 2, P + K, self.seed).to(device=device, dtype=dtype)
            self._made[P, K] = Noise(*torch.cat([rows, -rows]).split([P, K], dim=-1))
        return self._made[P, K]


def _points(m: int, n: int, seed: int) -> Tensor:
    """Return normal quasi-random points with covariance I, [m, n]."""
    if n <= SobolEngine.MAXDIM:
        uniform = SobolEngine(n, scramble=True, seed=seed).draw(m, dtype=torch.float64)
        rows = torch.special.ndtri(uniform.clamp(1e-10, 1 - 1e-10))
    else:
        rows = torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u, _, v = torch.linalg.svd(rows, full_matrices=False)
    return m**0.5 * (u @ v)


def least_draws(n: int) -> int:
    """Return twice a power of two (what Sobol points like) that is at least 8 and at least n = P + K."""
    return 2 * max(8, 1 << (n - 1).bit_length())


def fresh_draws(seed: int, device: torch.device) -> tuple[Coupling, torch.Generator]:
    """Return the coupling of independent draws, and a generator on the device."""
    return naive, torch.Generator(device).manual_seed(seed)


def fixed_elbo(family: Family, target: Target, coupling: FixedDraws) -> Tensor:
    """Return the ELBO on the fixed draws, a function of the family's parameters alone."""
    check_spaces(family, target)
    density = family()
    if not density.accurate:
        raise NonFiniteError("rounding would spoil the covariance")
    if isinstance(density, Gaussian):
        draws = density.draw(1, coupling)
        return terms_at(density, draws, None, target, None, Estimator("entropy")).objective().mean()
    if not density.coupled:  # it makes its own draws: the same from the same seed
        naive, generator = fresh_draws(coupling.seed, target.space.device)
        return elbo(family, target, None, Estimator("log_q", coupling.draws, naive), generator)
    return elbo(family, target, estimator=Estimator("log_q", coupling=coupling))
