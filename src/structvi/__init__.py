"""structvi: any PyTorch model, or any log density, becomes a variational posterior."""

from . import likelihoods
from .couplings import Noise, naive, paired, unscented
from .elbo import NonFiniteError, elbo, elbo_groups
from .families import (
    MAP,
    Density,
    Draws,
    Family,
    FullNormal,
    MeanField,
    StructuredNormal,
    StructuredPrecision,
    kl,
)
from .parameters import Parameters
from .priors import NormalPrior
from .targets import BayesianModel, LogDensity

__version__ = "0.1.0"

__all__ = [
    "MAP",
    "BayesianModel",
    "Density",
    "Draws",
    "Family",
    "FullNormal",
    "LogDensity",
    "MeanField",
    "Noise",
    "NonFiniteError",
    "NormalPrior",
    "Parameters",
    "StructuredNormal",
    "StructuredPrecision",
    "elbo",
    "elbo_groups",
    "kl",
    "likelihoods",
    "naive",
    "paired",
    "unscented",
]
