"""The tensors that a described family would have over a space: by arithmetic, before the family is made.

A description of a few bytes can ask for more numbers than there is memory. What it asks for has to be in the file.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..families.basis import layout
from ..parameters import Parameters
from ..util.patterns import assign
from .describe import is_sequence

Shapes = dict[str, tuple[int, ...]]


def tensors_of_family(description: Mapping[str, Any], space: Parameters) -> Shapes:
    """Name → shape of all that the family's state dict would have.

    Args:
        description: of a family, which `describe.check` has passed.
        space: what it is to be bound to.

    Example:
        >>> import torch
        >>> from structvi import Mixture, MeanField
        >>> from structvi.files.describe import encode
        >>> space = Parameters({"z": torch.zeros(3)})
        >>> tensors_of_family(encode(Mixture(MeanField(), components=1)), space)
        {'raw_logits': (1,), 'inner.0.mean': (3,), 'inner.0.log_scale': (3,)}
    """
    name, arguments = description["structvi"]
    return _SHAPES[name](arguments, space)


def _point(arguments: Mapping[str, Any], space: Parameters) -> Shapes:
    return {"point": (space.size,)}


def _mean_field(arguments: Mapping[str, Any], space: Parameters) -> Shapes:
    return {"mean": (space.size,), "log_scale": (space.size,)}


def _low_rank(arguments: Mapping[str, Any], space: Parameters) -> Shapes:
    P = space.size
    return {"mean": (P,), "log_scale": (P,), "factor": (P, arguments["rank"]), "unit": (P,)}


def _full(arguments: Mapping[str, Any], space: Parameters) -> Shapes:
    P = space.size
    return {"mean": (P,), "log_diagonal": (P,), "lower": (P * (P - 1) // 2,), "unit": (P,)}


def _mixture(arguments: Mapping[str, Any], space: Parameters) -> Shapes:
    part, components = arguments["part"], arguments.get("components")
    parts = part["list"] if is_sequence(part) else [part] * (2 if components is None else components)
    shapes: Shapes = {"raw_logits": (len(parts),)}
    for c, one in enumerate(parts):
        shapes |= _under(f"inner.{c}", tensors_of_family(one, space))
    return shapes


def _scale_mixture(arguments: Mapping[str, Any], space: Parameters) -> Shapes:
    components = arguments.get("components", 3)
    own: Shapes = {"log_ratio": (components - 1, space.size), "raw_logits": (components,)}
    return {**own, **_under("part", _low_rank(arguments, space))}


def _blocks(arguments: Mapping[str, Any], space: Parameters) -> Shapes:
    pairs = arguments["blocks"]["dict"]
    owners = assign(space.names, [pattern for pattern, _ in pairs], "PerLayer")
    shapes: Shapes = {}
    for b, (_, family) in enumerate(pairs):
        names = [name for name, owner in zip(space.names, owners, strict=True) if owner == b]
        shapes |= _under(f"inner.{b}", tensors_of_family(family, space.subset(names)))
    return shapes


def _rotated(arguments: Mapping[str, Any], space: Parameters) -> Shapes:
    axes = {axis.name: (axis.size, axis.size) for tensor in layout(space) for axis in tensor.axes}
    return {**_under("part", tensors_of_family(arguments["part"], space)), **_under("basis", axes)}


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


_SHAPES: dict[str, Callable[[Mapping[str, Any], Parameters], Shapes]] = {
    "MAP": _point,
    "MeanField": _mean_field,
    "LowRankNormal": _low_rank,
    "LowRankPrecision": _low_rank,
    "FullNormal": _full,
    "Mixture": _mixture,
    "PerLayer": _blocks,
    "MCDropout": _point,
    "Rotated": _rotated,
    "ScaleMixture": _scale_mixture,
}
