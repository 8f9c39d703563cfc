"""Priors of the weights: any callable (parameters, theta [S, P]) → [S], and the ones that are made here."""

from .base import Prior, PriorModule, SeparablePrior, SumPrior
from .distribution import DistributionPrior
from .hierarchical import HierarchicalNormalPrior
from .lipschitz import LipschitzPrior
from .scale import LaplacePrior, NormalPrior, ScalePrior, StudentTPrior

__all__ = [
    "DistributionPrior",
    "HierarchicalNormalPrior",
    "LaplacePrior",
    "LipschitzPrior",
    "NormalPrior",
    "Prior",
    "PriorModule",
    "ScalePrior",
    "SeparablePrior",
    "StudentTPrior",
    "SumPrior",
]
