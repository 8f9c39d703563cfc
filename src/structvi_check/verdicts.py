"""From numbers to words: the only place with thresholds; the reason for each stands on the page, `check.html`."""

from math import exp, inf, isinf
from typing import NamedTuple

from .measures import LEVEL, Measures
from .problems import Problem


class Thresholds(NamedTuple):
    """The errors that a method may have."""

    #: posterior standard deviations of a mean
    mean_error: float = 0.2
    #: what 90 % intervals must hold, at worst
    coverage: tuple[float, float] = (0.85, 0.95)
    log_variance_error: float = 0.35
    #: nats, in whichever direction is less; by Pinsker's inequality a total variation of 0.15
    kl: float = 0.045
    #: certain error of an event's probability, if there is no KL
    joint_error: float = 0.05
    #: of predictions
    total_variation: float = 0.15
    #: share of inputs at which the prediction must be the posterior's own
    agreement: float = 0.9


MOST = Thresholds()


def findings(problem: Problem, m: Measures) -> list[str]:
    """Return what keeps the method from being Bayesian on this problem, the worst first; nothing where all is well."""
    kl = least_kl(m)
    found = [_points(m), _normalised(m), _modes(m), _intervals(m)]
    if not m.mean_error <= MOST.mean_error:  # or NaN
        found.append(f"biased: a mean is off by {m.mean_error:.2g} posterior standard deviations")
    if abs(m.log_variance_error) > MOST.log_variance_error and not (found[3] or m.points):  # or it is the same again
        direction = "large" if m.log_variance_error > 0 else "small"
        found.append(f"a variance too {direction}: {exp(m.log_variance_error):.2g} times the posterior's")
    if kl is not None and MOST.kl < kl < inf:
        found.append(f"not the joint posterior: KL {kl:.2g} nats")
    if kl is None and not m.points and m.joint_error > MOST.joint_error:
        found.append(f"not the joint posterior: an event's probability is wrong by {m.joint_error:.2g} or more")
    if m.total_variation is not None and m.total_variation > MOST.total_variation:
        found.append(f"predictions differ by a total variation of {m.total_variation:.2f}")
    if m.agreement is not None and m.agreement < MOST.agreement:
        found.append(f"predictions agree with the posterior's at {percent(m.agreement)} of inputs")
    return [words for words in found if words]


def verdict(problem: Problem, m: Measures) -> str:
    """Return one line in words."""
    found, kl = findings(problem, m), least_kl(m)
    if found:
        return "; ".join(found)
    what = "posterior" if problem.identified else "predictions"
    words = [f"{percent(LEVEL)} intervals hold {percent(m.coverage_min)} to {percent(m.coverage_max)}"]
    words.append(f"means within {m.mean_error:.2f} posterior standard deviations")
    if kl is not None:
        words.append(f"KL {max(0.0, kl):.3f} nats")
    else:
        words.append("no event seen to be wrong" if m.joint_error == 0 else f"an event wrong by {m.joint_error:.2f}")
    if m.total_variation is not None:
        words.append(f"total variation of predictions {m.total_variation:.2f}")
    return f"Bayesian here: the {what} of the model, {', '.join(words)}"


def percent(share: float) -> str:
    """55 %"""
    return f"{100 * share:.0f} %"


def zero_for_the_truth(m: Measures) -> bool:
    """Return whether the method gives the true model probability zero."""
    return bool(m.points) or (m.log_q_true is not None and isinf(m.log_q_true))


def least_kl(m: Measures) -> float | None:
    """Return the lesser of the two divergences, in nats."""
    return min((kl.value for kl in (m.kl_p_q, m.kl_q_p) if kl is not None), default=None)


def _points(m: Measures) -> str:
    if not zero_for_the_truth(m):
        return ""
    what = f"{m.points} of {m.P} weights are points, which gives" if m.points else "it gives"
    return f"not a posterior: {what} the true model probability zero"


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
    return f"{m.modes_there - m.modes_found} of {m.modes_there} modes missing"


def _intervals(m: Measures) -> str:
    least, most = MOST.coverage
    wrong = [word for word, is_so in (("narrow", m.coverage_min < least), ("wide", m.coverage_max > most)) if is_so]
    if not wrong:
        return ""
    held = f"{percent(LEVEL)} intervals hold {percent(m.coverage_min)} to {percent(m.coverage_max)}"
    return f"intervals too {' and too '.join(wrong)}: {held}"
