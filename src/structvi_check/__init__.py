"""Is it Bayesian? Methods put to problems whose posterior is known: `structvi check`, `structvi_check.run(method)`."""

from . import at_scale
from .adapters import Adapter, NotApplicable, Ours
from .measures import Measures, measure
from .peers import PEERS
from .problems import PROBLEMS, Data, Problem, problem
from .report import Report
from .rows import Row
from .suite import run
from .verdicts import findings, verdict

__all__ = [
    "PEERS",
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
    "findings",
    "measure",
    "problem",
    "run",
    "verdict",
]
