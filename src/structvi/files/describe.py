"""Families, priors and likelihoods as JSON, and back: by name, from an explicit list of classes, never by import.

A description may come from anyone. It is walked before anything is made of it, so that what is made is of the kind that
was asked for and as large as the description, not larger.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributions as td

from ..families import (
    MAP,
    FullNormal,
    LowRankNormal,
    LowRankPrecision,
    MCDropout,
    MeanField,
    Mixture,
    PerLayer,
    Rotated,
    ScaleMixture,
)
from ..models.likelihoods import Bernoulli, Categorical, Gaussian, Poisson, StudentT
from ..models.priors.base import SumPrior
from ..models.priors.distribution import DistributionPrior
from ..models.priors.hierarchical import HierarchicalNormalPrior
from ..models.priors.scale import LaplacePrior, NormalPrior, StudentTPrior
from ..util.checks import is_integer
from ..util.configuration import configuration
from .header import brief

#: What a description may hold, far more than a posterior needs: families in families, families in all with the copies
#: that a mixture makes of its part, and letters in a family, likelihood or prior (patterns are compiled).
DEPTH = 8
FAMILIES = 4096
LETTERS = 1_000_000

#: of a described object; "plain" for values without any
Kind = Literal["family", "likelihood", "prior", "plain"]
_BY_KIND: dict[Kind, tuple[type, ...]] = {
    "family": (
        MAP,
        MeanField,
        LowRankNormal,
        LowRankPrecision,
        FullNormal,
        Mixture,
        PerLayer,
        MCDropout,
        Rotated,
        ScaleMixture,
    ),
    "likelihood": (Gaussian, Categorical, Bernoulli, Poisson, StudentT),
    "prior": (
        NormalPrior,
        LaplacePrior,
        StudentTPrior,
        HierarchicalNormalPrior,
        DistributionPrior,
        SumPrior,
    ),
}
#: rebuilt from their constructor's arguments, which they keep as attributes
_CLASSES = {cls.__name__: cls for classes in _BY_KIND.values() for cls in classes}
_KINDS: dict[str, Kind] = {cls.__name__: kind for kind, classes in _BY_KIND.items() for cls in classes}
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


def decode(value: Any, kind: Kind | None = None, patterns: int | None = None) -> Any:
    """The value that `encode` described; families are recipes, whatever they were.

    Args:
        value: the description.
        kind: what it has to describe, parts of it too; None for anything.
        patterns: the most entries of a dict, where dicts are of patterns, each with a tensor of its own.

    Raises:
        ValueError: it describes nothing, something of another kind, or more than the bounds above allow.

    Example:
        >>> decode(encode(MeanField(initial_scale=0.2)))
        MeanField(initial_mean='current', initial_scale=0.2, unbound)
    """
    try:
        check(value, kind, patterns)
        return _build(value)
    except ValueError:
        raise
    except Exception as error:  # whatever a constructor says of arguments that `encode` never wrote
        raise ValueError(f"{type(error).__name__}: {brief(str(error), 200)}") from None


def check(value: Any, kind: Kind | None = None, patterns: int | None = None) -> None:
    """Refuse, with a ValueError, what `decode` must not make; nothing is made.

    Example:
        >>> check(encode(NormalPrior(1.0)), "family")
        Traceback (most recent call last):
        ValueError: expected a family, got the prior NormalPrior
    """
    if kind in _BY_KIND and not (isinstance(value, dict) and value.keys() == {"structvi"}):
        raise ValueError(f"expected a family, likelihood or prior, got {brief(value)}")
    _Census(patterns).families(value, kind)


class _Census:
    """Walks a description: how many families `decode` would make, and a ValueError where it is none."""

    def __init__(self, patterns: int | None):
        self.patterns = patterns
        self.letters = 0

    def families(self, value: Any, kind: Kind | None, depth: int = 0) -> int:
        if value is None or isinstance(value, bool | int | float | str):
            self._scalar(value, kind)
            return 0
        if not isinstance(value, dict) or len(value) != 1:
            raise ValueError(f"expected a number, a text or an object with one entry, got {brief(value)}")
        ((tag, content),) = value.items()
        if not isinstance(content, list):
            raise ValueError(f"expected a list in {brief(value)}")
        if tag in _SEQUENCES:
            if tag == "frozenset" and not all(isinstance(item, str) for item in content):
                raise ValueError(f"expected names in a set, got {brief(content)}")
            return sum(self.families(item, kind, depth) for item in content)
        if tag == "dict":
            if self.patterns is not None and len(content) > self.patterns:
                raise ValueError(f"{len(content)} patterns for {self.patterns} tensors")
            if not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
                raise ValueError(f"expected pairs of keys and values in {brief(value)}")
            return sum(self.families(item, kind, depth) for pair in content for item in pair)
        if len(content) != 2 or not isinstance(content[0], str):
            raise ValueError(f"expected a name and what belongs to it in {brief(value)}")
        name, rest = content
        if tag == "structvi":
            return self._object(name, rest, kind, depth)
        if kind in ("family", "plain") or tag not in ("tensor", "distribution"):
            raise ValueError(f"there is no place for {brief(value)} here")
        if tag == "tensor":
            self._numbers(name, rest, kind)
        elif name not in _DISTRIBUTION_CLASSES or not isinstance(rest, dict):
            raise ValueError(f"no distribution that structvi knows: {brief(value)}")
        else:
            for argument in rest.values():
                self.families(argument, kind, depth)
        return 0

    def _object(self, name: str, arguments: Any, kind: Kind | None, depth: int) -> int:
        own = _KINDS.get(name)
        if own is None or not isinstance(arguments, dict):
            raise ValueError(f"no family, likelihood or prior that structvi knows: {brief(name)} {brief(arguments)}")
        if kind not in (None, own):
            raise ValueError(f"expected {'no object' if kind == 'plain' else f'a {kind}'}, got the {own} {name}")
        if depth == DEPTH:
            raise ValueError(f"more than {DEPTH} families or priors in each other")
        count = sum(self.families(argument, own, depth + 1) for argument in arguments.values())
        if own != "family":
            return count
        if name == Mixture.__name__ and not is_sequence(arguments.get("part")):
            components = arguments.get("components")
            if components is not None and not is_integer(components):
                raise ValueError(f"components must be None or an integer ≥ 1, got {brief(components)}")
            count *= 2 if components is None else components
        if count + 1 > FAMILIES:
            raise ValueError(f"more than {FAMILIES} families in all")
        return count + 1

    def _scalar(self, value: Any, kind: Kind | None) -> None:
        if isinstance(value, str):
            self.letters += len(value) if kind in _BY_KIND else 0
            if self.letters > LETTERS:
                raise ValueError(f"more than {LETTERS} letters in all")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"a whole number beyond 64 bits, {brief(value)}")
        elif isinstance(value, float) and kind in _BY_KIND and not isfinite(value):
            raise ValueError(f"a number that is not finite, {value}")

    def _numbers(self, dtype: str, rest: Any, kind: Kind | None) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"no dtype that structvi knows: {brief(dtype)}")
        rows = [rest]
        while rows:
            row = rows.pop()
            if is_sequence(row):
                rows += row["list"]
            elif not isinstance(row, bool | int | float):
                raise ValueError(f"expected numbers in a tensor, got {brief(row)}")
            else:
                self._scalar(row, kind)


def is_sequence(value: Any) -> bool:
    """Whether a description is of a list, as a mixture has its parts and a tensor its rows."""
    return isinstance(value, dict) and value.keys() == {"list"} and isinstance(value["list"], list)


def _build(value: Any) -> Any:
    """`decode`, of a description that has been checked."""
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_build(item) for item in content)
    if tag == "dict":
        pairs = [(_build(key), _build(item)) for key, item in content]
        if len(result := dict(pairs)) < len(pairs):
            raise ValueError(f"a key is there twice in {brief(value)}")
        return result
    name, rest = content
    if tag == "tensor":
        return torch.tensor(_build(rest), dtype=_DTYPES[name])
    arguments = {key: _build(item) for key, item in rest.items()}
    if tag == "structvi":
        return _CLASSES[name](**arguments)
    cls = _DISTRIBUTION_CLASSES[name]
    _check_arguments(cls, arguments)
    return cls(**arguments)


def _check_arguments(cls: type[td.Distribution], arguments: Mapping[str, Any]) -> None:
    """A distribution keeps its arguments in one shape: of others, broadcasting would make more than there is."""
    if arguments.keys() != set(_DISTRIBUTIONS[cls]):
        raise ValueError(f"{cls.__name__} has the arguments {_DISTRIBUTIONS[cls]}, got {brief(list(arguments))}")
    shapes = [tuple(x.shape) for x in arguments.values() if isinstance(x, Tensor)]
    if cls is td.MultivariateNormal and len(shapes) == 2:
        shapes[0] = (*shapes[0], *shapes[0][-1:])  # of loc [.., n] and scale_tril [.., n, n]
    if len(set(shapes)) > 1:
        raise ValueError(f"the arguments of {cls.__name__} differ in shape")
