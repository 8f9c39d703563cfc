"""Figure 3: the 1024 functions of MC dropout, beside draws of posteriors that have a density."""

from typing import Any

import torch
from torch import Tensor

from .figure2 import GRID
from .methods import KEEP, Method
from .pages import COLOURS, figure
from .processes import Starmap
from .regression import RANGE, data_set, features
from .settings import Settings
from .table2 import fit_known

#: functions of each method but MC dropout
DRAWS = 100
METHODS = (Method("MC dropout"), Method("sN-VI", 4), Method("exact"))


def inputs() -> Tensor:
    return torch.linspace(*RANGE, GRID, dtype=torch.float64)


def compute(settings: Settings, starmap: Starmap) -> dict[str, Any]:
    found = starmap("figure 3", functions, [(settings, method) for method in METHODS])
    panels = {method.name: one for method, one in zip(METHODS, found, strict=True)}
    summary = {
        "support": len(panels["MC dropout"]["curves"]),
        "nearest_distance": panels["MC dropout"]["nearest"],
        "keep": KEEP,
        "nearest_of_100_exact_draws": panels["exact"]["nearest"],
        "nearest_of_100_sN_draws": panels["sN-VI"]["nearest"],
    }
    data = data_set(settings, 0)
    picture = {"panels": panels, "truth": features(inputs()) @ data.theta, "x": data.x, "t": data.t}
    return {"figure3": summary, "picture": picture}


def functions(settings: Settings, method: Method) -> dict[str, Any]:
    """Return the method's functions on the grid, on the first data set: all of them, or draws."""
    data, generator = data_set(settings, 0), settings.generator("figure3", method)
    density: Any = data.posterior() if method.name == "exact" else fit_known(settings, method, 0)
    if method.name == "MC dropout":
        theta, _ = density.support()
    else:
        theta = density.draw(DRAWS, generator=generator).theta
    distance = (theta - data.theta).norm(dim=-1).min().item()
    return {"curves": theta @ features(inputs()).mT, "nearest": distance}


def draw(data: dict[str, Any]) -> Any:
    from matplotlib.collections import LineCollection

    made, axes = figure(1, 3, 12, 4.2, sharey=True, sharex=True)
    x, panels = inputs(), data["panels"]
    every = panels["MC dropout"]["curves"]
    titles = (f"MC dropout: all {len(every)}", "sN-VI, rank 4: 100", "Exact posterior: 100")
    for (name, panel), title, ax in zip(panels.items(), titles, axes, strict=True):
        lines = [torch.stack([x, y], dim=-1).numpy() for y in panel["curves"]]
        width, alpha = (0.4, 0.16) if name == "MC dropout" else (0.7, 0.35)
        ax.add_collection(LineCollection(lines, colors=COLOURS[name], linewidths=width, alpha=alpha, rasterized=True))
        ax.plot(data["x"].numpy(), data["t"].numpy(), ".", color="#9a6b3f", markersize=2.5, alpha=0.7, label="data")
        ax.plot(x.numpy(), data["truth"].numpy(), color="black", linewidth=1.3, label="true function")
        ax.set(title=f"{title} functions", xlabel="x", ylabel="y")
        ax.text(0.03, 0.03, f"nearest to θ*: {panel['nearest']:.2f}", transform=ax.transAxes, fontsize=9)
    height = torch.cat([data["t"], data["truth"], every.flatten()])
    margin = 0.12 * (height.max() - height.min()).item()
    axes[0].set(xlim=RANGE, ylim=(height.min().item() - margin, height.max().item() + 3 * margin))
    axes[-1].legend(loc="upper right", fontsize=9)
    return made
