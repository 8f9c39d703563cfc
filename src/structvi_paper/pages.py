"""Pictures and pages of the studies: one style, HTML by jinja2, no script and nothing from the network."""

from base64 import b64encode
from io import BytesIO
from math import isinf
from pathlib import Path
from typing import Any

#: nats or variances below this are rounding
NOTHING = 1e-20
COLOURS = {
    "MAP": "#e08214",
    "MC dropout": "#c2243b",
    "MF-VI": "#00796b",
    "sN-VI": "#1f5fa8",
    "sGMM-VI": "#5b3a9c",
    "exact": "#444444",
}
_STYLE: Any = {"font.sans-serif": ["DejaVu Sans"], "axes.spines.top": False, "axes.spines.right": False}


def figure(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """Return a matplotlib figure of this size in inches, and its axes; the user's matplotlib state is not touched."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        made = Figure(figsize=(width, height), layout="constrained")
        return made, made.subplots(rows, columns, **options)


def picture(made: Any) -> bytes:
    """Return the PNG file of a figure, the same bytes at every call."""
    import matplotlib as mpl

    buffer = BytesIO()
    with mpl.rc_context(_STYLE):
        made.savefig(buffer, dpi=130, metadata={"Software": None})
    return buffer.getvalue()


def render(template: Path, **values: Any) -> str:
    """Return the page that a jinja2 template makes of the values; it may extend `base.html` of this folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "base64": lambda content: b64encode(content).decode()}
    return environment.get_template(template.name).render(**values)


def number(value: float | str | None) -> str:
    """Return four figures; texts are as they are, but for infinities."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return {"inf": "+∞", "-inf": "−∞"}.get(value, value)
    text = "0" if abs(value) < NOTHING else f"{value:.4g}"
    return number(text) if isinf(value) else text.replace("-", "−")


def plain(value: Any) -> Any:
    """Return what JSON can hold: infinities become the strings "inf" and "-inf"."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and isinf(value):
        return "inf" if value > 0 else "-inf"
    return value
