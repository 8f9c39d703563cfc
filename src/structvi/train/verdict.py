"""Whether a fit has converged: the trend of its ELBO, and the words for it."""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from ..result import Status
from .result import History

#: The last part of the steps, whose iterates are averaged and whose trend gives the verdict.
LAST_PART = 0.25
#: A gain below this over the last part of a fit is none, whatever the noise: it changes no probability by 10 %.
NEGLIGIBLE = 0.1
#: A shorter last part tells no trend.
SHORTEST_PART = 16

TOO_SHORT = "too few steps to tell whether it has converged"
STOPPED = "stopped by you"
NOT_FINITE = "no finite ELBO: print(result.details) says which batch and why"


@dataclass(frozen=True)
class Trend:
    """The slope of the ELBO over some steps, in nats a step at the full learning rate, and its standard error.

    Args:
        slope, error: of the least-squares line.
        part: how many steps the last part of the fit has.
        num_data: N.
    """

    slope: float
    error: float
    part: int
    num_data: int

    @classmethod
    def of(cls, history: History, window: int, part: int, num_data: int, back: int = 0) -> "Trend":
        """Over `window` steps, up to `back` steps ago."""
        elbo, epoch, lr = (history.recent(c, window + back)[:window] for c in ("elbo", "epoch", "lr"))
        highest = history["lr"].nan_to_num(0.0).max()
        return cls(*trend(elbo, epoch, (lr / highest).nan_to_num(0.0)), part, num_data)

    @property
    def rises(self) -> bool:
        """By more than its noise, and by more than nothing."""
        return self.slope > 2 * self.error and self.slope * self.part > NEGLIGIBLE

    @property
    def may_hide_a_gain(self) -> bool:
        """Worth a further fit: a hundredth of a nat an observation, and one nat at least."""
        return (self.slope + 2 * self.error) * self.part > max(1.0, 0.01 * self.num_data)

    @property
    def has_ended(self) -> bool:
        return not self.slope * self.part > NEGLIGIBLE and not self.may_hide_a_gain

    def judge(self, length: int = 1, unit: str = "step") -> tuple[Status, str]:
        """Status and words; rates are told for `length` steps, an epoch's."""
        if self.rises:
            gain = self.slope * length
            form = ".0f" if gain >= 10 else ".2f" if gain >= 0.1 else ".2g"
            return Status.IMPROVING, f"still improving at {gain:{form}} nats per {unit}"
        if self.may_hide_a_gain:
            hidden = (self.slope + 2 * self.error) * length
            words = f"not shown to have converged: {hidden:.2g} nats per {unit} could hide in the noise"
            return Status.UNCLEAR, words
        return Status.CONVERGED, "converged"


def trend(elbo: Tensor, epoch: Tensor, rate: Tensor) -> tuple[float, float]:
    """The slope of the ELBO, in nats a step at the full rate, and its standard error, by least squares over epochs.

    Time runs as the learning rate does: steps that could not move the posterior say nothing of what is left to gain.

    Means over whole epochs: which batch is whose turn is most of the noise of a step, and cancels over an epoch. Where
    there are fewer than five, the steps in eight parts of equal length.

    Args:
        elbo: of consecutive steps, [n]; nan where one was undone.
        epoch: of these steps, [n].
        rate: the learning rate of these steps as a part of the highest, [n].
    """
    position = rate.cumsum(0)
    finite = elbo.isfinite()
    elbo, epoch, position = elbo[finite], epoch[finite], position[finite]
    _, sizes = epoch.unique_consecutive(return_counts=True)
    sizes = sizes.tolist()
    whole = [size == max(sizes) for size in sizes] if sizes else []
    if sum(whole) < 5:
        whole, sizes = [True] * 8, [len(part) for part in elbo.tensor_split(8)]
    if len(elbo) < 8:
        return 0.0, inf
    x = torch.stack([p.mean() for p, keep in zip(position.split(sizes), whole, strict=True) if keep])
    y = torch.stack([p.mean() for p, keep in zip(elbo.split(sizes), whole, strict=True) if keep])
    x, y = x - x.mean(), y - y.mean()
    slope = (x @ y) / (x @ x)
    residual = (y - slope * x).square().sum() / (len(x) - 2)
    return float(slope), float((residual / (x @ x)).sqrt())
