"""Table 1: random 8-dimensional Gaussians, fitted with every method, beside the best that each family can do."""

from math import inf
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from structvi.density.api import fit_density
from structvi.density.fixed_draws import FixedDraws
from structvi.families import Density, kl
from structvi.families.full import FullNormalDensity

from .methods import Batched, Method, fit, methods
from .optima import best_kl, random_gaussians
from .processes import Starmap
from .settings import TABLE, Settings

P = 8
#: standard deviations start at one: the targets' are exp N(0, 1) along their axes
SCALE = 1.0


def compute(settings: Settings, starmap: Starmap) -> dict[str, Any]:
    rows = methods(P, ("MC dropout",))
    normals = [row for row in rows if row.form]
    searched = starmap("table 1, optima", optimum, [(settings, row) for row in normals])
    arguments = [(settings, row, i) for row in rows for i in range(settings.targets)]
    found = iter(starmap("table 1", one_fit, arguments))
    optima = dict(zip(normals, searched, strict=True))
    return {"table1": {"rows": [line(row, [next(found) for _ in range(settings.targets)], optima) for row in rows]}}


def one_fit(settings: Settings, method: Method, index: int) -> dict[str, float]:
    """Return KL in both directions and the seconds of one method on one target, and KL[q‖p] of a stochastic fit."""
    means, covariances = targets(settings)
    exact = FullNormalDensity(means[index], torch.linalg.cholesky(covariances[index]))
    target = Batched(exact.log_prob, z=P)
    generator = settings.generator("table1", method, index)
    began = perf_counter()
    stochastic = fit(method, SCALE, target, settings, generator, settings.steps, settings.learning_rate)
    if not method.form:  # point masses
        return {"seconds": perf_counter() - began, "kl_p_q": inf, "kl_q_p": inf, "stochastic": inf}
    began = perf_counter()
    seed = int(torch.randint(2**31, (), generator=generator))
    result = fit_density(target, method.recipe(SCALE), seed=seed, tolerance=settings.tolerance, progress=False)
    density = result.family.requires_grad_(False)()
    return {
        "seconds": perf_counter() - began,
        "kl_p_q": max(0.0, kl(exact, density).item()),
        "kl_q_p": _kl(density, exact),
        "stochastic": _kl(stochastic, exact),
    }


def _kl(q: Density, p: FullNormalDensity) -> float:
    """Return KL[q‖p] = E_q log q/p, exact on fixed draws; rounding takes it below zero where q is p.

    The closed form by traces loses all digits where a scale of the precision form is near infinity, as some optimal
    ones are: Σ is then the difference of two large numbers.
    """
    theta = q.draw(1, FixedDraws(4 * P, seed=0)).theta
    return max(0.0, (q.log_prob(theta) - p.log_prob(theta)).mean().item())


def optimum(settings: Settings, method: Method) -> list[float]:
    """Return the least KL[q‖p] known to the deterministic search, for each target."""
    rank = P if method.rank is None else method.rank
    return best_kl(targets(settings)[1], rank, method.form, starts=settings.optimum_starts).tolist()


def targets(settings: Settings) -> tuple[Tensor, Tensor]:
    return random_gaussians(settings.targets, P, settings.generator("table1"))


def ranges(fits: list[dict[str, float]], *names: str) -> dict[str, float]:
    """Return median, least and largest of what the fits to all targets found."""
    result = {}
    for name in names:
        values = [one[name] for one in fits]
        result |= {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return result


def line(row: Method, fits: list[dict[str, float]], optima: dict[Method, list[float]]) -> dict[str, Any]:
    """Return a row of the table; a fit that beats the search is itself the best known."""
    found = {name: [one[name] for one in fits] for name in fits[0]}
    result: dict[str, Any] = {
        "method": row.name,
        "rank": row.rank,
        "paper_kl_p_q": TABLE["paper"]["table1"].get(row.label),
    }
    result |= ranges(fits, "kl_p_q", "kl_q_p")
    result |= dict.fromkeys(("optimum_kl_q_p", "excess", "excess_max", "stochastic_excess"))
    if row in optima:
        least = [min(each) for each in zip(optima[row], found["kl_q_p"], found["stochastic"], strict=True)]

        def above(values: list[float]) -> list[float]:
            return [a - b for a, b in zip(values, least, strict=True)]

        excess = above(found["kl_q_p"])
        result |= {"optimum_kl_q_p": median(least), "excess": median(excess), "excess_max": max(excess)}
        result |= {"stochastic_excess": median(above(found["stochastic"]))}
    return result | {"seconds": median(found["seconds"])}
