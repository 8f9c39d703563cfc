"""One method on one problem, as a row of the table."""

from dataclasses import asdict, dataclass, field
from math import inf, isinf
from typing import Any

from torch import Tensor

from structvi_paper.commentary import number

from .measures import Estimate, Measures
from .verdicts import percent, zero_for_the_truth

HEADINGS = (
    "method", "log q(θ*)", "log p(θ*)", "KL[p‖q]", "KL[q‖p]", "modes", "90 % hold", "mean", "log var", "joint",
    "agree", "TV", "verdict",
)  # fmt: skip
LEGEND = (
    "log q(θ*), log p(θ*): of the true model under method and posterior; KL in nats; modes: found of those there; 90 % "
    "hold: posterior mass of the method's 90 % intervals, least to most; mean: largest error in posterior standard "
    "deviations; log var: largest error; joint: by how much an event's probability is wrong, at least; agree, TV: "
    "predictions at new inputs against the posterior's; –: there is none"
)


@dataclass(frozen=True)
class Row:
    """One method on one problem.

    `bayesian` is None, and there are no measures, where the method is not applicable, and where it has `failed`: it
    raised, took too long or died, and nothing is known of its draws.
    """

    method: str
    problem: str
    verdict: str
    bayesian: bool | None
    seconds: float
    measures: Measures | None = None
    #: what is wrong, the worst first
    findings: tuple[str, ...] = ()
    #: whether the method gave no answer; the verdict says why
    failed: bool = False
    #: the traceback of a method that raised
    details: str = field(default="", repr=False, compare=False)
    #: for the pictures: some draws [S, 2] in two dimensions, or 5, 50 and 95 % quantiles of outputs [3, G]
    sketch: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def grade(self) -> str:
        """ "Bayesian", "off", "not a posterior", "not applicable" or "failed"."""
        if self.failed:
            return "failed"
        if self.bayesian is None:
            return "not applicable"
        if self.bayesian:
            return "Bayesian"
        return "off" if self.measures is None or not zero_for_the_truth(self.measures) else "not a posterior"

    def cells(self) -> list[str]:
        """In the order of `HEADINGS`."""
        m = self.measures
        if m is None:
            return [self.method, *["–"] * (len(HEADINGS) - 2), self.verdict]
        modes = "–" if m.modes_found is None else f"{m.modes_found}/{m.modes_there}"
        held = f"{percent(m.coverage_min)[:-2]}–{percent(m.coverage_max)[:-2]}"
        agree = "–" if m.agreement is None else percent(m.agreement)
        return [
            self.method, _number(m.log_q_true), _number(m.log_p_true), _number(m.kl_p_q), _number(m.kl_q_p), modes,
            held, _number(m.mean_error), _number(m.log_variance_error), _number(m.joint_error), agree,
            _number(m.total_variation), self.verdict,
        ]  # fmt: skip

    def record(self) -> dict[str, Any]:
        """For JSON."""
        one = {"method": self.method, "problem": self.problem, "bayesian": self.bayesian, "grade": self.grade}
        one |= {"verdict": self.verdict, "findings": list(self.findings), "seconds": round(self.seconds, 3)}
        one |= {"details": self.details} if self.details else {}
        return one | {"measures": None if self.measures is None else asdict(self.measures)}


def _number(value: float | Estimate | None) -> str:
    if isinstance(value, Estimate):
        value = value.value if isinf(value.value) else max(0.0, value.value)
    if value is None or not isinf(value):
        return "–" if value is None else number(round(value, 3))
    return "+∞" if value == inf else "−∞"
