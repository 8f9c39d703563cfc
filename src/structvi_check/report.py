"""The result of `run`: a row for each method and problem; a table, JSON and a page."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isinf
from pathlib import Path
from typing import Any

from structvi.util import __version__
from structvi.util.folder_files import check_folder, write_together
from structvi_paper.pages import number, plain, render

from .measures import Estimate, Measures
from .problems import Problem
from .verdicts import MOST, percent, zero_for_the_truth

HEADINGS = (
    "method", "log q(θ*)", "log p(θ*)", "KL[p‖q]", "KL[q‖p]", "modes", "90 % hold", "mean", "log var", "joint",
    "agree", "TV", "verdict",
)  # fmt: skip
LEGEND = (
    "log q(θ*), log p(θ*): of the true model under method and posterior; KL in nats; modes: found of those there; 90 % "
    "hold: posterior mass of the method's 90 % intervals, least to most; mean: largest error in posterior standard "
    "deviations; log var: largest error; joint: by how much an event's probability is wrong, at least; agree, TV: "
    "predictions at new inputs against the posterior's; –: there is none"
)
COLOURS = {
    "Bayesian": "#2e7d32",
    "off": "#b06a00",
    "not a posterior": "#c2243b",
    "not applicable": "#8a8a8a",
    "failed": "#4a3a6b",
}


@dataclass(frozen=True)
class Row:
    """One method on one problem.

    If the method is not applicable or has `failed`, `bayesian` is None and there are no measures. It fails if it
    raises, takes too long or dies.
    """

    method: str
    problem: str
    verdict: str
    bayesian: bool | None
    seconds: float
    measures: Measures | None = None
    #: faults, the worst first
    findings: tuple[str, ...] = ()
    failed: bool = False
    #: the traceback of a method that raised
    details: str = field(default="", repr=False, compare=False)

    @property
    def grade(self) -> str:
        """ "Bayesian", "off", "not a posterior", "not applicable" or "failed"."""
        if self.bayesian is None:
            return "failed" if self.failed else "not applicable"
        if self.bayesian:
            return "Bayesian"
        return "off" if self.measures is None or not zero_for_the_truth(self.measures) else "not a posterior"

    def cells(self) -> list[str]:
        """Return what stands under `HEADINGS`."""
        m = self.measures
        if m is None:
            return [self.method, *["–"] * (len(HEADINGS) - 2), self.verdict]
        densities = [_number(value) for value in (m.log_q_true, m.log_p_true, m.kl_p_q, m.kl_q_p)]
        modes = "–" if m.modes_found is None else f"{m.modes_found}/{m.modes_there}"
        held = f"{percent(m.coverage_min)[:-2]}–{percent(m.coverage_max)[:-2]}"
        errors = [_number(value) for value in (m.mean_error, m.log_variance_error, m.joint_error)]
        agree = "–" if m.agreement is None else percent(m.agreement)
        return [self.method, *densities, modes, held, *errors, agree, _number(m.total_variation), self.verdict]

    def record(self) -> dict[str, Any]:
        """Return what JSON has of it."""
        own = ("method", "problem", "bayesian", "grade", "verdict", "findings", "details")
        measures = None if self.measures is None else asdict(self.measures)
        return {name: getattr(self, name) for name in own} | {"seconds": round(self.seconds, 3), "measures": measures}


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of text whose columns are equally wide, words to the left and numbers to the right."""
    first, *widths, _ = (max(map(len, column)) for column in zip(*lines, strict=True))
    form = "  ".join([f"{{:{first}}}", *(f"{{:>{width}}}" for width in widths), "{}"])
    return [form.format(*line) for line in lines]


def save_report(folder: str | os.PathLike[str], name: str, text: object, record: Any, page: str = "") -> list[Path]:
    """Write a text, JSON, in which infinities are strings, and a page, if there is one, together."""
    files = {
        "txt": f"{text}\n",
        "json": json.dumps(plain(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n",
    }
    files |= {"html": page} if page else {}

    def write(hidden: Path) -> None:
        for kind, content in files.items():
            (hidden / f"{name}.{kind}").write_text(content, encoding="utf-8")

    return write_together(Path(folder), write)


def _number(value: float | Estimate | None) -> str:
    if isinstance(value, Estimate):
        value = max(0.0, value.value)
    return number(value if value is None or isinf(value) else round(value, 3))


@dataclass(frozen=True)
class Report:
    """All rows. `print(report)` is the table; `report[method, problem]` one row; `report.save(folder)` writes all."""

    rows: tuple[Row, ...]
    problems: dict[str, Problem] = field(repr=False)
    seed: int = 0

    def __getitem__(self, key: tuple[str, str]) -> Row:
        return {(row.method, row.problem): row for row in self.rows}[key]

    def of(self, problem: str) -> list[Row]:
        return [row for row in self.rows if row.problem == problem]

    def summary(self) -> list[str]:
        """Return a sentence for each method."""
        grades = {row.method: Counter(one.grade for one in self.rows if one.method == row.method) for row in self.rows}
        return [
            f"{method}: {', '.join(f'{grade} on {count}' for grade, count in found.items())}"
            for method, found in grades.items()
        ]

    def __str__(self) -> str:
        """Plain text: a block for each problem."""
        lines = []
        for name, problem in self.problems.items():
            lines += [f"{name}: {problem.title}", *aligned([HEADINGS, *(row.cells() for row in self.of(name))]), ""]
        return "\n".join([*lines, LEGEND, "", *self.summary()])

    def record(self) -> dict[str, Any]:
        """Return the content of check.json."""
        problems = {name: {"title": problem.title, "weights": problem.P} for name, problem in self.problems.items()}
        head = {"version": __version__, "seed": self.seed, "thresholds": MOST._asdict(), "summary": self.summary()}
        return head | {"problems": problems, "rows": [row.record() for row in self.rows]}

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write check.txt, check.json and check.html, together; the page needs jinja2."""
        check_folder(Path(folder))
        methods = list(dict.fromkeys(row.method for row in self.rows))
        shown = {"headings": HEADINGS, "legend": LEGEND, "thresholds": MOST._asdict(), "colours": COLOURS}
        template = Path(__file__).with_name("check.html")
        page = render(template, report=self, methods=methods, version=__version__, **shown)
        return save_report(folder, "check", self, self.record(), page)
