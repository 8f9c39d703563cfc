"""The table of `structvi check --at-scale`, and its page."""

import json
import os
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from structvi.util.folder_files import write_together
from structvi.util.folder_lock import folder_lock
from structvi.util.version import __version__

from .rows import HEADINGS, LEGEND, ScaleRow


@dataclass(frozen=True)
class ScaleReport:
    """All rows. `print(report)` is the table; `report.save(folder)` writes it, JSON and a page with pictures."""

    rows: tuple[ScaleRow, ...]
    weights: int
    size: int
    teachers: int
    seed: int
    constant: float

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row.method for row in self.rows))

    def of(self, method: str) -> list[ScaleRow]:
        return [row for row in self.rows if row.method == method]

    def cells(self, method: str) -> tuple[str, ...]:
        rows = self.of(method)

        def cell(values: list[Any], digits: int) -> str:
            if None in values:
                return "–"
            error = f" ± {stdev(values) / sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
            return f"{mean(values):.{digits}f}{error}"

        elbos: list[Any] = [row.elbo for row in rows]
        gains = [None] if None in elbos else [elbo - self.constant for elbo in elbos]
        return (
            method, cell(elbos, 0), cell(gains, 0), cell([row.moved for row in rows], 2),
            cell([row.coverage for row in rows], 3), cell([row.width for row in rows], 3),
            cell([row.nll for row in rows], 4), cell([row.kl for row in rows], 4),
            f"{mean(row.seconds for row in rows):.1f}",
        )  # fmt: skip

    def title(self) -> str:
        many = "a network" if self.teachers == 1 else f"{self.teachers} networks"
        return f"{many} of {self.weights} weights drawn from the prior, {self.size} labels each"

    def table(self) -> str:
        every = [HEADINGS, *(self.cells(method) for method in self.methods)]
        widths = [max(len(cells[i]) for cells in every) for i in range(len(HEADINGS))]
        lines = [self.title(), ""]
        for name, *numbers in every:
            right = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *right]))
        return "\n".join([*lines, "", LEGEND])

    __str__ = table

    def record(self) -> dict[str, Any]:
        """The content of at_scale.json."""
        rows = [{key: x for key, x in asdict(row).items() if key != "sketch"} for row in self.rows]
        head = {"version": __version__, "weights": self.weights, "size": self.size, "teachers": self.teachers}
        return head | {"seed": self.seed, "constant": self.constant, "rows": rows}

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write at_scale.txt, at_scale.json and at_scale.html, together; the page needs matplotlib."""
        with folder_lock(folder, "structvi check"):
            return self.write(Path(folder))

    def write(self, folder: Path) -> list[Path]:
        """`save`, by who has the folder's lock."""
        from .page import page

        def make(hidden: Path) -> None:
            (hidden / "at_scale.txt").write_text(self.table() + "\n", encoding="utf-8")
            (hidden / "at_scale.json").write_text(json.dumps(self.record(), indent=1) + "\n", encoding="utf-8")
            (hidden / "at_scale.html").write_text(page(self), encoding="utf-8")

        return write_together(folder, make)
