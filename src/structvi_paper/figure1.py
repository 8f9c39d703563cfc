"""Figure 1: a truth with four parameters and a model with two. The posterior contracts, the bias stays."""

from typing import Any

import torch
from torch import Tensor

from .jobs import Job
from .settings import Settings

#: of the functions 1, x, sin 3x, cos 5x
TRUTH = (0.5, 1.0, 0.6, -0.4)
NOISE = 0.3
SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
SHOWN = (8, 32, 512)
DATA_SETS = 400


def functions(x: Tensor) -> Tensor:
    """[..] → [.., 4]; the model has the first two."""
    return torch.stack([torch.ones_like(x), x, (3 * x).sin(), (5 * x).cos()], dim=-1)


def jobs(settings: Settings) -> list[Job]:
    return [Job("figure 1", decompose, (settings,), 0.3)]


def posterior(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Exact, of the two-parameter model under N(0, I): means [.., 2] and covariances [.., 2, 2]."""
    design = functions(x)[..., :2]
    precision = design.mT @ design / NOISE**2 + torch.eye(2, dtype=torch.float64)
    covariance = torch.linalg.inv(precision)
    return (covariance @ (design.mT @ t.unsqueeze(-1)) / NOISE**2).squeeze(-1), covariance


def decompose(settings: Settings) -> dict[str, Any]:
    """The expected squared error of a new observation, and its parts, over data sets of each size.

    Of t* − E[y*]: aleatoric σ²; discrepancy, the squared distance of the truth from the nearest function that the
    model can reach; epistemic, the model's own posterior variance of y*. What is left of the measured error is the
    distance of the posterior mean from the nearest function beyond what the posterior says of it.
    """
    generator = settings.generator("figure1")
    options = {"generator": generator, "dtype": torch.float64}
    truth = torch.tensor(TRUTH, dtype=torch.float64)
    grid = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    basis, y = functions(grid)[:, :2], functions(grid) @ truth
    nearest = torch.linalg.lstsq(basis, y.unsqueeze(-1)).solution.squeeze(-1)  # least squares over inputs
    discrepancy = (y - basis @ nearest).square().mean().item()
    rows, shown = [], []
    for N in SIZES:
        x = 2 * torch.rand(DATA_SETS, N, **options) - 1
        t = functions(x) @ truth + NOISE * torch.randn(DATA_SETS, N, **options)
        mean, covariance = posterior(x, t)
        error = (y - mean @ basis.mT).square().mean().item()
        epistemic = ((basis @ covariance) * basis).sum(-1).mean().item()
        rows.append(
            {
                "observations": N,
                "aleatoric": NOISE**2,
                "discrepancy": discrepancy,
                "epistemic": epistemic,
                "measured": error + NOISE**2,
            }
        )
        if N in SHOWN:
            shown.append({"observations": N, "mean": mean[0].tolist(), "covariance": covariance[0].tolist()})
    return {"rows": rows, "nearest": nearest.tolist(), "posteriors": shown}


def assemble(settings: Settings, results: list[Any]) -> dict[str, Any]:
    return results.pop(0)
