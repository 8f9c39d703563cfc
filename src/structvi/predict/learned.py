"""Predictions with a learned variance: y is N(f(x), v(x)), and one forward pass of the network gives both."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..models.likelihoods import Bernoulli, Categorical
from ..models.likelihoods import Gaussian as GaussianNoise
from ..networks.last_layer import LAYERS
from ..networks.learned_variance import OnePass
from ..networks.out_of_distribution import OutOfDistribution
from .linearised import output_moments
from .predictive import Predictive, PredictiveDraws, evenly_spread, on_device

if TYPE_CHECKING:
    from ..posterior import Posterior

#: training rows whose features tell how the data look, and most features
TYPICAL_ROWS, MOST_FEATURES = 5000, 4096
#: points of y where p(t | y) has no mixture in closed form
POINTS = 32


def one_pass(posterior: "Posterior", theta: Tensor, inputs: Any, name: str) -> OnePass:
    """Return what the network's forward pass at θ [P] tells, with the features of a layer of this name."""
    model, calls = posterior.model, []
    with torch.no_grad(), posterior.network_mode() as net, model.linearised_around(None):
        layer = net.get_submodule(name)
        hook = layer.register_forward_pre_hook(lambda _, given: calls.append(given[0]))
        try:
            y = model.outputs(theta.unsqueeze(0), inputs)[0]
        finally:
            hook.remove()
    return OnePass.of(y, layer, calls[-1], isinstance(model.likelihood, Categorical))


def last_layer(posterior: "Posterior", theta: Tensor, inputs: Any) -> str | None:
    """Return the name of the linear layer or convolution that is called last; None if there is none."""
    called: list[str] = []
    with torch.no_grad(), posterior.network_mode() as net, posterior.model.linearised_around(None):
        layers = [(name, module) for name, module in net.named_modules() if isinstance(module, LAYERS)]
        hooks = [one.register_forward_pre_hook(lambda *_, name=name: called.append(name)) for name, one in layers]
        try:
            y = posterior.model.outputs(theta.unsqueeze(0), inputs)
        finally:
            for hook in hooks:
                hook.remove()
    return called[-1] if called and isinstance(y, Tensor) else None


def out_of_distribution(
    posterior: "Posterior", theta: Tensor, train: Iterable[Any], held_out: Iterable[Any]
) -> OutOfDistribution | None:
    """Return the score of inputs unlike the data, for the network at θ [P]; None if no layer tells features."""
    found: list[list[OnePass]] = [[], []]
    layer, classes, rows = None, 1, 0
    for passes, batches in zip(found, (train, held_out), strict=True):
        for batch in batches:
            inputs = posterior.model.split(batch)[0]
            layer = last_layer(posterior, theta, inputs) if layer is None else layer
            if layer is None:
                return None
            passes.append(one_pass(posterior, theta, inputs, layer))
            rows += len(passes[-1].output)
            if passes is found[0] and rows >= TYPICAL_ROWS:
                break
    if isinstance(posterior.model.likelihood, Categorical):
        classes = found[0][0].output.shape[1]
    is_wide = found[0][0].pooled(classes)[0].shape[1] > MOST_FEATURES
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
    if not isinstance(posterior.model.likelihood, Categorical):
        return deviations.square().mean(0)
    centred = deviations - deviations.mean(2, keepdim=True)
    return centred.square().sum(2, keepdim=True).mean(0) / (deviations.shape[2] - 1)


def variance_of(posterior: "Posterior", output: Tensor, covariance: Tensor) -> Tensor:
    """Return the same of covariances [B, O, O] of outputs [B, ..]."""
    if not isinstance(posterior.model.likelihood, Categorical):
        return covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).reshape(output.shape)
    B, C = output.shape[:2]
    own = covariance.reshape(B, C, -1, C, output[0, 0].numel()).diagonal(dim1=2, dim2=4)  # [B, C, C, n]
    found = (own.diagonal(dim1=1, dim2=2).sum(-1) - own.sum((1, 2)) / C) / (C - 1)
    return found.clamp(min=0.0).reshape(B, 1, *output.shape[2:])


def predictive_of(output: Tensor, variance: Tensor, likelihood: Any, note: str = "") -> Predictive:
    """Return the predictive of normal outputs [B, ..] with known variances, those of `LearnedVariance`.

    It is in closed form for Gaussian noise that does not depend on y, a probit approximation for labels, and an average
    over points of y else.
    """
    of_labels = isinstance(likelihood, Categorical | Bernoulli)
    if of_labels or (type(likelihood) is GaussianNoise and likelihood.noise not in ("head", "random")):
        return Predictive(
            output.unsqueeze(0), output.new_ones(1), likelihood, {}, note, True, variance.to(output).unsqueeze(0)
        )
    z = evenly_spread(POINTS, 1, 0).to(output).reshape(-1, *[1] * output.ndim)
    weights = output.new_full((POINTS,), 1 / POINTS)
    return Predictive(output + variance.sqrt() * z, weights, likelihood, {}, note, True)


class LearnedDraws(PredictiveDraws):
    """The predictive of a linearised posterior with its learned variance: one forward pass, and no draws.

    Args:
        posterior: with a `learned_variance`.
    """

    def __init__(self, posterior: "Posterior"):
        learned = posterior.learned_variance
        theta = posterior.model.linearised_at
        assert learned is not None
        assert theta is not None
        self.posterior, self.learned, self.theta, self.note = posterior, learned, theta, "learned variance"
        self.device, self.draws = self.theta.device, 1

    def mixture(self, inputs: Any) -> Predictive:
        with torch.inference_mode(False), torch.no_grad():
            one = one_pass(self.posterior, self.theta, on_device(inputs, self.device), self.learned.layer)
            return predictive_of(one.output, self.learned(one), self.posterior.model.likelihood, self.note)


class ExactDraws(LearnedDraws):
    """The same predictive with exact variances, so that one temperature suits both."""

    def __init__(self, posterior: "Posterior"):
        super().__init__(posterior)
        self.note = "exact variance"

    def mixture(self, inputs: Any) -> Predictive:
        with torch.inference_mode(False), torch.no_grad():
            moments = output_moments(self.posterior, on_device(inputs, self.device))
            variance = variance_of(self.posterior, moments.mean, moments.covariance).clamp(min=self.learned.least)
            return predictive_of(moments.mean, variance, self.posterior.model.likelihood, self.note)
