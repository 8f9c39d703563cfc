"""A fit's checkpoints: all that a run is between two steps, in one file, and back."""

import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from . import checkpoint
from .describing import decode, encode
from .history import History, Skipped
from .mixed_precision import GradientScale
from .optimizing import Adam, assign, optimizer_state, set_optimizer_state

if TYPE_CHECKING:
    from .fitting import Run

KIND = "fit"
#: The last checkpoints are kept: where the newest is damaged, the one before is read.
KEPT = 2


def save(run: "Run", directory: str | os.PathLike) -> None:
    """Write the run to `directory`/fit-<step>.safetensors, atomically, and remove all but the last two.

    Of several ranks the first one writes: all are in the same state, or give it their rows.
    """
    tensors: dict[str, Tensor] = {"history": run.history.to_tensor(), "generator": run.generator.get_state()}
    numbers: dict[str, Any] = {}
    parts = {
        "posterior": run.learned(),
        "optimizer": optimizer_state(run.optimizer, run.named),
        "snapshot": run.snapshot.parameters,
        "average": run.average.mean,
        "without_factor": run.without_factor,
    }
    for part, values in parts.items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{part}/{name}"] = value
            elif isinstance(value, int | float):
                numbers[f"{part}/{name}"] = value
            else:
                raise TypeError(f"{type(run.optimizer).__name__} keeps {name} = {value!r}, which no checkpoint holds")
    description = {
        "kind": KIND,
        "options": asdict(run.options),
        "optimizer": type(run.optimizer).__name__,
        "highest": run.schedule.highest,
        "numbers": numbers,
        "step": run.step,
        "epoch": run.epoch,
        "index": run.index,
        "failures": run.failures,
        "snapshot": run.snapshot.step,
        "stage": run.stage,
        "cooling": run.schedule.cooling,
        "end": run.schedule.end,
        "averaged": run.average.count,
        "skipped": [asdict(one) for one in run.skipped],
        "evaluation": encode(run.posterior.model.evaluation.record),
        "scale": [run.posterior.model.scale.value, run.posterior.model.scale.finite],
    }
    tensors = run.ranks.whole(tensors)
    if run.ranks.rank != 0:
        return
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint.write(directory / f"fit-{run.step:010d}.safetensors", tensors, description)
    # what a process that was killed while writing has left
    for old in [*_files(directory)[KEPT:], *directory.glob(".fit-*.tmp")]:
        old.unlink()


def save_alone(run: "Run", directory: str | os.PathLike) -> str:
    """After another rank was lost: the state before the step in which it was, unless that rank had rows of it; what
    there is to say."""
    if not run.ranks.sharded:
        save(run, directory)
    newest = _files(directory)[:1]
    return f"go on from {newest[0]}" if newest else f"no checkpoint had been written to {directory}"


class Found(NamedTuple):
    """The newest checkpoint that is whole."""

    path: Path
    tensors: dict[str, Tensor]
    description: dict[str, Any]
    damaged: list[str]  # what was said of newer ones


def latest(directory: str | os.PathLike) -> Found | None:
    """The newest checkpoint in a directory that is whole; None where there is no checkpoint at all."""
    damaged: list[str] = []
    for path in _files(directory):
        try:
            tensors, description = checkpoint.read(path)
        except checkpoint.CheckpointError as error:
            damaged.append(f"{path.name} was left aside: {error}")
            continue
        if description.get("kind") != KIND:
            raise checkpoint.CheckpointError(f"{path} is no checkpoint of a fit: of kind {description.get('kind')!r}")
        return Found(path, tensors, description, damaged)
    if damaged:
        raise checkpoint.CheckpointError(f"no checkpoint in {directory} is whole: " + "; ".join(damaged))
    return None


def name_of(function: Any) -> str:
    """A function by its name, an object by what it prints: equal for equal settings."""
    return getattr(function, "__qualname__", repr(function))


def _files(directory: str | os.PathLike) -> list[Path]:
    return sorted(Path(directory).glob("fit-*.safetensors"), reverse=True)


def restore(run: "Run", found: Found) -> list[str]:
    """Put a freshly made run into the state of a checkpoint; returns what there is to say."""
    path, tensors, description, damaged = found

    def part(name: str) -> dict[str, Any]:
        both = {**{path: run.ranks.own(path, x) for path, x in tensors.items()}, **description["numbers"]}
        found = {key.removeprefix(f"{name}/"): value for key, value in both.items() if key.startswith(f"{name}/")}
        # torch keeps step counts on the CPU but for the fused Adam; moments are where their parameter is
        on_device = isinstance(run.optimizer, Adam)
        return {
            key: value.to(run.generator.device)
            if isinstance(value, Tensor) and (on_device or not key.endswith("/step"))
            else value
            for key, value in found.items()
        }

    learned, saved = run.learned(), part("posterior")
    differ = sorted(
        name for name in learned.keys() | saved.keys()
        if name not in learned or name not in saved or learned[name].shape != saved[name].shape
    )  # fmt: skip
    if differ:
        raise ValueError(f"{path} belongs to another posterior; these tensors differ: {', '.join(differ)}")
    now = {**asdict(run.options), "optimizer": type(run.optimizer).__name__, "learning rates": run.schedule.highest}
    then = {
        **description["options"],
        "optimizer": description["optimizer"],
        "learning rates": description["highest"],
    }
    differ = [f"{key}: {then.get(key)!r} then, {now[key]!r} now" for key in now if then.get(key) != now[key]]
    if differ:
        raise ValueError(f"{path} belongs to a fit with other settings; resume with the same: " + "; ".join(differ))
    assign(learned, saved)
    run.stage = description["stage"]
    if run.stage == 2:
        for parameter in run.named.values():
            parameter.requires_grad_(True)
    set_optimizer_state(run.optimizer, run.named, part("optimizer"))
    run.snapshot.parameters = {name: tensor.cpu() for name, tensor in part("snapshot").items()}
    run.snapshot.step = description["snapshot"]
    run.average.mean, run.average.count = part("average"), description["averaged"]
    run.without_factor = part("without_factor")
    run.history = History.from_tensor(tensors["history"])
    run.generator.set_state(tensors["generator"])
    run.step, run.epoch, run.index = description["step"], description["epoch"], description["index"]
    run.failures = description["failures"]
    run.skipped = [Skipped(**one) for one in description["skipped"]]
    run.posterior.model.evaluation.record = decode(description["evaluation"])
    run.posterior.model.scale = GradientScale(*description["scale"])
    run.schedule.cooling, run.schedule.end = description["cooling"], description["end"]
    _replay(run)
    return [*damaged, f"resumed at step {run.step} from {path.name}"]


def _replay(run: "Run") -> None:
    """A scheduler of the user's has no state in the file: it is called as often as it was."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)`")
        for _ in range(run.step - len(run.skipped)):
            run.schedule.after()
