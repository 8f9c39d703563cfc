"""Several processes: ranks that share a fit, posteriors cut into rows, and loops of your own."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .collectives import LostRankError

if TYPE_CHECKING:
    from .own_loops import LossModule, average_gradients
    from .sharding import gather, load_sharded, save_sharded, shard

_LATER = {"LossModule": "own_loops", "average_gradients": "own_loops"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LATER.get(name, 'sharding')}", __name__), name)


__all__ = ["LossModule", "LostRankError", "average_gradients", "gather", "load_sharded", "save_sharded", "shard"]
