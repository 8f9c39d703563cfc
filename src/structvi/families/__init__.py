"""Variational families: one family, one file; first its density (the mathematics), then its module (the state)."""

from .blocks import PerLayer
from .density import Density, DistributionDensity, Draws, check_draw
from .family import Family
from .full import FullNormal
from .gaussian import Gaussian, kl
from .mc_dropout import MCDropout
from .mean_field import MeanField
from .mixture import Mixture
from .point import MAP
from .precision import LowRankPrecision
from .rotated import Rotated
from .scale_mixture import ScaleMixture
from .structured import LowRankNormal

__all__ = [
    "MAP",
    "Density",
    "DistributionDensity",
    "Draws",
    "Family",
    "FullNormal",
    "Gaussian",
    "LowRankNormal",
    "LowRankPrecision",
    "MCDropout",
    "MeanField",
    "Mixture",
    "PerLayer",
    "Rotated",
    "ScaleMixture",
    "check_draw",
    "kl",
]
