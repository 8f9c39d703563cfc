"""Parts of a file: a family, a likelihood, a prior with their tensors, described, compared and set."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..families.basis import is_orthogonal
from .describe import OfYourOwn, encode
from .header import CheckpointError, brief

#: lines of differences in a message
_LINES = 20


def any_start() -> torch.Generator:
    """For a family whose values come from the file."""
    return torch.Generator().manual_seed(0)


def describe_part(part: Any) -> dict[str, Any]:
    """{"value": its description}, or {"own": its name} where it is the user's own.

    Example:
        >>> describe_part(len)
        {'own': 'len'}
    """
    try:
        return {"value": encode(part)}
    except OfYourOwn as name:
        return {"own": str(name)}


def under(part: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a part, by their names in it.

    Example:
        >>> under("family", {"family.mean": 1, "prior.scale": 2})
        {'mean': 1}
    """
    return {name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")}


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Lines that tell two tables apart, name → tuple; none where they are the same.

    Example:
        >>> differences({"a": ((2,), "float")}, {"a": ((3,), "float")})
        ['  a: [2] float in the file, [3] float here']
    """
    lines = [f"  missing: {shown(name)} {_text(saved[name])}" for name in saved if name not in here]
    lines += [f"  extra: {shown(name)} {_text(here[name])}" for name in here if name not in saved]
    lines += [
        f"  {shown(name)}: {_text(saved[name])} in the file, {_text(here[name])} here"
        for name in saved
        if name in here and saved[name] != here[name]
    ]
    return lines if len(lines) <= _LINES else [*lines[:_LINES], f"  … and {len(lines) - _LINES} more"]


def shown(name: str) -> str:
    """A name out of a file, fit to be printed."""
    return name if name.isprintable() and len(name) <= 200 else brief(name)


def _text(entry: tuple) -> str:
    return " ".join(shown(str(list(item) if isinstance(item, tuple) else item)) for item in entry)


def check_values(tensors: Mapping[str, Tensor], what: str) -> None:
    """Of our families, likelihoods and priors: what was learned is finite, and so are scales; units are positive, and
    axes at right angles.
    """
    for name, tensor in tensors.items():
        last = name.split(".")[-1]
        if not tensor.isfinite().all():
            raise CheckpointError(f"{what} has values that are not finite in {name}: save one whose fit has not failed")
        if last.startswith("log_") and not tensor.exp().isfinite().all():
            raise CheckpointError(f"{what} has scales that are not finite: {name} goes up to {tensor.max().item():g}")
        if last == "unit" and not (tensor > 0).all():
            raise CheckpointError(f"{what} has scales that are not positive in {name}")
        if ".basis." in f".{name}" and not is_orthogonal(tensor):
            raise CheckpointError(f"{what} has axes that are not orthogonal: {name}")


def set_tensors(module: Any, tensors: Mapping[str, Tensor], what: str) -> None:
    """A module's tensors, with the dtypes of the file."""
    if not tensors:
        return
    try:
        module.load_state_dict(tensors, assign=True)  # assign: with the dtype of the file
    except RuntimeError as error:
        raise ValueError(f"{what} does not take the tensors of the file: {error}") from None
