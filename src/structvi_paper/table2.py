"""Table 2: RBF regression against the exact posterior, with the noise known and, beyond the paper, unknown."""

from math import inf, log
from statistics import median
from typing import Any

import torch
from torch import Tensor

from structvi.families import Density, kl
from structvi.families.mc_dropout import DroppedPoint

from .methods import KEEP, Batched, Method, fit, methods
from .processes import Starmap
from .regression import CENTRES, NOISE, NormalInverseGamma, data_set
from .settings import TABLE, Settings
from .table1 import ranges

DROPOUTS = ("MC dropout",)
#: standard deviations start at a tenth of the prior's
SCALE = 0.1
KNOWN = methods(CENTRES, DROPOUTS, mixture=True)
#: MAP's and MC dropout's σ are points; the others have a posterior for it
UNKNOWN = [Method(name, rank) for name, rank in (("MAP", None), ("MC dropout", None), ("MF-VI", 0))]
UNKNOWN += [Method("sN-VI", 4), Method("sP-VI", 4), Method("full")]


def compute(settings: Settings, starmap: Starmap) -> dict[str, Any]:
    known = _each("table 2", known_noise, KNOWN, settings, starmap)
    unknown = _each("table 2, σ unknown", unknown_noise, UNKNOWN, settings, starmap)
    rows = []
    for row, found in known.items():
        log_q, divergence = TABLE["paper"]["table2"].get(row.label, (None, None))
        own = {"paper_log_q_true": log_q, "paper_kl_p_q": divergence}
        rows.append({"method": row.name, "rank": row.rank} | ranges(found, "log_q_true", "kl_p_q") | own)
    gaps = [one["closed_form_gap"] for one in known[Method("MC dropout")]]
    variant = []
    for row, found in unknown.items():
        own = {"noise": _median(found, "noise")}
        variant.append({"method": row.name, "rank": row.rank} | ranges(found, "log_q_true", "kl_p_q") | own)
    return {
        "table2": {
            "exact_log_p_true": _median(known[KNOWN[0]], "exact_log_p_true"),
            "dropout_closed_form_gap": max(gaps),
            "rows": rows,
            "data": TABLE["regression"],
        },
        "table2_unknown_noise": {
            "exact_log_p_true": _median(unknown[UNKNOWN[0]], "exact_log_p_true"),
            "exact_noise": _median(unknown[UNKNOWN[0]], "exact_noise"),
            "true_noise": NOISE,
            "rows": variant,
        },
    }


def _each(label: str, function: Any, rows: list[Method], settings: Settings, starmap: Starmap) -> dict[Method, list]:
    n = settings.targets
    found = starmap(label, function, [(settings, row, i) for row in rows for i in range(n)])
    return {row: found[k * n : (k + 1) * n] for k, row in enumerate(rows)}


def fit_regression(method: Method, target: Batched, settings: Settings, generator: torch.Generator) -> Density:
    return fit(method, SCALE, target, settings, generator, settings.regression_steps, settings.regression_rate)


def fit_known(settings: Settings, method: Method, index: int) -> Density:
    target = Batched(data_set(settings, index).log_joint, theta=CENTRES)
    return fit_regression(method, target, settings, settings.generator("table2", method, index))


def _log_q(density: Density, theta: Tensor) -> Tensor:
    """Return log q(θ); −∞ of point masses."""
    return density.log_prob(theta) if density.has_density else theta.new_full(theta.shape[:1], -inf)


def known_noise(settings: Settings, method: Method, index: int) -> dict[str, float]:
    data = data_set(settings, index)
    exact, truth = data.posterior(), data.theta.unsqueeze(0)
    density = fit_known(settings, method, index)
    if method.form:
        divergence = kl(exact, density).item()
    else:
        draws = exact.draw(settings.kl_draws, generator=settings.generator("table2", index)).theta
        divergence = (exact.log_prob(draws) - _log_q(density, draws)).mean().item()
    result = {"exact_log_p_true": exact.log_prob(truth).item(), "kl_p_q": divergence}
    if isinstance(density, DroppedPoint):
        result["closed_form_gap"] = (density.point - data.dropout_optimum(KEEP)).abs().max().item()
    return result | {"log_q_true": _log_q(density, truth).item()}


def unknown_noise(settings: Settings, method: Method, index: int) -> dict[str, float]:
    data = data_set(settings, index)
    exact = NormalInverseGamma(data)
    target = Batched(exact.log_prob, theta=CENTRES, log_noise=1)
    density = fit_regression(method, target, settings, settings.generator("unknown noise", method, index))
    truth = torch.cat([data.theta, data.theta.new_tensor([log(NOISE)])]).unsqueeze(0)
    draws = exact.draw(settings.kl_draws, settings.generator("unknown noise", index))
    # E_q σ: log σ is normal under q, or a point
    noise = (density.mean[CENTRES] + 0.5 * density.variance[CENTRES]).exp().item()
    return {
        "exact_log_p_true": exact.log_prob(truth).item(),
        "exact_noise": draws[:, CENTRES].exp().mean().item(),
        "log_q_true": _log_q(density, truth).item(),
        "kl_p_q": (exact.log_prob(draws) - _log_q(density, draws)).mean().item(),
        "noise": noise,
    }


def _median(found: list[dict[str, float]], name: str) -> float:
    return median([one[name] for one in found])
