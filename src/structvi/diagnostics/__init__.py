"""Diagnostics of a fitted posterior: how near it is to the truth, and how well its model fits the data.

`bayes.diagnose(loader)` uses most of them, and explains their values.
"""

from ..density.importance import Importance, Moments, Unavailable, psis
from .arviz import to_arviz
from .diagnosis import Finding, Report, diagnose
from .importance_weights import importance
from .learned import Learned, learned
from .predictive_checks import PredictiveCheck, predictive_check
from .simulation import SBCResult, sbc

__all__ = [
    "Finding",
    "Importance",
    "Learned",
    "Moments",
    "PredictiveCheck",
    "Report",
    "SBCResult",
    "Unavailable",
    "diagnose",
    "importance",
    "learned",
    "predictive_check",
    "psis",
    "sbc",
    "to_arviz",
]
