"""A fit's state written to a directory, and put back into a fit that was freshly made."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..families.low_rank import factors
from ..files import fit_checkpoint
from ..files.fit_checkpoint import Found
from ..util.checks import check_integer
from .fingerprint import differences
from .result import History, Skipped

if TYPE_CHECKING:
    from .loop import Fit

#: attributes of a fit that are numbers, and those that are tensors by name
NUMBERS = ("step", "epoch", "index", "rows", "end", "cooling", "stage", "failures", "averaged")
NAMED = ("learned", "average", "without_factor")


@dataclass(frozen=True)
class Checkpoint:
    """A directory to which a fit writes its whole state, atomically, and from which it resumes.

    Args:
        directory: belongs to one fit; one that holds checkpoints is refused unless you resume.
        every: steps between checkpoints; an epoch by default. The end of the fit is always written.
        resume: go on from the newest checkpoint in the directory, with the same posterior, data and options; without
            one the fit begins. A finished fit is restored; call `fit` again, without the checkpoint, to go on from it.
    """

    directory: str | os.PathLike[str]
    every: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        os.fspath(self.directory)
        check_integer("every", self.every, optional=True)

    def found(self, rank: int = 0) -> Found | None:
        """Return the newest checkpoint that is whole, to resume; raise ValueError if the directory is another fit's."""
        there = [] if rank else fit_checkpoint.files(self.directory)  # the first rank looks for all
        if there and not self.resume:
            raise ValueError(
                f"the folder {self.directory} holds checkpoints of another fit, up to {there[0].name}: a folder "
                "belongs to one fit. Give another folder, go on with that fit (resume=True), or remove its files"
            )
        return fit_checkpoint.latest(self.directory) if self.resume else None


def save(fit: "Fit", directory: str | os.PathLike[str]) -> None:
    """Write the state to a folder; of several ranks the first one: all are in the same, or give it their rows."""
    factor, moments = fit.make_step.factor, optimizer_state(fit.optimizer, fit.named)
    for name, value in moments.items():
        if not isinstance(value, Tensor | int | float):
            raise TypeError(f"{type(fit.optimizer).__name__} keeps {name} = {value!r}, which no checkpoint holds")
    tensors = {"history": fit.history.to_tensor(), "stream": fit.generator.get_state()}
    tensors |= {f"{part}/{name}": x for part in NAMED for name, x in getattr(fit, part).items()}
    tensors |= {f"moments/{name}": x for name, x in moments.items() if isinstance(x, Tensor)}
    description = {
        "settings": fit.settings,
        "problem": dict(fit.problem),
        "numbers": {name: getattr(fit, name) for name in NUMBERS},
        "skipped": [asdict(one) for one in fit.skipped],
        "moments": {name: x for name, x in moments.items() if not isinstance(x, Tensor)},
        "loss factor": [factor.value, factor.finite],
    }
    tensors = fit.ranks.whole(tensors)
    if fit.ranks.rank == 0:
        fit_checkpoint.write(directory, fit.step, tensors, description)


def restore(fit: "Fit", found: Found) -> list[str]:
    """Put a freshly made fit into the state of a checkpoint; return what there is to say."""
    tensors, saved = {path: fit.ranks.own(path, x) for path, x in found.tensors.items()}, found.description
    parts = {part: _under(f"{part}/", tensors) for part in (*NAMED, "moments")}
    _check_same(fit, saved, parts["learned"], found.path)
    device = fit.generator.device
    with torch.no_grad():
        for name, tensor in fit.learned.items():
            tensor.copy_(parts["learned"][name])
    for name in NUMBERS:
        setattr(fit, name, saved["numbers"][name])
    if fit.stage == 2:
        for factor in factors(fit.posterior.family):
            factor.requires_grad_(True)
    for part in ("average", "without_factor"):
        setattr(fit, part, {name: x.to(device) for name, x in parts[part].items()})
    # torch keeps step counts on the CPU but for fused optimizers; moments are where their parameter is
    fused = getattr(fit.optimizer, "_step_supports_amp_scaling", False)
    moments = {path: x.to(device) if fused or not path.endswith("/step") else x for path, x in parts["moments"].items()}
    set_optimizer_state(fit.optimizer, fit.named, moments | saved["moments"])
    fit.history, fit.skipped = History.from_tensor(tensors["history"]), [Skipped(**row) for row in saved["skipped"]]
    fit.make_step.factor.set(*saved["loss factor"])
    said = [*found.damaged, f"resumed at step {fit.step} from {found.path.name}"]
    stream = tensors["stream"]
    if stream.numel() == fit.generator.get_state().numel():
        fit.generator.set_state(stream)
    else:
        fit.generator.manual_seed(crc32(stream.cpu().numpy().tobytes()))
        said.append("the checkpoint was written on another kind of device: draws go on from another stream")
    fit.stream = fit.generator.get_state()
    with warnings.catch_warnings():  # the user's scheduler has no state in the file: it is called as often as it was
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)`")
        for _ in range(fit.step - len(fit.skipped)):
            fit.after_step()
    return said


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {path.removeprefix(prefix): x for path, x in tensors.items() if path.startswith(prefix)}


def _check_same(fit: "Fit", saved: dict[str, Any], learned: dict[str, Tensor], path: Any) -> None:
    """Refuse another posterior, other settings and another problem."""
    shapes, own = ({name: tuple(x.shape) for name, x in one.items()} for one in (learned, fit.learned))
    if differ := sorted(name for name in own.keys() | shapes.keys() if own.get(name) != shapes.get(name)):
        raise ValueError(f"{path} belongs to another posterior; these tensors differ: {', '.join(differ)}")
    if others := differences(saved["problem"], fit.problem):
        raise ValueError(
            f"{path} belongs to another problem; these differ: {'; '.join(others)}. Resume with what the fit was begun "
            "with, or begin anew with another folder"
        )
    then, now, made = saved["settings"], fit.settings, saved["numbers"]["step"]
    differ = [f"{key}: {then.get(key)!r} then, {now[key]!r} now" for key in now if then.get(key) != now[key]]
    if differ:
        raise ValueError(
            f"{path} belongs to a fit with other settings ({'; '.join(differ)}), which has made {made} steps: resume "
            "with the same; to train a finished fit further, call fit again without the checkpoint"
        )


def optimizer_state(optimizer: Optimizer, named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what the optimizer remembers of each parameter, flat: "name/key" → tensor or number, not copied."""
    return {
        f"{name}/{key}": value
        for name, parameter in named.items()
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
        if value is not None
    }


def set_optimizer_state(optimizer: Optimizer, named: Mapping[str, Tensor], flat: Mapping[str, Any]) -> None:
    """Invert `optimizer_state`; what `flat` does not name is forgotten."""
    optimizer.state.clear()
    for path, value in flat.items():
        name, key = path.rsplit("/", 1)
        parameter = named[name]
        if isinstance(value, Tensor):  # moments are laid out in memory as their parameter is
            like = value if value.shape != parameter.shape else parameter
            value = torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)
        optimizer.state[parameter][key] = value
