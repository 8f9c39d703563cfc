"""The rows of the weights that one of several processes holds: what a family has to know of it."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from .density import Density


class Rows(NamedTuple):
    """The rows `start` to `stop` of P, which this rank holds: all ranks have `most`, but for the last ones."""

    start: int
    stop: int
    P: int
    most: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


class Shard(ABC):
    """This rank's rows, and how those of all ranks become one density; see `structvi.distributed.sharding`."""

    rows: Rows

    @abstractmethod
    def join(self, part: Density) -> Density:
        """The density over all weights, of which `part` is that of this rank's rows."""

    @abstractmethod
    def generator(self, common: torch.Generator | None, device: torch.device) -> torch.Generator:
        """A stream of this rank's own, seeded from the common one."""
