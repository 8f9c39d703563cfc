"""The draws of several posteriors, each of a network of its own, as one sequence of chunks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..couplings import Coupling, naive
from .draws import DrawChunks
from .function_chunks import POINTS, FunctionChunks, is_normal
from .predictive import Predictive

if TYPE_CHECKING:
    from ..posterior import EnsembleBase, Posterior

#: of weights, where no number is asked for
DRAWS = 64
#: points of each member of a mixture, which has its share of all of them
FEWEST_POINTS = 64


class MemberChunks:
    """What `DrawChunks` is to one posterior: chunks of every member, each with its member's weight.

    Args:
        mixture: members and their weights.
        members: the chunks of each.
        calibrated: as in `DrawChunks`.
    """

    def __init__(
        self,
        mixture: "Posterior | EnsembleBase",
        members: Sequence[DrawChunks | FunctionChunks],
        calibrated: bool = False,
    ):
        self.posterior, self.members = mixture.posteriors[0], members
        self.reference, self.linearise = members[0].reference, members[0].linearise
        self.weights: list[float] = mixture.weights.tolist()  # pyright: ignore
        self.places = [(c, index) for c, one in enumerate(self.members) for index in range(len(one))]
        self.device = self.members[0].device
        self.draws = sum(one.draws for one in self.members)
        self.note = f"{len(members)} networks"
        if all(isinstance(one, FunctionChunks) for one in members):
            self.note += ", in function space"
        as_fitted = all(one.is_as_fitted for one in self.members)
        self.calibration = mixture.calibration if calibrated and as_fitted else None

    def __len__(self) -> int:
        return len(self.places)

    def share(self, index: int) -> float:
        """The weight of all draws of a chunk together."""
        c, own = self.places[index]
        return self.weights[c] * self.members[c].share(own)

    def predictive(self, index: int, inputs: Any) -> Predictive:
        """The mixture over the draws of one chunk, its weights summing to one."""
        c, own = self.places[index]
        return self.members[c].predictive(own, inputs)

    def whole(self, inputs: Any) -> Predictive:
        """The mixture over all draws of all members; the calibrated one, where that is asked for."""
        return self.uncalibrated(inputs).calibrated(self.calibration)

    def uncalibrated(self, inputs: Any) -> Predictive:
        """The mixture over all draws of all members, as it is."""
        every = range(len(self))
        return Predictive.joined([self.predictive(i, inputs) for i in every], [self.share(i) for i in every], self.note)

    def split(self, batch: Any) -> tuple[Any, Any]:
        """The inputs of a batch, and its target."""
        return self.members[0].split(batch)

    def target(self, batch: Any) -> Any:
        """The target that a user's `forward` makes of a batch."""
        return self.members[0].target(batch)


Chunks = DrawChunks | FunctionChunks | MemberChunks


def chunks_of(
    posterior: "Posterior | EnsembleBase",
    draws: int,
    coupling: Coupling,
    chunk: int,
    reference: Any,
    generator: torch.Generator | None,
    linearise: bool | None = None,
    calibrated: bool = False,
) -> DrawChunks | MemberChunks:
    """The draws of a posterior, or those of a mixture, an equal share of each member; arguments as of `DrawChunks`."""
    rest = (coupling, chunk, reference, generator, linearise)
    if posterior.posteriors[0] is posterior:
        return DrawChunks(posterior.posteriors[0], draws, *rest, calibrated)
    each = -(-draws // len(posterior.posteriors)) if isinstance(draws, int) else draws
    return MemberChunks(posterior, [DrawChunks(one, each, *rest) for one in posterior.posteriors], calibrated)


def chunks_for(
    inputs: Callable[[], Any],
    posterior: "Posterior | EnsembleBase",
    draws: int | None,
    coupling: Coupling,
    chunk: int,
    reference: Any,
    generator: torch.Generator | None,
    linearise: bool | None = None,
    calibrated: bool = False,
) -> Chunks:
    """In function space, where `draws` is None and that is exact at such inputs; else draws of weights.

    Args:
        inputs: gives the first of the inputs; asked for only where the posterior would do.
        draws: of weights; None for `DRAWS` where the outputs are not known to be normal.
        posterior, coupling, chunk, reference, generator, linearise, calibrated: as of `chunks_of`.
    """
    if draws is None and coupling is naive and reference is None:
        members = posterior.posteriors
        if all(is_normal(one, linearise) for one in members):
            is_mixture = posterior is not members[0]
            points = max(FEWEST_POINTS, POINTS // 2 ** (len(members) - 1).bit_length())
            found = [FunctionChunks(one, points, calibrated and not is_mixture) for one in members]
            first = inputs()
            if all(one.suits(first) for one in found):
                for one in found:
                    one.take_seed(generator)
                return MemberChunks(posterior, found, calibrated) if is_mixture else found[0]
    return chunks_of(
        posterior, DRAWS if draws is None else draws, coupling, chunk, reference, generator, linearise, calibrated
    )
