"""A run's state into a checkpoint, and back into a run that was freshly made."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Protocol
from zlib import crc32

import torch
from torch import Tensor

from ..distributed.ranks import Ranks
from ..files import fit_checkpoint
from ..files.fit_checkpoint import Found
from ..networks.mixed_precision import GradientScale
from .averaging import assign
from .fingerprint import differences
from .optimizers import optimizer_state, set_optimizer_state
from .schedule import LearningRate
from .state import FitState

if TYPE_CHECKING:
    from ..posterior import Posterior


class Running(Protocol):
    """What of a run a checkpoint needs: its state, and what has a memory of its own."""

    state: FitState
    posterior: "Posterior"
    named: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    schedule: LearningRate
    generator: torch.Generator
    ranks: Ranks


def save(run: Running, directory: str | os.PathLike[str]) -> None:
    """Write the state to a folder; of several ranks the first one: all are in the same, or give it their rows."""
    model = run.posterior.model
    moments = optimizer_state(run.optimizer, run.named)
    for name, value in moments.items():
        if not isinstance(value, Tensor | int | float):
            raise TypeError(f"{type(run.optimizer).__name__} keeps {name} = {value!r}, which no checkpoint holds")
    state = replace(
        run.state,
        stream=run.generator.get_state(),
        moments=moments,
        gradient_scale=(model.scale.value, model.scale.finite),
    )
    tensors, description = state.pack()
    tensors = run.ranks.whole(tensors)
    if run.ranks.rank == 0:
        fit_checkpoint.write(directory, state.step, tensors, description)


def save_alone(run: Running, directory: str | os.PathLike[str]) -> str:
    """After another rank was lost: the state before the step in which it was, unless that rank had rows of it; what
    there is to say."""
    if not run.ranks.sharded:
        save(run, directory)
    newest = fit_checkpoint.files(directory)[:1]
    return f"go on from {newest[0]}" if newest else f"no checkpoint had been written to {directory}"


def restore(run: Running, found: Found) -> list[str]:
    """Put a freshly made run into the state of a checkpoint; returns what there is to say.

    Args:
        run: about to begin, with what it is a fit of in its state.
        found: the checkpoint.
    """
    tensors = {path: run.ranks.own(path, x) for path, x in found.tensors.items()}
    saved = FitState.unpack(tensors, found.description)
    extended = _check_same(run.state, saved, found.path)
    assign(run.state.learned, saved.learned)
    if saved.stage == 2:
        for parameter in run.named.values():
            parameter.requires_grad_(True)
    device = run.generator.device
    # torch keeps step counts on the CPU but for fused optimizers; moments are where their parameter is
    on_device = getattr(run.optimizer, "_step_supports_amp_scaling", False)
    moments = {
        path: x.to(device) if isinstance(x, Tensor) and (on_device or not path.endswith("/step")) else x
        for path, x in saved.moments.items()
    }
    set_optimizer_state(run.optimizer, run.named, moments)
    another = _set_stream(run.generator, saved.stream)
    model = run.posterior.model
    if saved.gradient_scale is not None:
        model.scale = GradientScale(*saved.gradient_scale)
    settings = replace(saved.settings, total=run.state.settings.total)
    run.state = replace(
        saved,
        settings=settings,
        problem=run.state.problem,
        learned=run.state.learned,
        stream=run.generator.get_state(),
        snapshot=_moved(saved.snapshot, torch.device("cpu")),
        average=_moved(saved.average, device),
        without_factor=_moved(saved.without_factor, device),
        moments={},
    )
    _replay(run)
    said = [*found.damaged, f"resumed at step {run.state.step} from {found.path.name}", *another]
    if extended:
        total = run.state.settings.total
        run.state = replace(run.state, begun=saved.step, end=total, cooling=None, average={}, averaged=0)
        said.append(
            f"extended from {saved.step} to {total} steps, by a new cycle of the learning rate: not what {total} steps "
            "from the start would have given"
        )
    return said


def _set_stream(generator: torch.Generator, state: Tensor) -> list[str]:
    """A stream of the CPU cannot be gone on with on a GPU, nor one of a GPU on the CPU: then a new one; what to say."""
    if state.numel() == generator.get_state().numel():
        generator.set_state(state)
        return []
    generator.manual_seed(crc32(state.cpu().numpy().tobytes()))
    return ["the checkpoint was written on another kind of device: draws go on from another stream"]


def _moved(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _check_same(now: FitState, then: FitState, path: Any) -> bool:
    """Refuse another posterior, other settings and another problem; whether a finished fit is to be extended."""
    learned, saved = now.learned, then.learned
    differ = sorted(
        name for name in learned.keys() | saved.keys()
        if name not in learned or name not in saved or learned[name].shape != saved[name].shape
    )  # fmt: skip
    if differ:
        raise ValueError(f"{path} belongs to another posterior; these tensors differ: {', '.join(differ)}")
    others = differences(then.problem, now.problem)
    if others:
        raise ValueError(
            f"{path} belongs to another problem; these differ: {'; '.join(others)}. Resume with what the fit was begun "
            "with, or begin anew with another folder"
        )
    here, there = (
        {**asdict(state.settings), "optimizer": state.optimizer, "learning rates": list(state.rates)}
        for state in (now, then)
    )
    names = [key for key in here if there[key] != here[key]]
    differ = [f"{key}: {there[key]!r} then, {here[key]!r} now" for key in names]
    finished = then.step >= then.end
    if names == ["total"] and finished and now.settings.total > then.step:
        return True
    if names == ["total"]:
        how = (
            f"the fit has made {then.step} steps: give more than that to extend it"
            if finished
            else f"the fit has made {then.step} of {then.end} steps: finish it with the same first, then extend it"
        )
        raise ValueError(f"{path} belongs to a fit of another length ({differ[0]}); {how}")
    if differ:
        raise ValueError(f"{path} belongs to a fit with other settings; resume with the same: " + "; ".join(differ))
    return False


def _replay(run: Running) -> None:
    """A scheduler of the user's has no state in the file: it is called as often as it was."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)`")
        for _ in range(run.state.step - len(run.state.skipped)):
            run.schedule.after()
