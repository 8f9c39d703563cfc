"""The pictures, drawn from what the jobs computed."""

from math import log
from typing import Any

import torch

from . import couplings, figure1, figure2, figure3
from .commentary import NOTHING

COLOURS = {
    "MAP": "#e08214",
    "MC dropout": "#c2243b",
    "MF-VI": "#00796b",
    "sN-VI": "#1f5fa8",
    "sGMM-VI": "#5b3a9c",
    "exact": "#444444",
}
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "svg.hashsalt": "structvi",
    "svg.fonttype": "none",
}


def draw(name: str, data: dict[str, Any]) -> Any:
    """The matplotlib figure called `name`; nothing of the user's matplotlib state is touched."""
    import matplotlib as mpl

    functions = {"figure1": _figure1, "figure2": _figure2, "figure3": _figure3, "couplings": _couplings}
    with mpl.rc_context(STYLE):
        return functions[name](data)


def _new(columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, **options)


def _figure1(data: dict[str, Any]) -> Any:
    figure, (left, right) = _new(2, 10, 4.2, width_ratios=(1, 1.35))
    angle = torch.linspace(0, 2 * torch.pi, 200, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()])
    shades = ("#9cc3ea", "#4f8fd0", "#174a86")
    for posterior, shade in zip(data["posteriors"], shades, strict=True):
        mean = torch.tensor(posterior["mean"], dtype=torch.float64).unsqueeze(-1)
        factor = torch.linalg.cholesky(torch.tensor(posterior["covariance"], dtype=torch.float64))
        ellipse = (mean + 2 * factor @ circle).numpy()
        left.fill(*ellipse, color=shade, alpha=0.25, linewidth=0)
        left.plot(*ellipse, color=shade, label=f"posterior, N = {posterior['observations']} (2σ)")
    left.plot(*data["nearest"], "*", color="#2e7d32", markersize=13, label="nearest reachable point")
    left.plot(*figure1.TRUTH[:2], "o", color="#2e7d32", markersize=7, label="first two of the true four")
    left.set(xlabel="θ₁", ylabel="θ₂", title="The posterior contracts, around the wrong point")
    left.margins(0.08)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=8.5, ncols=2)
    rows = data["rows"]
    N = [row["observations"] for row in rows]
    parts = ("aleatoric", "discrepancy", "epistemic")
    colours = ("#f0b45c", "#7fb685", "#6fa1d8")
    right.stackplot(N, *[[row[part] for row in rows] for part in parts], colors=colours, alpha=0.9)
    right.plot(N, [row["measured"] for row in rows], "o", color="black", markersize=4, clip_on=False, zorder=5)
    top = 1.12 * max(row["measured"] for row in rows)
    right.set(xscale="log", xlabel="observations N", ylabel="squared error of a new observation", xlim=(N[0], N[-1]))
    right.set(ylim=(0, top), title="Its variance says nothing of the bias")
    right.set_xscale("log", base=2)
    right.set_xticks(N, [str(n) for n in N])
    aleatoric, discrepancy = rows[0]["aleatoric"], rows[0]["discrepancy"]
    right.text(64, aleatoric / 2, "aleatoric: noise σ²", ha="center", va="center")
    right.text(64, aleatoric + discrepancy / 2, "discrepancy: what the model cannot reach", ha="center", va="center")
    edge = aleatoric + discrepancy
    right.annotate(
        "epistemic: the posterior's variance",
        (5.8, edge + 0.3 * rows[0]["epistemic"]),
        (11, edge + 0.9 * rows[0]["epistemic"]),
        va="center",
        arrowprops={"arrowstyle": "-", "color": "#555555"},
    )
    right.annotate(
        "measured, mean over data sets",
        (N[1], rows[1]["measured"]),
        (11, 0.75 * top),
        va="center",
        arrowprops={"arrowstyle": "-", "color": "#555555"},
    )
    return figure


def _figure2(data: dict[str, Any]) -> Any:
    figure, axes = _new(2, 10, 5.7, sharey=True)
    titles = {"unimodal": "A correlated posterior", "bimodal": "A posterior with two modes"}
    n = figure2.GRID
    axis = torch.linspace(*figure2.EXTENT, n, dtype=torch.float64).numpy()
    handles: dict[str, Any] = {}
    for (name, methods), ax in zip(data.items(), axes, strict=True):
        density = figure2.log_density(name, figure2.grid()).exp().reshape(n, n)
        ax.imshow(density.numpy(), origin="lower", extent=(*figure2.EXTENT, *figure2.EXTENT), cmap="Blues", alpha=0.75)
        ax.axhline(0, color="white", linewidth=1)
        ax.axvline(0, color="white", linewidth=1)
        shown = ["MF-VI", "sN-VI"] + (["sGMM-VI"] if name == "bimodal" else [])
        for method in shown:
            log_q = methods[method]["log_q"].reshape(n, n).numpy()
            peak = log_q.max().item()
            levels = sorted(peak + log(1 - mass) for mass in (0.5, 0.9))
            style = {"MF-VI": "solid", "sN-VI": "solid", "sGMM-VI": "dashed"}[method]
            ax.contour(axis, axis, log_q, levels=levels, colors=COLOURS[method], linewidths=1.8, linestyles=style)
            handles[method] = ax.plot([], [], color=COLOURS[method], linestyle=style, linewidth=1.8)[0]
        for method in ("MC dropout", "MAP"):
            x, y = zip(*methods[method]["points"], strict=True)
            mass = methods[method]["probabilities"]
            sizes = [30 + 150 * p for p in mass] if method == "MC dropout" else 80
            marker = "o" if method == "MC dropout" else "X"
            handles[method] = ax.scatter(
                x, y, s=sizes, marker=marker, color=COLOURS[method], edgecolor="white", linewidth=0.8, zorder=5
            )
            if method == "MC dropout":
                for px, py, p in zip(x, y, mass, strict=True):
                    label = f"{100 * p:.0f} %"
                    where = {"xytext": (0, 9), "textcoords": "offset points", "ha": "center"}
                    ax.annotate(label, (px, py), **where, fontsize=8.5, color=COLOURS[method], zorder=6)
        ax.set(xlabel="θ₁", title=titles[name], xlim=figure2.EXTENT, ylim=figure2.EXTENT)
    axes[0].set_ylabel("θ₂")
    names = {
        "MAP": "MAP: one point",
        "MC dropout": "MC dropout: four points",
        "MF-VI": "MF-VI",
        "sN-VI": "sN-VI, rank 1",
        "sGMM-VI": "sGMM-VI, two parts",
    }
    figure.legend(
        [handles[key] for key in names], list(names.values()), loc="outside lower center", ncols=5, handletextpad=0.5
    )
    return figure


def _figure3(data: dict[str, Any]) -> Any:
    from matplotlib.collections import LineCollection

    figure, axes = _new(3, 10, 3.9, sharey=True, sharex=True)
    x, exact = figure3.inputs(), data["exact"]
    titles = {
        "MC dropout": f"MC dropout: all {len(data['panels']['MC dropout']['curves'])} functions",
        "sN-VI": "sN-VI, rank 4: 100 draws",
        "exact": "Exact posterior: 100 draws",
    }
    panels = {**data["panels"], "exact": exact}
    for (name, title), ax in zip(titles.items(), axes, strict=True):
        curves = panels[name]["curves"]
        lines = [torch.stack([x, y], dim=-1).numpy() for y in curves]
        thin = name == "MC dropout"
        collection = LineCollection(
            lines, colors=COLOURS[name], linewidths=0.4 if thin else 0.7, alpha=0.16 if thin else 0.35, rasterized=True
        )
        ax.add_collection(collection)
        ax.plot(exact["x"].numpy(), exact["t"].numpy(), ".", color="#9a6b3f", markersize=2.5, alpha=0.7, label="data")
        ax.plot(x.numpy(), exact["truth"].numpy(), color="black", linewidth=1.3, label="true function")
        ax.set(title=title, xlabel="x")
        box = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 2}
        nearest = f"nearest to θ*: {panels[name]['nearest']:.2f}"
        ax.text(0.03, 0.03, nearest, transform=ax.transAxes, fontsize=9, bbox=box)
    shown = torch.cat([exact["t"], exact["truth"], data["panels"]["MC dropout"]["curves"].flatten()])
    margin = 0.12 * (shown.max() - shown.min()).item()
    axes[0].set(
        ylabel="y",
        xlim=(x[0].item(), x[-1].item()),
        ylim=(shown.min().item() - margin, shown.max().item() + 0.3 * margin),
    )
    axes[-1].legend(loc="upper right", fontsize=9, handlelength=1.5, framealpha=0.85, frameon=True, edgecolor="none")
    return figure


def _couplings(data: dict[str, Any]) -> Any:
    from matplotlib.lines import Line2D

    figure, axes = _new(4, 14, 4, width_ratios=(1, 1, 1, 1.2))
    colours = {"path": "#1f5fa8", "log_q": "#c2243b", "entropy": "#8a8a8a"}
    names = list(couplings.COUPLINGS)
    late = {(row["coupling"], row["estimator"]): row for row in data["rows"] if row["phase"] == "late"}
    titles = {"var_mean": "mean", "var_scale": "log scale", "var_factor": "factor"}
    for (column, title), ax in zip(titles.items(), axes[:3], strict=True):
        for shift, estimator in zip((-0.22, 0, 0.22), colours, strict=True):
            values = [late[name, estimator][column] for name in names]
            where = [index + shift for index in range(len(names))]
            ax.plot(where, values, "o", color=colours[estimator], markersize=7)
        ax.set_yscale("log")
        ax.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=8)
        ax.set_title(f"Gradient variance, {title}", fontsize=10)
        ax.set_xlim(-0.6, len(names) - 0.4)
        ax.grid(axis="y", color="#eeeeee")
        ax.set_axisbelow(True)
        positive = [late[name, e][column] for name in names for e in colours if late[name, e][column] > NOTHING]
        bottom = min(positive) / 10
        ax.set_ylim(bottom, 3 * max(positive))
        for index, name in enumerate(names):
            if all(late[name, estimator][column] <= NOTHING for estimator in colours):
                ax.text(index, 1.5 * bottom, "zero", ha="center", va="bottom", color="#333333", fontsize=9)
    per_step, every = data["evaluations_per_step"], data["steps_between_values"]
    ax = axes[3]
    styles: dict[str, Any] = {
        "naive": "dotted",
        "paired": "dashed",
        "unscented": "solid",
        "unscented shared": "dashdot",
    }
    for line in data["curves"]:
        x = [per_step * every * (1 + index) for index in range(len(line["kl_q_p"]) - 1)]
        colour, style = colours[line["estimator"]], styles[line["coupling"]]
        ax.plot(x, line["kl_q_p"][1:], color=colour, linestyle=style, linewidth=1.3)
    ax.set(yscale="log", xlabel="evaluations of log p")
    ax.set_title("log evidence − ELBO along a fit, nats", fontsize=10)
    handles = [
        Line2D([], [], color=colour, marker="o", linestyle="none", label=name) for name, colour in colours.items()
    ]
    handles += [Line2D([], [], color="#333333", linestyle=style, label=name) for name, style in styles.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=7)
    return figure
