"""Is it Bayesian? Methods put to problems whose posterior is known: `structvi check`, `structvi_check.run(method)`."""

from . import at_scale
from .measures import Measures
from .methods import Adapter, NotApplicable, Ours
from .problems import PROBLEMS, Data, Problem, problem
from .report import Report, Row
from .suite import run

__all__ = [
    "PROBLEMS",
    "Adapter",
    "Data",
    "Measures",
    "NotApplicable",
    "Ours",
    "Problem",
    "Report",
    "Row",
    "at_scale",
    "problem",
    "run",
]
