"""Priors of the weights: any callable (parameters, theta [S, P]) → [S], and the ones that are made here."""

from .hierarchical import HierarchicalNormalPrior
from .lipschitz import LipschitzPrior
from .separable import (
    DistributionPrior,
    LaplacePrior,
    NormalPrior,
    Prior,
    PriorModule,
    ScalePrior,
    SeparablePrior,
    StudentTPrior,
    SumPrior,
)

__all__ = [
    "DistributionPrior", "HierarchicalNormalPrior", "LaplacePrior", "LipschitzPrior", "NormalPrior", "Prior",
    "PriorModule", "ScalePrior", "SeparablePrior", "StudentTPrior", "SumPrior",
]  # fmt: skip
