"""The paper's section 4, measured: what coupled draws and the form of the objective do to the gradient's noise."""

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from structvi.couplings import Coupling, naive, paired, unscented
from structvi.families import Family, kl
from structvi.families.full import FullNormalDensity
from structvi.objective import Estimator, Kind, elbo

from .methods import Batched, Method, adam
from .optima import random_gaussians
from .pages import NOTHING, figure
from .processes import Starmap
from .settings import Settings
from .table1 import P

RANK = 4
#: evaluations of log p in every estimate: one unscented group at this rank
EVALUATIONS = unscented.group_size(RANK)
COUPLINGS: dict[str, tuple[Coupling, int]] = {
    "naive": (naive, EVALUATIONS),
    "paired": (paired, EVALUATIONS // 2),
    "unscented": (unscented, 1),
    "unscented shared": (unscented(shared_diagonal=True), 1),
}
ESTIMATORS: tuple[Kind, ...] = ("path", "log_q", "entropy")
PAIRS: list[tuple[str, Kind]] = [(name, kind) for name in COUPLINGS for kind in ESTIMATORS]
PARTS = {"var_mean": "mean", "var_scale": "log_scale", "var_factor": "factor"}
#: steps between two values of a curve; a fit is called early after so many, and late where it ends
EVERY = 20
COLOURS = {"path": "#1f5fa8", "log_q": "#c2243b", "entropy": "#8a8a8a"}
STYLES: dict[str, Any] = dict(zip(COUPLINGS, ("dotted", "dashed", "solid", "dashdot"), strict=True))


def compute(settings: Settings, starmap: Starmap) -> dict[str, Any]:
    n = settings.coupling_targets
    found = starmap("couplings, variance", variances, [(settings, i) for i in range(n)])
    rows = []
    for same in zip(*found, strict=True):  # one row of every target
        rows.append(same[0] | {column: median([one[column] for one in same]) for column in PARTS})
    fits = iter(starmap("couplings, fits", curve, [(settings, *pair, i) for pair in PAIRS for i in range(n)]))
    curves = []
    for name, kind in PAIRS:
        values = [median(same) for same in zip(*(next(fits) for _ in range(n)), strict=True)]
        curves.append({"coupling": name, "estimator": kind, "kl_q_p": values})
    summary = {"rows": rows, "evaluations_per_step": EVALUATIONS, "steps_between_values": EVERY, "curves": curves}
    return {"couplings": summary, "picture": summary}


def _problem(settings: Settings, index: int) -> tuple[FullNormalDensity, Batched]:
    means, covariances = random_gaussians(settings.coupling_targets, P, settings.generator("couplings"))
    exact = FullNormalDensity(means[index], torch.linalg.cholesky(covariances[index]))
    return exact, Batched(exact.log_prob, z=P)


def _estimator(coupling: str, kind: Kind) -> Estimator:
    draw, groups = COUPLINGS[coupling]
    return Estimator(kind, groups=groups, coupling=draw)


def _fit(settings: Settings, coupling: str, kind: Kind, index: int, label: str) -> Iterator[tuple[int, Family, Any]]:
    """Fit the structured normal; yield the steps made, the family and the stream of its draws."""
    generator = settings.generator("couplings", label, index)  # the same start for all couplings
    _, target = _problem(settings, index)
    family = Method("sN-VI", RANK).recipe(1.0).bind(target.space, generator)
    how, steps = _estimator(coupling, kind), settings.coupling_steps
    for step in adam(family, target, how, settings, generator, steps, settings.regression_rate):
        yield step, family, generator


def variances(settings: Settings, index: int) -> list[dict[str, Any]]:
    """Return Σ over coordinates of the gradient's variance, at the same q for all: early and late in one fit."""
    _, target = _problem(settings, index)
    rows = []
    for step, family, generator in _fit(settings, "unscented", "path", index, "variance"):
        if step not in (EVERY, settings.coupling_steps):
            continue
        own = [family.get_parameter(name) for name in PARTS.values()]
        for name, kind in PAIRS:
            gradients: list[tuple[Tensor, ...]] = []
            for _ in range(settings.coupling_repeats):
                value = elbo(family, target, estimator=_estimator(name, kind), generator=generator)
                gradients.append(torch.autograd.grad(value, own))
            spread = [torch.stack(each).var(0).sum().item() for each in zip(*gradients, strict=True)]
            row = {"coupling": name, "estimator": kind, "phase": "early" if step == EVERY else "late"}
            rows.append(row | dict(zip(PARTS, spread, strict=True)))
    return rows


def curve(settings: Settings, coupling: str, kind: Kind, index: int) -> list[float]:
    """Return KL[q‖p], the distance of the ELBO from log evidence, after every `EVERY` steps of a fit."""
    exact, _ = _problem(settings, index)
    values = []
    for step, family, _ in _fit(settings, coupling, kind, index, "curve"):
        if step % EVERY == 0:
            with torch.no_grad():
                values.append(kl(family(), exact).item())
    return values


def draw(data: dict[str, Any]) -> Any:
    from matplotlib.lines import Line2D

    made, axes = figure(1, 4, 14, 4, width_ratios=(1, 1, 1, 1.2))
    late = {(row["coupling"], row["estimator"]): row for row in data["rows"] if row["phase"] == "late"}
    for (column, part), ax in zip(PARTS.items(), axes[:3], strict=True):
        for shift, (kind, colour) in zip((-0.22, 0, 0.22), COLOURS.items(), strict=True):
            for at, name in enumerate(COUPLINGS):
                if late[name, kind][column] > NOTHING:
                    ax.plot(at + shift, late[name, kind][column], "o", color=colour, markersize=7)
        ax.set(yscale="log", title=f"Gradient variance, {part.replace('_', ' ')}", xlim=(-0.6, len(COUPLINGS) - 0.4))
        ax.set_xticks(range(len(COUPLINGS)), [name.replace(" ", "\n") for name in COUPLINGS], fontsize=8)
        ax.grid(axis="y", color="#eeeeee")
    for line in data["curves"]:
        x = [EVALUATIONS * EVERY * (1 + index) for index in range(len(line["kl_q_p"]) - 1)]
        axes[3].plot(x, line["kl_q_p"][1:], color=COLOURS[line["estimator"]], linestyle=STYLES[line["coupling"]])
    axes[3].set(yscale="log", xlabel="evaluations of log p", title="log evidence − ELBO along a fit, nats")
    handles = [
        Line2D([], [], color=colour, marker="o", linestyle="none", label=kind) for kind, colour in COLOURS.items()
    ]
    handles += [Line2D([], [], color="#333333", linestyle=style, label=name) for name, style in STYLES.items()]
    made.legend(handles=handles, loc="outside lower center", ncols=7)
    return made
