"""Instruments for a fitted posterior: how near it is to the truth, how noisy its fit, and what more would be worth.

`bayes.diagnose(loader)` uses most of them and says what they mean; each is there by itself too.
"""

from ..density.importance import Importance, Moments, Unavailable, psis
from .arviz import to_arviz
from .calibration import Calibration, sbc
from .diagnosis import Finding, Report, diagnose
from .gradients import GradientNoise, gradient_noise
from .importance_weights import importance
from .learned import Learned, Spectrum, learned, spectrum
from .predictive_checks import PredictiveCheck, predictive_check

__all__ = [
    "Calibration",
    "Finding",
    "GradientNoise",
    "Importance",
    "Learned",
    "Moments",
    "PredictiveCheck",
    "Report",
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
