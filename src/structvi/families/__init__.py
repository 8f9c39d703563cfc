"""Variational families: one family, one file; first its density (the mathematics), then its module (the state)."""

from .blocks import Blocks
from .density import Density, DistributionDensity, Draws, check_draw
from .family import Family
from .fitted_dropout import FittedDropout
from .full import FullNormal
from .gaussian import Gaussian, kl
from .mc_dropout import MCDropout
from .mean_field import MeanField
from .mixture import Mixture
from .point import MAP
from .precision import StructuredPrecision
from .rotated import Rotated
from .scale_mixture import ScaleMixture
from .structured import StructuredNormal

__all__ = [
    "MAP",
    "Blocks",
    "Density",
    "DistributionDensity",
    "Draws",
    "Family",
    "FittedDropout",
    "FullNormal",
    "Gaussian",
    "MCDropout",
    "MeanField",
    "Mixture",
    "Rotated",
    "ScaleMixture",
    "StructuredNormal",
    "StructuredPrecision",
    "check_draw",
    "kl",
]
