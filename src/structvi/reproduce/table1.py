"""Table 1: random 8-dimensional Gaussians, fitted with every method, beside the best that each family can do."""

import torch
from torch import Tensor

from ..families import kl
from ..families.full import FullNormalDensity
from .fits import Batched, fit, median, space
from .jobs import Job
from .methods import Method, methods
from .optima import best_kl, random_gaussians
from .settings import Settings

P = 8
#: standard deviations start at one: the targets' are exp N(0, 1) along their axes
SCALE = 1.0
#: KL[p‖q] of the paper's table 1
PAPER = {"MAP": "inf", "MF-VI": 175.8051, "sN-VI 1": 37.9890, "sN-VI 2": 25.9107, "sN-VI 4": 0.8774, "sN-VI 8": 0.0979}


def targets(settings: Settings) -> tuple[Tensor, Tensor]:
    return random_gaussians(settings.targets, P, settings.generator("table1"))


def jobs(settings: Settings) -> list[Job]:
    rows = methods(P, ("MC dropout",))
    optima = [Job("table 1: optima", optimum, (settings, row), weight=2.0) for row in rows if _form(row)]
    indices = range(settings.targets)
    return optima + [Job(f"table 1: {row.label}", one_fit, (settings, row, i)) for row in rows for i in indices]


def one_fit(settings: Settings, method: Method, index: int) -> dict:
    """KL in both directions and the time of one method on one target."""
    means, covariances = targets(settings)
    exact = FullNormalDensity(means[index], torch.linalg.cholesky(covariances[index]))
    generator = settings.generator("table1", method, index)
    starts = settings.starts if method.rank in range(1, P) else 1
    target = Batched(space(z=P), exact.log_prob)
    steps, rate = settings.steps, settings.learning_rate
    density, seconds = fit(method.recipe(SCALE), target, settings, generator, steps=steps, rate=rate, starts=starts)
    finite = density.has_density
    return {
        "seconds": seconds,
        "kl_p_q": kl(exact, density).item() if finite else torch.inf,
        "kl_q_p": kl(density, exact).item() if finite else torch.inf,
    }


def optimum(settings: Settings, method: Method) -> list[float]:
    """The least KL[q‖p] known to the deterministic search, for each target."""
    _, covariances = targets(settings)
    rank = P if method.rank is None else method.rank
    return best_kl(covariances, rank, _form(method)).tolist()


def _form(method: Method) -> str:
    """The shape of covariance, empty for point masses."""
    return {"MF-VI": "covariance", "sN-VI": "covariance", "full": "covariance", "sP-VI": "precision"}.get(
        method.name, ""
    )


def assemble(settings: Settings, results: list) -> dict:
    """`results` in the order of `jobs`."""
    rows = methods(P, ("MC dropout",))
    optima = {row: results.pop(0) for row in rows if _form(row)}
    table = []
    for row in rows:
        found = [results.pop(0) for _ in range(settings.targets)]
        known = optima.get(row)
        line = {"method": row.name, "rank": row.rank}
        for name in ("kl_p_q", "kl_q_p"):
            values = [one[name] for one in found]
            line |= {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
        # a fit that beats the search is itself the best known
        best = None if known is None else [min(a, one["kl_q_p"]) for a, one in zip(known, found, strict=True)]
        excess = None if best is None else [one["kl_q_p"] - b for one, b in zip(found, best, strict=True)]
        line["optimum_kl_q_p"] = None if best is None else median(best)
        line["excess"] = None if excess is None else median(excess)
        line["excess_max"] = None if excess is None else max(excess)
        line["paper_kl_p_q"] = PAPER.get(row.label)
        line["seconds"] = median([one["seconds"] for one in found])
        table.append(line)
    return {"rows": table}
