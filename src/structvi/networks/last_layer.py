"""A network's last linear layer or convolution: its tensors as one matrix, and the features that come to it.

The network's output must be the layer's own, up to its shape: y = W φ + b. A row is one position: an input of a linear
layer, a place of a convolution, whose features are the patch under it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..parameters import Parameters

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (nn.Linear, *CONVOLUTIONS)


class Pass(NamedTuple):
    """One call of the network: its output, the target if the call gave one, and the layer's features and output."""

    output: Tensor
    target: Any
    features: Tensor  # [n, D], the last column ones if the bias is random
    own: Tensor  # [n, C]


def head_tensors(net: nn.Module, layer: str | None) -> tuple[str, ...]:
    """Return the names of a layer's tensors; without its name those of the network's last linear layer or convolution.

    Example:
        >>> head_tensors(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), None)
        ('2.weight', '2.bias')
    """
    known = {name: module for name, module in net.named_modules() if isinstance(module, LAYERS)}
    layer = list(known)[-1] if known and layer is None else layer
    if layer not in known:
        raise ValueError(
            f"{type(net).__name__} has no linear head: layer= must be the name of a linear layer or convolution, of "
            f"{list(known)}, got {layer!r}"
        )
    prefix = f"{layer}." if layer else ""
    return tuple(prefix + name for name, tensor in known[layer].named_parameters(recurse=False) if tensor.requires_grad)


class LastLayer:
    """The layer whose weight, and bias if it has one, are all that is random.

    Args:
        net: the network.
        space: of the random tensors.
        channels_first: whether the outputs lie on axis 1 of the network's output, as for class labels.
    """

    def __init__(self, net: nn.Module, space: Parameters, channels_first: bool):
        self.net, names = net, space.names
        self.name = names[0].rpartition(".")[0]
        layer = net.get_submodule(self.name)
        own = {f"{self.name}.{key}".removeprefix(".") for key, _ in layer.named_parameters(recurse=False)}
        is_plain = type(layer).forward in [kind.forward for kind in LAYERS] and getattr(layer, "groups", 1) == 1
        if not isinstance(layer, LAYERS) or not is_plain or own != {*names}:
            raise ValueError(
                "fit_head is for a posterior over the weight and bias of one linear layer or convolution of torch, of "
                f"one group, that no other layer shares and whose bias, if any, is trainable; here {', '.join(names)} "
                "are random. variationalize_head(net, likelihood) makes one"
            )
        self.bias, self.outputs = layer.bias is not None, layer.weight.shape[0]
        self.layer, self.space, self.width = layer, space, layer.weight[0].numel() + self.bias
        self.channels_first = channels_first
        #: of the outputs in the network's output, once `checked` has found it
        self.axis: int | None = None

    @property
    def order(self) -> Tensor:
        """Return where in θ the weights and then the bias of output 0 lie, then those of output 1, ..: [C·D]."""
        places = self.space.unravel(torch.arange(self.space.size))
        weight_and_bias = [places[name].reshape(self.outputs, -1) for name in sorted(places, reverse=True)]
        return torch.cat(weight_and_bias, -1).reshape(-1).to(self.space.device)

    def run(self, call: Callable[[], tuple[Any, Any]]) -> Pass:
        """Call the network, which gives its output and target; return these with the layer's features and output."""
        calls: list[tuple[Tensor, Tensor]] = []
        handle = self.layer.register_forward_hook(lambda _, inputs, y: calls.append((inputs[0], y)))  # pyright: ignore
        try:
            output, target = call()
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
        features = _features(self.layer, x)
        if self.bias:
            features = torch.cat([features, features.new_ones(len(features), 1)], -1)
        own = y.movedim(1, -1) if isinstance(self.layer, CONVOLUTIONS) else y
        return Pass(output, target, features, own.reshape(-1, self.outputs))

    def checked(self, here: Pass, call: Callable[[Tensor], tuple[Any, Any]], theta: Tensor) -> None:
        """Find the axis of the outputs; raise if, at other values of the layer, the output is not the layer's own.

        Args:
            here: a pass at θ.
            call: the network at other values of the layer [P].
            theta: [P].
        """
        if self.axis is not None:
            return
        noise = torch.randn(theta.shape, generator=torch.Generator().manual_seed(0)).to(theta)
        passes = here, self.run(lambda: call(theta + self.space.scale.to(theta) * noise))
        for axis in (1,) if self.channels_first else (1, -1, 0):
            self.axis = axis
            fits = all(one.output.numel() == one.own.numel() and one.output.ndim > axis for one in passes)
            if fits and all(torch.equal(self.as_rows(one.output), one.own) for one in passes):
                return
        self.axis = None
        raise ValueError(
            f"the network's output {tuple(here.output.shape)} is not that of its layer {self.name!r}: a nonlinearity, "
            "a normalisation, a pooling or a sum comes after it, or its weights are used elsewhere too. Name the last "
            "layer with layer=, let the network give its logits or means, or use fit"
        )

    def as_rows(self, y: Tensor) -> Tensor:
        """Return what has the shape of the network's output as [n, C]."""
        assert self.axis is not None
        return y.movedim(self.axis, -1).reshape(-1, self.outputs)

    def as_output(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return [.., n, C] in the shape of the network's output, after the leading axes."""
        assert self.axis is not None
        shape = like.movedim(self.axis, -1).shape
        axis = self.axis if self.axis < 0 else self.axis - like.ndim
        return rows.reshape(*rows.shape[:-2], *shape).movedim(-1, axis)


def _features(layer: nn.Module, x: Tensor) -> Tensor:
    """Return inputs of a linear layer, or patches under a convolution in the order of its kernel: [n, D]."""
    if not isinstance(layer, CONVOLUTIONS):
        return x.reshape(-1, x.shape[-1])
    shape = layer.weight.shape[1:]
    one_each = torch.eye(shape.numel(), dtype=x.dtype, device=x.device).reshape(-1, *shape)
    patches = layer._conv_forward(x, one_each, None)  # pyright: ignore[reportArgumentType]
    return patches.movedim(1, -1).reshape(-1, shape.numel())
