"""Optimizers that know the family they move: preconditioned means, and natural gradients."""

from .natural_gradient import NaturalGradient
from .soap import Soap

__all__ = ["NaturalGradient", "Soap"]
