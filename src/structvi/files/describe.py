"""Families, priors and likelihoods as JSON, and back: by name, from the classes of their packages, never by import.

A description may come from anyone: `decode` makes an object of the requested kind, within a bound on its size.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributions as td

from .. import families
from ..families import Family
from ..models import likelihoods, priors
from ..models.likelihoods import Likelihood
from ..models.priors import SeparablePrior, SumPrior
from ..util.checks import is_integer
from ..util.configuration import configuration
from .file import CheckpointError, brief

#: families in a description, with the copies that a mixture makes of its part: far more than a posterior needs
FAMILIES = 4096

Kind = Literal["family", "likelihood", "prior"]
_PACKAGES = {"family": (families, Family), "likelihood": (likelihoods, Likelihood), "prior": (priors, SeparablePrior)}
#: classes that are rebuilt from their constructors' arguments, which they keep as attributes
_CLASSES: dict[str, tuple[str, type]] = {
    name: (kind, getattr(package, name))
    for kind, (package, base) in _PACKAGES.items()
    for name in package.__all__
    if isinstance(getattr(package, name), type) and issubclass(getattr(package, name), (base, SumPrior))
}
_DISTRIBUTIONS: dict[str, type[td.Distribution]] = {
    cls.__name__: cls
    for cls in (
        td.Cauchy, td.Exponential, td.Gamma, td.HalfCauchy, td.HalfNormal, td.InverseGamma, td.Laplace, td.LogNormal,
        td.MultivariateNormal, td.Normal, td.StudentT,
    )
}  # fmt: skip
_SEQUENCES = {"tuple": tuple, "list": list}
_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)}
#: errors of a constructor, or of the code here, for values that `encode` never wrote
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError, RecursionError)


class OfYourOwn(Exception):
    """A function, or an object of a class that is not in the list, cannot be described; the text is its name."""


def encode(value: Any) -> Any:
    """Return a value as JSON from which `decode` makes it again.

    Example:
        >>> from structvi.models.priors import NormalPrior
        >>> encode(NormalPrior({"head.*": 0.1}))["structvi"][0]
        'NormalPrior'
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) in (tuple, list):
        return {type(value).__name__: [encode(item) for item in value]}
    if isinstance(value, Mapping):  # pairs: the order of patterns counts, that of a JSON object is lost
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, Tensor):
        return {"tensor": [str(value.dtype), encode(value.detach().cpu().tolist())]}
    name = type(value).__name__
    if _DISTRIBUTIONS.get(name) is type(value):
        arguments = {argument: encode(getattr(value, argument)) for argument in _arguments(type(value))}
        return {"distribution": [name, arguments]}
    if name in _CLASSES and _CLASSES[name][1] is type(value):
        arguments = {argument: encode(item) for argument, item in configuration(value).items()}
        return {"structvi": [name, arguments]}
    raise OfYourOwn(getattr(value, "__name__", name))


def _arguments(cls: Any) -> tuple[str, ...]:
    """Return the constructor's arguments that make a torch distribution again."""
    return ("loc", "scale_tril") if cls is td.MultivariateNormal else tuple(cls.arg_constraints)


def decode(value: Any, kind: Kind | None = None) -> Any:
    """Return the value that `encode` described; families are recipes, whatever they were.

    Args:
        value: the description.
        kind: of the value, and of every object in it; None for a value without objects.

    Raises:
        ValueError: it describes nothing, something of another kind, or more families than the bound allows.

    Example:
        >>> from structvi import MeanField
        >>> decode(encode(MeanField(initial_scale=0.2)), "family")
        MeanField(initial_mean='current', initial_scale=0.2, unbound)
    """
    if kind is not None and not (isinstance(value, dict) and value.keys() == {"structvi"}):
        raise ValueError(f"expected a {kind}, got {brief(value)}")
    try:
        return _build(value, kind)
    except MALFORMED as error:
        raise ValueError(f"{type(error).__name__}: {brief(str(error), 200)}") from None


def _build(value: Any, kind: Kind | None) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        if not (isfinite(value) and abs(value) < 2**63):
            raise ValueError(f"a number that is not finite, or beyond 64 bits: {brief(value)}")
        return value
    ((tag, content),) = value.items()
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_build(item, kind) for item in content)
    if tag == "dict":
        return {_build(key, kind): _build(item, kind) for key, item in content}
    name, described = content
    if tag == "tensor":
        return torch.tensor(_build(described, kind), dtype=_DTYPES[name])
    arguments = {key: _build(item, kind) for key, item in described.items()}
    if tag == "distribution":
        cls = _DISTRIBUTIONS[name]
        if arguments.keys() != set(_arguments(cls)):
            raise ValueError(f"{name} has the arguments {_arguments(cls)}, got {brief(list(arguments))}")
        shapes = {tuple(x.shape) for x in arguments.values() if isinstance(x, Tensor)}
        if len(shapes) > 1 and cls is not td.MultivariateNormal:  # broadcasting would make more than there is
            raise ValueError(f"the arguments of {name} differ in shape")
        return cls(**arguments)
    if tag != "structvi":
        raise ValueError(f"nothing that structvi writes: {brief(value)}")
    own, cls = _CLASSES[name]
    if own != kind:
        raise ValueError(f"expected {'a ' + kind if kind else 'no object'}, got the {own} {name}")
    part, copies = arguments.get("part"), arguments.get("components")
    inside = sum(isinstance(one, Family) for one in part.modules()) if isinstance(part, Family) else 0
    if is_integer(copies) and copies * inside > FAMILIES:
        raise ValueError(f"more than {FAMILIES} families in all")
    return cls(**arguments)


@contextmanager
def refusing(path: Any) -> Iterator[None]:
    """Raise CheckpointError, which names the file, for an error inside."""
    try:
        yield
    except CheckpointError:
        raise
    except MALFORMED as error:
        raise CheckpointError(
            f"{path} cannot be loaded, it is not as structvi writes it: {type(error).__name__} {brief(str(error), 400)}"
        ) from None
