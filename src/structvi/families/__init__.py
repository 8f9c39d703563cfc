"""Variational families: one family, one file; first its density (the mathematics), then its module (the state)."""

from .base import Density, DistributionDensity, Draws, Family
from .full import FullNormal
from .gaussian import Gaussian, kl
from .mean_field import MeanField
from .point import MAP
from .precision import StructuredPrecision
from .structured import StructuredNormal

__all__ = [
    "MAP",
    "Density",
    "DistributionDensity",
    "Draws",
    "Family",
    "FullNormal",
    "Gaussian",
    "MeanField",
    "StructuredNormal",
    "StructuredPrecision",
    "kl",
]
