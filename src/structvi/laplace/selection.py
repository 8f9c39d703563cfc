"""Selection on held-out data: priors of several widths around the network, and the network itself.

Every candidate has its own temperature, or noise, cross-fitted by folds. The rule: the widest candidate that is as good
as the best one, and as the network with its own temperature. As good means at most `MARGIN` worse, one paired standard
error included: what a validation set cannot tell is not selected. The widest costs nothing where data are like the
training data, and gains where they are not.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, exp, inf, pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli

from ..models.bayesian_model import rows
from ..models.calibration import Adjustment, Calibration
from ..networks.learned_variance import LearnedVariance
from ..predict.calibration import FEWEST, FOLDS, GRID, each_temperature
from ..predict.linearised import LinearisedDraws, is_normal
from ..predict.one_pass import last_layer, one_pass, predictive_of, variance_of_draws
from ..predict.predict import WeightDraws
from ..predict.predictive import Predictive, PredictiveDraws, log_average, log_probabilities, observed_target
from ..train.data import Reread
from .curvature import cut
from .place import DEFAULT_WIDTH, NETWORK, Candidate, TrainedNetwork, at_noise, learned_noise

#: nats for each observed number by which a candidate may be worse than another that it replaces
MARGIN = 0.003
#: prior widths in units of each tensor's root mean square
WIDTHS = tuple(DEFAULT_WIDTH * 2.5**k for k in range(-1, 3))
#: outputs of an input up to which predictions have exact variances, a backward pass each; of more they are learned
EXACT_OUTPUTS = 3
#: share of the gain that learned variances may lose
LOST = 0.1
#: draws of the weights for a candidate without normal outputs, and for variances to learn from
WEIGHT_DRAWS, VARIANCE_DRAWS = 8, 4
#: held-out rows on which candidates without learned variances are scored
SCORED_ROWS = 1000
#: log factors of a regression's noise, relative to the network's residuals
NOISES = GRID[::2]
#: rows, or pixels, whose variances are known to learn from; and the batches from which they come
KNOWN_ROWS, KNOWN_BATCHES = 500, 16


@dataclass(frozen=True)
class HeldOut:
    """−log p of every row at each point of a grid, and how many observed numbers a row has.

    Args:
        losses: summed over the elements (pixels) of a row: [n, G].
        count: observed elements: [n].
        grid: log temperatures, or logs of the noise over that of the network's residuals; zero is one of them: [G].
    """

    losses: Tensor
    count: Tensor
    grid: Tensor

    @cached_property
    def fitted(self) -> tuple[float, Tensor]:
        """Return the log temperature, or log noise factor, of all rows; and the cross-fitted log p of each row [n].

        A factor stays at one if rows are few or set it no bound; one below one also if it does not gain on left-out
        rows: few rows may call a network too careful by chance, and that costs most where it is wrong.
        """
        losses, plain = self.losses, self.plain
        value, log_p = float(self.grid[losses.sum(0).argmin()]), torch.empty_like(plain)
        fold = torch.arange(len(losses)) % FOLDS
        for own in range(FOLDS):
            log_p[fold == own] = -losses[fold == own, int(losses[fold != own].sum(0).argmin())]
        is_inside = float(self.grid[0]) < value < float(self.grid[-1])
        is_known = len(losses) >= FEWEST and is_inside and bool(losses.isfinite().all())
        is_better = is_known and (value > 0 or float((log_p - plain).sum()) > 0)
        return (value, log_p) if is_better else (0.0, plain)

    @property
    def value(self) -> float:
        return self.fitted[0]

    @property
    def plain(self) -> Tensor:
        """The log p of each row with a temperature, or noise factor, of one: [n]."""
        return -self.losses[:, int(self.grid.abs().argmin())]

    @property
    def untempered(self) -> "HeldOut":
        """The same with a factor of one alone."""
        return replace(self, losses=-self.plain.unsqueeze(1), grid=torch.zeros(1))

    @property
    def mean(self) -> float:
        """Return the cross-fitted log density in nats for each observed number; −∞ if it is none."""
        value = float(self.fitted[1].sum() / self.count.sum())
        return value if value == value else -inf

    def gain_over(self, other: "HeldOut") -> tuple[float, float]:
        """Return how much higher the mean is on the rows that both have seen, and the paired standard error of that.

        Example:
            >>> count, grid = torch.ones(4, dtype=torch.float64), torch.zeros(1)
            >>> one, two = (HeldOut(loss * count.unsqueeze(1), count, grid) for loss in (1.0, 2.0))
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
    """The candidates that were tried, from narrow to wide, and the widest one that is as good as the best.

    Args:
        tried: with the network itself.
        of_noise: whether the factor of a candidate is a noise, not a temperature.
        learned: the variances of each network, if predictions take them.
        lost: what these lose to the variances of draws, in nats, and its standard error.
    """

    tried: dict[Candidate, HeldOut]
    of_noise: bool = False
    learned: list[LearnedVariance] = field(default_factory=list[LearnedVariance])
    lost: tuple[float, float] | None = None

    @cached_property
    def selected(self) -> Candidate:
        """Return the widest candidate that is as good as the best one, and as the network with its own temperature."""
        good = {one: found for one, found in self.tried.items() if is_as_good(found, self.network)}
        best = max(good.values(), key=lambda found: found.gain_over(self.network)[0])
        return [one for one, found in good.items() if is_as_good(found, best)][-1]

    @property
    def network(self) -> HeldOut:
        return self.tried[NETWORK]

    @property
    def held_out(self) -> HeldOut:
        return self.tried[self.selected]

    def density(self, one: Candidate) -> float:
        """Return a candidate's held-out log density: the network's, and the gain on the rows of both."""
        return self.network.mean + self.tried[one].gain_over(self.network)[0]

    @property
    def log_noise(self) -> float:
        """Return the log of the selected noise, in units of the network's residuals."""
        return self.held_out.value if self.of_noise else 0.0

    @property
    def calibration(self) -> Calibration | None:
        """Return the temperature of the selected candidate, if it has one."""
        found = self.held_out
        if self.of_noise or not found.value:
            return None
        adjustment = Adjustment("temperature", exp(found.value), *found.gain_over(found.untempered), len(found.count))
        draws = 1 if self.selected.linearised or self.selected == NETWORK else WEIGHT_DRAWS
        note = "the temperature was fitted together with the posterior, on the validation data of bayes.laplace"
        return Calibration(adjustment, None, draws, (note,))


def is_as_good(one: HeldOut, other: HeldOut) -> bool:
    """Return whether a candidate is at most `MARGIN` worse than another, one paired standard error included."""
    gain, error = one.gain_over(other)
    return one is other or gain - error >= -MARGIN


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
    alone = of_posteriors(networks, NETWORK, validation, seed, is_exact=False)
    if unknown := int(alone.losses.isnan().any(1).sum()):
        raise ValueError(
            f"the network's log density is NaN for {unknown} of the {len(alone.count)} rows of validation=, and "
            "nothing can be selected by it. Is there NaN in their inputs or targets? Leave these rows out, or mask them"
        )
    found = Selection({NETWORK: alone}, learned_noise(first.likelihood) is not None)
    linearised = all(one.is_linearised for one in networks)
    widths = WIDTHS if "prior" in first.posterior.left_open else (None,)
    candidates = [Candidate(width, linearised) for width in widths]
    is_exact = linearised and all(has_few_outputs(one, batch) for one in networks)
    if linearised and not is_exact:
        say("the variance of the linearised network under priors of several widths")
        learned = _of_learned(networks, candidates, found, validation, seed)
        if learned.learned or (len(learned.tried) > 1 and learned.selected == NETWORK):
            return learned
        found.lost = learned.lost
    some = Reread(validation.batches, ceil(SCORED_ROWS / rows(batch)))
    for candidate in candidates:
        say(candidate.name)
        found.tried[candidate] = of_posteriors(networks, candidate, some, seed, is_exact)
        if not is_as_good(found.tried[candidate], alone):
            break  # a wider one is worse still
    return found


# ------------------------------------------------------------------------------- held-out losses of candidates


#: of the c-th network and a batch: the predictive of every candidate, and the target
Predict = Callable[[int, Any], tuple[Sequence[Predictive], Any]]


def score(networks: int, batches: Iterable[Any], predict: Predict) -> list[HeldOut]:
    """Return the held-out losses of every candidate, each the equal mixture of those around several networks.

    Args:
        networks: how many are mixed.
        batches: the held-out data.
        predict: of one network.
    """
    losses: list[list[Tensor]] = []
    counts: list[Tensor] = []
    for batch in batches:
        found, (target, *_) = zip(*(predict(c, batch) for c in range(networks)), strict=True)
        losses.append([_losses(parts, target) for parts in zip(*found, strict=True)])
        t, observed = observed_target(found[0][0].likelihood, target)
        counts.append(_of_rows(torch.ones_like(t, dtype=torch.float64) if observed is None else observed.double()))
    if not counts or not float(torch.cat(counts).sum()):
        raise ValueError(
            "validation= has no observation: it gave no batch, or every label is masked or ignored. Give held-out data "
            "with labels, as a loader that can be read again"
        )
    every = [torch.cat(own) for own in zip(*losses, strict=True)]
    grid = {len(GRID): GRID, len(NOISES): NOISES}.get(every[0].shape[1], NOISES.new_zeros(1))
    return [HeldOut(own, torch.cat(counts), grid) for own in every]


def _losses(parts: Sequence[Predictive], target: Any) -> Tensor:
    """Return −log p of the rows under the mixture, at every temperature of labels or noise of a regression: [B, G]."""
    shares, found = [1 / len(parts)] * len(parts), list[Tensor]()
    if not parts[0].is_of_labels:
        for u in NOISES.tolist() if learned_noise(parts[0].likelihood) is not None else [0.0]:
            each = [_with(p, at_noise(p.likelihood, u)) for p in parts]
            found.append(_of_rows(-Predictive.joined(each, shares).log_prob(target).double()))
        return torch.stack(found, 1)
    whole = Predictive.joined(parts, shares)
    whole.log_prob(target)  # its checks of the labels
    t, observed = observed_target(whole.likelihood, target)
    t = t > 0.5 if isinstance(whole.components, Bernoulli) else t
    log_p = log_average(log_probabilities(whole.components).double(), whole.weights)  # [B, .., C]
    known: Any = 1 if observed is None else observed
    return torch.stack([_of_rows(own * known) for own in each_temperature(log_p, t)], 1)


def _with(p: Predictive, likelihood: Any) -> Predictive:
    return Predictive(p.outputs, p.weights, likelihood, p.values, within=p.within)


def _of_rows(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).sum(1).cpu()


def of_posteriors(
    networks: Sequence[TrainedNetwork], candidate: Candidate, batches: Iterable[Any], seed: int, is_exact: bool
) -> HeldOut:
    """Return the held-out losses of a candidate: of its normal outputs, or on draws of the weights."""
    draws = [_draws(one, candidate, len(networks), seed + c, is_exact) for c, one in enumerate(networks)]

    def predict(c: int, batch: Any) -> tuple[list[Predictive], Any]:
        inputs, target = draws[c].split(batch)
        return [_with(draws[c].mixture(inputs), networks[c].likelihood)], target

    return score(len(networks), batches, predict)[0]


def _draws(network: TrainedNetwork, one: Candidate, networks: int, seed: int, is_exact: bool) -> PredictiveDraws:
    posterior = network.posterior.with_family(network.placed(one))
    if is_exact:
        return LinearisedDraws(posterior)
    count = 1 if one == NETWORK else ceil(WEIGHT_DRAWS / networks)
    return WeightDraws(posterior, count, generator=torch.Generator().manual_seed(seed), linearise=one.linearised)


def outputs_of(network: TrainedNetwork, batch: Any) -> Any:
    """Return the network's outputs [B, ..]."""
    draws = _draws(network, NETWORK, 1, 0, is_exact=False)
    return draws.mixture(draws.split(batch)[0]).function_mean


def has_few_outputs(network: TrainedNetwork, batch: Any) -> bool:
    """Return whether outputs are normal and so few that predictions have exact variances."""
    y, posterior = outputs_of(network, batch), network.posterior.with_family(network.placed(NETWORK))
    few = isinstance(y, Tensor) and y[0].numel() <= EXACT_OUTPUTS
    return few and is_normal(posterior, posterior.model.split(batch)[0])


# ------------------------------------------------------------------------------------- variances that are learned


def learn(
    network: TrainedNetwork, candidates: Sequence[Candidate], data: Reread, seed: int
) -> tuple[list[Any], list[LearnedVariance], list[list[Tensor]]]:
    """Return held-out batches, the learned variance of each candidate, and those of draws on each batch.

    There are none if the outputs are no tensor, or not known to be normal, or no layer is called last.

    Args:
        network: linearised.
        candidates: of several prior widths.
        data: from which batches are taken, evenly spread, each with its own draws of the weights.
        seed: of the draws.
    """
    posterior, model, theta = network.posterior, network.posterior.model, network.theta
    generator = torch.Generator(theta.device).manual_seed(seed)
    first = next(iter(data))
    y, layer = outputs_of(network, first), None
    if network.is_function_of_inputs and isinstance(y, Tensor):
        layer = last_layer(posterior, theta, model.split(first)[0])
    if layer is None:
        return [], [], []
    positions = y[0, 0].numel() if y.ndim > 2 else 1
    rows_of_an_epoch = model.num_data // (VARIANCE_DRAWS * len(candidates))
    enough = min(KNOWN_ROWS, max(rows_of_an_epoch, ceil(KNOWN_ROWS / positions)))
    size = ceil(enough / KNOWN_BATCHES)
    batches = [next(cut(one, size))[0] for one in Reread(data.batches, ceil(enough / size))]
    inputs = [model.split(batch)[0] for batch in batches]
    passes = [one_pass(posterior, theta, own, layer) for own in inputs]
    found, known = list[LearnedVariance](), list[list[Tensor]]()
    for candidate in candidates:
        density, drawn = network.placed(candidate)(), list[Tensor]()
        for own, one in zip(inputs, passes, strict=True):
            with torch.no_grad(), posterior.network_mode(), model.linearised_around(theta):
                y = model.outputs(density.draw(VARIANCE_DRAWS, generator=generator).theta, own)
            drawn.append(variance_of_draws(posterior, y - one.output))
        features, variance = zip(*[one.rows(own) for one, own in zip(passes, drawn, strict=True)], strict=True)
        found.append(LearnedVariance.fitted(layer, torch.cat(features), torch.cat(variance)))
        known.append(drawn)
    return batches, found, known


def learned_variance(network: TrainedNetwork, data: Reread, seed: int) -> LearnedVariance | None:
    """Return the learned variance of the default candidate, from training data; None if exact ones are cheap."""
    if not network.is_linearised or has_few_outputs(network, next(iter(data))):
        return None
    _, found, _ = learn(network, [network.default], data, seed)
    return found[0] if found else None


def _of_learned(
    networks: Sequence[TrainedNetwork], candidates: Sequence[Candidate], alone: Selection, validation: Reread, seed: int
) -> Selection:
    """Return what is selected with learned variances; without these if they lose too much, or there are none."""
    learned = [learn(network, candidates, validation, seed) for network in networks]
    if not all(variances for _, variances, _ in learned):
        return alone

    def around(c: int, batch: Any, variances: Sequence[LearnedVariance | Tensor]) -> tuple[list[Predictive], Any]:
        inputs, target = networks[c].posterior.model.split(batch)
        one = one_pass(networks[c].posterior, networks[c].theta, inputs, learned[c][1][0].layer)
        each = [v if isinstance(v, Tensor) else v(one) for v in variances]
        return [predictive_of(one.output, v, networks[c].likelihood) for v in each], target

    scored = score(len(networks), validation, lambda c, batch: around(c, batch, learned[c][1]))
    found = replace(alone, tried=alone.tried | dict(zip(candidates, scored, strict=True)))
    if found.selected == NETWORK:
        return found
    k = candidates.index(found.selected)

    def compare(c: int, b: int) -> tuple[list[Predictive], Any]:
        batches, variances, drawn = learned[c]
        return around(c, batches[b], [drawn[k][b], variances[k]])

    exact, approximate = score(len(networks), range(len(learned[0][0])), compare)
    found.lost = loss, error = exact.gain_over(approximate)
    if loss - error <= max(LOST * found.held_out.gain_over(found.network)[0], MARGIN):
        found.learned = [variances[k] for _, variances, _ in learned]
        for variance in found.learned:
            variance.least.fill_(0.0 if found.of_noise else least_variance(found.network.value, found.held_out.value))
    return found


def least_variance(alone: float, found: float) -> float:
    """Return the least variance v of logits at which predictions are no surer than the network with its temperature.

    Predictions are softmax(y/(T√(1 + πv/8))), those of the network softmax(y/T₀): v ≥ 8((T₀/T)² − 1)/π. If inputs
    are unlike the data, a learned variance can be too small. The temperature of the network is then the better one.

    Args:
        alone: log T₀ of the network.
        found: log T of the posterior.
    """
    return max(0.0, 8 / pi * (exp(2 * (alone - found)) - 1))
