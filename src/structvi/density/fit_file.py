"""A fitted log density as one file, without code: the family, what the fit came to, and of which parameters.

The log density itself is a function and is not in the file: `load_fit` is given it again. Its parameters and its value
at the mean of q tell whether it is the one that was fitted. A file is checked before anything is made of it.
"""

import os
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from ..families.family import Family
from ..files.describe import decode, refusing
from ..files.file import CheckpointError, all_finite, brief, read, write
from ..files.posterior_file import describe_part, differences, shapes_of, table, under
from ..models.target import Target
from ..objective import Estimate
from ..parameters import Parameters
from ..result import Status
from .mixture import Mode
from .schedule import SearchStep
from .targets import OverBatches

if TYPE_CHECKING:
    from .result import DensityFit

DENSITY_FIT = "density fit"
#: counts that a fit has, in a file
COUNTS = ("evaluations", "draws", "starts", "check_evaluations", "verdict_evaluations", "refused")
#: by how much log p at the mean may differ, as a share of itself and of one nat
SAME = {torch.float64: 1e-6, torch.float32: 1e-2}


def save_fit(fit: "DensityFit", path: str | os.PathLike[str]) -> None:
    """Write a fit to one file, see `DensityFit.save`."""
    target, family, space = fit.target, fit.family, fit.target.space
    tensors = {f"family.{name}": tensor for name, tensor in family.state_dict().items()}
    if not all(map(all_finite, tensors.values())):
        raise ValueError("the family has values that are not finite, and a file of it could not be loaded: fit again")
    described = describe_part(family)
    if "value" in described:
        decode(described["value"], "family")
    tensors["elbo.per_group"] = fit.elbo.per_group
    tensors["modes.theta"] = torch.stack([m.theta for m in fit.modes]) if fit.modes else torch.zeros(0, space.size)
    value, again = _at_mean(target, family), _at_mean(target, family)
    description = {
        "kind": DENSITY_FIT, "family": described, "space": _space(space),
        "log_joint": value if _is_same(value, again, space) else None,  # else of random batches
        "status": str(fit.status), "verdict": fit.verdict, "notes": fit.notes, "seconds": fit.seconds,
        "elbo": [fit.elbo.value, fit.elbo.standard_error, fit.elbo.bound], "trace": [list(step) for step in fit.trace],
        "modes": [[mode.log_p, mode.log_mass] for mode in fit.modes],
        **{name: getattr(fit, name) for name in COUNTS},
    }  # fmt: skip
    write(path, tensors, description)


def load_fit(
    path: str | os.PathLike[str],
    target: Target,
    loader: Iterable[Any] | None = None,
    *,
    family: Family | None = None,
) -> dict[str, Any]:
    """Return the fields of the fit in a file that `DensityFit.save` wrote; `vi.load` makes the fit of them.

    Reading runs no code. The log density is not in the file: give the same again. `vi.fit_density(target, fit.family)`
    goes on from there.

    Args:
        path: the file.
        target: the log density that was fitted. Parameters of other names, shapes or constraints, and another value at
            the mean of q (other data, another prior), are refused.
        loader: of a fit in minibatches, its batches; one pass over them tells whether they are the same, but for
            batches that differ from pass to pass.
        family: a family that you wrote yourself is not in the file: give its recipe again.

    Raises:
        CheckpointError: the file is missing, damaged, of another version or of another kind.
        ValueError: the log density, the loader or the family is another one than was saved.

    Example:
        >>> import tempfile
        >>> from structvi import FullNormal, LogDensity, Parameters, fit_density
        >>> path = os.path.join(tempfile.mkdtemp(), "fit.safetensors")
        >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), Parameters({"z": torch.zeros(2)}))
        >>> fit_density(target, FullNormal(), progress=False).save(path)
        >>> load_fit(path, target)["status"].name
        'CONVERGED'
    """
    space = target.space
    tensors, saved = read(path)
    if saved.get("kind") != DENSITY_FIT:
        raise CheckpointError(f"{path} holds no fit of a log density, but a {brief(saved.get('kind'))}")
    with refusing(path):
        different = differences(saved["space"], _space(space))
    if different:
        raise ValueError(f"{path} is the fit of other parameters. They are\n" + "\n".join(different))
    recipe = _recipe(saved, family, space, path)
    with refusing(path):
        own = table(recipe.state_dict()) if recipe.is_bound else shapes_of(recipe, space)
        expected = {f"family.{name}": (shape,) for name, (shape, _) in own.items()}
        expected["modes.theta"] = ((len(saved["modes"]), space.size),)
        found = {name: (shape,) for name, (shape, _) in table(tensors).items() if name != "elbo.per_group"}
        different = differences(found, expected)
    if different:
        what = f"{path}: the family ({type(recipe).__name__}) is not the one that was saved. The tensors are\n"
        raise (CheckpointError if family is None else ValueError)(what + "\n".join(different))
    own = under("family", tensors)
    with refusing(path):
        if not all(map(all_finite, own.values())):
            raise ValueError("the family has values that are not finite")
        q = recipe if recipe.is_bound else recipe.bind(space, torch.Generator().manual_seed(0))
        q.load_state_dict(own)
        theta, (value, error, bound) = tensors["modes.theta"].to(space.initial), saved["elbo"]
        fields: dict[str, Any] = {
            "family": q,
            "status": Status(saved["status"]),
            "verdict": str(saved["verdict"]),
            "notes": [str(note) for note in saved["notes"]],
            "seconds": float(saved["seconds"]),
            "elbo": Estimate(float(value), float(error), tensors["elbo.per_group"], bool(bound)),
            "trace": [SearchStep(str(a), int(b), int(c), float(d)) for a, b, c, d in saved["trace"]],
            "modes": [Mode(at, float(a), float(b)) for at, (a, b) in zip(theta, saved["modes"], strict=True)],
            **{name: int(saved[name]) for name in COUNTS},
        }
        before = None if saved["log_joint"] is None else float(saved["log_joint"])
    whole = target if loader is None else OverBatches(target, loader)
    if before is not None and not _is_same(before, now := _at_mean(whole, q), space):
        raise ValueError(
            f"{path} is the fit of another log density: at the mean of q it was {before:.6g} and is {now:.6g}. Give "
            "the data and the prior that were fitted; to fit these, vi.fit_density(target, family)"
        )
    return {"target": whole, **fields}


def _recipe(saved: Mapping[str, Any], family: Family | None, space: Parameters, path: Any) -> Family:
    """Return the family that was given, bound, or a recipe from the file."""
    with refusing(path):
        ((form, value),) = saved["family"].items()
        if form == "value" and family is None:
            return decode(value, "family")
    if family is None:
        raise ValueError(
            f"{path} has a family of your own, {brief(value)}, which is not in the file: give it again, "
            "load(path, target, family=..)"
        )
    return family if family.is_bound else family.bind(space, torch.Generator().manual_seed(0))


def _space(space: Parameters) -> dict[str, Any]:
    """Return places in θ, free shapes, dtypes and constraints by name.

    Example:
        >>> from structvi.constraints import positive
        >>> _space(Parameters({"mu": 0.0, "sigma": positive(1.0)}))
        {'mu': ['number 0', [], 'torch.float64', ''], 'sigma': ['number 1', [], 'torch.float64', 'positive']}
    """
    named = zip(space.names, space.shapes, strict=True)
    constraints = {name: constraint.name for name, constraint in space.constraints.items()}
    return {
        name: [f"number {place}", list(shape), str(space.dtype), constraints.get(name, "")]
        for place, (name, shape) in enumerate(named)
    }


@torch.no_grad()
def _at_mean(target: Target, family: Family) -> float:
    """Return log p at the mean of q."""
    return float(target.log_joint(family().mean.unsqueeze(0)))


def _is_same(one: float, other: float, space: Parameters) -> bool:
    return isfinite(one) and abs(one - other) <= SAME[space.dtype] * (1 + abs(one))
