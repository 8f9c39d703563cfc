"""The pictures of a report, as PNG."""

from io import BytesIO
from typing import Any

import numpy as np

from .assessing import Assessment
from .model import TableModel

BLUE, RED, GREY = "#20639b", "#c2243b", "#888888"
STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white"}
#: rows in the picture of intervals
SHOWN = 60


def pictures(model: TableModel, found: Assessment) -> dict[str, tuple[bytes, str]]:
    """Name → PNG and a description in words."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        calibration = Figure((4.6, 3.6), layout="constrained")
        intervals = Figure((7.2, 3.6), layout="constrained")
        if model.target.classes:
            words = _reliability(calibration.subplots(), found)
            more = _confusion(intervals.subplots(), model, found)
        else:
            words = _coverage(calibration.subplots(), found)
            more = _intervals(intervals.subplots(), model, found)
        return {"calibration": (_png(calibration), words), "rows": (_png(intervals), more)}


def _coverage(axes: Any, found: Assessment) -> str:
    levels, inside = np.array(list(found.coverage)), np.array(list(found.coverage.values()))
    axes.plot([0, 1], [0, 1], color=GREY, lw=1)
    error = 1.96 * np.sqrt(levels * (1 - levels) / len(found.log_prob))
    axes.errorbar(levels, inside, error, fmt="o", color=BLUE, capsize=3)
    axes.set(xlabel="probability of the interval", ylabel="share of test rows inside", xlim=(0, 1), ylim=(0, 1.05))
    return "Share of test rows inside intervals of 50, 80, 90 and 95 %: on the line where the intervals are right."


def _reliability(axes: Any, found: Assessment) -> str:
    p, right, count = (np.array(x) for x in zip(*found.reliability, strict=True))
    axes.plot([0, 1], [0, 1], color=GREY, lw=1)
    error = 1.96 * np.sqrt(np.maximum(p * (1 - p), 1e-4) / count)
    axes.errorbar(p, right, error, fmt="o", color=BLUE, capsize=3)
    low = max(0.0, min(p.min(), right.min()) - 0.1)
    axes.set(xlabel="probability of the likeliest class", ylabel="share that is right", xlim=(low, 1.02))
    axes.set_ylim(low, 1.05)
    return "Share of right predictions by their probability: on the line where the probabilities are right."


def _intervals(axes: Any, model: TableModel, found: Assessment) -> str:
    table = found.predictions
    rows = np.unique(np.linspace(0, len(table) - 1, SHOWN).round().astype(int))
    some = table.iloc[rows].sort_values("mean")
    at = np.arange(len(some))
    low, high, mean = (some[name].to_numpy() for name in ("low", "high", "mean"))
    axes.vlines(at, low, high, color=BLUE, lw=3, alpha=0.35, label=f"{100 * model.level:.0f} % interval")
    axes.plot(at, mean, "_", color=BLUE, label="mean")
    y = some.iloc[:, 1].to_numpy(dtype=float)
    outside = (y < low) | (y > high)
    axes.plot(at[~outside], y[~outside], ".", color="#222222", label="observed")
    axes.plot(at[outside], y[outside], "x", color=RED, label="observed, outside")
    axes.set(xlabel=f"{len(some)} test rows, by predicted mean", ylabel=model.target.name[:40], xticks=[])
    axes.legend(fontsize=8, frameon=False)
    return f"{len(some)} test rows with interval, mean and observation; {int(outside.sum())} lie outside."


def _confusion(axes: Any, model: TableModel, found: Assessment) -> str:
    table, names = found.predictions, model.target.classes
    observed = model.target.encode(table.iloc[:, [1]].set_axis([model.target.name], axis=1)).numpy()
    predicted = np.array([names.index(name) for name in table["prediction"]])
    entropy = table["entropy"].to_numpy()
    wrong = observed != predicted
    top = max(float(entropy.max()), 1e-6)
    bins = np.linspace(0, top, 25)
    axes.hist([entropy[~wrong], entropy[wrong]], bins, color=[BLUE, RED], label=["right", "wrong"], stacked=True)
    axes.set(xlabel="entropy of the prediction (nats)", ylabel="test rows")
    if len(table) > 20:
        axes.set_yscale("symlog")
    axes.legend(fontsize=8, frameon=False)
    return f"Test rows by the entropy of their prediction; {int(wrong.sum())} of {len(table)} are wrong."


def _png(figure: Any) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    return buffer.getvalue()
