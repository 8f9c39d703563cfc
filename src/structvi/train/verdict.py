"""The verdict on convergence: the trend of the ELBO, and its words."""

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from ..result import Status
from .result import History

#: nats gained over the last part of a fit that count as none: they change no probability by 10 %
NEGLIGIBLE = 0.1
#: steps of a last part that is too short for a trend
SHORTEST_PART = 16
#: nats an observation that are worth a further fit
WORTHWHILE = 0.01


class Trend(NamedTuple):
    """The slope of the ELBO over some steps, in nats a step at the full learning rate, and its standard error."""

    slope: float
    error: float  # ∞ where nothing moved, or too few steps tell
    part: int  # steps of the last part of the fit
    num_data: int

    @classmethod
    def of(cls, history: History, window: int, part: int, num_data: int, back: int = 0) -> "Trend":
        """Return the trend over `window` steps, up to `back` steps ago."""
        elbo, epoch, lr = (history.recent(c, window + back)[:window] for c in ("elbo", "epoch", "lr"))
        highest = history["lr"].nan_to_num(0.0).max()
        rate = (lr / highest).nan_to_num(0.0) if highest > 0 else torch.zeros_like(lr)
        return cls(*trend(elbo, epoch, rate), part, num_data)

    @property
    def rises(self) -> bool:
        """By more than its noise, and by more than nothing."""
        return self.slope > 2 * self.error and self.slope * self.part > NEGLIGIBLE

    @property
    def may_hide_a_gain(self) -> bool:
        return (self.slope + 2 * self.error) * self.part > max(1.0, WORTHWHILE * self.num_data)

    @property
    def has_ended(self) -> bool:
        return self.slope * self.part <= NEGLIGIBLE and not self.may_hide_a_gain

    def judge(self, length: int, unit: str) -> tuple[Status, str]:
        """Return status and words; rates are stated for `length` steps, an epoch."""
        if self.error == inf:
            return Status.UNCLEAR, "not shown to have converged: the learning rate was zero, and nothing moved"
        if self.rises:
            gain = self.slope * length
            form = ".0f" if gain >= 10 else ".2f" if gain >= 0.1 else ".2g"
            return Status.IMPROVING, f"still improving at {gain:{form}} nats per {unit}"
        if self.may_hide_a_gain:
            hidden = (self.slope + 2 * self.error) * length
            return Status.UNCLEAR, f"not shown to have converged: {hidden:.2g} nats per {unit} could hide in the noise"
        return Status.CONVERGED, "converged"


def trend(elbo: Tensor, epoch: Tensor, rate: Tensor) -> tuple[float, float]:
    """Return the slope of the ELBO, in nats a step at the full rate, and its standard error, by least squares.

    Time is measured in learning rate: steps that could not move the posterior say nothing about further gain.
    Points are means over whole epochs: most noise of a step is which batch it has, and cancels over an epoch. With
    fewer than five epochs, points are eight parts of equal length.

    Args:
        elbo: of consecutive steps, [n]; nan where one was undone.
        epoch: of these steps, [n].
        rate: the learning rate of these steps relative to the highest, [n].
    """
    position = rate.cumsum(0)
    finite = elbo.isfinite()
    elbo, epoch, position = elbo[finite], epoch[finite], position[finite]
    if len(elbo) < 8:
        return 0.0, inf
    _, counts = epoch.unique_consecutive(return_counts=True)
    sizes: list[int] = counts.tolist()
    whole = [size == max(sizes) for size in sizes]
    if sum(whole) < 5:
        whole, sizes = [True] * 8, [len(part) for part in elbo.tensor_split(8)]
    x = torch.stack([p.mean() for p, keep in zip(position.split(sizes), whole, strict=True) if keep])
    y = torch.stack([p.mean() for p, keep in zip(elbo.split(sizes), whole, strict=True) if keep])
    x, y = x - x.mean(), y - y.mean()
    if not float(x @ x) > 0:
        return 0.0, inf
    slope = (x @ y) / (x @ x)
    residual = (y - slope * x).square().sum() / (len(x) - 2)
    return float(slope), float((residual / (x @ x)).sqrt())
