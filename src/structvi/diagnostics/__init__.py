"""Diagnostics of a fitted posterior: how near it is to the truth, how noisy its fit, how well its model fits the data.

`bayes.diagnose(loader)` uses most of them, and explains their values.
"""

from ..density.importance import Importance, Moments, Unavailable, psis
from .arviz import to_arviz
from .diagnosis import Finding, Report, diagnose
from .gradients import GradientNoise, gradient_noise
from .importance_weights import importance
from .learned import Learned, Spectrum, learned, spectrum
from .predictive_checks import PredictiveCheck, predictive_check
from .simulation import SBCResult, sbc

__all__ = [
    "Finding",
    "GradientNoise",
    "Importance",
    "Learned",
    "Moments",
    "PredictiveCheck",
    "Report",
    "SBCResult",
    "Spectrum",
    "Unavailable",
    "diagnose",
    "gradient_noise",
    "importance",
    "learned",
    "predictive_check",
    "psis",
    "sbc",
    "spectrum",
    "to_arviz",
]
