"""The variance of a linearised network's outputs, learned from the features of one forward pass.

The exact variance takes a backward pass for each output. Its logarithm is nearly linear in the outputs and in the
features that come to the last layer: a ridge regression on rows with known variance predicts it for others. Only
differences between the logits of classes count: all classes have one variance, and predictions keep the network's
label. The learned variance does not see what the features do not show, and beyond their range it stays constant.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .last_layer import CONVOLUTIONS

#: rows, or pixels, of the regression, evenly spread over those that are given
ROWS = 2000
#: penalties that are tried, for standardised features
PENALTIES = torch.logspace(-4, 6, 41, dtype=torch.float64)


class OnePass(NamedTuple):
    """Outputs and features of one forward pass. Features are by position: an input, or a pixel of it."""

    output: Tensor  # [B, ..]
    features: Tensor  # [B, .., F]
    axis: int | None  # of the outputs of one position; None if a position has one number and no axis

    @classmethod
    def of(cls, output: Tensor, layer: nn.Module, inputs: Tensor, is_classes: bool) -> "OnePass":
        """Return as features the layer's inputs, their size, and the outputs; of classes log probabilities too.

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
            phi = phi.reshape(own.shape[0], -1, phi.shape[-1]).mean(1)
            phi = phi.reshape(own.shape[0], *[1] * (own.ndim - 2), -1).expand(*own.shape[:-1], -1)
        size = 0.5 * phi.square().sum(-1, keepdim=True).clamp(min=torch.finfo(phi.dtype).eps).log()
        return cls(output, torch.cat([phi, size, own, *([own.log_softmax(-1)] if is_classes else [])], -1), axis)

    def rows(self, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [n, F] and variances [n, V], of variances in the shape of the output, or [B, 1, ..]."""
        return self.features.flatten(0, -2), _by_position(variance, self.axis).flatten(0, -2)

    def pooled(self, classes: int) -> tuple[Tensor, Tensor]:
        """Return the layer's inputs [B, D] and the outputs of a position [B, V], as means over the positions."""
        own = _by_position(self.output, self.axis)
        width = self.features.shape[-1] - 1 - own.shape[-1] * (2 if classes > 1 else 1)
        phi = self.features[..., :width].reshape(len(own), -1, width).mean(1)
        return phi, own.reshape(len(own), -1, own.shape[-1]).mean(1)


def _by_position(values: Tensor, axis: int | None) -> Tensor:
    return values.unsqueeze(-1) if axis is None else values.movedim(axis, -1)


class LearnedVariance(nn.Module):
    """log v(x) = slope · φ(x) + constant, with features φ held between `low` and `high`, and v at least `least`.

    Args:
        layer: the name of the layer whose inputs are among the features.
        features: how many there are, F.
        variances: how many a position has, V: one for all classes, else one for each output.
    """

    slope: Tensor
    constant: Tensor
    low: Tensor
    high: Tensor
    least: Tensor

    def __init__(self, layer: str, features: int, variances: int):
        super().__init__()
        self.layer = layer
        shapes = {"slope": (features, variances), "constant": variances, "low": features, "high": features, "least": ()}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))

    @classmethod
    def fitted(cls, layer: str, features: Tensor, variance: Tensor) -> "LearnedVariance":
        """Return the ridge regression of log variances [n, V] on features [n, F], with the mean of the variances.

        Its penalty has the least generalised cross-validation error, Σ residual² / (n − degrees of freedom)². The mean
        of known over learned variances is one: the logarithm of a variance from few draws is too small on average.
        """
        some = torch.linspace(0, len(features) - 1, min(len(features), ROWS)).long()
        X, tiny = features[some].double(), torch.finfo(torch.float32).tiny
        Y = variance[some].double().clamp(min=tiny).log()
        centre, unit, mean = X.mean(0), X.std(0).clamp(min=1e-6), Y.mean(0)
        U, s, Vh = torch.linalg.svd((X - centre) / unit, full_matrices=False)
        along = U.mT @ (Y - mean)
        penalty = PENALTIES.to(s.device).unsqueeze(1)
        kept = s.square() / (s.square() + penalty)  # [penalties, F]
        left = (Y - mean).square().sum() - along.square().sum()
        residual = left + (1 - kept).square() @ along.square().sum(1)
        best = (residual / (len(X) - 1 - kept.sum(1)).clamp(min=1e-3).square()).argmin()
        shrunk = (s / (s.square() + penalty[best])).unsqueeze(-1)
        slope = Vh.mT @ (shrunk * along) / unit.unsqueeze(-1)
        constant = mean - centre @ slope
        constant = constant + (Y - X @ slope - constant).exp().mean(0).log()
        parts = {"slope": slope, "constant": constant, "low": X.amin(0), "high": X.amax(0), "least": X.new_zeros(())}
        found = cls(layer, *slope.shape)
        found.load_state_dict({name: tensor.to(features.dtype) for name, tensor in parts.items()}, assign=True)
        return found

    def forward(self, one: OnePass) -> Tensor:
        """Return variances in the shape of the outputs, or [B, 1, ..] of classes."""
        held = torch.maximum(torch.minimum(one.features, self.high), self.low)
        v = (held @ self.slope + self.constant).exp().clamp(min=self.least)
        return v.squeeze(-1) if one.axis is None else v.movedim(-1, one.axis)
