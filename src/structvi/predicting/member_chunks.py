"""The draws of several posteriors, each of a network of its own, as one sequence of chunks."""

from typing import Any

import torch

from ..couplings import Coupling
from ..posterior import NetworkMixtureBase, PosteriorBase
from .draws import DrawChunks
from .predictive import Predictive


class MemberChunks:
    """What `DrawChunks` is to one posterior: chunks of draws of every member, each with its member's weight.

    Args:
        mixture: members and their weights.
        draws: at least so many in all: each member has an equal share of them.
        coupling, chunk, reference, generator, linearise, calibrated: as in `DrawChunks`.
    """

    def __init__(
        self,
        mixture: NetworkMixtureBase,
        draws: int,
        coupling: Coupling,
        chunk: int,
        reference: Any = None,
        generator: torch.Generator | None = None,
        linearise: bool | None = None,
        calibrated: bool = False,
    ):
        members = mixture.posteriors
        each = -(-draws // len(members)) if isinstance(draws, int) else draws
        self.posterior = members[0]
        self.linearise, self.reference = linearise, reference
        self.members = [DrawChunks(one, each, coupling, chunk, reference, generator, linearise) for one in members]
        self.weights: list[float] = mixture.weights.tolist()
        self.places = [(c, index) for c, one in enumerate(self.members) for index in range(len(one))]
        self.device = self.members[0].device
        self.draws = sum(one.draws for one in self.members)
        self.note = f"{len(members)} networks"
        as_fitted = all((one.around is None) == (one.posterior.model.linearised_at is None) for one in self.members)
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


Chunks = DrawChunks | MemberChunks


def chunks_of(posterior: PosteriorBase | NetworkMixtureBase, *arguments: Any) -> Chunks:
    """The draws of a posterior, or of a mixture of them; arguments as of `DrawChunks`."""
    if isinstance(posterior, NetworkMixtureBase):
        return MemberChunks(posterior, *arguments)
    return DrawChunks(posterior, *arguments)
