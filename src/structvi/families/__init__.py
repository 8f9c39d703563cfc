"""Variational families: one family, one file; first its density (the mathematics), then its module (the state)."""

from .blocks import PerLayer
from .family import Density, DistributionDensity, Draws, Family, check_draw
from .full import FullNormal
from .gaussian import Gaussian, kl
from .low_rank import LowRankNormal, LowRankPrecision
from .matrix_normal import MatrixNormal
from .mc_dropout import MCDropout
from .mean_field import MeanField
from .mixture import Mixture
from .normal import Diagonal, LowRank, NormalForm, Triangle
from .point import MAP
from .rotated import Rotated

__all__ = [
    "MAP",
    "Density",
    "Diagonal",
    "DistributionDensity",
    "Draws",
    "Family",
    "FullNormal",
    "Gaussian",
    "LowRank",
    "LowRankNormal",
    "LowRankPrecision",
    "MCDropout",
    "MatrixNormal",
    "MeanField",
    "Mixture",
    "NormalForm",
    "PerLayer",
    "Rotated",
    "Triangle",
    "check_draw",
    "kl",
]
