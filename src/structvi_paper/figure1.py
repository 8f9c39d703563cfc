"""Figure 1: a truth with four parameters and a model with two. The posterior contracts, the bias stays."""

from typing import Any

import torch
from torch import Tensor

from .pages import figure
from .processes import Starmap
from .settings import TABLE, Settings

_OWN: dict[str, Any] = TABLE["figure1"]
TRUTH, SIZES = _OWN["truth"], _OWN["sizes"]
NOISE, DATA_SETS = float(_OWN["noise"]), int(_OWN["data_sets"])
ELLIPSES = {int(size): colour for size, colour in _OWN["ellipses"].items()}
PARTS = {"aleatoric": "#f0b45c", "discrepancy": "#7fb685", "epistemic": "#6fa1d8"}


def functions(x: Tensor) -> Tensor:
    """Return [.., 4] for [..]; the model has the first two."""
    return torch.stack([torch.ones_like(x), x, (3 * x).sin(), (5 * x).cos()], dim=-1)


def posterior(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exact posterior of the two-parameter model under N(0, I): means [.., 2], covariances [.., 2, 2]."""
    design = functions(x)[..., :2]
    covariance = torch.linalg.inv(design.mT @ design / NOISE**2 + torch.eye(2, dtype=torch.float64))
    return (covariance @ (design.mT @ t.unsqueeze(-1)) / NOISE**2).squeeze(-1), covariance


def compute(settings: Settings, starmap: Starmap) -> dict[str, Any]:
    """Return the expected squared error of a new observation, and its parts, over data sets of each size.

    The parts of t* − E[y*] are three. Aleatoric: σ². Discrepancy: the squared distance of the truth from the nearest
    function that the model can reach. Epistemic: the model's own posterior variance of y*. The rest is the distance of
    the posterior mean from the nearest function beyond that variance.
    """
    generator = settings.generator("figure1")
    options = {"generator": generator, "dtype": torch.float64}
    truth = torch.tensor(TRUTH, dtype=torch.float64)
    grid = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    basis, y = functions(grid)[:, :2], functions(grid) @ truth
    nearest = torch.linalg.lstsq(basis, y.unsqueeze(-1)).solution.squeeze(-1)  # least squares over inputs
    common = {"aleatoric": NOISE**2, "discrepancy": (y - basis @ nearest).square().mean().item()}
    rows, posteriors = [], []
    for N in SIZES:
        x = 2 * torch.rand(DATA_SETS, N, **options) - 1
        t = functions(x) @ truth + NOISE * torch.randn(DATA_SETS, N, **options)
        mean, covariance = posterior(x, t)
        measured = (y - mean @ basis.mT).square().mean().item() + NOISE**2
        epistemic = ((basis @ covariance) * basis).sum(-1).mean().item()
        rows.append({"observations": N, **common, "epistemic": epistemic, "measured": measured})
        if N in ELLIPSES:
            posteriors.append({"observations": N, "mean": mean[0].tolist(), "covariance": covariance[0].tolist()})
    found = {"rows": rows, "nearest": nearest.tolist(), "posteriors": posteriors}
    return {"figure1": found, "picture": found}


def draw(data: dict[str, Any]) -> Any:
    made, (left, right) = figure(1, 2, 10, 4.2, width_ratios=(1, 1.35))
    angle = torch.linspace(0, 2 * torch.pi, 200, dtype=torch.float64)
    for one in data["posteriors"]:
        factor = torch.linalg.cholesky(torch.tensor(one["covariance"], dtype=torch.float64))
        circle = 2 * factor @ torch.stack([angle.cos(), angle.sin()])
        ellipse = (torch.tensor(one["mean"], dtype=torch.float64).unsqueeze(-1) + circle).numpy()
        colour = ELLIPSES[one["observations"]]
        left.fill(*ellipse, color=colour, alpha=0.25, linewidth=0)
        left.plot(*ellipse, color=colour, label=f"posterior, N = {one['observations']} (2σ)")
    left.plot(*data["nearest"], "*", color="#2e7d32", markersize=13, label="nearest reachable point")
    left.plot(*TRUTH[:2], "o", color="#2e7d32", markersize=7, label="first two of the true four")
    left.set(xlabel="θ₁", ylabel="θ₂", title="The posterior contracts, around the wrong point")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=8.5, ncols=2)
    rows = data["rows"]
    layers = [[row[part] for row in rows] for part in PARTS]
    right.stackplot(SIZES, *layers, labels=PARTS, colors=PARTS.values(), alpha=0.9)
    right.plot(SIZES, [row["measured"] for row in rows], "ko", markersize=4, clip_on=False, label="measured")
    right.set_xscale("log", base=2)
    right.set_xticks(SIZES, [str(n) for n in SIZES])
    right.set(xlabel="observations N", ylabel="squared error of a new observation", xlim=(SIZES[0], SIZES[-1]))
    right.set(ylim=(0, 1.12 * max(row["measured"] for row in rows)), title="Its variance says nothing of the bias")
    right.legend(loc="upper right")
    return made
