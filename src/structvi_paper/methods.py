"""The methods that the paper compares, by the names of its tables."""

from dataclasses import dataclass

from structvi.families import (
    MAP,
    Family,
    FullNormal,
    LowRankNormal,
    LowRankPrecision,
    MCDropout,
    MeanField,
    Mixture,
)
from structvi.parameters import FREE_SCALE_FLOOR

#: the probability to keep a weight in MC dropout; the paper does not say its own
KEEP = 0.8
#: parts of the mixture and the rank of each
COMPONENTS, MIXTURE_RANK = 2, 2


@dataclass(frozen=True)
class Method:
    """A row of a table: the paper's name and the rank, where it has one."""

    name: str
    rank: int | None = None

    @property
    def label(self) -> str:
        return self.name if self.rank is None or self.name == "MF-VI" else f"{self.name} {self.rank}"

    @property
    def anneal(self) -> bool:
        return self.name == "sGMM-VI"

    def recipe(self, scale: float, exempt: tuple[str, ...] = ()) -> Family:
        """The family, unbound.

        Args:
            scale: where standard deviations start; factors start as wide.
            exempt: tensors that dropout leaves alone.
        """
        rank = self.rank or 0
        start = scale / FREE_SCALE_FLOOR
        return {
            "MAP": lambda: MAP(),
            "MC dropout": lambda: MCDropout(keep=KEEP, exempt=exempt),
            "MF-VI": lambda: MeanField(initial_scale=start),
            "sN-VI": lambda: LowRankNormal(rank, initial_scale=start, initial_factor=1.0),
            "sP-VI": lambda: LowRankPrecision(rank, initial_scale=start, initial_factor=1.0),
            "full": lambda: FullNormal(initial_scale=start),
            "sGMM-VI": lambda: Mixture(
                LowRankNormal(rank, initial_scale=start, initial_factor=1.0), components=COMPONENTS
            ),
        }[self.name]()


def methods(P: int, dropouts: tuple[str, ...], mixture: bool = False) -> list[Method]:
    """The rows of a table over P weights, in the paper's order."""
    ranks = (1, 2, 4, P)
    rows = [Method("MAP"), *(Method(name) for name in dropouts), Method("MF-VI", 0)]
    rows += [Method("sN-VI", rank) for rank in ranks] + [Method("sP-VI", rank) for rank in ranks]
    rows.append(Method("full"))
    return [*rows, Method("sGMM-VI", MIXTURE_RANK)] if mixture else rows
