"""Results of held-out data on top of a posterior: a temperature or a scale, and the scores of conformal sets.

Plain data, kept with the posterior and in its file. It is fitted in `predict/calibration.py`, applied in
`predict/predictive.py` and `predict/conformal.py`.
"""

from dataclasses import astuple, dataclass
from math import ceil, isfinite, log
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from ..util.checks import is_integer, is_positive

#: the search for a temperature or a scale: no further from one than this, as logarithm
LOG_BOUND = 2.5
#: the thresholds on a probability at which the risk of masks is kept, 0 and the sigmoids of −16 … 16
THRESHOLDS = torch.tensor([-torch.inf, *torch.linspace(-16, 16, 1025).tolist()], dtype=torch.float64).sigmoid()

Kind = Literal["temperature", "scale"]
Form = Literal["label", "number", "mask"]


@dataclass(frozen=True)
class Adjustment:
    """One number, fitted on held-out cases by maximum likelihood, and its gain.

    Example:
        >>> print(Adjustment("temperature", 1.31, gain=0.021, error=0.004, cases=500))
        temperature 1.31, applied: held-out gain 0.021 ± 0.004 nats over 500 cases
    """

    kind: Kind
    value: float
    #: nats for each observed element, of cases that took no part in the fit of the value (five folds), and its standard
    #: error over cases, paired
    gain: float
    error: float
    cases: int

    def __post_init__(self) -> None:
        numbers = isfinite(self.gain) and isfinite(self.error) and is_positive(self.value) and is_integer(self.cases)
        if self.kind not in get_args(Kind) or not numbers or self.error < 0:
            raise ValueError(f"expected a temperature or a scale, and its gain: got {str(astuple(self))[:200]}")

    @property
    def is_bounded(self) -> bool:
        """True if the value lies inside the search: data that are all predicted right ask for certainty."""
        return abs(log(self.value)) < 0.999 * LOG_BOUND

    @property
    def is_applied(self) -> bool:
        """True if predictions use it: it gains on left-out cases, or it is a temperature above one."""
        is_careful = self.kind == "temperature" and self.value > 1
        return self.is_bounded and (is_careful or self.gain > 0)

    def __str__(self) -> str:
        why = f"held-out gain {self.gain:.3g} ± {self.error:.2g} nats over {self.cases} cases"
        if self.is_applied:
            return f"{self.kind} {self.value:.3g}, applied: {why}"
        cause = "no gain" if self.is_bounded else "but it lies at the end of the search, the data set no bound to it"
        return f"{self.kind} {self.value:.3g}, not applied: {why}, {cause}"


@dataclass(frozen=True, eq=False)
class Conformal:
    """Scores of n held-out cases, for sets and intervals at any level.

    Args:
        form: "label": one label a case, "number": one number or several a case, "mask": several labels a case.
        values: sorted, float64. The score of every case, [n], for labels and numbers. For masks the average loss of
            the cases at each of `THRESHOLDS`.
        cases: n.
    """

    form: Form
    values: Tensor
    cases: int

    def _check_level(self, level: float) -> None:
        if not isinstance(level, float) or not 0 < level < 1:
            raise ValueError(f"conformal: the level must lie inside (0, 1), got {level!r}")
        if level > self.highest_level + 1e-12:
            needed = ceil(level / (1 - level) - 1e-9)
            raise ValueError(
                f"conformal: the level {level:g} needs {needed} cases, and calibrate had {self.cases}, which can "
                f"guarantee levels up to {self.highest_level:.4g}"
            )

    @property
    def highest_level(self) -> float:
        """n/(n + 1): beyond it a set must hold everything."""
        return self.cases / (self.cases + 1)

    def quantile(self, level: float) -> float:
        """The ⌈(n + 1)·level⌉-th smallest score: a new case's is at most that with probability ≥ level.

        Example:
            >>> Conformal("label", torch.arange(1.0, 10.0, dtype=torch.float64), 9).quantile(0.8)
            8.0
        """
        self._check_level(level)
        return float(self.values[min(self.cases, ceil((self.cases + 1) * level - 1e-9)) - 1])

    def threshold(self, level: float) -> float:
        """The largest threshold τ with n/(n + 1)·R(τ) + 1/(n + 1) ≤ 1 − level, R the average loss of the cases.

        Example:
            >>> risk = torch.where(THRESHOLDS > 0.5, 0.2, 0.0).double()
            >>> Conformal("mask", risk, 99).threshold(0.9)
            0.5
        """
        self._check_level(level)
        bound = (self.cases * self.values + 1) / (self.cases + 1)
        return float(THRESHOLDS[int((bound <= 1 - level + 1e-12).sum()) - 1])

    def __str__(self) -> str:
        what = {"label": "sets of labels", "number": "intervals", "mask": "masks with their share of misses controlled"}
        return f"conformal {what[self.form]} from {self.cases} cases: levels up to {self.highest_level:.4g}"

    def check(self) -> None:
        """Raise ValueError if a file's values cannot be scores: finite, sorted, ≥ 0, and of labels at most one."""
        n, values = len(THRESHOLDS) if self.form == "mask" else self.cases, self.values
        most = torch.finfo(torch.float64).max if self.form == "number" else 1.0
        fits = self.form in get_args(Form) and is_integer(self.cases) and values.shape == (n,)
        if not fits or values.dtype != torch.float64 or not bool((values.diff() >= 0).all()):
            raise ValueError("conformal scores must be sorted, in float64, one for each case or threshold")
        if not 0 <= values[0] <= values[-1] <= most:
            raise ValueError("conformal scores must be ≥ 0 and finite, of labels at most one")


@dataclass(frozen=True, eq=False)
class Calibration:
    """The result of `bayes.calibrate`: `print` it. `predict` uses it, and `predict(x, calibrated=False)` does not.

    Args:
        adjustment: a temperature or a scale, and whether it is applied; None where none was fitted.
        conformal: what `predict(x).conformal(level)` needs; None where no data were given for it.
        draws: S, over which predictions were averaged.
        notes: how the data were split, and what else there is to know.
    """

    adjustment: Adjustment | None = None
    conformal: Conformal | None = None
    draws: int = 1
    notes: tuple[str, ...] = ()

    @property
    def applied(self) -> Adjustment | None:
        """The temperature or scale that predictions have; None where it was not found to gain."""
        return self.adjustment if self.adjustment is not None and self.adjustment.is_applied else None

    def __str__(self) -> str:
        parts = [str(part) for part in (self.adjustment, self.conformal) if part is not None]
        return "\n".join([*parts, *self.notes])

    def described(self) -> dict[str, Any]:
        """For a file: all but the conformal values and the notes."""
        one, two = self.adjustment, self.conformal
        return {
            "adjustment": None if one is None else list(astuple(one)),
            "conformal": None if two is None else [two.form, two.cases],
            "draws": self.draws,
        }

    @classmethod
    def of(cls, description: Any, values: Tensor | None = None) -> Self | None:
        """Return what `described` and the values tell, None of None; raise ValueError where it cannot be."""
        if (description is not None and description["conformal"] is not None) != (values is not None):
            raise ValueError("conformal scores and their description go together")
        if description is None:
            return None
        one, two, draws = description["adjustment"], description["conformal"], description["draws"]
        if not is_integer(draws):
            raise ValueError("the draws of a calibration must be a positive number")
        conformal = None
        if values is not None:
            form, cases = two
            conformal = Conformal(form, values, cases)
            conformal.check()
        return cls(None if one is None else Adjustment(*one), conformal, draws)
