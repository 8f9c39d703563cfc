"""Is it Bayesian, of a network of thousands of weights? `structvi check --at-scale`, `check.at_scale.run()`."""

from .report import ScaleReport
from .suite import run

__all__ = ["ScaleReport", "run"]
