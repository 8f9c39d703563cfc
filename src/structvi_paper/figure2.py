"""Figure 2: a correlated and a bimodal posterior in two dimensions, and what each method makes of them."""

from typing import Any

import torch
from torch import Tensor

from structvi.families.full import FullNormalDensity

from .fits import Batched, fit, space
from .jobs import Job
from .methods import Method
from .settings import Settings

METHODS = [Method("MAP"), Method("MC dropout"), Method("MF-VI", 0), Method("sN-VI", 1), Method("sGMM-VI", 1)]
EXTENT = (-1.0, 4.2)
GRID = 161


def posteriors() -> dict[str, tuple[list[FullNormalDensity], Tensor]]:
    """Name → the Gaussians of a mixture and their log proportions."""

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


def jobs(settings: Settings) -> list[Job]:
    return [
        Job(f"figure 2: {row.label}", one_fit, (settings, name, row), 0.5) for name in posteriors() for row in METHODS
    ]


def grid() -> Tensor:
    axis = torch.linspace(*EXTENT, GRID, dtype=torch.float64)
    first, second = torch.meshgrid(axis, axis, indexing="xy")
    return torch.stack([first, second], dim=-1).reshape(-1, 2)


def one_fit(settings: Settings, name: str, method: Method) -> dict[str, Any]:
    """Point masses with their probabilities, or log q on the grid."""
    target = Batched(space(z=2), lambda theta: log_density(name, theta))
    generator = settings.generator("figure2", name, method)
    steps, rate = settings.regression_steps, settings.regression_rate
    density = fit(method.recipe(0.3), target, settings, generator, steps=steps, rate=rate, anneal=method.anneal)
    if method.name == "MAP":
        return {"points": [density.mean.tolist()], "probabilities": [1.0]}
    if method.name == "MC dropout":
        points, probabilities = density.support()  # pyright: ignore[reportAttributeAccessIssue]
        return {"points": points.tolist(), "probabilities": probabilities.tolist()}
    return {"log_q": density.log_prob(grid())}


def assemble(settings: Settings, results: list[Any]) -> dict[str, Any]:
    return {name: {row.name: results.pop(0) for row in METHODS} for name in posteriors()}
