"""Figure 3: the 1024 functions of MC dropout, beside draws of posteriors that have a density."""

from typing import Any

import torch
from torch import Tensor

from .jobs import Job
from .methods import KEEP, Method
from .regression import RANGE, data_set, features
from .settings import Settings
from .table2 import fit_known

DRAWS = 100
POINTS = 300
METHODS = (Method("MC dropout"), Method("sN-VI", 4))


def inputs() -> Tensor:
    return torch.linspace(*RANGE, POINTS, dtype=torch.float64)


def jobs(settings: Settings) -> list[Job]:
    return [Job(f"figure 3: {method.label}", functions, (settings, method), 0.5) for method in METHODS]


def functions(settings: Settings, method: Method) -> dict[str, Any]:
    """The method's functions on the grid, with probabilities, on the first data set: all of them, or draws."""
    data, generator = data_set(settings, 0), settings.generator("figure3", method)
    density = fit_known(settings, method, 0)
    if method.name == "MC dropout":
        theta, probability = density.support()  # pyright: ignore[reportAttributeAccessIssue]
    else:
        theta = density.draw(DRAWS, generator=generator).theta
        probability = torch.full((DRAWS,), 1 / DRAWS, dtype=torch.float64)
    distance = (theta - data.theta).norm(dim=-1).min().item()
    return {"curves": theta @ features(inputs()).mT, "probability": probability, "nearest": distance}


def exact(settings: Settings) -> dict[str, Any]:
    """Draws of the exact posterior, and what they are drawn for: the truth and the data."""
    data = data_set(settings, 0)
    theta = data.posterior().draw(DRAWS, generator=settings.generator("figure3", "exact")).theta
    basis = features(inputs())
    distance = (theta - data.theta).norm(dim=-1).min().item()
    return {"curves": theta @ basis.mT, "truth": basis @ data.theta, "x": data.x, "t": data.t, "nearest": distance}


def assemble(settings: Settings, results: list[Any]) -> dict[str, Any]:
    panels = {method.name: results.pop(0) for method in METHODS}
    dropout = panels["MC dropout"]
    return {
        "summary": {
            "support": len(dropout["curves"]),
            "nearest_distance": dropout["nearest"],
            "keep": KEEP,
            "nearest_of_100_exact_draws": exact(settings)["nearest"],
            "nearest_of_100_sN_draws": panels["sN-VI"]["nearest"],
        },
        "panels": panels,
        "exact": exact(settings),
    }
