"""Several processes: ranks that share a fit, posteriors cut into rows, and loops of your own."""

from .collectives import LossModule, LostRankError, average_gradients
from .sharding import gather, shard

__all__ = ["LossModule", "LostRankError", "average_gradients", "gather", "shard"]
