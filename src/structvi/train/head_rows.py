"""What the last layer of a network sees: the features that come to it and the targets beside them, row by row.

The network's output must be the layer's own, up to its shape and a term that does not depend on the layer:

    y = W φ + b + c(x).

A row is one position: an input of a linear layer, a place of a convolution, whose features are the patch under it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..models.batch import batch_size
from ..models.likelihoods import Bernoulli, Categorical, Gaussian, split_mask
from .warm_start import trained_values

if TYPE_CHECKING:
    from ..posterior import Posterior

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (nn.Linear, *CONVOLUTIONS)


class Rows(NamedTuple):
    """Of one batch, n rows and C outputs."""

    features: Tensor  # [n, D], the last column ones where the bias is random
    offset: Tensor  # [n, C]: what the output has beside the layer's
    target: Tensor  # [n, C]; of classes, labels [n]
    weight: Tensor  # [n, C], of classes [n, 1]: zero where nothing was observed


def head_tensors(net: nn.Module, layer: str | None) -> tuple[str, ...]:
    """The names of the tensors of a layer; without its name, of the last linear layer or convolution of the network."""
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
        posterior: over the weight, and the bias where it has one, of one linear layer or convolution.
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
        if isinstance(layer, CONVOLUTIONS) and layer.groups != 1:
            raise ValueError(f"fit_head is for convolutions of one group, and {self.name!r} has {layer.groups}")
        self.prefix = f"{self.name}." if self.name else ""
        self.bias = "bias" in kinds
        self.outputs = layer.weight.shape[0]
        self.width = layer.weight[0].numel() + self.bias
        self._axis: int | None = None
        self._checked = False

    @property
    def order(self) -> Tensor:
        """[C·D]: where in θ the numbers of output 0 lie, its weights and then its bias; then those of output 1, .."""
        space, C, D = self.model.net_space, self.outputs, self.width - self.bias
        weight = torch.arange(C * D).reshape(C, D) + space.slice(f"{self.prefix}weight").start
        if not self.bias:
            return weight.reshape(-1)
        bias = torch.arange(C).unsqueeze(-1) + space.slice(f"{self.prefix}bias").start
        return torch.cat([weight, bias], -1).reshape(-1)

    @torch.no_grad()
    def rows(self, batches: Iterable[Any]) -> Iterator[tuple[Rows, int]]:
        """Of each batch its rows, and B: one pass of the network."""
        model = self.model
        theta = trained_values(self.posterior)
        with self.posterior.network_mode() as net, model.linearised_around(None):
            layer = net.get_submodule(self.name)
            for batch in batches:
                output, target, features, own = self._call(layer, theta, batch)
                model.likelihood(output, target)  # its checks of shapes, types and labels
                if not self._checked:
                    self._check(layer, theta, batch, output, features, own)
                offset = self._as_rows(output) - own
                held = layer.bias if isinstance(layer, LAYERS) and not self.bias else None
                offset = offset if held is None else offset + held
                labels, weight = self._targets(target)
                yield Rows(features, offset, labels, weight), batch_size(target)

    def _call(self, layer: nn.Module, theta: Tensor, batch: Any) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Output and target, and the layer's features [n, D] and output [n, C]."""
        with _recorded(layer) as calls:
            output, target = self.model.call(self.model.net_space.unravel(theta), batch)
        if len(calls) != 1:
            raise ValueError(
                f"the layer {self.name!r} was called {len(calls)} times in one pass: fit_head needs exactly one. Name "
                "another with layer=, or use fit"
            )
        if not isinstance(output, Tensor):
            raise TypeError(f"the network's output must be a tensor, got {type(output).__name__}: use fit")
        ((x, y),) = calls
        features = _features(layer, x)
        own = (y.movedim(1, -1) if isinstance(layer, CONVOLUTIONS) else y).reshape(-1, self.outputs)
        if self.bias:
            features = torch.cat([features, features.new_ones(len(features), 1)], -1)
        return output, target, features, own

    def _check(
        self, layer: nn.Module, theta: Tensor, batch: Any, output: Tensor, features: Tensor, own: Tensor
    ) -> None:
        """On the first batch: at other values of the layer the output changes as the layer's does, and no feature."""
        noise = torch.randn(theta.shape, generator=torch.Generator().manual_seed(0)).to(theta)
        moved = theta + self.model.net_space.scale.to(theta) * noise
        there, _, features_there, own_there = self._call(layer, moved, batch)
        change = own_there - own
        near = torch.finfo(theta.dtype).eps ** 0.5 * float(change.abs().max() + own.abs().max())
        axes: tuple[int | None, ...] = (1,) if isinstance(self.model.likelihood, Categorical) else (1, -1)
        axes = (*axes, None) if self.outputs == 1 else axes
        for axis in axes:
            fits = axis is None or (output.ndim > 1 and output.shape[axis] == self.outputs)
            if not fits or output.numel() != own.numel() or features.shape != features_there.shape:
                continue
            self._axis = axis
            error = (self._as_rows(there) - self._as_rows(output) - change).abs().max()
            if bool(error <= near) and torch.equal(features, features_there):
                self._checked = True
                return
        raise ValueError(
            f"the network's output {tuple(output.shape)} is not that of its layer {self.name!r} plus what does not "
            "depend on it: a nonlinearity, a normalisation or a pooling comes after it, or its weights are used "
            "elsewhere too. Name the last layer with layer=, let the network give its logits or means, or use fit"
        )

    def _as_rows(self, y: Tensor) -> Tensor:
        """[n, C] of what has the shape of the network's output."""
        return y.reshape(-1, 1) if self._axis is None else y.movedim(self._axis, -1).reshape(-1, self.outputs)

    def _targets(self, target: Any) -> tuple[Tensor, Tensor]:
        likelihood = self.model.likelihood
        assert isinstance(likelihood, Gaussian | Bernoulli | Categorical)
        t, mask = split_mask(target)
        seen = torch.ones_like(t, dtype=torch.bool) if mask is None else mask
        if not isinstance(likelihood, Gaussian) and likelihood.ignore_index is not None:
            seen = seen & (t != likelihood.ignore_index)
        t = t.masked_fill(~seen, 0)
        weight = seen.double()
        if not isinstance(likelihood, Gaussian) and likelihood.class_weights is not None:
            weight = weight * torch.tensor(likelihood.class_weights, dtype=torch.float64, device=t.device)[t.long()]
        if isinstance(likelihood, Categorical):
            return t.reshape(-1).long(), weight.reshape(-1, 1)
        return self._as_rows(t).double(), self._as_rows(weight)


@contextmanager
def _recorded(layer: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inside, what the layer is called with and what it gives. By an attribute: hooks are shared with the network."""
    calls: list[tuple[Tensor, Tensor]] = []
    own, before = layer.forward, layer.__dict__.get("forward")

    def forward(x: Tensor) -> Tensor:
        y = own(x)
        calls.append((x, y))
        return y

    layer.__dict__["forward"] = forward
    try:
        yield calls
    finally:
        del layer.__dict__["forward"]
        if before is not None:
            layer.__dict__["forward"] = before


def _features(layer: nn.Module, x: Tensor) -> Tensor:
    """[n, D]: inputs of a linear layer, patches under a convolution in the order of its kernel."""
    if not isinstance(layer, CONVOLUTIONS):
        return x.reshape(-1, x.shape[-1])
    shape = layer.weight.shape[1:]
    D = shape.numel()
    one_each = torch.eye(D, dtype=x.dtype, device=x.device).reshape(D, *shape)
    patches = layer._conv_forward(x, one_each, None)  # pyright: ignore[reportArgumentType]
    return patches.movedim(1, -1).reshape(-1, D)
