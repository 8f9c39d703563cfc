"""The table of a fit of a log density: means, standard deviations and quantiles of the parameters."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import floor, inf, log10
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .importance import K_LIMIT, psis

if TYPE_CHECKING:
    import pandas

#: of a longer table the first and the last rows are printed
LONGEST = 60
#: standard deviations, of a mean and of an sd, from which on two standard errors are worth a warning
OFF = 0.1, 0.15


class Row(NamedTuple):
    """One number: its name, and what the draws say."""

    name: str
    mean: float
    sd: float
    q5: float
    q50: float
    q95: float
    #: Monte Carlo standard error of the mean
    mcse: float


@dataclass(frozen=True, repr=False)
class Summary:
    """Mean, sd, 5, 50 and 95 % quantiles of the parameters' values. `print` shows a table, a row for each number.

    `summary["theta[0]"].mean` is one number, `summary.mean["theta"]` a tensor with the parameter's shape, and
    `pandas.DataFrame(summary.rows)` the table. Draws of your own, such as functions of those of `result.sample`, have
    one too: `Summary({"theta": theta})`.

    Args:
        draws: name → values at S draws, [S, *shape].
        weights: of the draws, summing to one, [S]; equal if None.
        k: k̂ of importance weights towards the posterior; None without weights.
        notes: lines that are printed below the table.

    Example:
        >>> draws = torch.linspace(-1, 1, 2001, dtype=torch.float64)
        >>> summary = Summary({"a": draws, "b": torch.stack([draws, 10 + draws], -1)})
        >>> print(summary)
                mean     sd      5%     50%     95%   mcse
        a      0.000  0.578  -0.900   0.000   0.900  0.013
        b[0]   0.000  0.578  -0.900   0.000   0.900  0.013
        b[1]  10.000  0.578   9.100  10.000  10.900  0.013
    """

    draws: dict[str, Tensor]
    weights: Tensor | None = None
    k: float | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = {len(x) if x.ndim else 0 for x in [*self.draws.values(), self.weights] if x is not None}
        if len(counts) != 1 or min(counts) < 2:
            raise ValueError(f"Summary expects tensors [S, ..] of the same S ≥ 2 draws, got S of {sorted(counts)}")

    @cached_property
    def _w(self) -> Tensor:
        """[S], float64."""
        S = len(next(iter(self.draws.values())))
        return torch.full((S,), 1 / S, dtype=torch.float64) if self.weights is None else self.weights.double().cpu()

    @cached_property
    def mean(self) -> dict[str, Tensor]:
        return self._each(self._average)

    @cached_property
    def sd(self) -> dict[str, Tensor]:
        return self._each(lambda x: self._average(self._squares(x)).sqrt())

    @cached_property
    def mcse(self) -> dict[str, Tensor]:
        """The Monte Carlo standard error of `mean`, (Σ w² (x − mean)²)^½."""
        return self._each(lambda x: torch.tensordot(self._w.square(), self._squares(x), dims=1).sqrt())

    def quantile(self, p: float) -> dict[str, Tensor]:
        """Return the values below which a part p of the weight is."""
        if not 0 < p < 1:
            raise ValueError(f"a quantile is of a part between 0 and 1, got {p!r}")
        return self._each(lambda x: _quantile(x, self._w, p))

    def interval(self, p: float = 0.9) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the ends between which a part p of the weight is, with as much below as above."""
        if not 0 < p < 1:
            raise ValueError(f"an interval holds a part between 0 and 1, got {p!r}")
        return self.quantile((1 - p) / 2), self.quantile((1 + p) / 2)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        columns = [self.mean, self.sd, self.quantile(0.05), self.quantile(0.5), self.quantile(0.95), self.mcse]
        numbers = ([x for name in self.draws for x in column[name].flatten().tolist()] for column in columns)
        labels = (label for label, _ in self.numbers())
        return tuple(Row(*row) for row in zip(labels, *numbers, strict=True))

    def numbers(self) -> Iterator[tuple[str, Tensor]]:
        """Give each number's label, "a" or "a[0, 1]", and its values at the draws, [S] in float64."""
        for name, draws in self.draws.items():
            shape, columns = draws.shape[1:], draws.detach().double().cpu().reshape(len(draws), -1)
            for column, x in enumerate(columns.unbind(-1)):
                index = [int(i) for i in torch.unravel_index(torch.tensor(column), shape)] if shape else []
                yield f"{name}[{', '.join(map(str, index))}]" if index else name, x

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return the table as a pandas frame, one row a number, with its name as the index."""
        try:
            import pandas
        except ImportError:
            raise ImportError("a dataframe needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.rows).set_index("name").rename(columns={"q5": "5%", "q50": "50%", "q95": "95%"})

    def __getitem__(self, label: str) -> Row:
        for row in self.rows:
            if row.name == label:
                return row
        raise KeyError(f"no row {label!r}; there are {[row.name for row in self.rows[:12]]}")

    def __str__(self) -> str:
        table = [["", "mean", "sd", "5%", "50%", "95%", "mcse"], *([row.name, *_numbers(row)] for row in self.rows)]
        widths = [max(len(line[i]) for line in table) for i in range(7)]
        lines = ["  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]) for first, *rest in table]
        if len(lines) > LONGEST + 1:
            half = LONGEST // 2
            more = f".. {len(lines) - 1 - LONGEST} more rows: summary.rows has all, select= chooses"
            lines = [*lines[: 1 + half], more, *lines[-half:]]
        return "\n".join([*(line.rstrip() for line in lines), *self.notes])

    __repr__ = __str__  # a notebook shows what print does

    def _each(self, function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {name: function(x.detach().double().cpu()) for name, x in self.draws.items()}

    def _average(self, x: Tensor) -> Tensor:
        return torch.tensordot(self._w, x, dims=1)

    def _squares(self, x: Tensor) -> Tensor:
        return (x - self._average(x)).square()


def doubtful(summary: Summary) -> list[str]:
    """Return the numbers whose mean or standard deviation importance weights may have wrong.

    A number is doubtful if two standard errors are a tenth of its sd for the mean or 0.15 of it for the sd, or if k̂ of
    w (x − mean)² is 0.7 or more: then there is mass in its tails that no draw has met.
    """
    names, w = [], summary._w
    for label, x in summary.numbers():
        square = (x - w @ x).square()
        variance = w @ square
        if not variance > 1e-24 * (w @ x.square()):  # a constant, such as the corner of a Cholesky factor
            continue
        of_mean = (w.square() @ square).sqrt() / variance.sqrt()
        of_sd = (w.square() @ (square - variance).square()).sqrt() / (2 * variance)
        is_off = 2 * of_mean > OFF[0] or 2 * of_sd > OFF[1]
        if is_off or psis(w.log() + square.log())[1] >= K_LIMIT:
            names.append(label)
    return names


def _numbers(row: Row) -> list[str]:
    """Return texts with as many decimals as the spread needs for three digits, so that numbers can be compared."""
    spreads = [x for x in (row.sd, row.q50 - row.q5, row.q95 - row.q50) if x > 1e-12 * abs(row.mean)]
    spread = min(spreads, default=abs(row.mean))  # a constant has an sd of rounding
    decimals = max(0, 2 - floor(log10(spread))) if 0 < spread < inf else 2
    if decimals > 6 or max(abs(x) for x in row[1:]) >= 1e9:
        return [f"{x:.3g}" for x in row[1:]]
    return [f"{round(x, decimals) + 0.0:.{decimals}f}" for x in row[1:]]  # no −0.00


def _quantile(x: Tensor, weights: Tensor, p: float) -> Tensor:
    """Return a quantile of weighted values, [S, ..] → [..]: between two of them by their weights' middles."""
    values, order = x.reshape(len(x), -1).sort(0)
    w = weights[order]
    middle = (w.cumsum(0) - 0.5 * w).mT.contiguous()  # [E, S]
    above = torch.searchsorted(middle, middle.new_full((len(middle), 1), p)).clamp(1, len(x) - 1)
    low, high = (middle.gather(1, i) for i in (above - 1, above))
    part = ((p - low) / (high - low).clamp_min(torch.finfo(middle.dtype).tiny)).clamp(0, 1)
    below, beyond = (values.mT.gather(1, i) for i in (above - 1, above))
    return torch.lerp(below, beyond, part).reshape(x.shape[1:])
