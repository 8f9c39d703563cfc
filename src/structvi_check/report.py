"""What `run` hands back: rows, and from them a table, JSON and a page with pictures."""

import json
import os
from dataclasses import dataclass, field
from math import isinf
from pathlib import Path
from typing import Any

from structvi.util.folder_files import write_together
from structvi.util.folder_lock import folder_lock
from structvi.util.version import __version__

from .problems import Problem
from .rows import HEADINGS, LEGEND, Row
from .verdicts import THRESHOLDS


@dataclass(frozen=True)
class Report:
    """All rows. `print(report)` is the table; `report[method, problem]` one row; `report.save(folder)` writes all."""

    rows: tuple[Row, ...]
    problems: dict[str, Problem] = field(repr=False)
    seed: int = 0

    def __getitem__(self, key: tuple[str, str]) -> Row:
        for row in self.rows:
            if (row.method, row.problem) == key:
                return row
        raise KeyError(f"no row {key!r}; there are {[(row.method, row.problem) for row in self.rows]}")

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row.method for row in self.rows))

    def summary(self) -> list[str]:
        """A sentence for each method."""
        sentences = []
        for method in self.methods:
            rows = [row for row in self.rows if row.method == method and row.bayesian is not None]
            failed = sum(row.failed for row in self.rows if row.method == method)
            if not rows and not failed:
                sentences.append(f"{method}: applicable to none of these problems")
                continue
            good = sum(bool(row.bayesian) for row in rows)
            points = sum(row.grade == "not a posterior" for row in rows)
            words = f"{method}: Bayesian on {good} of {len(rows) + failed} problems"
            words += f", not a posterior on {points}" if points else ""
            sentences.append(words + (f", no result on {failed}" if failed else ""))
        return sentences

    def table(self) -> str:
        """Plain text: a block for each problem."""
        widths = [max(len(row.cells()[i]) for row in self.rows) for i in range(len(HEADINGS) - 1)]
        widths = [max(width, len(heading)) for width, heading in zip(widths, HEADINGS, strict=False)]
        lines = []
        for name, problem in self.problems.items():
            lines += ["", f"{name}: {problem.title}", _line(HEADINGS, widths)]
            lines += [_line(row.cells(), widths) for row in self.rows if row.problem == name]
        return "\n".join([*lines, "", LEGEND, "", *self.summary()]).lstrip("\n")

    __str__ = table

    def record(self) -> dict[str, Any]:
        """The content of check.json: infinities are the strings "inf" and "-inf"."""
        rows = [_plain(row.record()) for row in self.rows]
        problems = {name: {"title": problem.title, "weights": problem.P} for name, problem in self.problems.items()}
        head = {"version": __version__, "seed": self.seed, "thresholds": THRESHOLDS, "summary": self.summary()}
        return head | {"problems": problems, "rows": rows}

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write check.txt, check.json and check.html, together; the page needs matplotlib.

        Raises:
            FolderInUse: where another run writes to the folder.
        """
        with folder_lock(folder, "structvi check"):
            return self.write(Path(folder))

    def write(self, folder: Path) -> list[Path]:
        """`save`, by who has the folder's lock."""
        from .page import page

        def make(hidden: Path) -> None:
            text = json.dumps(self.record(), indent=1, ensure_ascii=False, allow_nan=False)
            (hidden / "check.txt").write_text(self.table() + "\n", encoding="utf-8")
            (hidden / "check.json").write_text(text + "\n", encoding="utf-8")
            (hidden / "check.html").write_text(page(self), encoding="utf-8")

        return write_together(folder, make)


def _line(cells: list[str] | tuple[str, ...], widths: list[int]) -> str:
    numbers = [cell.rjust(width) for cell, width in zip(cells[1:-1], widths[1:], strict=True)]
    return "  ".join(["", cells[0].ljust(widths[0]), *numbers, cells[-1]])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, float) and isinf(value):
        return "inf" if value > 0 else "-inf"
    return value
