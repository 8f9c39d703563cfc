"""A fitted log density as one file: the family, what the fit came to, and of which parameters; without code.

The log density itself is a function and is not in the file: `loading.py` is given it again.
"""

import os
from collections.abc import Sequence
from math import isfinite
from typing import Any, Protocol

import torch

from ..families.family import Family
from ..files.describe import decode
from ..files.file import write
from ..files.posterior_file import describe_part
from ..models.target import Target
from ..objective import Estimate
from ..parameters import Parameters
from .adam import OverBatches
from .mixture import Mode

#: counts that a fit has, in a file
COUNTS = ("evaluations", "draws", "starts", "check_evaluations", "verdict_evaluations", "refused")
DENSITY_FIT = "density fit"


#: by how much log p at the mean may differ, as a share of itself and of one nat
SAME = {torch.float64: 1e-6, torch.float32: 1e-2}


class Savable(Protocol):
    """What of a fit is in its file, beside the counts."""

    seconds: float
    notes: list[str]
    verdict: str
    elbo: Estimate
    family: Family
    target: Target

    @property
    def status(self) -> str: ...
    @property
    def trace(self) -> Sequence[tuple[str, int, int, float]]: ...
    @property
    def modes(self) -> Sequence[Mode]: ...


def save_fit(fit: Savable, path: str | os.PathLike[str]) -> None:
    """Write a fit to one file, see `DensityFit.save`."""
    target, family = fit.target, fit.family
    tensors = {f"family.{name}": tensor for name, tensor in family.state_dict().items()}
    if not all(bool(x.isfinite().all()) for x in tensors.values()):
        raise ValueError("the family has values that are not finite, and a file of it could not be loaded: fit again")
    described = describe_part(family)
    if "value" in described:
        decode(described["value"], "family", len(target.space.names))
    P = target.space.size
    tensors["elbo.per_group"] = fit.elbo.per_group
    tensors["modes.theta"] = torch.stack([m.theta for m in fit.modes]) if fit.modes else torch.zeros(0, P)
    minibatches = isinstance(target, OverBatches)
    description = {
        "kind": DENSITY_FIT,
        "family": described,
        "space": space_of(target.space),
        "dtype": str(target.space.dtype),
        "log_joint": twice_the_same(target, family) if minibatches else at_mean(target, family),
        "minibatches": minibatches,
        "status": str(fit.status),
        "verdict": fit.verdict,
        "notes": fit.notes,
        "seconds": fit.seconds,
        "elbo": [fit.elbo.value, fit.elbo.standard_error, fit.elbo.bound],
        "trace": [list(step) for step in fit.trace],
        "modes": [[mode.log_p, mode.log_mass, mode.reached] for mode in fit.modes],
        **{name: getattr(fit, name) for name in COUNTS},
    }
    write(path, tensors, description)


def space_of(space: Parameters) -> list[list[Any]]:
    """Names in their order, free shapes, and constraints.

    Example:
        >>> from structvi.constraints import positive
        >>> space_of(Parameters({"mu": 0.0, "sigma": positive(1.0)}))
        [['mu', [], ''], ['sigma', [], 'positive']]
    """
    constraints = space.constraints
    return [
        [name, list(shape), constraints[name].name if name in constraints else ""]
        for name, shape in zip(space.names, space.shapes, strict=True)
    ]


@torch.no_grad()
def at_mean(target: Target, family: Family) -> float | None:
    """log p at the mean of q, where there is one that is finite."""
    value = float(target.log_joint(family().mean.unsqueeze(0)))
    return value if isfinite(value) else None


def twice_the_same(target: Target, family: Family) -> float | None:
    """`at_mean` over batches where two passes agree; None of random batches, or of some that leave rows out."""
    one, other = at_mean(target, family), at_mean(target, family)
    if one is None or other is None or abs(one - other) > SAME[target.space.dtype] * (1 + abs(one)):
        return None
    return one
