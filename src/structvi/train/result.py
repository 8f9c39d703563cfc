"""The result of a fit, and the history of its steps."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..objective import Estimate
from ..result import Result, Status

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

#: The columns of a history, one row for each step.
COLUMNS = (
    "step", "epoch", "elbo", "standard_error", "lr", "gradient_norm", "kl_weight", "stage", "held_out", "seconds"
)  # fmt: skip

#: The next thing to do after each status.
NEXT = {
    Status.CONVERGED: "bayes.diagnose(loader) says how far to trust it; bayes.predict(x), bayes.evaluate(test_loader)",
    Status.IMPROVING: "fit longer, with more epochs= (steps=, iterations=): bayes.fit goes on from here",
    Status.UNCLEAR: "call fit again with more groups= (less noise) or more epochs=: it goes on from here",
    Status.TOO_SHORT: "give more epochs=: a trend needs 64 steps; fit goes on from here",
    Status.STOPPED: "call fit again: it goes on from here",
    Status.DIVERGED: "look at the batch that the notes name; a smaller lr= helps where it is not the data",
}


class History:
    """One row a step: the ELBO in nats for the whole data set at λ = 1, its standard error over groups, and the rest.

    `held_out` is the log density of held-out data in nats for each number, at the last step of an epoch, of a fit with
    `validation=`; nan elsewhere.

    `history["elbo"]` is a column as a float64 tensor. Steps that were undone have an ELBO of nan.

    Example:
        >>> history = History()
        >>> history.append(step=0, epoch=0, elbo=-12.0, standard_error=0.5, lr=0.01)
        >>> len(history), history["elbo"]
        (1, tensor([-12.], dtype=torch.float64))
    """

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def append(self, **values: float) -> None:
        if unknown := sorted(set(values) - set(COLUMNS)):
            raise ValueError(f"a history holds {COLUMNS}, got {unknown}")
        self.rows.append([float(values.get(column, float("nan"))) for column in COLUMNS])

    def set_last(self, column: str, value: float) -> None:
        """Set a column of the last step."""
        if self.rows:
            self.rows[-1][COLUMNS.index(column)] = float(value)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> Tensor:
        return self.recent(column, len(self))

    def recent(self, column: str, count: int) -> Tensor:
        """Return the last `count` values of a column."""
        if column not in COLUMNS:
            raise ValueError(f"a history holds {COLUMNS}, got {column!r}")
        index = COLUMNS.index(column)
        return torch.tensor([row[index] for row in self.rows[-count:]], dtype=torch.float64)

    def to_tensor(self) -> Tensor:
        """Return all rows, [steps, columns] in float64."""
        return torch.tensor(self.rows, dtype=torch.float64).reshape(-1, len(COLUMNS))

    @classmethod
    def from_tensor(cls, rows: Tensor) -> "History":
        history = cls()
        history.rows = rows.tolist()
        return history

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a dataframe with one row a step and one column for each of `COLUMNS`; needs pandas."""
        try:
            import pandas
        except ImportError:
            raise ImportError("a dataframe needs pandas: pip install pandas") from None
        frame = pandas.DataFrame(self.rows, columns=list(COLUMNS))
        return frame.astype({"step": int, "epoch": int, "stage": int})

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Plot the ELBO over steps, and its running mean; return the axes."""
        try:
            import matplotlib.pyplot as plt
        except ImportError:
            raise ImportError('plots need matplotlib: pip install "structvi[plots]"') from None
        ax = plt.subplots()[1] if ax is None else ax
        finite = self["elbo"].isfinite()
        step, elbo = self["step"][finite], self["elbo"][finite]
        ax.plot(step, elbo, alpha=0.3, linewidth=0.8, label="each step")
        window = max(1, len(elbo) // 50)
        if len(elbo) >= 2 * window:
            mean = elbo.unfold(0, window, 1).mean(-1)
            ax.plot(step[window - 1 :], mean, label=f"mean of {window} steps")
            # the first steps are far below the rest: they would flatten it
            ax.set_ylim(bottom=mean[len(mean) // 10 :].min().item())
        ax.set_xlabel("step")
        ax.set_ylabel("ELBO (nats)")
        ax.legend()
        return ax


@dataclass
class Skipped:
    """A step that was undone: its batch, and the term that was not finite."""

    epoch: int
    index: int
    reason: str


@dataclass(repr=False, kw_only=True)
class FitResult(Result):
    """The result of a fit: `print(result)` has four lines, `print(result.details)` has all.

    Attributes:
        status: how it ended: `Status.CONVERGED`, `IMPROVING`, `UNCLEAR` where the noise could hide a gain of a
            hundredth of a nat an observation, `TOO_SHORT`, `STOPPED` by you, or `DIVERGED`: no finite ELBO.
        verdict: the same in words. Rates are stated at the highest learning rate: a rate of zero hides all further
            gain.
        converged: whether the status is that.
        elbo: of the posterior that was kept, in nats for the whole data set at λ = 1, with its standard error.
        kept: which of `candidates` was kept.
        candidates: the posteriors that were compared, on common draws: the ELBO of each, at λ = 1.
        objectives: of a tempered fit E log lik − λ KL of each, which decided; empty at λ = 1, where the ELBO did.
        comparison: what they were compared on.
        history: the steps.
        steps, epochs: how many were made, all in all.
        kl_weight: λ of the objective E log lik − λ KL; one but for a tempered posterior.
        bound: whether the ELBO is a lower bound on the evidence: False with point masses.
        exact: whether the same seed gives the same bits, and a resumed run those of one never stopped.
        skipped: the steps that were undone because something was not finite.
        notes: cautions for reading the numbers.
        evaluation: how draws were evaluated, by vmap or in a loop, and why.
        constant: the log likelihood of the best output that ignores the input, in nats for the whole data set: an ELBO
            below it is worse than knowing nothing. None where it is not known.
        held_out: of every candidate the log density of the held-out data, the average over draws, in nats for each
            observed number; where `validation=` was given.
    """

    kept: str
    candidates: dict[str, Estimate]
    comparison: str
    history: History
    steps: int
    epochs: float
    kl_weight: float
    bound: bool
    exact: bool
    objectives: dict[str, Estimate] = field(default_factory=dict[str, Estimate])
    skipped: list[Skipped] = field(default_factory=list)
    evaluation: str = "one draw at a time"
    constant: float | None = None
    held_out: dict[str, float] = field(default_factory=dict)

    def headlines(self) -> list[str]:
        return self._lines()[:3]

    @property
    def details(self) -> str:
        return "\n".join([*self._lines(), f"next: {self.next_step}", *self.notes])

    def _lines(self) -> list[str]:
        """Return all that is known, the most important first."""
        name = "ELBO" if self.bound else "E log joint (no bound)"
        bound = f"{name}: {self.elbo} ({self.comparison})"
        if self.constant is not None:
            bound += f"; of the best output that ignores the input {self.constant:.2f} nats"
        lines = [f"{self.verdict}, after {self.steps} steps ({self.epochs:.4g} epochs)", bound]
        if self.kept in self.held_out:
            lines.append(f"held-out log density: {self.held_out[self.kept]:.4f} nats")
        if len(self.candidates) > 1:
            by = f" by E log lik − λ KL at λ = {self.kl_weight:g}" if self.objectives else ""
            by = " by the held-out log density" if self.held_out else by
            compared = ", ".join(f"{key} {value}" for key, value in (self.objectives or self.candidates).items())
            lines.append(f"kept: {self.kept}; compared on common draws{by}: {compared}")
        return [*lines, f"draws: {self.evaluation}"]

    @property
    def next_step(self) -> str:
        known = self.status in (Status.CONVERGED, Status.UNCLEAR, Status.IMPROVING) and self.bound
        if known and self.constant is not None and self.elbo.value + 2 * self.elbo.standard_error < self.constant:
            return "it is below a constant output: are inputs and targets scaled? print(result.details) has what to try"
        return NEXT.get(self.status, "print(result.details) says what is missing")
