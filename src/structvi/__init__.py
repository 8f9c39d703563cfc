"""structvi: any PyTorch model, or any log density, becomes a variational posterior."""

from . import likelihoods
from .couplings import Noise, naive, paired, unscented
from .elbo import NonFiniteError, elbo, elbo_groups
from .families import (
    MAP,
    Blocks,
    Density,
    Draws,
    Family,
    FittedDropout,
    FullNormal,
    MCDropout,
    MeanField,
    Mixture,
    StructuredNormal,
    StructuredPrecision,
    kl,
)
from .lipschitz import LipschitzPrior
from .parameters import Parameters
from .priors import DistributionPrior, LaplacePrior, NormalPrior, StudentTPrior, SumPrior
from .targets import BayesianModel, LogDensity
from .tempering import Tempered, annealed
from .variationalize import Posterior, variationalize

__version__ = "0.1.0"

__all__ = [
    "MAP",
    "BayesianModel",
    "Blocks",
    "Density",
    "DistributionPrior",
    "Draws",
    "Family",
    "FittedDropout",
    "FullNormal",
    "LaplacePrior",
    "LipschitzPrior",
    "LogDensity",
    "MCDropout",
    "MeanField",
    "Mixture",
    "Noise",
    "NonFiniteError",
    "NormalPrior",
    "Parameters",
    "Posterior",
    "StructuredNormal",
    "StructuredPrecision",
    "StudentTPrior",
    "SumPrior",
    "Tempered",
    "annealed",
    "elbo",
    "elbo_groups",
    "kl",
    "likelihoods",
    "naive",
    "paired",
    "unscented",
    "variationalize",
]
