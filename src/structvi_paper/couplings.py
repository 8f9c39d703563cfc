"""The paper's section 4, measured: what coupled draws and the form of the objective do to the gradient's noise."""

from typing import Any

import torch
from torch import Tensor

from structvi.couplings import Coupling, naive, paired, unscented
from structvi.families import Family, kl
from structvi.families.full import FullNormalDensity
from structvi.objective import Estimator, Kind, elbo

from .fits import Batched, median, space
from .jobs import Job
from .methods import Method
from .optima import random_gaussians
from .settings import Settings

P, RANK = 8, 4
#: model evaluations of every estimate: one unscented group at this rank
EVALUATIONS = unscented.group_size(RANK)
COUPLINGS: dict[str, tuple[Coupling, int]] = {
    "naive": (naive, EVALUATIONS),
    "paired": (paired, EVALUATIONS // 2),
    "unscented": (unscented, 1),
    "unscented shared": (unscented(shared_diagonal=True), 1),
}
ESTIMATORS: tuple[Kind, ...] = ("path", "log_q", "entropy")
PARTS = {"var_mean": "mean", "var_scale": "log_scale", "var_factor": "factor"}
#: steps after which a fit is called early; late is where it ends
EARLY = 20


def jobs(settings: Settings) -> list[Job]:
    indices = range(settings.coupling_targets)
    variance = [Job("couplings: gradient variance", variances, (settings, i), 4.0) for i in indices]
    fits = [
        Job(f"couplings: {name}, {estimator}", curve, (settings, name, estimator, i), 0.4)
        for name in COUPLINGS
        for estimator in ESTIMATORS
        for i in indices
    ]
    return variance + fits


def _problem(settings: Settings, index: int) -> tuple[FullNormalDensity, Batched]:
    means, covariances = random_gaussians(settings.coupling_targets, P, settings.generator("couplings"))
    exact = FullNormalDensity(means[index], torch.linalg.cholesky(covariances[index]))
    return exact, Batched(space(z=P), exact.log_prob)


def _recipe() -> Family:
    return Method("sN-VI", RANK).recipe(1.0)


def _steps(family: Family, target: Batched, settings: Settings, coupling: str, estimator: Kind, generator):
    """Yield before the first step and after every one."""
    draw, groups = COUPLINGS[coupling]
    optimizer = torch.optim.Adam(family.parameters(), lr=settings.regression_rate, betas=settings.betas, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.coupling_steps)
    yield
    for _ in range(settings.coupling_steps):
        optimizer.zero_grad()
        (
            -elbo(family, target, estimator=Estimator(estimator, groups=groups, coupling=draw), generator=generator)
        ).backward()
        optimizer.step()
        schedule.step()
        yield


def variances(settings: Settings, index: int) -> list[dict[str, Any]]:
    """Σ over coordinates of the gradient's variance, at the same q for all: early and late in one fit."""
    _, target = _problem(settings, index)
    generator = settings.generator("couplings", "variance", index)
    family = _recipe().bind(target.space, generator)
    rows = []
    for step, _ in enumerate(_steps(family, target, settings, "unscented", "path", generator)):
        if step in (EARLY, settings.coupling_steps):
            phase = "early" if step == EARLY else "late"
            for name in COUPLINGS:
                for estimator in ESTIMATORS:
                    row = {"coupling": name, "estimator": estimator, "phase": phase}
                    rows.append(row | _variance(family, target, settings, name, estimator, generator))
    return rows


def _variance(family, target, settings: Settings, coupling: str, estimator: Kind, generator) -> dict[str, float]:
    draw, groups = COUPLINGS[coupling]
    parameters = dict(family.named_parameters())
    gradients: dict[str, list[Tensor]] = {column: [] for column in PARTS}
    for _ in range(settings.coupling_repeats):
        value = elbo(family, target, estimator=Estimator(estimator, groups=groups, coupling=draw), generator=generator)
        found = torch.autograd.grad(value, [parameters[name] for name in PARTS.values()])
        for column, gradient in zip(PARTS, found, strict=True):
            gradients[column].append(gradient)
    return {column: torch.stack(all_).var(0).sum().item() for column, all_ in gradients.items()}


def curve(settings: Settings, coupling: str, estimator: Kind, index: int) -> list[float]:
    """KL[q‖p], the distance of the ELBO from log evidence, after every tenth step of a fit."""
    exact, target = _problem(settings, index)
    generator = settings.generator("couplings", "curve", index)  # the same start for all
    family = _recipe().bind(target.space, generator)
    values = []
    for step, _ in enumerate(_steps(family, target, settings, coupling, estimator, generator)):
        if step % 10 == 0:
            with torch.no_grad():
                values.append(kl(family(), exact).item())
    return values


def assemble(settings: Settings, results: list[Any]) -> dict[str, Any]:
    found = [results.pop(0) for _ in range(settings.coupling_targets)]
    rows = []
    for same in zip(*found, strict=True):  # one row of every target
        row = {key: same[0][key] for key in ("coupling", "estimator", "phase")}
        rows.append(row | {column: median([one[column] for one in same]) for column in PARTS})
    curves = []
    for name in COUPLINGS:
        for estimator in ESTIMATORS:
            ours = [results.pop(0) for _ in range(settings.coupling_targets)]
            values = [median(list(at)) for at in zip(*ours, strict=True)]
            curves.append({"coupling": name, "estimator": estimator, "kl_q_p": values})
    return {
        "rows": rows,
        "evaluations_per_step": EVALUATIONS,
        "steps_between_values": 10,
        "curves": curves,
    }
