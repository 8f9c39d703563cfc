"""The page: verdicts at a glance, and for every problem its picture and table. No script, nothing from the network."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from io import BytesIO
from typing import Any, Protocol

import torch

from structvi_paper import figure2
from structvi_paper.figures import STYLE as MATPLOTLIB
from structvi_paper.report import STYLE

from .problems import Problem
from .rows import HEADINGS, LEGEND, Row
from .verdicts import REASONS

COLOURS = {"Bayesian": "#2e7d32", "off": "#b06a00", "not a posterior": "#c2243b", "not applicable": "#8a8a8a",
           "failed": "#4a3a6b"}  # fmt: skip
OWN = """
body { max-width: 84rem; }
.rows td:nth-child(2), .rows th:nth-child(2) { text-align: left; white-space: normal; min-width: 24rem; }
.glance td { text-align: center; color: #fff; }
.glance td:first-child { text-align: left; color: inherit; }
.glance th { font-weight: 400; }
.key span { display: inline-block; padding: 0 .6rem; color: #fff; margin-right: .4rem; }
"""


class Shown(Protocol):
    """What the page shows of a report."""

    @property
    def rows(self) -> tuple[Row, ...]: ...

    @property
    def problems(self) -> dict[str, Problem]: ...

    @property
    def seed(self) -> int: ...

    @property
    def methods(self) -> list[str]: ...

    def __getitem__(self, key: tuple[str, str]) -> Row: ...

    def summary(self) -> list[str]: ...

    def record(self) -> dict[str, Any]: ...


def page(report: Shown) -> str:
    """HTML with the pictures inside."""
    sections = []
    for name, problem in report.problems.items():
        rows = [row for row in report.rows if row.problem == name]
        head = _cells("th scope='col'", HEADINGS)
        body = "".join(f"<tr>{_cells('td', row.cells())}</tr>" for row in rows)
        table = (
            f"<div class='scroll'><table class='rows'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )
        title = problem.title[0].upper() + problem.title[1:]
        content = f"{_picture(problem, rows)}<div class='scroll'>{table}</div>"
        sections.append(f"<section id='{name}'><h2>{escape(title)}</h2>{content}</section>")
    summary = "".join(f"<li>{escape(sentence)}</li>" for sentence in report.summary())
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in REASONS)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>Is it Bayesian? structvi check</title><style>{STYLE}{OWN}</style></head>
<body>
<h1>Is it Bayesian?</h1>
<p>Every method was fitted to problems whose posterior is known, and its draws were compared with that posterior.</p>
{_glance(report)}
<ul>{summary}</ul>
{chr(10).join(sections)}
<section id="legend"><h2>What the numbers are</h2><p>{escape(LEGEND)}.</p><ul>{reasons}</ul></section>
<p class="muted">structvi {report.record()["version"]}, seed {report.seed}.</p>
</body></html>
"""


def _cells(tag: str, cells: Sequence[str]) -> str:
    """The verdict, which is the last, next to the method: numbers may lie beyond the edge of a small screen."""
    method, *numbers, verdict = cells
    return "".join(f"<{tag}>{escape(cell)}</{tag.split()[0]}>" for cell in (method, verdict, *numbers))


def _glance(report: Shown) -> str:
    """Problems × methods, coloured by grade."""
    key = "".join(f"<span style='background:{colour}'>{grade}</span>" for grade, colour in COLOURS.items())
    head = "".join(f"<th scope='col'>{escape(method)}</th>" for method in report.methods)
    body = []
    for name in report.problems:
        cells = []
        for method in report.methods:
            row = report[method, name]
            m = row.measures
            text = "" if m is None else f"{100 * m.coverage_min:.0f}–{100 * m.coverage_max:.0f} %"
            tip = escape(row.verdict, quote=True)
            cells.append(f"<td style='background:{COLOURS[row.grade]}' title='{tip}'>{text}</td>")
        body.append(f"<tr><td><a href='#{name}'>{escape(name)}</a></td>{''.join(cells)}</tr>")
    return (
        f"<p class='key'>{key} What the method's 90 % intervals hold of the posterior, at least and at most:</p>"
        f"<div class='scroll'><table class='glance'><thead><tr><th></th>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _picture(problem: Problem, rows: "list[Row]") -> str:
    shown = [row for row in rows if row.sketch is not None]
    if not shown:
        return ""
    import matplotlib as mpl

    with mpl.rc_context(MATPLOTLIB):
        figure = (_plane if problem.P == 2 else _band)(problem, shown)
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    source = b64encode(buffer.getvalue()).decode()
    alt = f"{problem.title}: the posterior in grey, and what each of {len(shown)} methods makes of it"
    return f"<img src='data:image/png;base64,{source}' alt='{escape(alt, quote=True)}'>"


def _panels(count: int, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, count)
    lines = -(-count // columns)
    figure = Figure(figsize=(3 * columns, height * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten().tolist()
    for ax in axes[count:]:
        ax.set_axis_off()
    return figure, axes[:count]


def _plane(problem: Problem, rows: "list[Row]") -> Any:
    """The posterior as shade, draws of the method as dots."""
    low, high = problem.reference.min(0).values, problem.reference.max(0).values
    axis = [
        torch.linspace(a, b, figure2.GRID, dtype=torch.float64)
        for a, b in zip(low.tolist(), high.tolist(), strict=True)
    ]
    first, second = torch.meshgrid(*axis, indexing="xy")
    density = problem.log_posterior(torch.stack([first, second], dim=-1).reshape(-1, 2)).exp().reshape(first.shape)
    figure, axes = _panels(len(rows), 3.0)
    for ax, row in zip(axes, rows, strict=True):
        assert row.sketch is not None
        ax.contourf(first, second, density, levels=12, cmap="Greys", alpha=0.8)
        size, alpha = (9, 1.0) if row.grade == "not a posterior" else (4, 0.5)
        ax.plot(*row.sketch.T, ".", color=COLOURS[row.grade], markersize=size, alpha=alpha)
        ax.set(title=row.method, xlim=(low[0].item(), high[0].item()), ylim=(low[1].item(), high[1].item()))
    return figure


def _band(problem: Problem, rows: "list[Row]") -> Any:
    """90 % of the outputs along the grid: the posterior's in grey, the method's coloured."""
    assert problem.data is not None
    exact = torch.quantile(problem.outputs(problem.reference), torch.tensor([0.05, 0.95], dtype=torch.float64), dim=0)
    x = torch.arange(exact.shape[1])
    figure, axes = _panels(len(rows), 2.4)
    for ax, row in zip(axes, rows, strict=True):
        assert row.sketch is not None
        ax.fill_between(x, *exact, color="#bbbbbb", linewidth=0)
        low, middle, high = row.sketch
        ax.fill_between(x, low, high, color=COLOURS[row.grade], alpha=0.35, linewidth=0)
        ax.plot(x, middle, color=COLOURS[row.grade])
        margin = 0.5 * (exact.max() - exact.min()).item()
        ax.set(title=row.method, ylim=(exact.min().item() - margin, exact.max().item() + margin), xticks=[])
    return figure
