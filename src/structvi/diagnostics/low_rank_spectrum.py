"""The spectrum of the low-rank part: how many of its directions matter, and which tensors they run through."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..families.density import Density
from ..families.family import Family
from ..families.gaussian import Gaussian
from ..families.numerics.algebra import capacitance
from ..families.numerics.fused import State, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..posterior import Posterior

#: A direction matters where it changes the entropy by more, in nats: one standard deviation in twenty, about.
MATTERS = 0.05


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of the low-rank part relative to the diagonal, largest first.

    In the covariance form Σ = D(I + Σₖ λₖvₖvₖᵀ)D with D = diag(s): along vₖ the variance is 1 + λₖ times the
    diagonal's. In the precision form the same holds of the precision.

    Attributes:
        eigenvalues: λ, [K], float64.
        of: "variance" or "precision".
        shares: tensor → how much of each direction lies in it, [K]; over tensors they sum to one.
    """

    eigenvalues: Tensor
    of: str
    shares: dict[str, Tensor]

    @property
    def nats(self) -> Tensor:
        """½ log(1 + λ): what each direction adds to (of the precision: takes from) the entropy."""
        return 0.5 * self.eigenvalues.log1p()

    @property
    def matter(self) -> int:
        """How many directions change the entropy by more than 0.05 nats."""
        return int((self.nats > MATTERS).sum())

    @property
    def verdict(self) -> str:
        K = len(self.eigenvalues)
        if not K:
            return "rank 0: there is no low-rank part"
        if self.matter == 0:
            return f"none of {K} directions matters: as good as mean field; was the factor fitted?"
        if self.matter == K:
            return f"all {K} directions matter: a higher rank may pay"
        return f"{self.matter} of {K} directions matter: a rank of {self.matter} would do"

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The eigenvalues on a logarithmic scale, and from where on they matter."""
        from ..plots import BLUE, GREY, axes_of, finish

        ax = axes_of(ax)
        limit = torch.tensor(2 * MATTERS).expm1().item()
        ax.plot(range(1, len(self.eigenvalues) + 1), self.eigenvalues.numpy(), "o-", color=BLUE, label=f"{self.of} − 1")
        ax.axhline(limit, color=GREY, linestyle="--", linewidth=1, label=f"{MATTERS} nats")
        ax.set_yscale("log")
        ax.set_xlabel("direction")
        ax.set_ylabel(f"{self.of} relative to the diagonal's")
        return finish(ax, loc="best")

    def __str__(self) -> str:
        values = ", ".join(f"{value:.3g}" for value in self.eigenvalues.tolist())
        return f"{self.of} added along each direction, relative to the diagonal's: {values}\n{self.verdict}"


def spectrum(q: "Posterior | Family | Density") -> Spectrum:
    """The K eigenvalues of diag(s)⁻¹UUᵀdiag(s)⁻¹, and of the precision form those of diag(s)WWᵀdiag(s).

    They are those of the K×K matrix Fᵀ diag(r²) F: nothing of size P×P is made.

    Example:
        >>> from structvi import Parameters, LowRankNormal
        >>> q = LowRankNormal(rank=2, initial_factor=0.0).bind(Parameters({"z": torch.zeros(4)}))
        >>> spectrum(q).verdict
        'none of 2 directions matters: as good as mean field; was the factor fitted?'
    """
    family = q if isinstance(q, Family | Density) else q.family
    with torch.no_grad():
        density = family() if isinstance(family, Family) else family
        state = low_rank_state(density)
        if state is None:
            raise TypeError(
                f"the spectrum is that of a low-rank part; {type(density).__name__} has none: give a LowRankNormal "
                "or LowRankPrecision, of a mixture or of blocks one of the parts"
            )
        r = ratio(state.log_scale.exp(), state.unit, state.precision)
        scaled, L = state.factor * r.unsqueeze(-1), capacitance(state.factor, r)
        values, vectors = torch.linalg.eigh(L @ L.mT)  # of I + Fᵀ diag(r²) F
        values, vectors = values.flip(-1) - 1, vectors.flip(-1)
        directions = (scaled.double() @ vectors).square()  # [P, K]; columns sum to the eigenvalues
        total = directions.sum(0).clamp(min=torch.finfo(torch.float64).tiny)
        names = {} if density.space is None else {name: density.space.slice(name) for name in density.space.names}
        shares = {name: (directions[rows].sum(0) / total).cpu() for name, rows in names.items()}
    of = "precision" if state.precision else "variance"
    return Spectrum(values.clamp(min=0.0).cpu(), of, shares)


def low_rank_state(density: Density) -> State | None:
    """Return the parameters of a diagonal plus low-rank Gaussian, or None."""
    return density.state() if isinstance(density, Gaussian) else None
