"""structvi: any PyTorch model, or any log density, becomes a variational posterior."""

from . import constraints, couplings, diagnostics, imaging, optim, plots
from .density.api import fit_density
from .density.result import DensityFit
from .density.summary import Summary
from .ensemble.ensemble import Ensemble
from .ensemble.many import fit_many
from .families import (
    MAP,
    Density,
    Draws,
    Family,
    FullNormal,
    LowRankNormal,
    LowRankPrecision,
    MatrixNormal,
    MCDropout,
    MeanField,
    Mixture,
    PerLayer,
    Rotated,
    kl,
)
from .files.file import CheckpointError
from .loading import load
from .models import likelihoods, priors
from .models.bayesian_model import BayesianModel
from .models.target import LogDensity
from .objective import Estimator, NonFiniteError, elbo
from .parameters import Parameters
from .posterior import Posterior, variationalize, variationalize_head
from .predict import metrics
from .predict.predictive import Predictive
from .predict.tiles import predict_tiles
from .result import Result, Status
from .train.checkpoint import Checkpoint
from .train.fit import Schedule
from .train.result import FitResult
from .train.step import Compute
from .util import __version__

__all__ = [
    "MAP",
    "BayesianModel",
    "Checkpoint",
    "CheckpointError",
    "Compute",
    "Density",
    "DensityFit",
    "Draws",
    "Ensemble",
    "Estimator",
    "Family",
    "FitResult",
    "FullNormal",
    "LogDensity",
    "LowRankNormal",
    "LowRankPrecision",
    "MCDropout",
    "MatrixNormal",
    "MeanField",
    "Mixture",
    "NonFiniteError",
    "Parameters",
    "PerLayer",
    "Posterior",
    "Predictive",
    "Result",
    "Rotated",
    "Schedule",
    "Status",
    "Summary",
    "__version__",
    "constraints",
    "couplings",
    "diagnostics",
    "elbo",
    "fit_density",
    "fit_many",
    "imaging",
    "kl",
    "likelihoods",
    "load",
    "metrics",
    "optim",
    "plots",
    "predict_tiles",
    "priors",
    "variationalize",
    "variationalize_head",
]
