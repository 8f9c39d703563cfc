"""The variance of a linearised network's outputs, learned from one forward pass: y is N(f(x), v(x)).

The exact variance takes a backward pass for each output. Its logarithm is nearly linear in the outputs and in the
features that come to the last layer: a ridge regression on rows with known variance predicts it for others. Of classes
only differences between logits count: all of them have one variance, and predictions keep the network's
label. The learned variance does not see what the features do not show, and beyond their range it stays constant.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..models.likelihoods import Bernoulli, Categorical
from ..models.likelihoods import Gaussian as GaussianNoise
from .predictive import Predictive, PredictiveDraws, evenly_spread, on_device

if TYPE_CHECKING:
    from ..posterior import Posterior

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (nn.Linear, *CONVOLUTIONS)
#: rows, or pixels, of the regression, evenly spread over those that are given
ROWS = 2000
#: penalties that are tried, for standardised features
PENALTIES = torch.logspace(-4, 6, 41, dtype=torch.float64)
#: the least square of the size of features
SMALLEST = 1e-6
#: points of y where p(t | y) has no mixture in closed form
POINTS = 32


class OnePass(NamedTuple):
    """What one forward pass tells: outputs, and features by position, which is an input or a pixel of it."""

    output: Tensor  # [B, ..]
    features: Tensor  # [B, .., F]
    axis: int | None  # of the outputs of one position; None if a position has one number and no axis

    @classmethod
    def of(cls, output: Tensor, layer: nn.Module, inputs: Tensor, is_classes: bool) -> "OnePass":
        """Return as features the layer's inputs and their size, and the outputs, of classes their log probabilities too.

        If the layer has other positions than the outputs, its inputs are averaged over them.
        """
        is_map, axis = isinstance(layer, CONVOLUTIONS), -1
        if is_classes or (is_map and output.ndim == inputs.ndim):
            axis = 1
        elif output.ndim == 1 or (is_map and output.ndim == inputs.ndim - 1):
            axis = None
        own = _by_position(output, axis)
        phi = inputs.movedim(1, -1) if is_map else inputs
        if phi.shape[:-1] != own.shape[:-1]:
            phi = phi.reshape(len(own), -1, phi.shape[-1]).mean(1)
            phi = phi.reshape(len(own), *[1] * (own.ndim - 2), -1).expand(*own.shape[:-1], -1)
        size = 0.5 * (phi.square().sum(-1, keepdim=True) + SMALLEST).log()
        return cls(output, torch.cat([phi, size, own, *([own.log_softmax(-1)] if is_classes else [])], -1), axis)

    def rows(self, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [n, F] and variances [n, V], of variances in the shape of the output, or [B, 1, ..]."""
        return self.features.flatten(0, -2), _by_position(variance, self.axis).flatten(0, -2)


def _by_position(values: Tensor, axis: int | None) -> Tensor:
    return values.unsqueeze(-1) if axis is None else values.movedim(axis, -1)


class LearnedVariance(nn.Module):
    """log v(x) = slope · φ(x) + constant, with features φ held between `low` and `high`.

    Args:
        layer: the name of the layer whose inputs are among the features.
        features: how many there are, F.
        variances: how many a position has, V: one for all classes, else one for each output.
    """

    slope: Tensor
    constant: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, layer: str, features: int, variances: int):
        super().__init__()
        self.layer = layer
        self.register_buffer("slope", torch.zeros(features, variances))
        self.register_buffer("constant", torch.zeros(variances))
        self.register_buffer("low", torch.zeros(features))
        self.register_buffer("high", torch.zeros(features))

    @classmethod
    def fitted(cls, layer: str, features: Tensor, variance: Tensor) -> "LearnedVariance":
        """Return the ridge regression of log variances [n, V] on features [n, F].

        Its penalty has the least generalised cross-validation error, Σ residual² / (n − degrees of freedom)².
        """
        some = torch.linspace(0, len(features) - 1, min(len(features), ROWS)).long()
        X, tiny = features[some].double(), torch.finfo(torch.float32).tiny
        Y = variance[some].double().clamp(min=tiny).log()
        centre, unit, mean = X.mean(0), X.std(0).clamp(min=1e-6), Y.mean(0)
        U, s, Vh = torch.linalg.svd((X - centre) / unit, full_matrices=False)
        along = U.mT @ (Y - mean)
        left = (Y - mean).square().sum() - along.square().sum()
        errors, slopes = [], []
        for penalty in PENALTIES.tolist():
            shrunk = s.square() / (s.square() + penalty)
            residual = left + ((1 - shrunk).unsqueeze(-1) * along).square().sum()
            errors.append(float(residual / (len(X) - 1 - shrunk.sum()).clamp(min=1e-3).square()))
            slopes.append(s / (s.square() + penalty))
        best = slopes[errors.index(min(errors))]
        slope = Vh.mT @ (best.unsqueeze(-1) * along) / unit.unsqueeze(-1)
        found = cls(layer, *slope.shape)
        parts = {"slope": slope, "constant": mean - centre @ slope, "low": X.amin(0), "high": X.amax(0)}
        found.load_state_dict({name: tensor.to(features.dtype) for name, tensor in parts.items()}, assign=True)
        return found

    def forward(self, one: OnePass) -> Tensor:
        """Return variances in the shape of the outputs, or [B, 1, ..] of classes."""
        held = torch.maximum(torch.minimum(one.features, self.high), self.low)
        v = (held @ self.slope + self.constant).exp()
        return v.squeeze(-1) if one.axis is None else v.movedim(-1, one.axis)


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


def variance_of(posterior: "Posterior", output: Tensor, covariance: Tensor) -> Tensor:
    """Return variances in the shape of outputs [B, ..], of covariances [B, O, O]; of classes one, [B, 1, ..].

    That of classes is the mean over pairs of half the variance of their difference.
    """
    if not isinstance(posterior.model.likelihood, Categorical):
        return covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).reshape(output.shape)
    B, C = output.shape[:2]
    own = covariance.reshape(B, C, -1, C, output[0, 0].numel()).diagonal(dim1=2, dim2=4)  # [B, C, C, n]
    found = (own.diagonal(dim1=1, dim2=2).sum(-1) - own.sum((1, 2)) / C) / (C - 1)
    return found.clamp(min=0.0).reshape(B, 1, *output.shape[2:])


def variance_of_draws(posterior: "Posterior", deviations: Tensor) -> Tensor:
    """Return the same of draws of the outputs around their known mean, [S, B, ..]."""
    if not isinstance(posterior.model.likelihood, Categorical):
        return deviations.square().mean(0)
    centred = deviations - deviations.mean(2, keepdim=True)
    return centred.square().sum(2, keepdim=True).mean(0) / (deviations.shape[2] - 1)


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
