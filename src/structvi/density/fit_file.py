"""A fitted log density as one file, without code: the family, what the fit came to, and of which parameters.

The log density itself is a function and is not in the file: `load_fit` is given it again. Its parameters and its value
at the mean of q tell whether it is the one that was fitted. A file is checked before anything is made of it.
"""

import os
from collections.abc import Iterable, Mapping
from math import isfinite
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from ..families.family import Family
from ..files.describe import decode, refusing
from ..files.file import CheckpointError, brief, read, write
from ..files.posterior_file import describe_part, differences, shapes_of, table, under
from ..models.target import Target
from ..objective import Estimate
from ..parameters import Parameters
from ..result import Status
from .adam import OverBatches
from .mixture import Mode
from .schedule import SearchStep

if TYPE_CHECKING:
    from .result import DensityFit

DENSITY_FIT = "density fit"
#: counts that a fit has, in a file
COUNTS = ("evaluations", "draws", "starts", "check_evaluations", "verdict_evaluations", "refused")
#: by how much log p at the mean may differ, as a share of itself and of one nat
SAME = {torch.float64: 1e-6, torch.float32: 1e-2}
#: the fields of a description and their types: [type] is a list of any length
FIELDS: dict[str, Any] = {
    "kind": str, "family": dict, "space": [(str, [int], str)], "dtype": str, "log_joint": float | NoneType,
    "minibatches": bool, "status": str, "verdict": str, "notes": [str], "seconds": float, "elbo": (float, float, bool),
    "trace": [(str, int, int, float)], "modes": [(float, float, int)], **dict.fromkeys(COUNTS, int),
}  # fmt: skip


def save_fit(fit: "DensityFit", path: str | os.PathLike[str]) -> None:
    """Write a fit to one file, see `DensityFit.save`."""
    target, family, space = fit.target, fit.family, fit.target.space
    tensors = {f"family.{name}": tensor for name, tensor in family.state_dict().items()}
    if not all(bool(x.isfinite().all()) for x in tensors.values()):
        raise ValueError("the family has values that are not finite, and a file of it could not be loaded: fit again")
    described = describe_part(family)
    if "value" in described:
        decode(described["value"], "family")
    tensors["elbo.per_group"] = fit.elbo.per_group
    tensors["modes.theta"] = torch.stack([m.theta for m in fit.modes]) if fit.modes else torch.zeros(0, space.size)
    minibatches = isinstance(target, OverBatches)
    value, again = _at_mean(target, family), _at_mean(target, family) if minibatches else None
    if minibatches and not _same(value, again, space):  # random batches, or some that leave rows out
        value = None
    description = {
        "kind": DENSITY_FIT, "family": described, "space": _space(space), "dtype": str(space.dtype),
        "log_joint": value, "minibatches": minibatches, "status": str(fit.status), "verdict": fit.verdict,
        "notes": fit.notes, "seconds": fit.seconds,
        "elbo": [fit.elbo.value, fit.elbo.standard_error, fit.elbo.bound],
        "trace": [list(step) for step in fit.trace],
        "modes": [[mode.log_p, mode.log_mass, mode.reached] for mode in fit.modes],
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
    if not isinstance(target, Target):
        raise TypeError(
            f"load_fit expects the log density after the path, got {type(target).__name__}; a posterior of a network "
            "is read by vi.load(path, net)"
        )
    space = target.space
    tensors, saved = read(path)
    _check(saved, space, path)
    q = _family(saved, family, space, path)
    with refusing(path):
        expected = {f"family.{name}": shape for name, shape in _shapes(q, space).items()}
    expected["modes.theta"] = (len(saved["modes"]), space.size)
    file = {name: (shape,) for name, (shape, _) in table(tensors).items() if name != "elbo.per_group"}
    if different := differences(file, {name: (shape,) for name, shape in expected.items()}):
        what = f"{path}: the family ({type(q).__name__}) is not the one that was saved. The tensors are\n"
        raise (CheckpointError if family is None else ValueError)(what + "\n".join(different))
    _check_dtypes(tensors, space, family is None, path)
    own = under("family", tensors)
    if family is None and not all(bool(x.isfinite().all()) for x in own.values()):
        raise CheckpointError(f"{path}: the family has values that are not finite: save one whose fit has not failed")
    with refusing(path):
        q = q if q.is_bound else q.bind(space, torch.Generator().manual_seed(0))
    q.load_state_dict(own, assign=True)
    q.to(space.device)
    theta = tensors["modes.theta"].to(space.initial)
    value, error, bound = saved["elbo"]
    return dict(
        target=_whole(saved, target, loader, q, path), family=q, status=Status(saved["status"]),
        modes=[Mode(theta[i], *numbers) for i, numbers in enumerate(saved["modes"])], notes=list(saved["notes"]),
        elbo=Estimate(value, error, tensors["elbo.per_group"], bound), verdict=saved["verdict"],
        seconds=saved["seconds"], trace=[SearchStep(*step) for step in saved["trace"]],
        **{name: saved[name] for name in COUNTS},
    )  # fmt: skip


def _space(space: Parameters) -> list[list[Any]]:
    """Return names in their order, free shapes, and constraints.

    Example:
        >>> from structvi.constraints import positive
        >>> _space(Parameters({"mu": 0.0, "sigma": positive(1.0)}))
        [['mu', [], ''], ['sigma', [], 'positive']]
    """
    constraints = space.constraints
    return [
        [name, list(shape), constraints[name].name if name in constraints else ""]
        for name, shape in zip(space.names, space.shapes, strict=True)
    ]


@torch.no_grad()
def _at_mean(target: Target, family: Family) -> float | None:
    """Return log p at the mean of q, None if it is not finite."""
    value = float(target.log_joint(family().mean.unsqueeze(0)))
    return value if isfinite(value) else None


def _same(one: float | None, other: float | None, space: Parameters) -> bool:
    if one is None or other is None:
        return False
    return abs(one - other) <= SAME[space.dtype] * (1 + abs(one))


def _is(value: Any, kind: Any) -> bool:
    """Return whether a value of a description has a type of `FIELDS`; whole numbers are not negative.

    Example:
        >>> _is([["a", 1]], [(str, int)]), _is([["a", -1]], [(str, int)])
        (True, False)
    """
    if isinstance(kind, list):
        return isinstance(value, list) and all(_is(one, kind[0]) for one in value)
    if isinstance(kind, tuple):
        return isinstance(value, list) and len(value) == len(kind) and all(map(_is, value, kind))
    if isinstance(value, int) and not isinstance(value, bool):
        return value >= 0 if kind is int else kind is float and isfinite(float(value))
    return isinstance(value, kind)


def _check(saved: Mapping[str, Any], space: Parameters, path: Any) -> None:
    """Raise if the file is of another kind or other parameters, or `save_fit` has not written it."""
    kind = saved.get("kind")
    if kind == "posterior":
        raise CheckpointError(f"{path} is the posterior of a network: vi.load(path, net) reads it")
    if kind != DENSITY_FIT:
        raise CheckpointError(f"{path} holds no fit of a log density: its description is of kind {brief(kind)}")
    with refusing(path):
        if saved.keys() != FIELDS.keys():
            raise ValueError(f"expected the fields {sorted(FIELDS)}, got {brief(sorted(saved), 400)}")
        for name, kind in FIELDS.items():
            if not _is(saved[name], kind):
                raise ValueError(f"{name} is {brief(saved[name])}")
        if saved["log_joint"] is not None and not isfinite(saved["log_joint"]):  # NaN is near any number
            raise ValueError(f"log_joint must be finite, got {saved['log_joint']}")
        Status(saved["status"])
        there = {name: (tuple(shape), constraint) for name, shape, constraint in saved["space"]}
    here = {name: (tuple(shape), constraint) for name, shape, constraint in _space(space)}
    if different := differences(there, here):
        raise ValueError(f"{path} is the fit of other parameters. They are\n" + "\n".join(different))
    if saved["space"] != _space(space):
        raise ValueError(f"{path} has the parameters in another order: {', '.join(map(brief, there))}")
    if saved["dtype"] != str(space.dtype):
        raise ValueError(f"{path} is a fit in {brief(saved['dtype'])}, the parameters here are in {space.dtype}")


def _family(saved: Mapping[str, Any], family: Family | None, space: Parameters, path: Any) -> Family:
    """Return the family that was given, bound, or a recipe from the file."""
    with refusing(path):
        ((form, value),) = saved["family"].items()
        if form not in ("own", "value"):
            raise ValueError(f"expected a value or the name of your own, got {brief(form)}")
        if form == "value" and family is None:
            return decode(value, "family")
    if family is None:
        raise ValueError(
            f"{path} has a family of your own, {brief(value)}, which is not in the file: give it again, "
            "load_fit(path, target, family=..)"
        )
    if not isinstance(family, Family):
        raise TypeError(f"family must be a family such as MeanField(), got {family!r}")
    return family if family.is_bound else family.bind(space, torch.Generator().manual_seed(0))


def _shapes(q: Family, space: Parameters) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the family's tensors: of a recipe by arithmetic, before it is made."""
    if q.is_bound:
        return {name: tuple(tensor.shape) for name, tensor in q.state_dict().items()}
    return {name: shape for name, (shape, _) in shapes_of(q, space).items()}


def _check_dtypes(tensors: Mapping[str, torch.Tensor], space: Parameters, ours: bool, path: Any) -> None:
    wrong = [name for name, x in under("family", tensors).items() if ours and x.dtype != space.dtype]
    per_group = tensors.get("elbo.per_group")
    if wrong or per_group is None or per_group.dtype != torch.float64 or per_group.ndim != 1:
        raise CheckpointError(f"{path} is damaged: it does not hold the numbers that structvi writes")


def _whole(saved: Mapping[str, Any], target: Target, loader: Iterable[Any] | None, q: Family, path: Any) -> Target:
    """Return the log density of all data; raise if it is another one than was fitted."""
    if saved["minibatches"]:
        if loader is None:
            raise ValueError(f"{path} was fitted in minibatches: give the loader too, load_fit(path, target, loader)")
        target = OverBatches(target, loader)
    elif loader is not None:
        raise ValueError(f"{path} was fitted without minibatches: load_fit(path, target), without a loader")
    before = saved["log_joint"]
    if before is not None and not _same(before, now := _at_mean(target, q), target.space):
        raise ValueError(
            f"{path} is the fit of another log density: at the mean of q it was {before:.6g} and is "
            f"{'not finite' if now is None else f'{now:.6g}'}. Give the data and the prior that were fitted; to fit "
            "these, vi.fit_density(target, family)"
        )
    return target
