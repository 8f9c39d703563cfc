"""Selection on held-out data: a grid of prior widths × {linearised, drawn weights}, and the network itself.

Every candidate has its own temperature, or noise, cross-fitted by folds. The rule: the best held-out log density; of
the candidates that are as good within `SHARE` of a paired standard error, the widest. The widest costs nothing where
data are like the training data, and gains where they are not.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, inf, log, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical
from torch.nn.functional import logsigmoid
from torch.utils._pytree import tree_map

from ..families.gaussian import Gaussian as Normal
from ..models.bayesian_model import rows
from ..models.calibration import Adjustment, Calibration
from ..models.likelihoods import Gaussian
from ..predict.linearised import POINTS, evenly_spread, is_normal, jacobians, normal_outputs
from ..predict.predict import WeightDraws
from ..predict.predictive import Predictive, observed_target
from ..predict.temperature import (
    FEWEST,
    FOLDS,
    GRID,
    ONE,
    each_temperature,
)  # fmt: skip
from ..train.data import Reread
from .place import DEFAULT_WIDTH, NETWORK, Candidate, TrainedNetwork, learned_noise

#: candidates within this share of a paired standard error of the best are as good
SHARE = 0.5
#: prior widths in units of each tensor's root mean square, each 1.58 times the one before
WIDTHS = tuple(DEFAULT_WIDTH * 1.58**k for k in range(-4, 5))
#: widths of candidates that are measured on draws of the weights, which cost more
DRAWN_WIDTHS = WIDTHS[2::2]
#: paired standard errors by which a drawn candidate is worse when no wider one is tried
STOP = 2.0
#: draws of the weights for a candidate whose outputs are not known to be normal
WEIGHT_DRAWS = 8
#: passes over the training data that all linearised candidates may take, and all drawn ones
PASSES = 1.0
#: held-out rows that are read in any case
FEWEST_ROWS = 1000
#: the least temperature of a posterior: what needs a colder one is too wide, for the temperature only hides it
COLDEST = 0.7
#: log factors of a regression's noise, relative to the network's residuals on its own data, which are too small
NOISE_GRID = torch.linspace(0.0, 20.0, 401, dtype=torch.float64)
#: points of that grid by which a posterior's noise may be below the network's: its own spread explains a part
BELOW_NETWORK = 24


@dataclass(frozen=True)
class HeldOut:
    """−log p of every row at each point of a grid, and how many observed numbers a row has.

    Args:
        losses: summed over the elements (pixels) of a row: [n, G].
        count: observed elements: [n].
        grid: log temperatures or log noise factors: [G].
        one: the point of the grid with a temperature of one; None for a noise.
    """

    losses: Tensor
    count: Tensor
    grid: Tensor
    one: int | None

    @cached_property
    def fitted(self) -> tuple[float, Tensor]:
        """Return the log temperature, or log noise factor, of all rows; and the cross-fitted log p of each row [n].

        A temperature stays at one if rows are few, if it does not gain on left-out rows, or if they set it no bound.
        """
        losses, best, is_many = self.losses, int(self.losses.sum(0).argmin()), len(self.losses) >= FEWEST
        value, log_p = float(self.grid[best]), -losses[:, best]
        fold = torch.arange(len(losses)) % FOLDS
        for own in range(FOLDS if is_many else 0):
            log_p[fold == own] = -losses[fold == own, int(losses[fold != own].sum(0).argmin())]
        if self.one is None:
            return value, log_p
        plain, is_inside = -losses[:, self.one], float(GRID[0]) < value < float(GRID[-1])
        is_better = is_many and is_inside and bool(losses.isfinite().all()) and float((log_p - plain).sum()) > 0
        return (value, log_p) if is_better else (0.0, plain)

    @property
    def value(self) -> float:
        return self.fitted[0]

    @property
    def plain(self) -> "HeldOut":
        """The same with a temperature of one; of a noise, with the smallest factor."""
        place = self.one or 0
        return replace(self, losses=self.losses[:, place : place + 1], grid=torch.zeros(1), one=None)

    @property
    def mean(self) -> float:
        """Return the cross-fitted log density in nats for each observed number; −∞ if it is none."""
        value = float(self.fitted[1].sum() / self.count.sum())
        return value if value == value else -inf

    def gain_over(self, other: "HeldOut") -> tuple[float, float]:
        """Return how much higher the mean is on the rows that both have seen, and the paired standard error of that.

        Example:
            >>> count, grid = torch.ones(4, dtype=torch.float64), torch.zeros(1)
            >>> one, two = (HeldOut(loss * count.unsqueeze(1), count, grid, None) for loss in (1.0, 2.0))
            >>> one.gain_over(two)
            (1.0, 0.0)
        """
        n = min(len(self.count), len(other.count))
        difference, count = self.fitted[1][:n] - other.fitted[1][:n], self.count[:n]
        gain = float(difference.sum() / count.sum())
        if gain != gain:
            return -inf, 0.0
        residual = (difference - gain * count) / count.mean()
        return gain, sqrt(float(residual.square().sum()) / (n * (n - 1))) if n > 1 else 0.0


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
    def log_noise(self) -> float:
        """Return the log of the selected noise, in units of the network's residuals."""
        return self.held_out.value if self.held_out.one is None else 0.0

    @property
    def calibration(self) -> Calibration | None:
        """Return the temperature of the selected candidate, if it has one."""
        found = self.held_out
        if found.one is None or not found.value:
            return None
        adjustment = Adjustment("temperature", exp(found.value), *found.gain_over(found.plain), len(found.count))
        draws = 1 if self.selected.is_network else WEIGHT_DRAWS
        draws = POINTS if self.is_exact and self.selected.linearised else draws
        note = "the temperature was fitted together with the posterior, on the validation data of bayes.laplace"
        return Calibration(adjustment, None, draws, (note,))


def select(networks: Sequence[TrainedNetwork], validation: Reread, seed: int, say: Callable[[str], None]) -> Selection:
    """Return what the validation set selects for one network, or for the equal mixture of several.

    Args:
        networks: with their curvatures.
        validation: the held-out data.
        seed: of all draws.
        say: told what is done.
    """
    first = networks[0]
    has_widths = "prior" in first.posterior.left_open
    ways = [way for way in first.ways if all(way in one.ways for one in networks)] or list(first.ways)
    batch = next(iter(validation), None)
    if batch is None:
        raise ValueError("validation= gives no batch: is its data set empty, or was it read to its end before?")

    say("the network on the validation set")
    grid = NOISE_GRID if learned_noise(first.likelihood) is not None else NOISE_GRID[:1]
    alone = of_networks(networks, validation, grid)
    tried = {NETWORK: alone}
    if unknown := int(alone.losses.isnan().any(1).sum()):
        raise ValueError(
            f"the network's log density is NaN for {unknown} of the {len(alone.count)} rows of validation=, and "
            "nothing can be selected by it. Is there NaN in their inputs or targets? Leave these rows out, or mask them"
        )
    _count(networks, len(alone.count))
    log_factor = alone.value if alone.one is None else 0.0
    if len(grid) > 1:  # in steps of two points
        grid = (log_factor - grid[: BELOW_NETWORK + 1 : 2]).clamp(min=0.0).unique()

    exact = True in ways and all(is_exact(one, batch) for one in networks)
    if exact:
        say("the linearised network under priors of several widths")
        widths = WIDTHS if has_widths else (None,)
        forwards = 1 + 2 * outputs_of(first, batch)
        found = of_linearised(networks, widths, _few(networks, validation, forwards, batch), grid, seed)
        _count(networks, forwards * len(found[0].count))
        tried |= {Candidate(width, linearised=True): one for width, one in zip(widths, found, strict=True)}
    for way in (way for way in ways if not (way and exact)):
        widths = DRAWN_WIDTHS if has_widths else (None,)
        forwards = WEIGHT_DRAWS * (3 if way else 1)
        some, best = _few(networks, validation, forwards * len(widths), batch), alone
        for candidate in (Candidate(width, way) for width in widths):
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


def _few(networks: Sequence[TrainedNetwork], validation: Reread, forwards: int, batch: Any) -> Reread:
    """Return held-out batches, evenly spread: as many as fit into `PASSES`, at so many forward passes of a row."""
    enough = max(FEWEST_ROWS, int(3 * PASSES * networks[0].posterior.model.num_data / forwards))
    return Reread(validation.batches, -(-enough // rows(batch)))


def _count(networks: Sequence[TrainedNetwork], forwards: int) -> None:
    """Charge forward passes of single rows to every network."""
    for one in networks:
        one.passes += forwards / (3 * one.posterior.model.num_data)


# ------------------------------------------------------------------------------- held-out losses of candidates


#: of one network and a batch: the predictives of every candidate at every noise of the grid, and the target
Predict = Callable[["TrainedNetwork", Any], tuple[list[list[Predictive]], Any]]


def score(
    networks: Sequence[TrainedNetwork], batches: Iterable[Any], grid: Tensor, predict: Predict, coldest: float = 0.0
) -> list[HeldOut]:
    """Return the held-out losses of every candidate, each the equal mixture of those around several networks.

    Args:
        networks: that are mixed.
        batches: the held-out data.
        grid: log noise factors, one zero if the likelihood learns no noise.
        predict: of one network.
        coldest: the least temperature.
    """
    losses: list[list[Tensor]] = []
    counts: list[Tensor] = []
    for batch in batches:
        found, (target, *_) = zip(*(predict(one, batch) for one in networks), strict=True)
        rows = [[_losses([own[k][g] for own in found], target) for g in range(len(grid))] for k in range(len(found[0]))]
        losses.append([torch.cat([loss for loss, _ in one], 1) for one in rows])
        counts.append(rows[0][0][1])
    if not counts or not float(torch.cat(counts).sum()):
        raise ValueError(
            "validation= has no observation: it gave no batch, or every label is masked or ignored. Give held-out data "
            "with labels, as a loader that can be read again"
        )
    count, every = torch.cat(counts), [torch.cat(own) for own in zip(*losses, strict=True)]
    if every[0].shape[1] == len(grid):
        return [HeldOut(own, count, grid, None) for own in every]
    first = int((GRID.exp() < coldest).sum())
    return [HeldOut(own[:, first:], count, GRID[first:], ONE - first) for own in every]


def _losses(predictives: Sequence[Predictive], target: Any) -> tuple[Tensor, Tensor]:
    """Return −log p of the equal mixture [B, G], G of labels the temperatures; and the number of elements [B]."""
    first = predictives[0]
    log_prob = _log_mean([one.log_prob(target).double() for one in predictives])  # with its checks of the labels
    t, mask = (target, None) if first.is_function else observed_target(first.likelihood, target)
    observed = torch.ones_like(log_prob, dtype=torch.bool) if mask is None else mask

    def of_rows(losses: Tensor) -> Tensor:
        return losses.masked_fill(~observed, 0.0).reshape(len(losses), -1).sum(1).cpu()

    count = of_rows(torch.ones_like(log_prob))
    if first.is_function or not isinstance(first.components, Categorical | Bernoulli):
        return of_rows(-log_prob).unsqueeze(1), count
    labels = (t > 0.5 if isinstance(first.components, Bernoulli) else t).masked_fill(~observed, 0)
    log_p = _log_mean([_log_classes(one) for one in predictives])  # [B, .., C]
    return torch.stack([of_rows(own) for own in each_temperature(log_p, labels)], 1), count


def _log_classes(predictive: Predictive) -> Tensor:
    """Return the log probability of every class, classes last: [B, .., C]."""
    d: Any = predictive.components
    log_p = torch.stack([logsigmoid(-d.logits), logsigmoid(d.logits)], -1) if isinstance(d, Bernoulli) else d.logits
    log_p = log_p.double()
    weights = predictive.weights.to(log_p).log().reshape(-1, *[1] * (log_p.ndim - 1))
    return (weights + log_p).logsumexp(0)


def _log_mean(log_probs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(log_probs)).logsumexp(0) - log(len(log_probs))


# ------------------------------------------------------------------------- predictives of a network and around it


def of_networks(networks: Sequence[TrainedNetwork], batches: Iterable[Any], grid: Tensor) -> HeldOut:
    """Return the held-out losses of the average over the networks themselves, at each noise of the grid."""
    forms: set[Any] = set()

    def predict(network: TrainedNetwork, batch: Any) -> tuple[list[list[Predictive]], Any]:
        output, target = _called(network, batch)
        forms.add((tuple(output.shape[1:]), output.dtype) if isinstance(output, Tensor) else None)
        if len(forms) > 1:
            raise ValueError(f"the networks of an ensemble must have outputs of one shape and dtype, got {forms}")
        values = network.posterior.model.likelihood_values(network.theta.unsqueeze(0))
        outputs = tree_map(lambda y: y.unsqueeze(0), output)
        ones = network.theta.new_ones(1)
        return [[Predictive(outputs, ones, network.at_noise(u), values) for u in grid.tolist()]], target

    return score(networks, batches, grid, predict)[0]


def _called(network: TrainedNetwork, batch: Any) -> tuple[Any, Any]:
    posterior, model = network.posterior, network.posterior.model
    named = model.space.unravel(network.theta)
    with posterior.network_mode(), model.linearised_around(None):
        return model.call({name: x for name, x in named.items() if name not in model.likelihood_names}, batch)


def is_exact(network: TrainedNetwork, batch: Any) -> bool:
    """Return whether the linearised network's outputs are normal, and few enough to be known without draws."""
    posterior = network.posterior
    if network.obstacle or posterior.model.user_forward is not None:
        return False
    family = network.placed(network.narrow)
    inputs = posterior.model.split(batch)[0]
    return isinstance(family(), Normal) and is_normal(posterior.with_family(family), inputs)


def outputs_of(network: TrainedNetwork, batch: Any) -> int:
    """Return how many numbers the network gives for one input."""
    with torch.no_grad():
        return _called(network, batch)[0][0].numel()


def of_linearised(
    networks: Sequence[TrainedNetwork], widths: Sequence[float | None], batches: Iterable[Any], grid: Tensor, seed: int
) -> list[HeldOut]:
    """Return the held-out losses of the linearised network at several prior widths, from the same Jacobians."""
    noises = grid.tolist()

    def predict(network: TrainedNetwork, batch: Any) -> tuple[list[list[Predictive]], Any]:
        inputs, target = network.posterior.model.split(batch)
        means, covariances = [], []
        for y, J in jacobians(network.posterior, network.theta, inputs):
            means.append(y)
            covariances.append([[network.normal(width, u).between(J, J) for u in noises] for width in widths])
        mean = torch.cat(means)
        points = evenly_spread(POINTS, mean[0].numel(), seed).to(mean.device)
        found = [
            [
                _of_moments(network, mean, torch.cat([one[k][g] for one in covariances]), points, network.at_noise(u))
                for g, u in enumerate(noises)
            ]
            for k in range(len(widths))
        ]
        return found, target

    with torch.no_grad():
        return score(networks, batches, grid, predict, COLDEST)


def _of_moments(
    network: TrainedNetwork, mean: Tensor, covariance: Tensor, points: Tensor, likelihood: Any
) -> Predictive:
    """Return the predictive of normal outputs, [B, ..] and [B, O, O], at evenly spread points [S, O]."""
    model = network.posterior.model
    if type(likelihood) is Gaussian and likelihood.noise not in ("head", "random"):  # p(t | x) is normal
        variance = covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).reshape(1, *mean.shape)
        return Predictive(mean.unsqueeze(0), mean.new_ones(1), likelihood, {}, "", True, variance)
    S = len(points)
    values = model.likelihood_values(network.theta.unsqueeze(0).expand(S, -1))
    drawn = normal_outputs(mean, covariance, points)
    return Predictive(drawn, mean.new_full((S,), 1 / S), likelihood, values, "", True)


def of_draws(
    networks: Sequence[TrainedNetwork], candidate: Candidate, batches: Iterable[Any], log_factor: float, seed: int
) -> HeldOut:
    """Return the held-out losses of a candidate on draws of the weights, at one noise."""
    draws, each = -(-WEIGHT_DRAWS // len(networks)), {}
    for c, network in enumerate(networks):
        posterior = network.posterior.with_family(network.placed(network.form(candidate.width, log_factor)))
        generator = torch.Generator().manual_seed(seed + c)
        each[id(network)] = WeightDraws(posterior, draws, generator=generator, linearise=candidate.linearised)

    def predict(network: TrainedNetwork, batch: Any) -> tuple[list[list[Predictive]], Any]:
        drawn = each[id(network)]
        inputs, target = drawn.split(batch)
        p = drawn.mixture(inputs)
        return [[Predictive(p.outputs, p.weights, network.at_noise(log_factor), p.values)]], target

    return score(networks, batches, torch.tensor([log_factor]), predict, COLDEST)[0]
