"""Log densities of held-out data under candidates: each with its own temperature, or noise, cross-fitted by folds."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf, log, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical
from torch.nn.functional import logsigmoid
from torch.utils._pytree import tree_map

from ..families.normal import Diagonal, NormalForm, Triangle
from ..models.likelihoods import Gaussian
from ..predict.linearised import POINTS, evenly_spread, is_normal, jacobians, normal_outputs
from ..predict.predict import WeightDraws
from ..predict.predictive import Predictive, observed_target
from ..predict.temperature import FOLDS, GRID, ONE, cross_fitted_losses, fit_temperature, losses_at, temperature_losses
from .noise import learned_noise, set_noise
from .place import Candidate, TrainedNetwork

#: draws of the weights for a candidate whose outputs are not known to be normal
WEIGHT_DRAWS = 8
#: the least temperature of a posterior: what needs a colder one is too wide, for the temperature only hides it
COLDEST = 0.7
#: fewer rows say nothing of a temperature
FEWEST = 10
#: numbers of log probabilities whose losses are tabulated at once
TABULATED = 2**20


@dataclass(frozen=True)
class HeldOut:
    """−log p of every row at each point of a grid, and how many observed numbers a row has.

    Args:
        losses: summed over the elements (pixels) of a row: [n, G].
        count: observed elements: [n].
        grid: log temperatures or log noise factors: [G].
        of_temperature: whether the grid is that of a temperature, which may stay at one.
        coldest: the least log temperature that may be fitted.
    """

    losses: Tensor
    count: Tensor
    grid: Tensor
    of_temperature: bool
    coldest: float = -inf

    @cached_property
    def fitted(self) -> tuple[float, Tensor]:
        """Return the log temperature, or log noise factor, of all rows; and the cross-fitted log p of each row [n]."""
        losses, few = self.losses, len(self.losses) < FEWEST
        if self.of_temperature:
            plain = -losses[:, ONE]
            if few or not bool(losses.isfinite().all()):
                return 0.0, plain
            value, rows = log(fit_temperature(losses)), -cross_fitted_losses(losses)
            if value < self.coldest:
                return self.coldest, -losses_at(losses, exp(self.coldest))
            is_bounded = abs(value) < 0.999 * float(GRID[-1])
            return (value, rows) if is_bounded and float(rows.sum()) > float(plain.sum()) else (0.0, plain)
        best = int(losses.sum(0).argmin())
        rows, fold = -losses[:, best], torch.arange(len(losses)) % FOLDS
        if losses.shape[1] > 1 and not few:
            for own in range(FOLDS):
                rows[fold == own] = -losses[fold == own, int(losses[fold != own].sum(0).argmin())]
        return float(self.grid[best]), rows

    @property
    def value(self) -> float:
        return self.fitted[0]

    @property
    def plain(self) -> float:
        """Return the mean log density with a temperature of one; of a noise, with the smallest factor."""
        place = ONE if self.of_temperature else 0
        return _number(-self.losses[:, place].sum() / self.count.sum())

    @property
    def mean(self) -> float:
        """Return the cross-fitted log density in nats for each observed number; −∞ if it is none."""
        return _number(self.fitted[1].sum() / self.count.sum())

    def gain_over(self, other: "HeldOut") -> tuple[float, float]:
        """Return how much higher the mean is on the rows that both have seen, and the paired standard error of that.

        Example:
            >>> count, grid = torch.ones(4, dtype=torch.float64), torch.zeros(1)
            >>> one, two = (HeldOut(loss * count.unsqueeze(1), count, grid, False) for loss in (1.0, 2.0))
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


def _number(value: Tensor) -> float:
    return float(value) if bool(value == value) else -inf


#: of one network and a batch: the predictives of every candidate at every noise of the grid, and the target
Predict = Callable[["TrainedNetwork", Any], tuple[list[list[Predictive]], Any]]


def score(
    networks: Sequence[TrainedNetwork], batches: Iterable[Any], grid: Tensor, predict: Predict, coldest: float
) -> list[HeldOut]:
    """Return the held-out losses of every candidate, each the equal mixture of those around several networks."""
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
    of_temperature = losses[0][0].shape[1] > len(grid)
    known = torch.cat(counts), GRID if of_temperature else grid, of_temperature, coldest
    return [HeldOut(torch.cat(own), *known) for own in zip(*losses, strict=True)]


def _losses(predictives: Sequence[Predictive], target: Any) -> tuple[Tensor, Tensor]:
    """Return −log p of the equal mixture [B, G], G of labels the temperatures; and the number of elements [B]."""
    first = predictives[0]
    log_prob = _log_mean([one.log_prob(target).double() for one in predictives])  # with its checks of the labels
    observed = None if first.is_function else observed_target(first.likelihood, target)[1]
    observed = torch.ones_like(log_prob, dtype=torch.bool) if observed is None else observed
    B = len(log_prob)
    count = observed.reshape(B, -1).sum(1).double().cpu()
    if first.is_function or not isinstance(first.components, Categorical | Bernoulli):
        return -log_prob.masked_fill(~observed, 0.0).reshape(B, -1).sum(1, keepdim=True).cpu(), count
    labels = observed_target(first.likelihood, target)[0]
    labels = (labels > 0.5 if isinstance(first.components, Bernoulli) else labels).masked_fill(~observed, 0)
    log_p = _log_mean([_log_classes(one) for one in predictives])  # [B, .., C]
    step = max(1, TABULATED * B // max(1, log_p.numel()))
    rows = []
    for start in range(0, B, step):
        some = slice(start, start + step)
        losses = temperature_losses(log_p[some], labels[some]).masked_fill(~observed[some].unsqueeze(-1), 0.0)
        rows.append(losses.reshape(len(losses), -1, losses.shape[-1]).sum(1).cpu())
    return torch.cat(rows), count


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


def at_noise(network: TrainedNetwork, log_factor: float) -> Any:
    """Return the network's likelihood with the noise at a factor of its residuals."""
    likelihood = network.likelihood
    if learned_noise(likelihood) is None:
        return likelihood
    own = copy.deepcopy(likelihood)
    set_noise(own, network.log_noise + log_factor)
    return own


def of_networks(networks: Sequence[TrainedNetwork], batches: Iterable[Any], grid: Tensor) -> HeldOut:
    """Return the held-out losses of the average over the networks themselves, at each noise of the grid."""
    likelihoods = {id(one): [at_noise(one, u) for u in grid.tolist()] for one in networks}
    forms: set[Any] = set()

    def predict(network: TrainedNetwork, batch: Any) -> tuple[list[list[Predictive]], Any]:
        output, target = _called(network, batch)
        forms.add((tuple(output.shape[1:]), output.dtype) if isinstance(output, Tensor) else None)
        if len(forms) > 1:
            raise ValueError(f"the networks of an ensemble must have outputs of one shape and dtype, got {forms}")
        values = network.posterior.model.likelihood_values(network.theta.unsqueeze(0))
        outputs = tree_map(lambda y: y.unsqueeze(0), output)
        return [
            [Predictive(outputs, network.theta.new_ones(1), own, values) for own in likelihoods[id(network)]]
        ], target

    return score(networks, batches, grid, predict, coldest=-inf)[0]


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
    return family.normal() is not None and is_normal(posterior.with_family(family), posterior.model.split(batch)[0])


def outputs_of(network: TrainedNetwork, batch: Any) -> int:
    """Return how many numbers the network gives for one input."""
    with torch.no_grad():
        return _called(network, batch)[0][0].numel()


def of_linearised(
    networks: Sequence[TrainedNetwork], widths: Sequence[float | None], batches: Iterable[Any], grid: Tensor, seed: int
) -> list[HeldOut]:
    """Return the held-out losses of the linearised network at several prior widths, from the same Jacobians."""
    noises = grid.tolist()
    likelihoods = {id(one): [at_noise(one, u) for u in noises] for one in networks}

    def predict(network: TrainedNetwork, batch: Any) -> tuple[list[list[Predictive]], Any]:
        inputs, target = network.posterior.model.split(batch)
        means, covariances = [], []
        for y, J in jacobians(network.posterior, network.theta, inputs):
            means.append(y)
            covariances.append([[output_covariance(network.stored(width, u), J) for u in noises] for width in widths])
        mean, own = torch.cat(means), likelihoods[id(network)]
        points = evenly_spread(POINTS, mean[0].numel(), seed).to(mean.device)
        found = [
            [
                _of_moments(network, mean, torch.cat([one[k][g] for one in covariances]), points, own[g])
                for g in range(len(own))
            ]
            for k in range(len(widths))
        ]
        return found, target

    with torch.no_grad():
        return score(networks, batches, grid, predict, log(COLDEST))


def output_covariance(form: NormalForm, J: Tensor) -> Tensor:
    """Return J Σ Jᵀ for Jacobians [b, O, P]: [b, O, O]."""
    root = form.root
    if isinstance(root, Triangle):
        own = J @ root.lower
        return own @ own.mT
    own = J * root.scale
    whole = own @ own.mT
    if isinstance(root, Diagonal):
        return whole
    columns = own @ root.factor
    if not root.of_precision:
        return whole + columns @ columns.mT
    factor = root.factor.double()
    M = torch.eye(factor.shape[1], dtype=torch.float64, device=factor.device) + factor.mT @ factor
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(M), columns.double().mT, upper=False)
    return whole - (half.mT @ half).to(whole)


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
        drawn = WeightDraws(posterior, draws, generator=generator, linearise=candidate.linearised)
        each[id(network)] = drawn, at_noise(network, log_factor)

    def predict(network: TrainedNetwork, batch: Any) -> tuple[list[list[Predictive]], Any]:
        drawn, likelihood = each[id(network)]
        inputs, target = drawn.split(batch)
        p = drawn.mixture(inputs)
        return [[Predictive(p.outputs, p.weights, likelihood, p.values)]], target

    return score(networks, batches, torch.tensor([log_factor]), predict, log(COLDEST))[0]
