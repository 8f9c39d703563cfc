"""Selection on a validation set: a grid of prior widths × {linearised, drawn weights}, and the network itself.

Every candidate has its own temperature, or noise, cross-fitted. The rule: the best held-out log density; of the
candidates that are as good within `SHARE` of a paired standard error, the widest. The widest costs nothing where data
are like the training data, and gains where they are not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Any

import torch

from ..models.batch import rows
from ..models.calibration import Adjustment, Calibration
from ..predict.linearised import POINTS
from ..predict.temperature import ONE
from ..train.data import Reread
from .held_out import (
    WEIGHT_DRAWS,
    HeldOut,
    is_exact,
    of_draws,
    of_linearised,
    of_networks,
    outputs_of,
)
from .noise import BELOW_NETWORK, NETWORK_GRID, learned_noise
from .place import NETWORK, Candidate, TrainedNetwork

#: candidates within this share of a paired standard error of the best are as good
SHARE = 0.5
#: prior widths in units of each tensor's root mean square, each 1.58 times the one before
WIDTHS = tuple(round(1.5 * 2.5 ** (k / 2), 4) for k in range(-8, 1))
#: widths of candidates that are measured on draws of the weights, which cost more
DRAWN_WIDTHS = WIDTHS[2:8:2]
#: passes over the training data that the Jacobians may take, and each candidate on draws
JACOBIAN_PASSES, DRAWN_PASSES = 1.0, 0.3
#: held-out rows that are read in any case
FEWEST_ROWS = 200
#: paired standard errors by which a wider candidate is worse when no wider one is tried
STOP = 2.0


@dataclass
class Selection:
    """What was selected on a validation set, and what was tried."""

    selected: Candidate
    tried: dict[Candidate, HeldOut]
    is_exact: bool

    @property
    def network(self) -> HeldOut:
        return self.tried[NETWORK]

    @property
    def held_out(self) -> HeldOut:
        return self.tried[self.selected]

    @property
    def density(self) -> float:
        """Return the selected candidate's held-out log density: the network's, and the gain on the rows of both."""
        return self.network.mean + self.held_out.gain_over(self.network)[0]

    @property
    def choice(self) -> tuple[Candidate, float]:
        """Return what was selected, and the log of its noise in units of the network's residuals."""
        return self.selected, 0.0 if self.held_out.of_temperature else self.held_out.value

    @property
    def calibration(self) -> Calibration | None:
        """Return the temperature of the selected candidate, if it has one."""
        found = self.held_out
        if not found.of_temperature or not found.value:
            return None
        without = replace(found, losses=found.losses[:, ONE : ONE + 1], of_temperature=False)
        gain, error = found.gain_over(without)
        draws = POINTS if self.is_exact and self.selected.linearised else WEIGHT_DRAWS
        draws = 1 if self.selected.is_network else draws
        note = "the temperature was fitted together with the posterior, on the validation data of bayes.laplace"
        return Calibration(
            Adjustment("temperature", exp(found.value), gain, error, len(found.count)), None, draws, (note,)
        )


def select(networks: Sequence[TrainedNetwork], validation: Reread, seed: int, say: Callable[[str], None]) -> Selection:
    """Return what the validation set selects for one network, or for the equal mixture of several.

    Args:
        networks: with their curvatures.
        validation: the held-out data.
        seed: of all draws.
        say: told what is done.
    """
    first = networks[0]
    widths: Sequence[float | None] = WIDTHS if "prior" in first.posterior.left_open else (None,)
    ways = [way for way in first.ways if all(way in one.ways for one in networks)] or list(first.ways)
    batch = next(iter(validation), None)
    if batch is None:
        raise ValueError("validation= gives no batch: is its data set empty, or was it read to its end before?")

    say("the network on the validation set")
    grid = torch.zeros(1, dtype=torch.float64) if learned_noise(first.likelihood) is None else NETWORK_GRID
    alone = of_networks(networks, validation, grid)
    tried = {NETWORK: alone}
    if unknown := int(alone.losses.isnan().any(1).sum()):
        raise ValueError(
            f"the network's log density is NaN for {unknown} of the {len(alone.count)} rows of validation=, and "
            "nothing can be selected by it. Is there NaN in their inputs or targets? Leave these rows out, or mask them"
        )
    _count(networks, len(alone.count))
    log_factor = 0.0 if alone.of_temperature else alone.value
    if len(grid) > 1:
        below = log_factor + BELOW_NETWORK
        grid = torch.cat([below[below > grid[0]], grid[:1]]).sort().values

    exact = True in ways and all(is_exact(one, batch) for one in networks)
    if exact:
        say("the linearised network under priors of several widths")
        forwards = 1 + 2 * outputs_of(first, batch)
        some = _few(networks, validation, JACOBIAN_PASSES, forwards, batch)
        found = of_linearised(networks, widths, some, grid, seed)
        _count(networks, forwards * len(found[0].count))
        tried |= {Candidate(width, linearised=True): one for width, one in zip(widths, found, strict=True)}
    drawn_widths = [width for width in widths if width is None or width in DRAWN_WIDTHS]
    for way in (way for way in ways if not (way and exact)):
        forwards = WEIGHT_DRAWS * (3 if way else 1)
        some, best = _few(networks, validation, DRAWN_PASSES, forwards, batch), alone
        for candidate in (Candidate(width, way) for width in drawn_widths):
            say(candidate.name)
            tried[candidate] = found = of_draws(networks, candidate, some, log_factor, seed)
            _count(networks, forwards * len(found.count))
            gain, error = found.gain_over(best)
            if not gain >= -STOP * error:
                break
            best = found if gain > 0 else best
    return Selection(widest(tried), tried, exact)


def widest(tried: dict[Candidate, HeldOut]) -> Candidate:
    """Return the widest of the candidates that are as good as the best, within `SHARE` of a paired standard error."""
    network = tried[NETWORK]
    best = max(tried.values(), key=lambda one: one.gain_over(network)[0])

    def is_good(one: HeldOut) -> bool:
        gain, error = one.gain_over(best)
        return one is best or gain >= -SHARE * error

    return max((candidate for candidate, found in tried.items() if is_good(found)), key=lambda one: one.spread)


def _few(networks: Sequence[TrainedNetwork], validation: Reread, passes: float, forwards: int, batch: Any) -> Reread:
    """Return held-out batches, evenly spread: as many as fit into so many passes over the training data."""
    enough = max(FEWEST_ROWS, int(3 * passes * networks[0].posterior.model.num_data / forwards))
    return Reread(validation.batches, -(-enough // rows(batch)))


def _count(networks: Sequence[TrainedNetwork], forwards: int) -> None:
    """Charge forward passes of single rows to every network."""
    for one in networks:
        one.passes += forwards / (3 * one.posterior.model.num_data)
