"""Predictions with a learned variance: y is N(f(x), v(x)), and one forward pass of the network gives both."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..models.likelihoods import Bernoulli, Categorical
from ..networks.last_layer import LAYERS
from ..networks.learned_variance import OnePass
from ..networks.out_of_distribution import OutOfDistribution
from .network_at import network_at
from .predictive import DRAWS, Predictive, PredictiveDraws, evenly_spread, is_closed, on_device

if TYPE_CHECKING:
    from ..posterior import Posterior

#: training rows whose features tell how the data look; of more features than rows there is no covariance
TYPICAL_ROWS = 5000


def _called(net: nn.Module, name: str | None, call: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """Return the network's output, and pairs (name, input) of this layer, or of all linear ones in order."""
    layers = dict(net.named_modules()) if name is None else {name: net.get_submodule(name)}
    calls: list[Any] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, own=own: calls.append((own, given[0])))
        for own, layer in layers.items()
        if isinstance(layer, LAYERS)
    ]
    try:
        return call(), calls
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _at(posterior: "Posterior", theta: Tensor, inputs: Any, name: str | None) -> tuple[Any, list[Any]]:
    """As `_called`, of the network at θ [P]."""
    with posterior.network_mode() as net, posterior.model.linearised_around(None):
        return _called(net, name, lambda: posterior.model.outputs(theta.unsqueeze(0), inputs))


def one_pass(posterior: "Posterior", theta: Tensor, inputs: Any, name: str) -> OnePass:
    """Return what the network's forward pass at θ [P] tells, with the features of a layer of this name."""
    y, calls = _at(posterior, theta, inputs, name)
    return OnePass.of(y[0], posterior.net.get_submodule(name), calls[-1][1], _is_classes(posterior))


def last_layer(posterior: "Posterior", theta: Tensor, inputs: Any) -> str | None:
    """Return the name of the linear layer or convolution that is called last; None if there is none."""
    y, calls = _at(posterior, theta, inputs, None)
    return calls[-1][0] if calls and isinstance(y, Tensor) else None


def out_of_distribution(
    posterior: "Posterior", theta: Tensor, train: Iterable[Any], held_out: Iterable[Any]
) -> OutOfDistribution | None:
    """Return the score of inputs unlike the data, for the network at θ [P]; None if no layer tells features."""
    model, layer, found = posterior.model, None, []
    for batches in (train, held_out):
        passes: list[OnePass] = []
        for batch in batches:
            inputs = model.split(batch)[0]
            layer = last_layer(posterior, theta, inputs) if layer is None else layer
            if layer is None:
                return None
            passes.append(one_pass(posterior, theta, inputs, layer))
            if not found and sum(len(one.output) for one in passes) >= TYPICAL_ROWS:
                break
        found.append(passes)
    first = found[0][0]
    classes = first.output.shape[1] if _is_classes(posterior) else 1
    is_wide = first.pooled(classes)[0].shape[1] > TYPICAL_ROWS
    return None if is_wide else OutOfDistribution.fitted(layer or "", classes, *found)


def ood_scores(posterior: "Posterior", inputs: Any) -> tuple[Tensor, Tensor]:
    """Return how unlike the data inputs are, [B], and the threshold: one pass of the network at the mean."""
    assert posterior.ood is not None
    theta = posterior.family().mean.detach()
    one = one_pass(posterior, theta, on_device(inputs, theta.device), posterior.ood.layer)
    return posterior.ood(one), posterior.ood.threshold


def variance_of_draws(posterior: "Posterior", deviations: Tensor) -> Tensor:
    """Return variances in the shape of outputs from draws around a known mean, [S, B, ..]; of classes one, [B, 1, ..].

    That of classes is the mean over pairs of half the variance of their difference.
    """
    if not _is_classes(posterior):
        return deviations.square().mean(0)
    centred = deviations - deviations.mean(2, keepdim=True)
    return centred.square().sum(2, keepdim=True).mean(0) / (deviations.shape[2] - 1)


def predictive_of(output: Tensor, variance: Tensor, likelihood: Any, note: str = "") -> Predictive:
    """Return the predictive of normal outputs [B, ..] with known variances, those of `LearnedVariance`.

    It is in closed form for Gaussian noise that does not depend on y, a probit approximation for labels, and an average
    over points of y else.
    """
    ones, variance = output.new_ones(1), variance.to(output)
    if isinstance(likelihood, Categorical | Bernoulli) or is_closed(likelihood):
        return Predictive(output.unsqueeze(0), ones, likelihood, {}, note, True, variance.unsqueeze(0))
    z = evenly_spread(DRAWS, 1, 0).to(output).reshape(-1, *[1] * output.ndim)
    return Predictive(output + variance.sqrt() * z, ones.repeat(DRAWS) / DRAWS, likelihood, {}, note, True)


class LearnedDraws(PredictiveDraws):
    """The predictive of a linearised posterior with its learned variance: one forward pass, and no draws.

    Args:
        posterior: with a `learned_variance`.
    """

    def __init__(self, posterior: "Posterior"):
        self.posterior, self.note, self.draws = posterior, "learned variance", 1
        learned, theta = posterior.learned_variance, posterior.model.linearised_at
        assert learned is not None
        assert theta is not None
        self.learned, self.theta, self.device = learned, theta, theta.device

    def mixture(self, inputs: Any) -> Predictive:
        with torch.inference_mode(False), torch.no_grad():
            inputs, name = on_device(inputs, self.device), self.learned.layer
            at = network_at(self.posterior, self.theta, inputs)
            if at is None:
                one = one_pass(self.posterior, self.theta, inputs, name)
            else:
                with at.lock:
                    y, calls = _called(at.net, name, lambda: at(inputs))
                one = OnePass.of(y, at.net.get_submodule(name), calls[-1][1], _is_classes(self.posterior))
            return predictive_of(one.output, self.learned(one), self.posterior.model.likelihood, self.note)


def _is_classes(posterior: "Posterior") -> bool:
    return isinstance(posterior.model.likelihood, Categorical)
