"""Held-out data of a fit: watched while it runs, and used to select."""

from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..families.normal import Diagonal, NormalForm
from .averaging import assign
from .batches import held_out_batches
from .held_out import DRAWS, HeldOut, of_network, of_posterior

if TYPE_CHECKING:
    from ..posterior import Posterior

#: nats within which held-out densities count as equal
MARGIN = 0.005
#: draws while the fit runs
FEW_DRAWS = 8
#: the name under which a network is kept, and the posterior's standard deviations then, in units of tensors' scales:
#: the first at which predictions are the network's own
NETWORK, NARROW = "the network", (1e-3, 1e-5, 1e-7, 1e-9)
PREFERRED = "the held-out data prefer the network: the posterior is a narrow normal around it"

UNKNOWN = (
    "the held-out log density is not finite under any candidate, and the ELBO has chosen: is there NaN in inputs or "
    "targets of validation=?"
)


class Watch:
    """The held-out data, and what the posterior's densities of them are.

    Args:
        data: batches as `fit` takes them.
        seed: of the draws: all posteriors see the same.
        device: where batches are moved to.
    """

    def __init__(self, data: Iterable[Any], seed: int, device: torch.device):
        self.batches, self.seed = held_out_batches(data, seed, device), seed

    def of(self, posterior: "Posterior", draws: int = DRAWS) -> HeldOut:
        return of_posterior(posterior, self.batches, self.seed, draws)

    def of_network(self, posterior: "Posterior", theta: Tensor) -> HeldOut:
        return of_network(posterior, theta, self.batches)


def as_good(one: HeldOut, best: HeldOut) -> bool:
    """Whether a held-out density is within `MARGIN` nats of the best, and a standard error of the difference.

    The margin alone would be an eighth of a network's whole loss where pixels are nearly certain.
    """
    gain, error = best.gain_over(one)
    return gain <= min(MARGIN, error)


class Choice:
    """What held-out data say of the candidates of a fit, and which is kept: the network too is one, where trained."""

    def __init__(self) -> None:
        self.held_out: dict[str, HeldOut] = {}
        self.network: HeldOut | None = None
        self.notes: list[str] = []
        #: as last seen while the fit runs
        self.last: float | None = None

    def make(
        self,
        posterior: "Posterior",
        watch: Watch,
        states: Mapping[str, Mapping[str, Tensor]],
        learned: Mapping[str, Tensor],
        trained: Tensor | None,
        otherwise: str,
    ) -> str:
        """The name of the state that is kept; "the network" where the posterior has been placed at it.

        Where the held-out data say nothing it is `otherwise`.
        """
        widths = {}
        for name, values in states.items():
            assign(learned, values)
            self.held_out[name] = watch.of(posterior)
            widths[name] = width_of(posterior)
        if trained is not None:
            self.network = watch.of_network(posterior, trained)
        best = max(self.held_out.values(), key=lambda one: one.mean).mean
        prefers = self.network is not None and self.network.mean > best + MARGIN
        if prefers and trained is not None and narrowed(posterior, trained, watch.batches):
            self.held_out[NETWORK] = watch.of(posterior)
            self.notes.append(PREFERRED)
            return NETWORK
        if best == -inf:
            self.notes.append(UNKNOWN)
            return otherwise
        leader = max(self.held_out.values(), key=lambda one: one.mean)
        good = [name for name, one in self.held_out.items() if as_good(one, leader)]
        return max(good, key=lambda name: widths[name])

    def against_network(self, kept: str) -> tuple[float, float] | None:
        if self.network is None or kept not in self.held_out:
            return None
        return self.held_out[kept].gain_over(self.network)


def width_of(posterior: "Posterior") -> float:
    """Mean log standard deviation of the weights; −∞ for point masses."""
    with torch.no_grad():
        density = posterior.family()
        return float(0.5 * density.variance.double().log().mean()) if density.has_density else -inf


def narrowed(posterior: "Posterior", trained: Tensor, batches: Iterable[Any]) -> bool:
    """Place the posterior so near to the network that predictions are its own; False where its family cannot be.

    Where there is hardly any noise a thousandth of a weight is not near: what is near is seen on the first of some
    batches, by log densities within half of `MARGIN`.
    """
    space, first = posterior.space, [next(iter(batches))]
    network = of_network(posterior, trained, first).mean
    for narrow in NARROW:
        with torch.no_grad():
            try:
                posterior.family.set_normal(NormalForm(trained, Diagonal(narrow * space.scale)))
            except TypeError:
                return False
        if of_posterior(posterior, first, 0, FEW_DRAWS).mean >= network - MARGIN / 2:
            break
    return True
