"""Selection on held-out data: priors of several widths around the network, and the network itself.

Every candidate has its own temperature, or noise, cross-fitted by folds. The rule: the widest candidate that is as good
as the best one, and as the network with its own temperature. As good means at most `MARGIN` worse, one paired standard
error included: what a validation set cannot tell is not selected. The widest costs nothing where data are like the
training data, and gains where they are not.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, exp, inf, log, pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical
from torch.nn.functional import logsigmoid
from torch.utils._pytree import tree_map

from ..models.bayesian_model import rows
from ..models.calibration import Adjustment, Calibration
from ..models.likelihoods import Gaussian
from ..networks.learned_variance import LearnedVariance
from ..predict.learned import last_layer, one_pass, predictive_of, variance_of_draws
from ..predict.linearised import POINTS, is_normal, jacobians, normal_outputs
from ..predict.predict import WeightDraws
from ..predict.predictive import Predictive, evenly_spread, observed_target
from ..predict.temperature import FEWEST, FOLDS, GRID, ONE, each_temperature
from ..train.data import Reread
from .curvature import cut
from .place import DEFAULT_WIDTH, NETWORK, Candidate, TrainedNetwork, learned_noise

#: nats for each observed number by which a candidate may be worse than another that it replaces
MARGIN = 0.003
#: prior widths in units of each tensor's root mean square
WIDTHS = tuple(DEFAULT_WIDTH * 2.5**k for k in range(-1, 3))
#: forward passes that a prediction with exact variances may cost, else they are learned
EXACT_PASSES = 8
#: share of the gain that learned variances may lose
LOST = 0.1
#: draws of the weights for a candidate whose outputs are not known to be normal, and for variances to learn from
WEIGHT_DRAWS, VARIANCE_DRAWS = 8, 4
#: epochs of training that the variances of all linearised candidates may take, or all drawn candidates
EPOCHS = 1.0
#: held-out rows that exact or drawn candidates are measured on in any case
FEWEST_ROWS = 500
#: batches, rows or pixels with known variances at least, and rows at most
KNOWN_BATCHES, FEWEST_KNOWN, MOST_KNOWN = 16, 256, 600
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

        A temperature stays at one if rows are few or set it no bound; one below one also if it does not gain on
        left-out rows: few rows may call a network too careful by chance, and that costs most where it is wrong.
        """
        losses, best, is_many = self.losses, int(self.losses.sum(0).argmin()), len(self.losses) >= FEWEST
        value, log_p = float(self.grid[best]), -losses[:, best]
        fold = torch.arange(len(losses)) % FOLDS
        for own in range(FOLDS if is_many else 0):
            log_p[fold == own] = -losses[fold == own, int(losses[fold != own].sum(0).argmin())]
        if self.one is None:
            return value, log_p
        plain, is_inside = -losses[:, self.one], float(GRID[0]) < value < float(GRID[-1])
        is_known = is_many and is_inside and bool(losses.isfinite().all())
        is_better = is_known and (value > 0 or float((log_p - plain).sum()) > 0)
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
    """The selected candidate, and all candidates that were tried."""

    selected: Candidate
    tried: dict[Candidate, HeldOut]
    #: the variances of each network, if predictions take them; and what they lose to drawn ones, with standard error
    learned: "list[LearnedVariance] | None" = None
    lost: tuple[float, float] | None = None

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
        draws = WEIGHT_DRAWS if not self.selected.is_network and not self.selected.linearised else 1
        note = "the temperature was fitted together with the posterior, on the validation data of bayes.laplace"
        return Calibration(adjustment, None, draws, (note,))


def select(networks: Sequence[TrainedNetwork], validation: Reread, seed: int, say: Callable[[str], None]) -> Selection:
    """Return what the validation set selects for one network, or for the equal mixture of several.

    Args:
        networks: with their curvatures.
        validation: the held-out data.
        seed: of all draws.
        say: called with what is being done.
    """
    first, batch = networks[0], next(iter(validation), None)
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
    log_factor = alone.value if alone.one is None else 0.0
    if len(grid) > 1:  # in steps of two points
        grid = (log_factor - grid[: BELOW_NETWORK + 1 : 2]).clamp(min=0.0).unique()
    widths = WIDTHS if "prior" in first.posterior.left_open else (None,)
    linearised = all(one.is_linearised for one in networks)
    candidates = [Candidate(width, linearised) for width in widths]
    if linearised and all(is_cheap(one, batch) for one in networks):
        say("the linearised network under priors of several widths")
        some = _few(networks, validation, EXACT_PASSES + len(widths), batch)
        tried |= dict(zip(candidates, of_linearised(networks, widths, some, grid, seed), strict=True))
        return Selection(widest(tried), tried)
    if linearised and all(one.is_function_of_inputs for one in networks) and outputs_of(first, batch):
        say("the variance of the linearised network under priors of several widths")
        some = known_rows(first, len(widths), validation)
        learned = [learn(one, widths, some, log_factor, seed) for one in networks]
        each = {id(one): own for one, own in zip(networks, learned, strict=True) if own is not None}
        if len(each) == len(networks):
            return _of_learned(networks, each, candidates, tried, validation, some, grid)
    some = _few(networks, validation, WEIGHT_DRAWS * len(candidates) * (3 if linearised else 1), batch)
    for candidate in candidates:
        say(candidate.name)
        tried[candidate] = of_draws(networks, candidate, some, log_factor, seed)
        if not is_as_good(tried[candidate], alone):
            break  # a wider one is worse still
    return Selection(widest(tried), tried)


def is_as_good(one: HeldOut, other: HeldOut) -> bool:
    """Return whether a candidate is at most `MARGIN` worse than another, one paired standard error included."""
    gain, error = one.gain_over(other)
    return one is other or gain - error >= -MARGIN


def widest(tried: dict[Candidate, HeldOut]) -> Candidate:
    """Return the widest candidate that is as good as the best one, and as the network with its own temperature."""
    network = tried[NETWORK]
    good = {candidate: found for candidate, found in tried.items() if is_as_good(found, network)}
    best = max(good.values(), key=lambda one: one.gain_over(network)[0])
    return max((one for one, found in good.items() if is_as_good(found, best)), key=lambda one: one.spread)


def _few(networks: Sequence[TrainedNetwork], validation: Reread, forwards: int, batch: Any) -> Reread:
    """Return held-out batches, evenly spread: as many as fit into `EPOCHS`, at so many forward passes of a row."""
    enough = max(FEWEST_ROWS, int(3 * EPOCHS * networks[0].posterior.model.num_data / forwards))
    return Reread(validation.batches, -(-enough // rows(batch)))


# ------------------------------------------------------------------------------------- variances that are learned


@dataclass
class Learned:
    """The variances of one network's linearised outputs: learned at every width, from those of draws on some rows."""

    of_width: list[LearnedVariance]
    drawn: list[list[Tensor]]  # [batch][width]


def known_rows(network: TrainedNetwork, widths: int, data: Reread) -> list[Any]:
    """Return batches, evenly spread, with few enough rows for draws of their outputs at several widths."""
    batch = next(iter(data))
    rows_of_epochs = int(EPOCHS * network.posterior.model.num_data / (VARIANCE_DRAWS * widths))
    with torch.no_grad():
        output = _called(network, batch)[0]
    positions = output[0, 0].numel() if output.ndim > 2 else 1
    enough = min(MOST_KNOWN, max(rows_of_epochs, ceil(FEWEST_KNOWN / positions)))
    batches = max(min(KNOWN_BATCHES, enough), ceil(enough / rows(batch)))
    return [next(cut(one, ceil(enough / batches)))[0] for one in Reread(data.batches, batches)]


@torch.no_grad()
def learn(
    network: TrainedNetwork, widths: Sequence[float | None], batches: Sequence[Any], log_factor: float, seed: int
) -> Learned | None:
    """Return the learned variances of one network; None if they cannot be learned from its layers and outputs.

    Args:
        network: linearised.
        widths: of the prior.
        batches: on which outputs are drawn, each batch with its own draws of the weights.
        log_factor: of the noise.
        seed: of the draws.
    """
    posterior, model = network.posterior, network.posterior.model
    generator = torch.Generator(network.theta.device).manual_seed(seed)
    layer = last_layer(posterior, network.theta, model.split(batches[0])[0])
    if layer is None:
        return None
    passes, drawn, found = [], [], []
    for batch in batches:
        inputs, own = model.split(batch)[0], []
        passes.append(one_pass(posterior, network.theta, inputs, layer))
        with posterior.network_mode(), model.linearised_around(network.theta):
            for width in widths:
                theta = network.normal(width, log_factor).draw(VARIANCE_DRAWS, generator=generator).theta
                own.append(variance_of_draws(posterior, model.outputs(theta, inputs) - passes[-1].output))
        drawn.append(own)
    for of_width in zip(*drawn, strict=True):
        features, variance = zip(*[one.rows(own) for one, own in zip(passes, of_width, strict=True)], strict=True)
        found.append(LearnedVariance.fitted(layer, torch.cat(features), torch.cat(variance)))
    return Learned(found, drawn)


def learned_variance(network: TrainedNetwork, data: Reread, seed: int) -> LearnedVariance | None:
    """Return the learned variance of the default candidate, from training data; None if exact ones are cheap."""
    batch = next(iter(data))
    if not network.is_linearised or not network.is_function_of_inputs or not outputs_of(network, batch):
        return None
    if is_cheap(network, batch):
        return None
    found = learn(network, [network.default.width], known_rows(network, 1, data), 0.0, seed)
    return None if found is None else found.of_width[0]


def _of_learned(
    networks: Sequence[TrainedNetwork],
    learned: dict[int, Learned],
    candidates: Sequence[Candidate],
    tried: dict[Candidate, HeldOut],
    validation: Reread,
    some: Sequence[Any],
    grid: Tensor,
) -> Selection:
    """Return what is selected with learned variances, and with variances of draws if these are better."""
    noises = grid.tolist()

    def predict(network: TrainedNetwork, batch: Any) -> tuple[list[list[Predictive]], Any]:
        inputs, target = network.posterior.model.split(batch)
        of_width = learned[id(network)].of_width
        one = one_pass(network.posterior, network.theta, inputs, of_width[0].layer)
        return [[predictive_of(one.output, v(one), network.at_noise(u)) for u in noises] for v in of_width], target

    tried = tried | dict(zip(candidates, score(networks, validation, grid, predict), strict=True))
    selected = widest(tried)
    if selected.is_network:
        return Selection(selected, tried)
    k = candidates.index(selected)

    def compare(network: TrainedNetwork, numbered: Any) -> tuple[list[list[Predictive]], Any]:
        """Return the network, and its predictions with variances of draws and with learned ones."""
        own, (index, batch) = learned[id(network)], numbered
        inputs, target = network.posterior.model.split(batch)
        one = one_pass(network.posterior, network.theta, inputs, own.of_width[k].layer)
        variances = torch.zeros_like(own.drawn[index][k]), own.drawn[index][k], own.of_width[k](one)
        return [[predictive_of(one.output, v, network.at_noise(u)) for u in noises] for v in variances], target

    alone, exact, found = score(networks, list(enumerate(some)), grid, compare)
    (gain, _), (loss, error) = exact.gain_over(alone), exact.gain_over(found)
    if loss - error > max(LOST * gain, MARGIN):
        return Selection(selected, tried | {selected: exact}, lost=(loss, error))
    chosen = [learned[id(one)].of_width[k] for one in networks]
    for variance in chosen:
        variance.least.fill_(least_variance(tried[NETWORK], tried[selected]))
    return Selection(selected, tried, chosen, (loss, error))


def least_variance(alone: HeldOut, found: HeldOut) -> float:
    """Return the least variance v of logits at which predictions are no surer than the network with its temperature.

    Predictions are softmax(y/(T√(1 + πv/8))), those of the network softmax(y/T₀): v ≥ 8((T₀/T)² − 1)/π. Where inputs
    are unlike the data, a learned variance can be too small, and then the temperature of the network is the better one.
    """
    if found.one is None:
        return 0.0
    return max(0.0, 8 / pi * (exp(2 * (alone.value - found.value)) - 1))


# ------------------------------------------------------------------------------- held-out losses of candidates


#: of one network and a batch: the predictives of every candidate at every noise of the grid, and the target
Predict = Callable[["TrainedNetwork", Any], tuple[list[list[Predictive]], Any]]


def score(networks: Sequence[TrainedNetwork], batches: Iterable[Any], grid: Tensor, predict: Predict) -> list[HeldOut]:
    """Return the held-out losses of every candidate, each the equal mixture of those around several networks.

    Args:
        networks: that are mixed.
        batches: the held-out data.
        grid: log noise factors, one zero if the likelihood learns no noise.
        predict: of one network.
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
    return [HeldOut(own, count, GRID, ONE) for own in every]


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


def is_cheap(network: TrainedNetwork, batch: Any) -> bool:
    """Return whether a prediction with exact variances costs at most `EXACT_PASSES`."""
    few = network.is_function_of_inputs and 1 + 2 * outputs_of(network, batch) <= EXACT_PASSES
    return few and is_normal(
        network.posterior.with_family(network.placed(network.narrow)), network.posterior.model.split(batch)[0]
    )


def outputs_of(network: TrainedNetwork, batch: Any) -> int:
    """Return how many numbers the network gives for one input; 0 if its output is no tensor."""
    with torch.no_grad():
        output = _called(network, batch)[0]
        return output[0].numel() if isinstance(output, Tensor) else 0


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
        return score(networks, batches, grid, predict)


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

    return score(networks, batches, torch.tensor([log_factor]), predict)[0]
