"""The log density of data that take no part in a fit, of the average over draws, on draws that a seed alone decides."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf, log, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical
from torch.utils._pytree import tree_leaves

from ..couplings import Coupling, naive
from ..families.gaussian import Gaussian
from ..families.point import MAP
from ..predict.draws import WeightDraws
from ..predict.linearised import evenly_spread, outputs_of_normals
from ..predict.predictive import Predictive, log_average, log_probabilities, observed_target
from ..predict.temperature import cross_fitted_losses, each_temperature, losses_at

if TYPE_CHECKING:
    from ..posterior import Posterior

#: draws over which a prediction is averaged
DRAWS = 32
#: draws of outputs, where they are known to be normal: they cost no pass of the network
OUTPUT_DRAWS = 512
#: between the seeds of independent sets of draws
SETS_APART = 1000
#: standard deviations below the mean that a normal exceeds with 95 %
QUANTILE = 1.6449


class HeldOut(NamedTuple):
    """log p(t | x) of every row, summed over its elements (pixels), and how many were observed: [rows] each."""

    total: Tensor
    count: Tensor
    #: of labels −log p with a temperature on top, at each of `GRID` of predict/temperature.py: [rows, G]
    losses: Tensor | None = None
    #: the standard error of the mean by the draws of weights over which the predictions are averaged
    error: float = 0.0

    @property
    def mean(self) -> float:
        """In nats for each element; −∞ where some row has none that is a number."""
        mean = float(self.total.sum() / self.count.sum())
        return mean if mean == mean else -inf

    def gain_over(self, other: "HeldOut") -> tuple[float, float]:
        """How much higher the mean is, and the standard error of that: over the rows that both have seen, and by draws.

        Where one has seen fewer, those are the first of the other's. Draws are the same for all rows, so that no spread
        over rows shows their noise.

        Example:
            >>> count = torch.ones(4, dtype=torch.float64)
            >>> HeldOut(-count, count).gain_over(HeldOut(-2 * count, count))
            (1.0, 0.0)
        """
        gain, residual = self._beside(other)
        rows = len(residual)
        square = float(residual.square().sum()) / (rows * (rows - 1)) if rows > 1 else 0.0
        return gain, sqrt(square + self.error**2 + other.error**2)

    def least_gain_over(self, other: "HeldOut", deviations: float = QUANTILE) -> float:
        """A gain that the true one exceeds with 95 %; −∞ where it is no number, and of one row, which tells no more.

        With other deviations, what a normal exceeds by so many. The 5 % quantile of the Bayesian bootstrap: weights of
        the rows drawn from a flat Dirichlet distribution, the mean gain under them. With residuals rᵢ of n rows its
        variance is Σrᵢ²/n(n+1), its third central moment 2Σrᵢ³/n(n+1)(n+2), and the quantile is that of Cornish and
        Fisher with these. Gains are skewed: a wide posterior loses little on most rows and gains much on the few that a
        network has wrong, which a standard error alone counts against it.

        Example:
            >>> count = torch.ones(4, dtype=torch.float64)
            >>> HeldOut(-count, count).least_gain_over(HeldOut(-2 * count, count))
            1.0
        """
        gain, residual = self._beside(other)
        if (n := len(residual)) < 2:
            return -inf
        error = sqrt(float(residual.square().sum()) / (n * (n + 1)) + self.error**2 + other.error**2)
        if not error > 0:
            return gain if error == 0 else -inf
        skewness = 2 * float(residual.pow(3).sum()) / (n * (n + 1) * (n + 2)) / error**3
        return gain + error * (-deviations + (deviations**2 - 1) / 6 * skewness)

    def _beside(self, other: "HeldOut") -> tuple[float, Tensor]:
        """The gain over the rows that both have seen, and what each row adds to it, about zero [rows]."""
        rows = min(len(self.total), len(other.total))
        one, two = (HeldOut(x.total[:rows], x.count[:rows]) for x in (self, other))
        gain = one.mean - two.mean
        return gain, ((one.total - two.total) - gain * one.count) / one.count.mean()

    def at(self, temperature: float) -> "HeldOut":
        """With that temperature on top."""
        assert self.losses is not None
        return self._replace(total=-losses_at(self.losses, temperature), losses=None)

    def left_out(self) -> "HeldOut":
        """Each row at the temperature that other rows ask for (five folds)."""
        assert self.losses is not None
        return self._replace(total=-cross_fitted_losses(self.losses), losses=None)


def of_posterior(posterior: "Posterior", batches: Iterable[Any], seed: int, draws: int = DRAWS) -> HeldOut:
    """Of the average over draws of the weights, with the network as the model calls it."""
    return of_posteriors([posterior], batches, seed, draws)


def of_posteriors(
    posteriors: "Sequence[Posterior]",
    batches: Iterable[Any],
    seed: int,
    draws: int = DRAWS,
    coupling: Coupling = naive,
    times: int = 1,
) -> HeldOut:
    """Of the average over draws of several posteriors, each with its network: an equal mixture.

    Args:
        posteriors: the members.
        batches: held-out data.
        seed: of the draws.
        draws: of each member.
        coupling: of the draws.
        times: so many independent sets of such draws. With several the standard error by draws is known, from what the
            mean would be without each of them.
    """
    sets = [
        [_draws(one, draws, seed + 3 + c + SETS_APART * k) for c, one in enumerate(posteriors)] for k in range(times)
    ]
    found: list[list[HeldOut]] = [[] for _ in range(times + (times > 1))]  # of all sets, and without each
    for batch in batches:
        every = [[_predicted(chunks, batch) for chunks in members] for members in sets]
        for k, rows in enumerate(found):
            some = [one for j, members in enumerate(every) if times == 1 or j != k - 1 for one in members]
            rows.append(_density([one for one, _ in some], some[0][1]))
    whole, *without = [joined(rows) for rows in found]
    return whole._replace(error=_error(whole, without)) if without else whole


def _error(whole: HeldOut, without: Sequence[HeldOut]) -> float:
    """The jackknife's standard error of a mean, from what it is without each of several sets of draws."""
    n = len(without)
    means = torch.tensor([n * whole.mean - (n - 1) * one.mean for one in without], dtype=torch.float64)
    return float(means.std()) / sqrt(n) if bool(means.isfinite().all()) else inf


def member_log_probs(
    posteriors: "Sequence[Posterior]", batches: Sequence[Any], seed: int, draws: int = DRAWS
) -> tuple[Tensor, float]:
    """log p_c(t) of every observed number under each posterior, [C, n], and n."""
    found: list[list[Tensor]] = [[] for _ in posteriors]
    for rows, posterior in zip(found, posteriors, strict=True):
        chunks = _draws(posterior, draws, seed + 3)
        for batch in batches:
            predictive, target = _predicted(chunks, batch)
            log_prob, observed = predictive.log_prob(target).double(), _observed(predictive, target)
            rows.append((log_prob if observed is None else log_prob[observed]).flatten().cpu())
    log_probs = torch.stack([torch.cat(rows) for rows in found])
    return log_probs, float(log_probs.shape[1])


def of_network(posterior: "Posterior", theta: Tensor, batches: Iterable[Any]) -> HeldOut:
    """Of the network at one θ [P]."""
    return of_networks([(posterior, theta)], batches)[0]


def of_networks(networks: "Sequence[tuple[Posterior, Tensor]]", batches: Iterable[Any]) -> tuple[HeldOut, float]:
    """Of the average over networks, each at one θ [P], a deep ensemble; and by how many standard errors over rows it is
    too sure of labels.

    Too sure is: labels are less likely than it expects, −log p(t) is above the entropy in the mean. That difference is
    the derivative of the held-out log-likelihood by a temperature, at one: where it is negative every spread of the
    predictions costs, to first order. Of likelihoods that are not of labels nothing is said: ∞.
    """
    found, excess = [], []
    for predictives, target in network_predictives(networks, batches):
        rows, first = _density(predictives, target), predictives[0]
        found.append(rows)
        if not _is_of_labels(first):
            continue
        mean = torch.stack([one.mean.double() for one in predictives]).mean(0)
        entropy = -torch.xlogy(mean, mean)
        if isinstance(first.components, Bernoulli):
            entropy = entropy - torch.xlogy(1 - mean, 1 - mean)
        else:
            entropy = entropy.sum(1)
        excess.append(-_rows(entropy, _observed(first, target)).total - rows.total)
    return joined(found), _standard_errors(torch.cat(excess)) if excess else inf


def _standard_errors(x: Tensor) -> float:
    """The mean in units of its standard error; ±∞ where that is zero."""
    mean, error = float(x.mean()), float(x.std()) / sqrt(len(x)) if len(x) > 1 else 0.0
    return mean / error if error > 0 else inf if mean > 0 else -inf


def network_predictives(
    networks: "Sequence[tuple[Posterior, Tensor]]", batches: Iterable[Any]
) -> Iterator[tuple[list[Predictive], Any]]:
    """Batch by batch the predictive of every network at its θ [P], and the target."""
    model = networks[0][0].model
    with model.linearised_around(None):
        each = [_draws(_at(*one), 1, 3) for one in networks]
    for batch in batches:
        with model.linearised_around(None):
            found = [chunks.mixture(chunks.split(batch)[0]) for chunks in each], each[0].split(batch)[1]
        _check_alike(found[0])
        yield found


def _check_alike(predictives: Sequence[Predictive]) -> None:
    """ValueError where networks cannot be averaged."""
    forms = [[(tuple(leaf.shape[1:]), leaf.dtype) for leaf in tree_leaves(one.outputs)] for one in predictives]
    for c, form in enumerate(forms):
        if form != forms[0]:
            raise ValueError(
                f"the networks of a mixture must have outputs of one shape and dtype: those of network 0 are {forms[0]}"
                f", of network {c} {form}, for the same batch"
            )


def density_at(predictives: Sequence[Predictive], target: Any) -> HeldOut:
    """Of the average over predictives of one batch, with the likelihood's parameters as they are now."""
    return _density([Predictive(one.outputs, one.weights, one.likelihood, one.values) for one in predictives], target)


def _density(predictives: Sequence[Predictive], target: Any) -> HeldOut:
    """Of the equal mixture of predictives of one batch."""
    first = predictives[0]
    log_prob, observed = _log_mean([one.log_prob(target).double() for one in predictives]), _observed(first, target)
    losses = _losses([_classes(one) for one in predictives], first, target) if _is_of_labels(first) else None
    return _rows(log_prob, observed)._replace(losses=losses)


def _is_of_labels(predictive: Predictive) -> bool:
    return not predictive.is_function and isinstance(predictive.components, Categorical | Bernoulli)


def _classes(predictive: Predictive) -> Tensor:
    """The log probability of every class, classes last."""
    return log_average(log_probabilities(predictive.components).double(), predictive.weights)


def _losses(log_p: Sequence[Tensor], like: Predictive, target: Any) -> Tensor:
    t, observed = observed_target(like.likelihood, target)
    binary = isinstance(like.components, Bernoulli)
    each = each_temperature(_log_mean(list(log_p)), t > 0.5 if binary else t)
    if observed is not None:
        each = (loss.masked_fill(~observed, 0.0) for loss in each)
    return torch.stack([_rows(loss, observed).total for loss in each], 1)


def _at(posterior: "Posterior", theta: Tensor) -> "Posterior":
    family = MAP().bind(posterior.space)
    with torch.no_grad():
        family.point.copy_(theta)
    return posterior.with_family(family.to(posterior.device))


def of_normals(
    posterior: "Posterior",
    theta: Tensor,
    normals: Sequence[Callable[[], Gaussian]],
    batches: Iterable[Any],
    seed: int,
) -> list[HeldOut]:
    """Of normals over the weights of the network linearised at θ [P], without a draw of weights."""
    return of_mixed_normals([(posterior, theta)], [normals], batches, seed)


def of_mixed_normals(
    networks: "Sequence[tuple[Posterior, Tensor]]",
    normals: Sequence[Sequence[Callable[[], Gaussian]]],
    batches: Iterable[Any],
    seed: int,
    mixed: Sequence[Sequence[int]] | None = None,
) -> list[HeldOut]:
    """The same of equal mixtures: the k-th is of the k-th normal of each network, or of those that `mixed[k]` names."""
    noise: Tensor | None = None
    mixed = [[k] for k in range(len(normals[0]))] if mixed is None else mixed
    found: list[list[HeldOut]] = [[] for _ in mixed]
    with torch.no_grad():
        for batch in batches:
            inputs, target = networks[0][0].model.split(batch)
            if noise is None:
                size = int(outputs_of(*networks[0], inputs))
                noise = evenly_spread(OUTPUT_DRAWS, size, seed).to(networks[0][1].device)
            log_probs: list[list[Tensor]] = [[] for _ in normals[0]]
            classes: list[list[Tensor]] = [[] for _ in normals[0]]
            predictive = None
            for (posterior, theta), own in zip(networks, normals, strict=True):
                model, (S, _) = posterior.model, noise.shape
                values = model.likelihood_values(theta.unsqueeze(0).expand(S, -1))
                outputs = outputs_of_normals(posterior, theta, own, inputs, noise)
                for rows, own_classes, make, output in zip(log_probs, classes, own, outputs, strict=True):
                    make()  # with the noise that goes with it
                    predictive = Predictive(output, theta.new_full((S,), 1 / S), model.likelihood, values)
                    rows.append(predictive.log_prob(target).double())
                    if _is_of_labels(predictive):
                        own_classes.append(_classes(predictive))
            assert predictive is not None
            observed = _observed(predictive, target)
            for rows, places in zip(found, mixed, strict=True):
                density = _rows(_log_mean([one for place in places for one in log_probs[place]]), observed)
                parts = [one for place in places for one in classes[place]]
                rows.append(density._replace(losses=_losses(parts, predictive, target) if parts else None))
    return [joined(rows) for rows in found]


def outputs_of(posterior: "Posterior", theta: Tensor, inputs: Any) -> float:
    """How many numbers the network's output has for one input; ∞ where it is no tensor but several."""
    with torch.no_grad(), posterior.network_mode(), posterior.model.linearised_around(None):
        output = posterior.model.outputs(theta.unsqueeze(0), inputs)
    return output[0, 0].numel() if isinstance(output, Tensor) else inf


def _draws(posterior: "Posterior", draws: int, seed: int) -> WeightDraws:
    return WeightDraws(posterior, draws, generator=torch.Generator().manual_seed(seed))


def _predicted(chunks: WeightDraws, batch: Any) -> tuple[Predictive, Any]:
    inputs, target = chunks.split(batch)
    return chunks.mixture(inputs), target


def _observed(predictive: Predictive, target: Any) -> Tensor | None:
    return None if predictive.is_function else observed_target(predictive.likelihood, target)[1]


def _log_mean(log_probs: list[Tensor]) -> Tensor:
    if len(log_probs) == 1:
        return log_probs[0]
    return torch.stack(log_probs).logsumexp(0) - log(len(log_probs))


def _rows(log_prob: Tensor, observed: Tensor | None) -> HeldOut:
    observed = torch.ones_like(log_prob) if observed is None else observed.to(log_prob)
    flat = [x.reshape(len(log_prob), -1).sum(1).cpu() for x in (log_prob, observed)]
    return HeldOut(flat[0], flat[1])


def joined(rows: list[HeldOut]) -> HeldOut:
    if not rows:
        raise ValueError("validation= gives no batch: is its data set empty, or was it read to its end before?")
    losses = [one.losses for one in rows if one.losses is not None]
    return HeldOut(
        torch.cat([one.total for one in rows]), torch.cat([one.count for one in rows]),
        torch.cat(losses) if len(losses) == len(rows) else None,
    )  # fmt: skip
