"""Instruments for a fitted posterior: how near it is to the truth, how noisy its fit, and what more would be worth.

`bayes.diagnose(loader)` uses most of them and says what they mean; each is there by itself too.
"""

from .arviz import to_arviz
from .calibration import Calibration, sbc
from .compare import Comparison, compare
from .diagnose import diagnose
from .gradients import GradientNoise, gradient_noise
from .importance import Importance, Moments, importance, psis
from .learned import Learned, learned
from .predictive_checks import PredictiveCheck, predictive_check
from .problem import Unavailable
from .report import Finding, Report
from .spectrum import Spectrum, spectrum
from .worth import Trial, Worth, worth

__all__ = [
    "Calibration",
    "Comparison",
    "Finding",
    "GradientNoise",
    "Importance",
    "Learned",
    "Moments",
    "PredictiveCheck",
    "Report",
    "Spectrum",
    "Trial",
    "Unavailable",
    "Worth",
    "compare",
    "diagnose",
    "gradient_noise",
    "importance",
    "learned",
    "predictive_check",
    "psis",
    "sbc",
    "spectrum",
    "to_arviz",
    "worth",
]
