"""Several processes: ranks that share a fit, posteriors cut into rows, and loops of your own."""

from typing import TYPE_CHECKING

from ..util.later import later
from .collectives import LostRankError

if TYPE_CHECKING:
    from .own_loops import LossModule, average_gradients
    from .sharding import gather, load_sharded, save_sharded, shard

__getattr__ = later(
    __name__,
    {
        "LossModule": "own_loops",
        "average_gradients": "own_loops",
        "gather": "sharding",
        "load_sharded": "sharding",
        "save_sharded": "sharding",
        "shard": "sharding",
    },
)

__all__ = ["LossModule", "LostRankError", "average_gradients", "gather", "load_sharded", "save_sharded", "shard"]
