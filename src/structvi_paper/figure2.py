"""Figure 2: a correlated and a bimodal posterior in two dimensions, and what each method makes of them."""

from math import log
from typing import Any

import torch
from torch import Tensor

from structvi.families.full import FullNormalDensity

from .methods import Batched, Method, fit
from .pages import COLOURS, figure
from .processes import Starmap
from .settings import Settings

METHODS = [Method("MAP"), Method("MC dropout"), Method("MF-VI", 0), Method("sN-VI", 1), Method("sGMM-VI", 1)]
TITLES = {"unimodal": "A correlated posterior", "bimodal": "A posterior with two modes"}
#: of the picture: the range of both axes, and points along each
EXTENT = (-1.0, 4.2)
GRID = 161


def posteriors() -> dict[str, tuple[list[FullNormalDensity], Tensor]]:
    """Return name → the Gaussians of a mixture and their log proportions."""

    def normal(mean: tuple, covariance: tuple) -> FullNormalDensity:
        matrix = torch.tensor(covariance, dtype=torch.float64)
        return FullNormalDensity(torch.tensor(mean, dtype=torch.float64), torch.linalg.cholesky(matrix))

    correlated = normal((1.4, 1.2), ((0.55, 0.46), (0.46, 0.55)))
    wide = normal((1.1, 2.7), ((0.30, 0.18), (0.18, 0.25)))
    narrow = normal((3.0, 1.0), ((0.12, -0.06), (-0.06, 0.10)))
    return {
        "unimodal": ([correlated], torch.zeros(1, dtype=torch.float64)),
        "bimodal": ([wide, narrow], torch.tensor([0.6, 0.4], dtype=torch.float64).log()),
    }


def log_density(name: str, theta: Tensor) -> Tensor:
    parts, proportions = posteriors()[name]
    return torch.stack([part.log_prob(theta) for part in parts], dim=-1).add(proportions).logsumexp(-1)


def grid() -> Tensor:
    axis = torch.linspace(*EXTENT, GRID, dtype=torch.float64)
    return torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1).reshape(-1, 2)


def compute(settings: Settings, starmap: Starmap) -> dict[str, Any]:
    arguments = [(settings, name, row) for name in TITLES for row in METHODS]
    found = iter(starmap("figure 2", one_fit, arguments))
    every = {name: {row.name: next(found) for row in METHODS} for name in TITLES}
    points = {
        name: {"MAP": fits["MAP"]["points"][0], "MC dropout": fits["MC dropout"]["points"]}
        for name, fits in every.items()
    }
    return {"figure2": points, "picture": every}


def one_fit(settings: Settings, name: str, method: Method) -> dict[str, Any]:
    """Return point masses with their probabilities, or log q on the grid."""
    target = Batched(lambda theta: log_density(name, theta), z=2)
    generator = settings.generator("figure2", name, method)
    density: Any = fit(method, 0.3, target, settings, generator, settings.regression_steps, settings.regression_rate)
    if method.name == "MAP":
        return {"points": [density.mean.tolist()], "probabilities": [1.0]}
    if method.name == "MC dropout":
        points, probabilities = density.support()
        return {"points": points.tolist(), "probabilities": probabilities.tolist()}
    return {"log_q": density.log_prob(grid())}


def draw(data: dict[str, Any]) -> Any:
    made, axes = figure(1, 2, 10, 5.7, sharey=True)
    axis = torch.linspace(*EXTENT, GRID, dtype=torch.float64).numpy()
    labels = {"MAP": "MAP: one point", "MC dropout": "MC dropout: four points", "MF-VI": "MF-VI"}
    labels |= {"sN-VI": "sN-VI, rank 1", "sGMM-VI": "sGMM-VI, two parts"}
    handles: dict[str, Any] = {}
    for (name, methods), ax in zip(data.items(), axes, strict=True):
        density = log_density(name, grid()).exp().reshape(GRID, GRID)
        ax.imshow(density.numpy(), origin="lower", extent=(*EXTENT, *EXTENT), cmap="Blues", alpha=0.75)
        ax.axhline(0, color="white", linewidth=1)
        ax.axvline(0, color="white", linewidth=1)
        for method, found in methods.items():
            colour, style = COLOURS[method], "dashed" if method == "sGMM-VI" else "solid"
            if "points" in found:
                sizes = [30 + 150 * p for p in found["probabilities"]]
                marker = "X" if method == "MAP" else "o"
                x, y = zip(*found["points"], strict=True)
                handles[method] = ax.scatter(x, y, sizes, marker=marker, color=colour, edgecolor="white", zorder=5)
            elif method != "sGMM-VI" or name == "bimodal":
                log_q = found["log_q"].reshape(GRID, GRID).numpy()
                levels = sorted(log_q.max().item() + log(1 - mass) for mass in (0.5, 0.9))
                ax.contour(axis, axis, log_q, levels=levels, colors=colour, linewidths=1.8, linestyles=style)
                handles[method] = ax.plot([], [], color=colour, linestyle=style, linewidth=1.8)[0]
        dropout = methods["MC dropout"]
        for point, p in zip(dropout["points"], dropout["probabilities"], strict=True):
            where: Any = {"xytext": (0, 9), "textcoords": "offset points", "ha": "center", "zorder": 6}
            ax.annotate(f"{100 * p:.0f} %", point, **where, fontsize=8.5, color=COLOURS["MC dropout"])
        ax.set(xlabel="θ₁", ylabel="θ₂", title=TITLES[name], xlim=EXTENT, ylim=EXTENT)
    made.legend([handles[key] for key in labels], list(labels.values()), loc="outside lower center", ncols=5)
    return made
