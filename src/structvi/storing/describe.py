"""Families, priors and likelihoods as JSON, and back: by name, from an explicit list of classes, never by import."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from ..basics.configuration import configuration
from ..families import (
    MAP,
    Blocks,
    FittedDropout,
    FullNormal,
    MCDropout,
    MeanField,
    Mixture,
    StructuredNormal,
    StructuredPrecision,
)
from ..models.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from ..models.priors.base import SumPrior
from ..models.priors.distribution import DistributionPrior
from ..models.priors.scale import LaplacePrior, NormalPrior, StudentTPrior

_FAMILIES = (
    MAP,
    MeanField,
    StructuredNormal,
    StructuredPrecision,
    FullNormal,
    Mixture,
    Blocks,
    MCDropout,
    FittedDropout,
)
_LIKELIHOODS = (Gaussian, Categorical, Bernoulli, Poisson)
_PRIORS = (NormalPrior, LaplacePrior, StudentTPrior, DistributionPrior, SumPrior)
#: rebuilt from their constructor's arguments, which they keep as attributes
_CLASSES = {cls.__name__: cls for cls in (*_FAMILIES, *_LIKELIHOODS, *_PRIORS)}
#: torch distributions and their constructor's arguments
_DISTRIBUTIONS = {
    td.Cauchy: ("loc", "scale"),
    td.Exponential: ("rate",),
    td.Gamma: ("concentration", "rate"),
    td.HalfCauchy: ("scale",),
    td.HalfNormal: ("scale",),
    td.InverseGamma: ("concentration", "rate"),
    td.Laplace: ("loc", "scale"),
    td.LogNormal: ("loc", "scale"),
    td.MultivariateNormal: ("loc", "scale_tril"),
    td.Normal: ("loc", "scale"),
    td.StudentT: ("df", "loc", "scale"),
}
_DISTRIBUTION_CLASSES = {cls.__name__: cls for cls in _DISTRIBUTIONS}
_SEQUENCES = {"tuple": tuple, "list": list, "frozenset": frozenset}
_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)}


class OfYourOwn(Exception):
    """A value that cannot be described: a function, or a class that is not in the list; the text is its name."""


def encode(value: Any) -> Any:
    """A value as JSON from which `decode` makes it again: numbers and strings as they are, all else with its type.

    Example:
        >>> encode(NormalPrior({"head.*": 0.1}))["structvi"][0]
        'NormalPrior'
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) in (tuple, list):
        return {type(value).__name__: [encode(item) for item in value]}
    if isinstance(value, frozenset):
        return {"frozenset": [encode(item) for item in sorted(value)]}
    if isinstance(value, Mapping):  # pairs: the order of patterns counts, that of a JSON object is lost
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, Tensor):
        return {"tensor": [str(value.dtype), encode(value.detach().cpu().tolist())]}
    if type(value) in _DISTRIBUTIONS:
        arguments = {name: encode(getattr(value, name)) for name in _DISTRIBUTIONS[type(value)]}
        return {"distribution": [type(value).__name__, arguments]}
    if _CLASSES.get(type(value).__name__) is type(value):
        arguments = {name: encode(item) for name, item in configuration(value).items()}
        return {"structvi": [type(value).__name__, arguments]}
    raise OfYourOwn(getattr(value, "__name__", type(value).__name__))


def decode(value: Any) -> Any:
    """The value that `encode` described; families are recipes, whatever they were.

    Example:
        >>> decode(encode(MeanField(initial_scale=0.2)))
        MeanField(initial_mean='current', initial_scale=0.2, unbound)
    """
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](decode(item) for item in content)
    if tag == "dict":
        return {decode(key): decode(item) for key, item in content}
    name, rest = content
    if tag == "tensor":
        return torch.tensor(decode(rest), dtype=_DTYPES[name])
    classes = {"distribution": _DISTRIBUTION_CLASSES, "structvi": _CLASSES}[tag]
    return classes[name](**{key: decode(item) for key, item in rest.items()})
