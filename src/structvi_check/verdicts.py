"""From numbers to words: the only place with thresholds, and the reason for each."""

from math import e, inf, isinf

from .joint import ALARM
from .measures import LEVEL, Estimate, Measures
from .problems import Problem

#: posterior standard deviations by which a mean may be off
MEAN_ERROR = 0.2
#: what 90 % intervals must hold, at worst
COVERAGE = (0.85, 0.95)
#: of log variances
LOG_VARIANCE_ERROR = 0.35
#: of events under the joint posterior, and of predictions
TOTAL_VARIATION = 0.15
#: nats, in whichever direction is less
KL = 2 * TOTAL_VARIATION**2
#: by which an event's probability may be wrong for certain, where there is no KL
JOINT_ERROR = 0.05
#: share of inputs at which the prediction must be the posterior's own
AGREEMENT = 0.9

THRESHOLDS: dict[str, float | list[float]] = {
    "mean_error": MEAN_ERROR,
    "coverage": list(COVERAGE),
    "log_variance_error": LOG_VARIANCE_ERROR,
    "kl": KL,
    "joint_error": JOINT_ERROR,
    "total_variation": TOTAL_VARIATION,
    "agreement": AGREEMENT,
}
REASONS = (
    "Every threshold lies above the noise of the comparison. With 8192 draws on both sides the largest of a hundred "
    "errors of a perfect method is about 0.05 posterior standard deviations in the mean, 0.015 in coverage and 0.08 in "
    "log variance; with the 1000 reference draws of a sampler about twice that.",
    f"Means within {MEAN_ERROR} posterior standard deviations: a 90 % interval moved by that much still holds 89 %.",
    f"90 % intervals hold {COVERAGE[0]:.0%} to {COVERAGE[1]:.0%} at worst, log variances are within "
    f"{LOG_VARIANCE_ERROR}: standard deviations from 0.84 to 1.19 times the posterior's. A halved variance holds 76 %.",
    f"KL at most {KL:.3f} nats, in the direction in which it is less: by Pinsker's inequality, total variation ≤ "
    f"√(KL/2), no event has a probability that is wrong by more than {TOTAL_VARIATION}. Predictions are held to the "
    "same total variation.",
    "Without a density the joint distribution is examined from draws: half-spaces, ellipsoids, level sets of log p, "
    "unions of cells of two weights or two principal axes, and level sets of a discriminant. What the largest error of "
    f"an event exceeds the noise of draws by is an error for certain, but for a probability of {ALARM:g} in each row; "
    f"it may be {JOINT_ERROR}. For 8192 draws on both sides the noise is taken as 0.07 to 0.10, so that events wrong "
    "by 0.12 to 0.15 are seen; where a normal is moved by so much, KL is 0.045 to 0.07 nats.",
    "With a density the same error must be within √(KL/2), or log_prob is not the density of the draws.",
    f"Predictions agree at {AGREEMENT:.0%} of inputs: the same class, or a mean between the quartiles of the "
    "posterior's outputs.",
    "A mode is found where the method has a tenth of the posterior's mass in the ellipse that holds 99 % of that mode.",
    "Weights that repeat their values from draw to draw are points: there is no density there, and the true model "
    "has probability zero, as in the paper.",
)


def findings(problem: Problem, m: Measures) -> list[str]:
    """What keeps the method from being Bayesian on this problem, the worst first; nothing where all is well."""
    parts = [_points(m), _normalised(m), _modes(m), _intervals(m), _means(m), _variances(m), _joint(m), _predictions(m)]
    return [part for part in parts if part]


def verdict(problem: Problem, m: Measures) -> str:
    """One line in words."""
    found = findings(problem, m)
    if found:
        return "; ".join(found)
    what = "posterior" if problem.identified else "predictions"
    words = [f"{percent(LEVEL)} intervals hold {percent(m.coverage_min)} to {percent(m.coverage_max)}"]
    words.append(f"means within {m.mean_error:.2f} posterior standard deviations")
    if isinf(_least(m)):
        words.append("no event seen to be wrong" if m.joint_error == 0 else f"an event wrong by {m.joint_error:.2f}")
    else:
        words.append(f"KL {max(0.0, _least(m)):.3f} nats")
    if m.total_variation is not None:
        words.append(f"total variation of predictions {m.total_variation:.2f}")
    return f"Bayesian here: the {what} of the model, {', '.join(words)}"


def percent(share: float) -> str:
    """55 %"""
    return f"{100 * share:.0f} %"


def _points(m: Measures) -> str:
    zero = "gives the true model probability zero"
    if m.points == m.P:
        if _one_point(m):
            return f"not a posterior: a point mass {zero}"
        return f"not a posterior: all mass lies on points, which {zero}"
    if m.points:
        return f"not a posterior: {m.points} of {m.P} weights are points, which {zero}"
    if m.log_q_true is not None and isinf(m.log_q_true):
        return f"not a posterior: it {zero}"
    return ""


def zero_for_the_truth(m: Measures) -> bool:
    """Whether the method gives the true model probability zero."""
    return bool(m.points) or (m.log_q_true is not None and isinf(m.log_q_true))


def _one_point(m: Measures) -> bool:
    return m.points == m.P and m.log_variance_error_rms == inf and m.coverage_max == 0


def _normalised(m: Measures) -> str:
    for name, kl in (("KL[p‖q]", m.kl_p_q), ("KL[q‖p]", m.kl_q_p)):
        if kl is not None and kl.value < -0.01 - 5 * kl.standard_error:
            return f"log_prob is not the density of the draws: {name} comes out as {kl.value:.2f}, below zero"
        if kl is not None and m.joint_error > (max(0.0, kl.value + 5 * kl.standard_error) / 2) ** 0.5:  # Pinsker
            return (
                f"log_prob is not the density of the draws: an event's probability is wrong by {m.joint_error:.2g} or "
                f"more, and {name} comes out as {kl.value:.2g}"
            )
    return ""


def _modes(m: Measures) -> str:
    if m.modes_found is None or m.modes_there is None or m.modes_found >= m.modes_there:
        return ""
    missing, numbers = m.modes_there - m.modes_found, ("none", "one", "two", "three", "four")
    if m.modes_there == 1:
        return "no mass where the posterior has its mode"
    if m.modes_there < len(numbers):
        return f"{numbers[missing]} of {numbers[m.modes_there]} modes missing"
    return f"{missing} of {m.modes_there} modes missing"


def _intervals(m: Measures) -> str:
    if _one_point(m):
        return ""  # said already
    least, most = COVERAGE
    narrow, wide = m.coverage_min < least, m.coverage_max > most
    if narrow and wide:
        held = f"{percent(m.coverage_min)} to {percent(m.coverage_max)}"
        return f"intervals too narrow and too wide: {percent(LEVEL)} intervals hold {held}"
    if narrow:
        return f"intervals too narrow: {percent(LEVEL)} intervals hold {percent(m.coverage_min)} at worst"
    if wide:
        return f"intervals too wide: {percent(LEVEL)} intervals hold {percent(m.coverage_max)}"
    return ""


def _means(m: Measures) -> str:
    if not m.mean_error <= MEAN_ERROR:  # or NaN
        return f"biased: a mean is off by {m.mean_error:.2g} posterior standard deviations"
    return ""


def _variances(m: Measures) -> str:
    """Where the intervals are said to be wrong already, this is the same again."""
    if abs(m.log_variance_error) > LOG_VARIANCE_ERROR and not (_intervals(m) or m.points):
        direction = "large" if m.log_variance_error > 0 else "small"
        return f"a variance too {direction}: {e**m.log_variance_error:.2g} times the posterior's"
    return ""


def _least(m: Measures) -> float:
    """The lesser of the two divergences, in nats; −∞ where there is none."""
    known: list[Estimate] = [kl for kl in (m.kl_p_q, m.kl_q_p) if kl is not None]
    return min((kl.value for kl in known), default=-inf)


def _joint(m: Measures) -> str:
    """By KL, or else from draws."""
    if not isinf(_least(m)):
        return f"not the joint posterior: KL {_least(m):.2g} nats" if _least(m) > KL else ""
    if m.points or m.joint_error <= JOINT_ERROR:
        return ""
    return f"not the joint posterior: an event's probability is wrong by {m.joint_error:.2g} or more"


def _predictions(m: Measures) -> str:
    words = []
    if m.total_variation is not None and m.total_variation > TOTAL_VARIATION:
        words.append(f"predictions differ by a total variation of {m.total_variation:.2f}")
    if m.agreement is not None and m.agreement < AGREEMENT:
        words.append(f"predictions agree with the posterior's at {percent(m.agreement)} of inputs")
    return "; ".join(words)
