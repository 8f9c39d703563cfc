"""The files of a fit's checkpoints in a folder: written, found again, and removed when they are old."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from . import file

KIND = "fit"
#: checkpoints that are kept: if the newest is damaged, the one before is read
KEPT = 2


class Found(NamedTuple):
    """The newest checkpoint that is whole."""

    path: Path
    tensors: dict[str, Tensor]
    description: dict[str, Any]
    damaged: list[str]  # messages about newer ones


def write(
    directory: str | os.PathLike[str], step: int, tensors: Mapping[str, Tensor], description: Mapping[str, Any]
) -> None:
    """Write `directory`/fit-<step>.safetensors atomically; then remove all but the last two."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"fit-{step:010d}.safetensors"
    file.write(path, tensors, {"kind": KIND, "state": dict(description)})
    # temporary files are of processes that were killed
    for old in [*files(directory)[KEPT:], *directory.glob(".fit-*.tmp")]:
        old.unlink()


def latest(directory: str | os.PathLike[str]) -> Found | None:
    """Return the newest checkpoint in a directory that is whole; None if the directory has none."""
    damaged: list[str] = []
    for path in files(directory):
        try:
            tensors, description = file.read(path)
        except file.CheckpointError as error:
            damaged.append(f"{path.name} was left aside: {error}")
            continue
        if description.get("kind") != KIND or not isinstance(description.get("state"), dict):
            raise file.CheckpointError(f"{path} is no checkpoint of a fit: of kind {description.get('kind')!r}")
        return Found(path, tensors, description["state"], damaged)
    if damaged:
        raise file.CheckpointError(f"no checkpoint in {directory} is whole: " + "; ".join(damaged))
    return None


def files(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in a directory, the newest first."""
    return sorted(Path(directory).glob("fit-*.safetensors"), reverse=True)
