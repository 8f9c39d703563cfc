"""The page: the table, what each method says of probabilities that are known, and its bound."""

from base64 import b64encode
from html import escape
from io import BytesIO
from typing import Any, Protocol

from structvi_paper.figures import STYLE as MATPLOTLIB
from structvi_paper.report import STYLE

from .rows import HEADINGS, LEGEND, ScaleRow

COLOUR, GREY = "#2a6f97", "#555555"


class Shown(Protocol):
    """What the page shows of a report."""

    @property
    def methods(self) -> list[str]: ...

    @property
    def constant(self) -> float: ...

    @property
    def seed(self) -> int: ...

    def of(self, method: str) -> list[ScaleRow]: ...

    def cells(self, method: str) -> tuple[str, ...]: ...

    def title(self) -> str: ...

    def record(self) -> dict[str, Any]: ...


def page(report: Shown) -> str:
    """HTML with the pictures inside; no script, nothing from the network."""
    head = "".join(f"<th scope='col'>{escape(heading)}</th>" for heading in HEADINGS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in report.cells(method)) + "</tr>"
        for method in report.methods
    )
    pictures = "".join(
        f"<h2>{title}</h2>{_image(draw, report, title)}"
        for title, draw in (("What it says of probabilities that are known", _bands), ("The bound", _bounds))
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>Is it Bayesian, at scale? structvi check</title><style>{STYLE}</style></head>
<body>
<h1>Is it Bayesian, at scale?</h1>
<p>{escape(report.title()[0].upper() + report.title()[1:])}. What each method calls its posterior.</p>
<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<p>{escape(LEGEND)}.</p>
{pictures}
<p class="muted">structvi {report.record()["version"]}, seed {report.seed}.</p>
</body></html>
"""


def _image(draw: Any, report: Shown, title: str) -> str:
    import matplotlib as mpl

    with mpl.rc_context(MATPLOTLIB):
        buffer = BytesIO()
        draw(report).savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    source = b64encode(buffer.getvalue()).decode()
    return f"<img src='data:image/png;base64,{source}' alt='{escape(title, quote=True)}'>"


def _figure(columns: int, lines: int, width: float, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten().tolist()


def _bands(report: Shown) -> Any:
    """Of the first teacher: test inputs in the order of their true probability, and the 90 % interval of each."""
    count = len(report.methods)
    columns = min(4, count)
    figure, axes = _figure(columns, -(-count // columns), 3.0, 2.4)
    for ax in axes[count:]:
        ax.set_axis_off()
    for ax, method in zip(axes, report.methods, strict=False):
        row = report.of(method)[0]
        sketch, x = row.sketch, range(len(row.sketch.truth))
        ax.vlines(x, sketch.low, sketch.high, color=COLOUR, alpha=0.35, linewidth=0.7)
        ax.plot(x, sketch.mean, ".", color=COLOUR, markersize=2)
        ax.plot(x, sketch.truth, color=GREY, linewidth=1.5)
        ax.set(title=f"{method}: {100 * row.coverage:.0f} %", xticks=[], ylim=(0, 1))
    return figure


def _bounds(report: Shown) -> Any:
    """ELBO at λ = 1 above the constant predictor, on a scale that shows small and very large numbers."""
    known = [method for method in report.methods if report.of(method)[0].elbo is not None]
    figure, (ax, *_) = _figure(1, 1, 8.0, 0.4 * max(1, len(known)) + 1.0)
    gains = []
    for method in known:
        rows = report.of(method)
        gains.append(sum((row.elbo or 0.0) - report.constant for row in rows) / len(rows))
    ax.barh(known, gains, color=[COLOUR if gain > 0 else "#b03a2e" for gain in gains])
    ax.set_xscale("symlog", linthresh=100)
    ax.axvline(0, color=GREY, linewidth=1)
    ax.invert_yaxis()
    ax.set_xlabel("ELBO at λ = 1, nats above the best constant prediction")
    return figure
