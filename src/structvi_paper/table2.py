"""Table 2: RBF regression against the exact posterior, with the noise known and, beyond the paper, unknown."""

from math import log
from typing import Any

import torch

from structvi.families import Density, kl
from structvi.families.gaussian import Gaussian
from structvi.families.mc_dropout import DroppedPoint
from structvi.models.target import Target

from .fits import Batched, fit, median, space
from .jobs import Job
from .methods import KEEP, Method, methods
from .regression import CENTRES, NOISE, NormalInverseGamma, data_set
from .settings import Settings

DROPOUTS = ("MC dropout",)
#: standard deviations start at a tenth of the prior's
SCALE = 0.1
#: log q(θ*) and KL[p*‖q] of the paper's table 2
PAPER: dict[str, tuple[float | str, float | str]] = {
    "MAP": ("-inf", "inf"),
    "MC dropout": ("-inf", "inf"),
    "MF-VI": (15.5161, 3.1853),
    "sN-VI 1": (14.9543, 1.6967),
    "sN-VI 2": (14.6339, 3.8009),
    "sN-VI 4": (13.8562, 4.2452),
    "sN-VI 10": (15.1211, 0.8389),
}
KNOWN = methods(CENTRES, DROPOUTS, mixture=True)
#: MAP's σ and MC dropout's are points; the others have a posterior for it
UNKNOWN = [Method("MAP"), Method("MC dropout"), Method("MF-VI", 0)]
UNKNOWN += [Method("sN-VI", 4), Method("sP-VI", 4), Method("full")]


def jobs(settings: Settings) -> list[Job]:
    indices = range(settings.targets)
    known = [Job(f"table 2: {row.label}", known_noise, (settings, row, i), 0.5) for row in KNOWN for i in indices]
    unknown = [
        Job(f"table 2, σ unknown: {row.label}", unknown_noise, (settings, row, i), 0.5)
        for row in UNKNOWN
        for i in indices
    ]
    return known + unknown


def fit_known(settings: Settings, method: Method, index: int) -> Density:
    data = data_set(settings, index)
    generator = settings.generator("table2", method, index)
    return fit_regression(method, Batched(space(theta=CENTRES), data.log_joint), settings, generator)


def fit_regression(method: Method, target: Target, settings: Settings, generator: torch.Generator) -> Density:
    """Likewise for every target that is a posterior given data."""
    recipe = method.recipe(SCALE, exempt=("log_noise",) if "log_noise" in target.space else ())
    steps, rate = settings.regression_steps, settings.regression_rate
    return fit(recipe, target, settings, generator, steps=steps, rate=rate, anneal=method.anneal)


def known_noise(settings: Settings, method: Method, index: int) -> dict[str, Any]:
    data = data_set(settings, index)
    exact = data.posterior()
    density = fit_known(settings, method, index)
    result = {"exact_log_p_true": exact.log_prob(data.theta.unsqueeze(0)).item()}
    if isinstance(density, Gaussian):
        divergence = kl(exact, density).item()
    else:
        draws = exact.draw(settings.kl_draws, generator=settings.generator("table2", index)).theta
        divergence = (exact.log_prob(draws) - density.log_prob(draws)).mean().item()  # +∞ for point masses
    result |= {"log_q_true": density.log_prob(data.theta.unsqueeze(0)).item(), "kl_p_q": divergence}
    if isinstance(density, DroppedPoint):
        result["closed_form_gap"] = (density.point - data.dropout_optimum(KEEP)).abs().max().item()
    return result


def unknown_noise(settings: Settings, method: Method, index: int) -> dict[str, Any]:
    data = data_set(settings, index)
    exact = NormalInverseGamma(data)
    generator = settings.generator("unknown noise", method, index)
    target = Batched(space(theta=CENTRES, log_noise=1), exact.log_prob)
    density = fit_regression(method, target, settings, generator)
    truth = torch.cat([data.theta, data.theta.new_tensor([log(NOISE)])]).unsqueeze(0)
    draws = exact.draw(settings.kl_draws, settings.generator("unknown noise", index))
    log_p = exact.log_prob(draws)
    return {
        "exact_log_p_true": exact.log_prob(truth).item(),
        "exact_noise": draws[:, CENTRES].exp().mean().item(),
        "log_q_true": density.log_prob(truth).item(),
        "kl_p_q": (log_p - density.log_prob(draws)).mean().item(),
        "noise": _mean_noise(density),
    }


def _mean_noise(density: Density) -> float:
    """E_q σ, log σ being normal or a point under q."""
    mean, variance = density.mean[CENTRES], density.variance[CENTRES]
    return (mean + 0.5 * variance).exp().item()


def assemble(settings: Settings, results: list[Any]) -> dict[str, Any]:
    """`results` in the order of `jobs`: the table and its variant."""
    known = {row: [results.pop(0) for _ in range(settings.targets)] for row in KNOWN}
    unknown = {row: [results.pop(0) for _ in range(settings.targets)] for row in UNKNOWN}
    table = []
    for row, found in known.items():
        log_q, divergence = PAPER.get(row.label, (None, None))
        table.append(_line(row, found) | {"paper_log_q_true": log_q, "paper_kl_p_q": divergence})
    variant = [_line(row, found) | {"noise": _median(found, "noise")} for row, found in unknown.items()]
    return {
        "table2": {
            "exact_log_p_true": _median(known[KNOWN[0]], "exact_log_p_true"),
            "dropout_closed_form_gap": max(one["closed_form_gap"] for one in known[Method("MC dropout")]),
            "rows": table,
        },
        "table2_unknown_noise": {
            "exact_log_p_true": _median(unknown[UNKNOWN[0]], "exact_log_p_true"),
            "exact_noise": _median(unknown[UNKNOWN[0]], "exact_noise"),
            "true_noise": NOISE,
            "rows": variant,
        },
    }


def _line(method: Method, found: list[dict[str, Any]]) -> dict[str, Any]:
    line = {"method": method.name, "rank": method.rank}
    for name in ("log_q_true", "kl_p_q"):
        values = [one[name] for one in found]
        line |= {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return line


def _median(found: list[dict[str, Any]], name: str) -> float:
    return median([one[name] for one in found])
