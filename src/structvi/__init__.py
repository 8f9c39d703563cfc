"""structvi: any PyTorch model, or any log density, becomes a variational posterior."""

from . import check, diagnostics, likelihoods, metrics, plots
from .checkpoint import CheckpointError
from .couplings import Noise, naive, paired, unscented
from .deterministic import DensityFit, fit
from .elbo import NonFiniteError, elbo, elbo_groups
from .estimate import Estimate, full_elbo
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
from .history import FitResult, History
from .keeping import load
from .lipschitz import LipschitzPrior
from .metrics import Metrics
from .parameters import Parameters
from .predictive import Predictive
from .priors import DistributionPrior, LaplacePrior, NormalPrior, StudentTPrior, SumPrior
from .targets import BayesianModel, LogDensity
from .tempering import Tempered, annealed
from .variationalize import Posterior, variationalize

__version__ = "0.1.0"

__all__ = [
    "MAP",
    "BayesianModel",
    "Blocks",
    "CheckpointError",
    "Density",
    "DensityFit",
    "DistributionPrior",
    "Draws",
    "Estimate",
    "Family",
    "FitResult",
    "FittedDropout",
    "FullNormal",
    "History",
    "LaplacePrior",
    "LipschitzPrior",
    "LogDensity",
    "MCDropout",
    "MeanField",
    "Metrics",
    "Mixture",
    "Noise",
    "NonFiniteError",
    "NormalPrior",
    "Parameters",
    "Posterior",
    "Predictive",
    "StructuredNormal",
    "StructuredPrecision",
    "StudentTPrior",
    "SumPrior",
    "Tempered",
    "annealed",
    "check",
    "diagnostics",
    "elbo",
    "elbo_groups",
    "fit",
    "full_elbo",
    "kl",
    "likelihoods",
    "load",
    "metrics",
    "naive",
    "paired",
    "plots",
    "unscented",
    "variationalize",
]
