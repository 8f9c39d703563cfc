"""structvi: any PyTorch model, or any log density, becomes a variational posterior."""

from typing import TYPE_CHECKING

from .basics.later import later
from .basics.version import __version__
from .constraints import cholesky_correlation, interval, ordered, positive, simplex
from .couplings import Noise, naive, paired, unscented
from .families import (
    MAP,
    Density,
    Draws,
    Family,
    FittedDropout,
    FullNormal,
    LowRankNormal,
    LowRankPrecision,
    MCDropout,
    MeanField,
    Mixture,
    PerLayer,
    Rotated,
    ScaleMixture,
    kl,
)
from .front_door import Posterior, load, variationalize, variationalize_head
from .models import likelihoods
from .models.bayesian_model import BayesianModel
from .models.log_density import LogDensity
from .models.priors import (
    DistributionPrior,
    HierarchicalNormalPrior,
    LaplacePrior,
    MixturePrior,
    NormalPrior,
    StudentTPrior,
    SumPrior,
)
from .models.tempered import Tempered, annealed
from .network_mixture import Ensemble, MixtureResult, load_mixture
from .objective import Estimate, NonFiniteError, elbo, elbo_groups, full_elbo
from .parameters import Parameters
from .predicting import metrics
from .predicting.local_mixture import LocalMixture
from .predicting.metrics import Metrics
from .predicting.predictive import Predictive
from .result import Result, Status
from .storing.file import CheckpointError
from .training.fit_many import fit_many
from .training.natural import NaturalGradient
from .training.result import FitResult, History
from .training.soap import Soap

if TYPE_CHECKING:
    from . import diagnostics, imaging, plots
    from .models.priors.lipschitz import LipschitzPrior
    from .predicting.tiles import predict_tiles
    from .searching.fit import fit_density
    from .searching.loading import load_fit
    from .searching.result import DensityFit
    from .searching.summary import Summary
    from .studies import is_it_bayesian as check

__getattr__ = later(
    __name__,
    {
        "DensityFit": "searching.result",
        "LipschitzPrior": "models.priors.lipschitz",
        "Summary": "searching.summary",
        "check": "studies.is_it_bayesian.",
        "diagnostics": "diagnostics.",
        "fit_density": "searching.fit",
        "load_fit": "searching.loading",
        "imaging": "imaging.",
        "plots": "plots.",
        "predict_tiles": "predicting.tiles",
    },
)

__all__ = [
    "MAP",
    "BayesianModel",
    "CheckpointError",
    "Density",
    "DensityFit",
    "DistributionPrior",
    "Draws",
    "Ensemble",
    "Estimate",
    "Family",
    "FitResult",
    "FittedDropout",
    "FullNormal",
    "HierarchicalNormalPrior",
    "History",
    "LaplacePrior",
    "LipschitzPrior",
    "LocalMixture",
    "LogDensity",
    "LowRankNormal",
    "LowRankPrecision",
    "MCDropout",
    "MeanField",
    "Metrics",
    "Mixture",
    "MixturePrior",
    "MixtureResult",
    "NaturalGradient",
    "Noise",
    "NonFiniteError",
    "NormalPrior",
    "Parameters",
    "PerLayer",
    "Posterior",
    "Predictive",
    "Result",
    "Rotated",
    "ScaleMixture",
    "Soap",
    "Status",
    "StudentTPrior",
    "SumPrior",
    "Summary",
    "Tempered",
    "__version__",
    "annealed",
    "check",
    "cholesky_correlation",
    "diagnostics",
    "elbo",
    "elbo_groups",
    "fit_density",
    "fit_many",
    "full_elbo",
    "imaging",
    "interval",
    "kl",
    "likelihoods",
    "load",
    "load_fit",
    "load_mixture",
    "metrics",
    "naive",
    "ordered",
    "paired",
    "plots",
    "positive",
    "predict_tiles",
    "simplex",
    "unscented",
    "variationalize",
    "variationalize_head",
]
