"""`structvi reproduce`: compute the parts that were asked for, then write them all at once."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from structvi.util import __version__
from structvi.util.folder_files import check_folder, write_together

from . import couplings, figure1, figure2, figure3, table1, table2
from .pages import number, picture, plain, render
from .processes import processes
from .settings import Settings

#: in the order of the page
PARTS: dict[str, ModuleType] = {
    "figure1": figure1,
    "figure2": figure2,
    "table1": table1,
    "table2": table2,
    "figure3": figure3,
    "couplings": couplings,
}
#: the columns of the page's tables and their headings; the CSV files have all columns
COLUMNS = {
    "method": "method",
    "rank": "rank",
    "coupling": "coupling",
    "estimator": "estimator",
    "phase": "phase",
    "paper_log_q_true": "paper’s log q(θ*)",
    "log_q_true": "log q(θ*)",
    "paper_kl_p_q": "paper’s KL[p‖q]",
    "kl_p_q": "KL[p‖q]",
    "kl_q_p": "KL[q‖p]",
    "optimum_kl_q_p": "family’s best KL[q‖p]",
    "excess": "excess",
    "excess_max": "largest excess",
    "stochastic_excess": "excess, Adam",
    "noise": "σ under q",
    "var_mean": "mean",
    "var_scale": "log scale",
    "var_factor": "factor",
    "seconds": "seconds a fit",
}


def reproduce(parts: Sequence[str], settings: Settings, folder: Path, workers: int) -> list[Path]:
    """Compute and write; return the paths of the files."""
    check_folder(folder)
    found = compute(parts, settings, workers)
    return write_together(folder, lambda hidden: write(found, settings, hidden))


def compute(parts: Sequence[str], settings: Settings, workers: int) -> dict[str, dict[str, Any]]:
    """Return what each part computes; it does not depend on the number of workers."""
    with processes(workers) as starmap:
        return {part: PARTS[part].compute(settings, starmap) for part in PARTS if part in parts}


def record(found: dict[str, dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """Return the content of results.json."""
    results = {"version": __version__, "seed": settings.seed, "settings": asdict(settings)}
    for part in found.values():
        results |= {name: one for name, one in part.items() if name != "picture"}
    return plain(results)


def write(found: dict[str, dict[str, Any]], settings: Settings, folder: Path) -> None:
    results, pictures = record(found, settings), {}
    for name, part in found.items():
        if "picture" in part:
            pictures[name] = picture(PARTS[name].draw(part["picture"]))
            (folder / f"{name}.png").write_bytes(pictures[name])
    tables = {name: one["rows"] for name, one in results.items() if isinstance(one, dict) and "rows" in one}
    for name, rows in tables.items():
        with open(folder / f"{name}.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    values = {"results": results, "pictures": pictures, "columns": COLUMNS, "cell": cell}
    (folder / "report.html").write_text(render(Path(__file__).with_name("report.html"), **values), encoding="utf-8")
    text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")


def cell(row: dict[str, Any], column: str) -> tuple[str, str]:
    """Return the number and its range over targets, if it has one."""
    ends = [row.get(f"{column}_min"), row.get(f"{column}_max")]
    known = all(isinstance(end, float) for end in ends)
    return number(row[column]), " … ".join(map(number, ends)) if known else ""
