"""Another name for functions of `low_rank`, until no caller is left."""

from .low_rank import factors, hold_factors, is_untouched, release_factors

__all__ = ["factors", "hold_factors", "is_untouched", "release_factors"]
