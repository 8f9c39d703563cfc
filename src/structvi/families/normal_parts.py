"""A density as the mixture of normals that it is, each as cheap as its family makes it."""

from typing import NamedTuple

from .density import Density
from .gaussian import Gaussian
from .mixture import MixtureDensity


class Weighted(NamedTuple):
    """A normal and its weight in a mixture."""

    weight: float
    normal: Gaussian


def weighted_normals(density: Density) -> list[Weighted]:
    """The normals that a density is a mixture of, itself where it is one; none where it is no such mixture.

    Example:
        >>> import torch
        >>> from structvi import Mixture, MeanField, Parameters
        >>> q = Mixture(MeanField(), components=2).bind(Parameters({"z": torch.zeros(3)}))
        >>> [one.weight for one in weighted_normals(q())]
        [0.5, 0.5]
    """
    if isinstance(density, Gaussian):
        return [Weighted(1.0, density)]
    if not isinstance(density, MixtureDensity):
        return []
    parts = [weighted_normals(part) for part in density.parts]
    if not all(parts):
        return []
    own = zip(density.proportions.tolist(), parts, strict=True)
    return [Weighted(share * one.weight, one.normal) for share, part in own for one in part]
