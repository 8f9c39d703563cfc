"""A fit's state written to a directory, and put back into a fit that was freshly made."""

import os
import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor

from ..families.low_rank import factors
from ..files import fit_checkpoint
from ..files.fit_checkpoint import Found
from ..networks.mixed_precision import GradientScale
from ..util.checks import check_integer
from .fingerprint import differences
from .optimizer import optimizer_state, set_optimizer_state
from .result import History, Skipped

if TYPE_CHECKING:
    from .loop import Fit

#: attributes of a fit that are numbers, and those that are tensors by name
NUMBERS = ("step", "epoch", "index", "rows", "begun", "end", "cooling", "stage", "failures", "averaged")
NAMED = ("learned", "average", "without_factor")


@dataclass(frozen=True)
class Checkpoint:
    """A directory to which a fit writes its whole state, atomically, and from which it resumes.

    Args:
        directory: belongs to one fit; one that holds checkpoints is refused unless you resume.
        every: steps between checkpoints; an epoch by default. The end of the fit is always written.
        resume: go on from the newest checkpoint in the directory, with the same posterior, data and options; without
            one the fit begins. A finished fit goes on if more epochs or steps are asked for.
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
    scale, moments = fit.posterior.model.scale, optimizer_state(fit.optimizer, fit.named)
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
        "scale": [scale.value, scale.finite],
    }
    tensors = fit.ranks.whole(tensors)
    if fit.ranks.rank == 0:
        fit_checkpoint.write(directory, fit.step, tensors, description)


def restore(fit: "Fit", found: Found) -> list[str]:
    """Put a freshly made fit into the state of a checkpoint; return what there is to say."""
    tensors, saved = {path: fit.ranks.own(path, x) for path, x in found.tensors.items()}, found.description
    parts = {part: _under(f"{part}/", tensors) for part in (*NAMED, "moments")}
    extended = _check_same(fit, saved, parts["learned"], found.path)
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
    fit.posterior.model.scale = GradientScale(*saved["scale"])
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
            fit.rate.after_step()
    if extended:
        total = fit.settings["steps"]
        said.append(
            f"extended from {fit.step} to {total} steps, by a new cycle of the learning rate: not what {total} steps "
            "from the start would have given"
        )
        fit.begun, fit.end, fit.cooling, fit.average, fit.averaged = fit.step, total, None, {}, 0
    return said


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {path.removeprefix(prefix): x for path, x in tensors.items() if path.startswith(prefix)}


def _check_same(fit: "Fit", saved: dict[str, Any], learned: dict[str, Tensor], path: Any) -> bool:
    """Refuse another posterior, other settings and another problem; return whether a finished fit is to be extended."""
    shapes, own = ({name: tuple(x.shape) for name, x in one.items()} for one in (learned, fit.learned))
    if differ := sorted(name for name in own.keys() | shapes.keys() if own.get(name) != shapes.get(name)):
        raise ValueError(f"{path} belongs to another posterior; these tensors differ: {', '.join(differ)}")
    if others := differences(saved["problem"], fit.problem):
        raise ValueError(
            f"{path} belongs to another problem; these differ: {'; '.join(others)}. Resume with what the fit was begun "
            "with, or begin anew with another folder"
        )
    then, now, numbers = saved["settings"], fit.settings, saved["numbers"]
    names = [key for key in now if then.get(key) != now[key]]
    differ = [f"{key}: {then.get(key)!r} then, {now[key]!r} now" for key in names]
    finished = numbers["step"] >= numbers["end"]
    if names == ["steps"] and finished and now["steps"] > numbers["step"]:
        return True
    if names == ["steps"]:
        how = (
            f"the fit has made {numbers['step']} steps: give more than that to extend it"
            if finished
            else f"the fit has made {numbers['step']} of {numbers['end']} steps: finish it with the same first, then "
            "extend it"
        )
        raise ValueError(f"{path} belongs to a fit of another length ({differ[0]}); {how}")
    if differ:
        raise ValueError(f"{path} belongs to a fit with other settings; resume with the same: " + "; ".join(differ))
    return False
