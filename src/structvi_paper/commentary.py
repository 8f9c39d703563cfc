"""What the numbers say, in words that follow from them."""

from typing import Any

from .figure1 import NOISE as FIGURE1_NOISE
from .methods import COMPONENTS, KEEP

#: what is smaller is rounding
NOTHING = 1e-20
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: Any) -> str:
    """As a reader wants it: three or four figures, powers of ten only where there is no other way."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return {"inf": "+∞", "-inf": "−∞"}.get(value, value)
    if isinstance(value, int):
        return str(value)
    if abs(value) < NOTHING:
        return "0"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa.replace('-', '−')}·10{str(int(exponent)).translate(_SUPERSCRIPT)}"
    return f"{value:.{3 if abs(value) < 100 else 1}f}".replace("-", "−")


def commentary(results: dict[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Section → sentences before and after its table or picture."""
    words = {
        "table1": _table1,
        "table2": _table2,
        "table2_unknown_noise": _unknown_noise,
        "figure1": _figure1,
        "figure2": _figure2,
        "figure3": _figure3,
        "couplings": _couplings,
    }
    return {name: function(results) for name, function in words.items() if name in results}


def _table1(results: dict) -> dict[str, list[str]]:
    rows = {(row["method"], row["rank"]): row for row in results["table1"]["rows"]}
    settings = results["settings"]
    low = [row for (method, rank), row in rows.items() if method in ("MF-VI", "sN-VI", "sP-VI") and rank < 8]
    exact = [row for (method, rank), row in rows.items() if method == "full" or rank == 8]
    worst, best_exact = max(row["excess"] for row in low), max(row["excess"] for row in exact)
    searched = max(row["search_excess_max"] for row in (*low, *exact))
    better = [k for k in (1, 2, 4) if rows["sP-VI", k]["optimum_kl_q_p"] < rows["sN-VI", k]["optimum_kl_q_p"]]
    before = [
        "Each method is fitted to normals with random mean, axes and scales. The paper reports KL[p‖q] for one target; "
        "variational inference minimises KL[q‖p], so we show both, with the least KL[q‖p] that the family can reach "
        "(found by a deterministic search) and the excess of the fit over it. sP-VI is the precision form, "
        "diagonal plus low rank in the inverse covariance.",
        "Fits are those of fit_density: L-BFGS on fixed draws, on which the ELBO of a normal target is exact. For "
        "comparison “excess, Adam” is that of a "
        f"stochastic fit: {settings['steps']} steps of Adam on about {settings['evaluations']} fresh unscented draws "
        "each, path estimator, one start.",
    ]
    after = [
        f"The largest median excess of mean field and the low ranks is {number(worst)} nats; where the family contains "
        f"the target it is {number(best_exact)}. What is left of KL is the family’s, not the fit’s.",
        "An excess of zero means that the fit is itself the best known. The search, which knows the target’s "
        f"covariance, and the fit, which sees its log density at draws, find the same: the search is at most "
        f"{number(searched)} nats above the best known.",
        "Point masses (MAP, MC dropout) have no density: both divergences are infinite.",
        f"At the optimum the precision form is closer than the covariance form of the same rank for {_ranks(better)}."
        if better
        else "At the optimum the covariance form is at least as close as the precision form at every rank.",
    ]
    return {"before": before, "after": after}


def _table2(results: dict) -> dict[str, list[str]]:
    own, data = results["table2"], results["table2"]["data"]
    rows = {(row["method"], row["rank"]): row for row in own["rows"]}
    gaussians = [row for row in own["rows"] if isinstance(row["kl_p_q"], float)]
    closest = min(gaussians, key=lambda row: row["kl_p_q"])
    before = [
        f"{data['centres']} regularly spaced centres on [{data['range'][0]:g}, {data['range'][1]:g}], kernel width "
        f"{data['kernel_width']:.3f}, N = {data['observations']} uniform inputs, σ = {data['noise']} known, "
        f"θ ~ N(0, I). The exact posterior is normal; log p*(θ*) has median {own['exact_log_p_true']:.2f} (about 15 "
        f"in problems of the paper’s kind). Dropout keeps with probability {KEEP}; sGMM-VI has {COMPONENTS} parts of "
        "rank 2."
    ]
    falling = [rows["sN-VI", k]["kl_p_q"] for k in (1, 2, 4, 10)]
    order = (
        "falls with the rank" if falling == sorted(falling, reverse=True) else "does not fall steadily with the rank"
    )
    after = [
        "MAP and both dropouts give the true weights probability zero, log q(θ*) = −∞, as the paper says.",
        f"KL[p*‖q] of sN-VI {order}: " + ", ".join(map(number, falling)) + " at 1, 2, 4, 10. In the "
        "paper it rises from rank 1 to rank 4 and stays at 0.84 at rank 10, where the family contains the posterior: "
        "that is the optimiser’s error, not the family’s.",
        f"Closest is {closest['method']} (KL {number(closest['kl_p_q'])}). A greater log q(θ*) than log p*(θ*) is "
        "chance in one data set, not quality: KL[p*‖q] is the measure.",
        f"MC dropout’s fitted weights agree with their closed form to {own['dropout_closed_form_gap']:.1g}.",
    ]
    return {"before": before, "after": after}


def _unknown_noise(results: dict) -> dict[str, list[str]]:
    own = results["table2_unknown_noise"]
    rows = {(row["method"], row["rank"]): row for row in own["rows"]}
    dropout, full = rows["MC dropout", None], rows["full", None]
    before = [
        "The same data with σ² ~ inverse gamma and θ | σ² normal, so that the exact posterior of (θ, log σ) is known "
        "in closed form. A density over weights takes log σ in as one more number; dropout has no mechanism for it "
        "and can only fit a point."
    ]
    ratio = dropout["noise"] / own["true_noise"]
    after = [
        f"MC dropout puts σ at {dropout['noise']:.3f}, {ratio:.1f} times the true {own['true_noise']}: the noise "
        "that its masks add to the function is taken for noise in the data.",
        f"The full normal has σ at {full['noise']:.3f} (exact {own['exact_noise']:.3f}) and "
        f"KL[p*‖q] = {full['kl_p_q']:.2g}; what is left is that the posterior is not normal.",
    ]
    return {"before": before, "after": after}


def _figure1(results: dict) -> dict[str, list[str]]:
    rows = results["figure1"]["rows"]
    first, last = rows[0], rows[-1]
    before = [
        f"The truth has four parameters (of 1, x, sin 3x, cos 5x), the model the first two, σ = {FIGURE1_NOISE}. The "
        "squared error of a new observation is split into noise (aleatoric), what the model cannot reach (discrepancy) "
        "and the posterior’s own variance (epistemic)."
    ]
    after = [
        f"From N = {first['observations']} to {last['observations']} the epistemic part falls from "
        f"{first['epistemic']:.2g} to {number(last['epistemic'])}; the discrepancy stays at {last['discrepancy']:.2g} "
        f"and the measured error settles at {last['measured']:.2g}. No posterior over the model’s parameters, "
        "however exact, reports it."
    ]
    return {"before": before, "after": after}


def _figure2(results: dict) -> dict[str, list[str]]:
    return {
        "before": [
            "Heat maps: the true posterior. Lines enclose one half and nine tenths of a Gaussian’s mass (levels "
            "relative to the highest density of q)."
        ],
        "after": [
            "MC dropout’s four points are θ̂, its projections on the axes, and the origin, whatever the posterior; "
            f"their masses are set by the keep probability {KEEP}.",
            "Mean field is parallel to the axes and too narrow where the weights are correlated; sN-VI of rank 1 "
            "follows the correlation; on two modes only the mixture covers both.",
        ],
    }


def _figure3(results: dict) -> dict[str, list[str]]:
    own = results["figure3"]
    return {
        "before": [
            f"Table 2’s first data set. MC dropout’s posterior is {own['support']} point masses: all of its functions "
            "are drawn. Beside it draws of sN-VI and the exact posterior."
        ],
        "after": [
            f"The nearest of the {own['support']} weight vectors is {own['nearest_distance']:.2f} from θ*; the nearest "
            f"of a hundred exact draws is {own['nearest_of_100_exact_draws']:.2f} away and of a hundred sN-VI draws "
            f"{own['nearest_of_100_sN_draws']:.2f}."
        ],
    }


def _couplings(results: dict) -> dict[str, list[str]]:
    own = results["couplings"]
    rows = {(row["coupling"], row["estimator"], row["phase"]): row for row in own["rows"]}

    def ratios(coupling: str, estimator: str, other: tuple[str, str], phase: str) -> dict[str, float]:
        ours, theirs = rows[coupling, estimator, phase], rows[(*other, phase)]
        return {part: ours[f"var_{part}"] / theirs[f"var_{part}"] for part in ("scale", "factor")}

    before = [
        "The paper’s section 4 recommends coupled draws (paired, unscented) and log q at the draws instead of the "
        f"closed-form entropy. Gradient variance of the ELBO at {own['evaluations_per_step']} evaluations of log p, "
        "rank 4, on 8-dimensional normals, summed over coordinates, early (20 steps) and late in a fit; “shared” is "
        "the original code’s one diagonal noise for all directions; path drops the part of ∇log q that is zero on "
        "average. Targets are normal, so the gradient of the mean is linear in the noise and mirrored draws make its "
        "variance zero: that part is better here than on a network."
    ]
    after = []
    for phase in ("early", "late"):
        when = phase.capitalize()
        for coupling in ("paired", "unscented", "unscented shared"):
            change = ratios(coupling, "log_q", ("naive", "log_q"), phase)
            after.append(f"{when}, {coupling} against naive draws, both with log_q: {_changes(change)}")
        change = ratios("unscented", "log_q", ("unscented", "entropy"), phase)
        after.append(f"{when}, log_q against the closed-form entropy, both unscented: {_changes(change)}")
        change = ratios("unscented", "path", ("unscented", "log_q"), phase)
        after.append(f"{when}, path, which the paper does not have, against log_q, both unscented: {_factors(change)}.")
    last = sorted((line["kl_q_p"][-1], f"{line['coupling']} with {line['estimator']}") for line in own["curves"])
    after.append(
        f"At the end of equally long fits the ELBO is nearest with {last[0][1]} ({last[0][0]:.2g} nats below the "
        f"evidence) and farthest with {last[-1][1]} ({last[-1][0]:.2g})."
    )
    return {"before": before, "after": after}


def _factors(change: dict[str, float]) -> str:
    parts = [f"×{number(value)} for the {part}" for part, value in change.items()]
    return "variance " + " and ".join(parts)


def _changes(change: dict[str, float]) -> str:
    """The factors, and whether the paper's advice to make this change holds; a tenth is within the noise."""
    gains = [part for part, value in change.items() if value < 0.9]
    losses = [part for part, value in change.items() if value > 1.1]
    if gains and not losses:
        verdict = "The paper’s advice holds" + (f" for the {gains[0]}." if len(gains) == 1 else ".")
    elif gains:
        verdict = f"The paper’s advice holds for the {gains[0]}, not for the {losses[0]}."
    elif losses:
        verdict = f"The paper’s advice does not hold for the {_join(losses)}."
    else:
        verdict = "It makes no difference that we can measure."
    return f"{_factors(change)}. {verdict}"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + _join([str(rank) for rank in ranks])


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
