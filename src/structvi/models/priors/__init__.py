"""Priors of the weights: any callable (parameters, theta [S, P]) → [S], and the ones that are made here."""

from typing import TYPE_CHECKING

from ...util.later import later
from .base import MixturePrior, Prior, PriorModule, SeparablePrior, SumPrior
from .distribution import DistributionPrior
from .hierarchical import HierarchicalNormalPrior
from .scale import LaplacePrior, NormalPrior, ScalePrior, StudentTPrior

if TYPE_CHECKING:
    from .lipschitz import LipschitzPrior

__getattr__ = later(__name__, {"LipschitzPrior": "lipschitz"})

__all__ = [
    "DistributionPrior",
    "HierarchicalNormalPrior",
    "LaplacePrior",
    "LipschitzPrior",
    "MixturePrior",
    "NormalPrior",
    "Prior",
    "PriorModule",
    "ScalePrior",
    "SeparablePrior",
    "StudentTPrior",
    "SumPrior",
]
