"""λ at training's own pace: it rises only while the likelihood of the data bears it (`kl_warmup="paced"`)."""

from math import sqrt
from typing import NamedTuple

#: at its fastest λ has risen after this part of the steps, at its slowest after that
FASTEST, SLOWEST = 0.1, 0.5
#: parts of the fastest rise, after each of which the likelihood is looked at
LOOKS = 10
#: a look needs so many steps at least
FEWEST = 8
#: a fall by this part of what has been learned is borne
BORNE = 0.05


class Pace(NamedTuple):
    """How far λ has risen, and what the likelihood said of it last: one value, which a step maps to the next.

    λ rises linearly, within `FASTEST · steps` where nothing holds it. After every window of steps the mean log
    likelihood of the data at the draws, per observation, is compared with that of the window before. Where it has
    fallen by more than `BORNE` of what has been learned since the first window, and by more than the standard error of
    that difference, λ waits for another window: means and scales have to follow first. It never falls behind the rise
    that takes `SLOWEST · steps`, so that all fits end at λ itself.

    Example:
        >>> pace, risen = Pace(), []
        >>> for step in range(1000):  # the likelihood falls in the third window of ten steps, and then no more
        ...     pace = pace.after(step, 1000, log_likelihood=-1.0 if step < 20 else -2.0)
        ...     risen.append(round(pace.risen, 2))
        >>> risen[19], risen[29], risen[39], risen[49], risen[119]
        (0.21, 0.31, 0.31, 0.41, 1.0)
    """

    #: λ of the next step as a part of what it rises to; 0 before the first
    risen: float = 0.0
    #: whether it rises in this window
    rises: bool = True
    #: of this window: steps, and the mean and the summed squared deviations of the log likelihood
    steps: int = 0
    mean: float = 0.0
    squares: float = 0.0
    #: of the window before: the mean, and its squared standard error
    before: float | None = None
    error: float = 0.0
    #: of the first window the mean; and the highest of all
    first: float | None = None
    best: float | None = None

    def at(self, step: int, total: int) -> float:
        """λ at this step, from 0, as a part of what it rises to."""
        return self.risen if step else min(1.0, 1 / max(1.0, FASTEST * total))

    def after(self, step: int, total: int, log_likelihood: float) -> "Pace":
        """After a step.

        Args:
            step: from 0.
            total: steps of the fit.
            log_likelihood: of the data at the step's draws, in nats for each observation.
        """
        fastest = max(1.0, FASTEST * total)
        risen = self.at(step, total) + self.rises / fastest
        slowest = (step + 2) / max(1.0, SLOWEST * total)
        steps = self.steps + 1
        mean = self.mean + (log_likelihood - self.mean) / steps
        squares = self.squares + (log_likelihood - self.mean) * (log_likelihood - mean)
        now = self._replace(risen=min(1.0, max(risen, slowest)), steps=steps, mean=mean, squares=squares)
        return now._looked() if steps >= max(FEWEST, round(fastest / LOOKS)) else now

    def _looked(self) -> "Pace":
        """At the end of a window."""
        error = self.squares / (self.steps * (self.steps - 1))
        first = self.mean if self.first is None else self.first
        best = self.mean if self.best is None else max(self.best, self.mean)
        borne = max(BORNE * (best - first), sqrt(error + self.error))
        fallen = self.before is not None and self.before - self.mean > borne
        return Pace(self.risen, not fallen, before=self.mean, error=error, first=first, best=best)
