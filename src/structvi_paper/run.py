"""`structvi reproduce`: compute the parts that were asked for, then write them all at once."""

import json
from collections.abc import Sequence
from math import isinf
from pathlib import Path
from types import ModuleType
from typing import Any

from structvi.util.folder_files import check_folder, write_together
from structvi.util.folder_lock import folder_lock
from structvi.util.version import __version__

from . import couplings, figure1, figure2, figure3, table1, table2
from .jobs import run as run_jobs
from .regression import DESCRIPTION
from .settings import Settings

PARTS: dict[str, ModuleType] = {
    "table1": table1,
    "table2": table2,
    "figure1": figure1,
    "figure2": figure2,
    "figure3": figure3,
    "couplings": couplings,
}
PICTURES = ("figure1", "figure2", "figure3", "couplings")


def compute(parts: Sequence[str], settings: Settings, workers: int) -> dict[str, Any]:
    """Part → what it assembles from its jobs' results; independent of the number of workers."""
    jobs = {part: PARTS[part].jobs(settings) for part in parts}
    results = run_jobs([job for part in parts for job in jobs[part]], workers)
    found = {}
    for part in parts:
        own, results = results[: len(jobs[part])], results[len(jobs[part]) :]
        found[part] = PARTS[part].assemble(settings, own)
    return found


def record(found: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """The content of results.json."""
    results: dict[str, Any] = {"version": __version__, "seed": settings.seed, "settings": settings.record()}
    if "table1" in found:
        results["table1"] = found["table1"]
    if "table2" in found:
        results |= found["table2"]
        results["table2"] |= {"data": DESCRIPTION}
    if "figure1" in found:
        results["figure1"] = found["figure1"]
    if "figure2" in found:
        results["figure2"] = {
            name: {"MAP": methods["MAP"]["points"][0], "MC dropout": methods["MC dropout"]["points"]}
            for name, methods in found["figure2"].items()
        }
    if "figure3" in found:
        results["figure3"] = found["figure3"]["summary"]
    if "couplings" in found:
        results["couplings"] = found["couplings"]
    return _plain(results)


def _plain(value: Any) -> Any:
    """Infinities as the strings "inf" and "-inf", which JSON has no numbers for."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def write(found: dict[str, Any], results: dict[str, Any], folder: Path) -> list[Path]:
    """All files, together."""
    from .figures import draw
    from .report import csv_files, page

    def make(hidden: Path) -> None:
        for name in PICTURES:
            if name in found:
                figure = draw(name, found[name])
                figure.savefig(hidden / f"{name}.png", dpi=140, metadata={"Software": None})
                figure.savefig(hidden / f"{name}.svg", metadata={"Date": None, "Creator": None})
        for name, text in csv_files(results).items():
            (hidden / name).write_text(text, encoding="utf-8")
        pictures = {path.stem: path.read_bytes() for path in sorted(hidden.glob("*.png"))}
        (hidden / "report.html").write_text(page(results, pictures), encoding="utf-8")
        text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
        (hidden / "results.json").write_text(text + "\n", encoding="utf-8")

    return write_together(folder, make)


def reproduce(parts: Sequence[str], settings: Settings, folder: Path, workers: int) -> list[Path]:
    """Compute and write; returns the paths of the files. `FolderInUse` where another run is at it."""
    check_folder(folder)
    with folder_lock(folder, "structvi reproduce"):
        found = compute(parts, settings, workers)
        return write(found, record(found, settings), folder)
