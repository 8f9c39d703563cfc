"""The files of a run, put into a folder together."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def check_folder(folder: Path) -> None:
    """Make the folder and try it out; an OSError says why not."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".structvi-"):
        pass


def write_together(folder: Path, make: Callable[[Path], None]) -> list[Path]:
    """Return the paths of the files that `make(hidden folder)` writes; they replace files of the same names.

    Until all are made, those that were there stay; a process that is killed before leaves a hidden folder.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".structvi-making-") as hidden:
        make(Path(hidden))
        made = sorted(Path(hidden).iterdir())
        for path in made:
            os.replace(path, folder / path.name)
    return [folder / path.name for path in made]
