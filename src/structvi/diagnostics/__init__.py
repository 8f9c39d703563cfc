"""Instruments for a fitted posterior: how near it is to the truth, how noisy its fit, and what more would be worth.

`bayes.diagnose(loader)` uses most of them and says what they mean; each is there by itself too.
"""

from .arviz import to_arviz
from .calibration import Calibration, sbc
from .diagnosis import diagnose
from .gradients import GradientNoise, gradient_noise
from .importance_weights import Importance, Moments, importance, psis
from .low_rank_spectrum import Spectrum, spectrum
from .predictive_checks import PredictiveCheck, predictive_check
from .problem import Unavailable
from .report import Finding, Report
from .what_was_learned import Learned, learned

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
