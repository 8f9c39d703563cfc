"""`load_fit`: a fitted log density from its file (`saving.py`).

The log density is given again. Whether it is the one that was fitted is seen by its parameters and by its value at the
mean of q. What a file says is checked before anything is
made of it, as of posteriors (`files/posterior_file.py`).
"""

import os
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import torch

from ..families.family import Family
from ..files.describe import decode, refusing
from ..files.file import CheckpointError, Table, brief, opened
from ..files.posterior_file import differences, shapes_of, under
from ..models.target import Target
from ..objective import Estimate
from ..parameters import Parameters
from ..result import Status
from ..util.checks import is_integer
from .adam import OverBatches
from .mixture import Mode
from .result import DensityFit
from .saving import COUNTS, DENSITY_FIT, SAME, at_mean, space_of
from .schedule import SearchStep

_FIELDS = {"kind", "family", "space", "dtype", "log_joint", "minibatches", "status", "verdict", "notes", "seconds"}
_FIELDS |= {"elbo", "trace", "modes", *COUNTS}


def load_fit(
    path: str | os.PathLike[str],
    target: Target,
    loader: Iterable[Any] | None = None,
    *,
    family: Family | None = None,
) -> DensityFit:
    """The fit of a file that `DensityFit.save` wrote: it samples, prints and goes on as the one that was saved.

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
        ValueError: the log density, or what you gave, is not what was saved.

    Example:
        >>> import tempfile
        >>> from structvi import FullNormal, LogDensity, Parameters, fit_density
        >>> path = os.path.join(tempfile.mkdtemp(), "fit.safetensors")
        >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), Parameters({"z": torch.zeros(2)}))
        >>> fit_density(target, FullNormal(), progress=False).save(path)
        >>> load_fit(path, target).converged
        True
    """
    if not isinstance(target, Target):
        raise TypeError(
            f"load_fit expects the log density after the path, got {type(target).__name__}; a posterior of a network "
            "is read by vi.load(path, net)"
        )
    space = target.space
    with opened(path) as stored:
        saved = stored.description
        _check_kind(saved, path)
        with refusing(path):
            _check_fields(saved)
        _check_space(saved, space, path)
        q = _family(saved, family, space, path)
        with refusing(path):
            expected = _expected(saved, q, space)
        file = {name: (shape,) for name, (shape, _) in stored.table.items() if name != "elbo.per_group"}
        if different := differences(file, {name: (shape,) for name, shape in expected.items()}):
            what = f"{path}: the family ({type(q).__name__}) is not the one that was saved. The tensors are\n"
            raise (CheckpointError if family is None else ValueError)(what + "\n".join(different))
        _check_dtypes(stored.table, space, family is None, path)
        tensors = stored.tensors()
    own = under("family", tensors)
    if family is None and not all(bool(x.isfinite().all()) for x in own.values()):
        raise CheckpointError(f"{path}: the family has values that are not finite: save one whose fit has not failed")
    with refusing(path):
        q = q if q.is_bound else q.bind(space, torch.Generator().manual_seed(0))
    q.load_state_dict(own, assign=True)
    q.to(space.device)
    theta = tensors["modes.theta"].to(space.initial)
    modes = [Mode(theta[i], *numbers) for i, numbers in enumerate(saved["modes"])]
    whole = _whole(saved, target, loader, q, path)
    value, error, bound = saved["elbo"]
    return DensityFit(
        target=whole, family=q, modes=modes, notes=list(saved["notes"]), status=Status(saved["status"]),
        elbo=Estimate(value, error, tensors["elbo.per_group"], bound), verdict=saved["verdict"],
        seconds=saved["seconds"], trace=[SearchStep(*step) for step in saved["trace"]],
        **{name: saved[name] for name in COUNTS},
    )  # fmt: skip


def _check_kind(saved: Mapping[str, Any], path: Any) -> None:
    kind = saved.get("kind")
    if kind == "posterior":
        raise CheckpointError(f"{path} is the posterior of a network: vi.load(path, net) reads it")
    if kind != DENSITY_FIT:
        raise CheckpointError(f"{path} holds no fit of a log density: its description is of kind {brief(kind)}")


def _check_fields(saved: Mapping[str, Any]) -> None:
    """ValueError, or whatever else comes up, where `save_fit` has not written it."""
    if saved.keys() != _FIELDS:
        raise ValueError(f"expected the fields {sorted(_FIELDS)}, got {brief(sorted(saved), 400)}")
    if not all(is_integer(saved[name], 0) for name in COUNTS):
        raise ValueError(f"{', '.join(COUNTS)} must be whole numbers")
    Status(saved["status"])
    if not isinstance(saved["verdict"], str) or not all(isinstance(note, str) for note in saved["notes"]):
        raise ValueError("verdict and notes must be texts")
    if not isinstance(saved["minibatches"], bool):
        raise ValueError(f"minibatches must be true or false, got {brief(saved['minibatches'])}")
    value, error, bound = saved["elbo"]
    numbers = [value, error, saved["seconds"], *([] if saved["log_joint"] is None else [saved["log_joint"]])]
    numbers += [number for log_p, log_mass, _ in saved["modes"] for number in (log_p, log_mass)]
    numbers += [elbo for _, _, _, elbo in saved["trace"]]
    if not all(isinstance(number, int | float) for number in numbers) or not isinstance(bound, bool):
        raise ValueError("expected numbers in elbo, seconds, modes and trace")
    _ = [float(number) for number in numbers]  # OverflowError of 10**309
    if saved["log_joint"] is not None and not isfinite(saved["log_joint"]):  # NaN is near any number
        raise ValueError(f"log_joint must be finite, got {saved['log_joint']}")
    counts = [reached for _, _, reached in saved["modes"]]
    counts += [count for _, evaluations, draws, _ in saved["trace"] for count in (evaluations, draws)]
    if not all(is_integer(count, 0) for count in counts):
        raise ValueError("expected whole numbers in modes and trace")
    if not all(isinstance(stage, str) for stage, *_ in saved["trace"]):
        raise ValueError("expected names of stages in the trace")


def _check_space(saved: Mapping[str, Any], space: Parameters, path: Any) -> None:
    with refusing(path):
        there = {str(name): (tuple(shape), str(constraint)) for name, shape, constraint in saved["space"]}
    here = {name: (tuple(shape), constraint) for name, shape, constraint in space_of(space)}
    if different := differences(there, here):
        raise ValueError(f"{path} is the fit of other parameters. They are\n" + "\n".join(different))
    if saved["space"] != space_of(space):
        raise ValueError(f"{path} has the parameters in another order: {', '.join(map(brief, there))}")
    if saved["dtype"] != str(space.dtype):
        raise ValueError(f"{path} is a fit in {brief(saved['dtype'])}, the parameters here are in {space.dtype}")


def _family(saved: Mapping[str, Any], family: Family | None, space: Parameters, path: Any) -> Family:
    """As it was given, or a recipe from the file."""
    with refusing(path):
        ((form, value),) = saved["family"].items()
        if form not in ("own", "value"):
            raise ValueError(f"expected a value or the name of your own, got {brief(form)}")
        if form == "value" and family is None:
            return decode(value, "family", len(space.names))
    if family is None:
        raise ValueError(
            f"{path} has a family of your own, {brief(value)}, which is not in the file: give it again, "
            "load_fit(path, target, family=..)"
        )
    if not isinstance(family, Family):
        raise TypeError(f"family must be a family such as MeanField(), got {family!r}")
    return family if family.is_bound else family.bind(space, torch.Generator().manual_seed(0))


def _expected(saved: Mapping[str, Any], q: Family, space: Parameters) -> dict[str, tuple[int, ...]]:
    """The tensors that the file must have, beside the ELBO's: of a recipe by arithmetic, before it is made."""
    if q.is_bound:
        shapes = {name: tuple(tensor.shape) for name, tensor in q.state_dict().items()}
    else:
        shapes = {name: shape for name, (shape, _) in shapes_of(q, space).items()}
    own = {f"family.{name}": shape for name, shape in shapes.items()}
    return {**own, "modes.theta": (len(saved["modes"]), space.size)}


def _check_dtypes(table: Table, space: Parameters, ours: bool, path: Any) -> None:
    wrong = [name for name in under("family", table) if ours and table[f"family.{name}"][1] != space.dtype]
    per_group = table.get("elbo.per_group")
    if wrong or per_group is None or per_group[1] != torch.float64 or len(per_group[0]) != 1:
        raise CheckpointError(f"{path} is damaged: it does not hold the numbers that structvi writes")


def _whole(saved: Mapping[str, Any], target: Target, loader: Iterable[Any] | None, q: Family, path: Any) -> Target:
    """The log density of all data; ValueError where it is another one than was fitted."""
    if saved["minibatches"]:
        if loader is None:
            raise ValueError(f"{path} was fitted in minibatches: give the loader too, load_fit(path, target, loader)")
        target = OverBatches(target, loader)
    elif loader is not None:
        raise ValueError(f"{path} was fitted without minibatches: load_fit(path, target), without a loader")
    before = saved["log_joint"]
    now = None if before is None else at_mean(target, q)
    if before is not None and (now is None or abs(now - before) > SAME[target.space.dtype] * (1 + abs(before))):
        raise ValueError(
            f"{path} is the fit of another log density: at the mean of q it was {before:.6g} and is "
            f"{'not finite' if now is None else f'{now:.6g}'}. Give the data and the prior that were fitted; to fit "
            "these, vi.fit_density(target, family)"
        )
    return target
