"""The files of a run, put into a folder together."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from .interrupts import uninterrupted

#: folders inside: of files that are being made, and of files that are all made and are being moved
MAKING, READY = ".structvi-making-", ".structvi-ready"


def check_folder(folder: Path) -> None:
    """Make the folder and try it out; an OSError says why not."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".structvi-"):
        pass


def write_together(folder: Path, make: Callable[[Path], None]) -> list[Path]:
    """The files that `make(hidden folder)` writes, in place of those of the same names; their paths.

    Until all are made, those that were there stay. A process that is killed while they are made leaves them as they
    were; one killed in the instant in which they are moved has that finished by the next. One process at a time:
    `folder_lock`.
    """
    _tidy(folder)
    hidden = Path(tempfile.mkdtemp(dir=folder, prefix=MAKING))
    try:
        make(hidden)
        with uninterrupted():
            os.replace(hidden, folder / READY)
            return _move(folder)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _move(folder: Path) -> list[Path]:
    moved = []
    for path in sorted((folder / READY).iterdir()):
        moved.append(folder / path.name)
        os.replace(path, moved[-1])
    (folder / READY).rmdir()
    return moved


def _tidy(folder: Path) -> None:
    """After a process that was killed: what it had made is moved, what it had half made is removed."""
    if (folder / READY).is_dir():
        _move(folder)
    for left in folder.glob(f"{MAKING}*"):
        shutil.rmtree(left, ignore_errors=True)
