"""The features that come to a network's last layer, and the targets beside them, row by row.

The network's output must be the layer's own, up to its shape: y = W φ + b. A row is one position: an input of a linear
layer, a place of a convolution, whose features are the patch under it.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..laplace.place import trained_values
from ..models.bayesian_model import batch_size
from ..models.likelihoods import Bernoulli, Categorical, Gaussian, split_mask

if TYPE_CHECKING:
    from ..posterior import Posterior

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (nn.Linear, *CONVOLUTIONS)


class Rows(NamedTuple):
    """The n rows of one batch, with C outputs."""

    features: Tensor  # [n, D], the last column ones if the bias is random
    target: Tensor  # [n, C]; labels of classes as one-hot
    weight: Tensor  # [n, C], or [n, 1] of classes: zero if nothing was observed


def head_tensors(net: nn.Module, layer: str | None) -> tuple[str, ...]:
    """Return the names of a layer's tensors; without its name those of the network's last linear layer or convolution.

    Example:
        >>> head_tensors(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), None)
        ('2.weight', '2.bias')
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(net).__name__}")
    known = {name: module for name, module in net.named_modules() if isinstance(module, LAYERS)}
    if not known:
        raise ValueError(f"{type(net).__name__} has no linear layer and no convolution: it has no linear head")
    layer = list(known)[-1] if layer is None else layer
    if layer not in known:
        raise ValueError(f"layer= must be the name of a linear layer or convolution, of {list(known)}, got {layer!r}")
    prefix = f"{layer}." if layer else ""
    return tuple(prefix + name for name, tensor in known[layer].named_parameters(recurse=False) if tensor.requires_grad)


class Head:
    """The layer whose tensors are all that is random in a posterior.

    Args:
        posterior: over the weight, and the bias if it has one, of one linear layer or convolution.
    """

    def __init__(self, posterior: "Posterior"):
        self.posterior, self.model = posterior, posterior.model
        names = self.model.net_space.names
        owners = {name.rpartition(".")[0] for name in names}
        self.name = owners.pop()
        layer = None if owners else self.model.net.get_submodule(self.name)
        kinds = {name.rpartition(".")[2] for name in names}
        if not isinstance(layer, LAYERS) or "weight" not in kinds or kinds - {"weight", "bias"}:
            raise ValueError(
                "fit_head is for a posterior over the weight and bias of one linear layer or convolution, with a "
                f"trainable weight that no other layer shares; here {', '.join(names)} are random. "
                "variationalize_head(net, likelihood) makes one"
            )
        self.bias, self.outputs = "bias" in kinds, layer.weight.shape[0]
        if (layer.bias is not None) != self.bias or (isinstance(layer, CONVOLUTIONS) and layer.groups != 1):
            raise ValueError(f"fit_head is for a layer {self.name!r} of one group whose bias, if any, is trainable")
        self.width = layer.weight[0].numel() + self.bias
        self._axis: int | None = None

    @property
    def order(self) -> Tensor:
        """Return where in θ the weights and then the bias of output 0 lie, then those of output 1, ..: [M]."""
        space, prefix = self.model.net_space, f"{self.name}." if self.name else ""
        weight = torch.arange(self.outputs * (self.width - self.bias)).reshape(self.outputs, -1)
        places = weight + space.slice(f"{prefix}weight").start
        if self.bias:
            bias = torch.arange(self.outputs).unsqueeze(-1) + space.slice(f"{prefix}bias").start
            places = torch.cat([places, bias], -1)
        return places.reshape(-1).to(self.posterior.device)

    @torch.no_grad()
    def rows(self, batches: Iterable[Any]) -> Iterator[tuple[Rows, int]]:
        """Yield the rows of each batch, and its number of observations: one pass of the network."""
        model, theta = self.model, trained_values(self.posterior)
        with self.posterior.network_mode() as net, model.linearised_around(None):
            layer = net.get_submodule(self.name)
            for batch in batches:
                output, target, features, own = self._call(layer, theta, batch)
                model.likelihood(output, target)  # its checks of shapes, types and labels
                if self._axis is None:
                    self._axis = self._axis_of(layer, theta, batch, output, own)
                yield Rows(features.double(), *self._targets(target)), batch_size(target)

    def _call(self, layer: nn.Module, theta: Tensor, batch: Any) -> tuple[Any, Any, Tensor, Tensor]:
        """Return output and target of the network, and the layer's features [n, D] and output [n, C]."""
        calls: list[tuple[Tensor, Tensor]] = []
        handle = layer.register_forward_hook(lambda _, inputs, y: calls.append((inputs[0], y)))  # pyright: ignore
        try:
            output, target = self.model.call(self.model.net_space.unravel(theta), batch)
        finally:
            handle.remove()
        if len(calls) != 1:
            raise ValueError(
                f"the layer {self.name!r} was called {len(calls)} times in one pass: fit_head needs exactly one. Name "
                "another with layer=, or use fit"
            )
        if not isinstance(output, Tensor):
            raise TypeError(f"the network's output must be a tensor, got {type(output).__name__}: use fit")
        ((x, y),) = calls
        features = _features(layer, x)
        if self.bias:
            features = torch.cat([features, features.new_ones(len(features), 1)], -1)
        own = y.movedim(1, -1) if isinstance(layer, CONVOLUTIONS) else y
        return output, target, features, own.reshape(-1, self.outputs)

    def _axis_of(self, layer: nn.Module, theta: Tensor, batch: Any, output: Tensor, own: Tensor) -> int:
        """Return the axis of the outputs; raise if, at other values of the layer, the output is not the layer's own."""
        noise = torch.randn(theta.shape, generator=torch.Generator().manual_seed(0)).to(theta)
        there, _, _, own_there = self._call(layer, theta + self.model.net_space.scale.to(theta) * noise, batch)
        for axis in (1,) if isinstance(self.model.likelihood, Categorical) else (1, -1, 0):
            rows = [self._as_rows(y, axis) for y in (output, there) if y.numel() == own.numel() and y.ndim > axis]
            if len(rows) == 2 and torch.equal(rows[0], own) and torch.equal(rows[1], own_there):
                return axis
        raise ValueError(
            f"the network's output {tuple(output.shape)} is not that of its layer {self.name!r}: a nonlinearity, a "
            "normalisation, a pooling or a sum comes after it, or its weights are used elsewhere too. Name the last "
            "layer with layer=, let the network give its logits or means, or use fit"
        )

    def _as_rows(self, y: Tensor, axis: int) -> Tensor:
        """Return what has the shape of the network's output as [n, C]."""
        return y.movedim(axis, -1).reshape(-1, self.outputs)

    def _targets(self, target: Any) -> tuple[Tensor, Tensor]:
        likelihood = self.model.likelihood
        assert isinstance(likelihood, Gaussian | Bernoulli | Categorical)
        t, mask = split_mask(target)
        is_known = torch.ones_like(t, dtype=torch.bool) if mask is None else mask
        if not isinstance(likelihood, Gaussian) and likelihood.ignore_index is not None:
            is_known = is_known & (t != likelihood.ignore_index)
        t, weight = t.masked_fill(~is_known, 0), is_known.double()
        if isinstance(likelihood, Categorical):
            one_hot = nn.functional.one_hot(t.reshape(-1).long(), self.outputs)
            return one_hot.double(), weight.reshape(-1, 1)
        assert self._axis is not None
        return self._as_rows(t, self._axis).double(), self._as_rows(weight, self._axis)


def _features(layer: nn.Module, x: Tensor) -> Tensor:
    """Return inputs of a linear layer, or patches under a convolution in the order of its kernel: [n, D]."""
    if not isinstance(layer, CONVOLUTIONS):
        return x.reshape(-1, x.shape[-1])
    shape = layer.weight.shape[1:]
    one_each = torch.eye(shape.numel(), dtype=x.dtype, device=x.device).reshape(-1, *shape)
    patches = layer._conv_forward(x, one_each, None)  # pyright: ignore[reportArgumentType]
    return patches.movedim(1, -1).reshape(-1, shape.numel())
