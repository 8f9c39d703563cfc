"""A prior on how much a network can stretch its input: `LipschitzPrior`."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from math import erf, exp, inf, pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.proxy import TraceError
from torch.nn import functional as F

from ...parameters import Parameters
from ...util.checks import check_positive
from .base import PriorModule
from .operator_norms import operator_norm, spectral_norm

#: max |d/dx x Φ(x)|, at x = √2
GELU = 0.5 * (1 + erf(1)) + exp(-1) / sqrt(pi)
#: max |d/dx x sigmoid(x)|, where x tanh(x/2) = 2
SILU = 1.0998393201288668

Tensors = Mapping[str, Tensor]
Bound = float | Callable[[nn.Module, Tensors], Tensor]
Bounds = Mapping[str | type[nn.Module], Bound]
#: a constant, or (layer, its tensors [S, ..], the shape of one input) → its norm [S]
Rule = float | Callable[[nn.Module, Tensors, torch.Size], Tensor | float]


class LipschitzPrior(PriorModule):
    """log p(θ) = −strength · Σ_l ∏_{k ≤ l} ‖layer_k‖: end-to-end Lipschitz regularisation of the feature maps.

    The product of the layers' operator norms (largest singular values) from the input to a layer bounds how much that
    layer's output moves with the input; it is summed over the outputs of all layers that have weights. For a chain of
    layers with norms L₁, L₂, .. and 1-Lipschitz activations that is L₁ + L₁L₂ + … . It is not normalised, and says
    nothing about biases: add a prior that does, `NormalPrior(1.0) + LipschitzPrior(..)`.

    Linear layers are measured by their largest singular value, convolutions as the linear maps they are, with stride,
    padding, dilation and groups, at the size of their input, to 1e-6. Activations and pooling have constants: 1 for
    ReLU, Tanh, Softplus, Identity, Flatten, Dropout in eval mode and max-pooling without overlap, 1/4 for Sigmoid,
    1.129 for GELU, 1.100 for SiLU, max(1, slope) for LeakyReLU and ELU, the norm of the linear map for average pooling
    and BatchNorm in eval mode. A network that is not a chain of such layers is refused, unless told how.

    Args:
        net: the network, a chain: one layer's output is the next one's input.
        example_input: [B, ..], for the size of the feature maps.
        strength: > 0.
        bounds: what to take for layers by name or by class: a number, or a function of the module and its tensors at
            one draw, by name, that gives a scalar. A module so bounded may contain anything (a residual block, say).

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
        >>> prior = LipschitzPrior(net, torch.zeros(1, 2), strength=0.5)
        >>> theta = torch.tensor([[2.0, 0.0, 0.0, 1.0, 3.0, 4.0]])  # norms 2 and 5
        >>> prior(Parameters.of(net), theta)
        tensor([-6.])
    """

    normalised = False

    def __init__(
        self,
        net: nn.Module,
        example_input: Tensor,
        strength: float,
        bounds: Bounds | None = None,
    ):
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"LipschitzPrior expects an nn.Module, got {type(net).__name__}")
        if not isinstance(example_input, Tensor) or example_input.ndim < 2:
            came = tuple(example_input.shape) if isinstance(example_input, Tensor) else type(example_input).__name__
            raise ValueError(f"LipschitzPrior: example_input must be a batch of inputs [B, ..], got {came}")
        check_positive(strength, "the strength of a LipschitzPrior")
        self.example_input, self.strength = example_input, strength
        self.bounds = dict(bounds or {})
        self._layers = tuple(_chain(net, example_input, self.bounds))
        if not any(layer.tensors for layer in self._layers):
            raise ValueError("LipschitzPrior: the network has no layer with weights, so there is nothing to bound")
        self._net = (net,)  # in a tuple: its weights are not the prior's to learn

    @property
    def net(self) -> nn.Module:
        return self._net[0]

    def extra_repr(self) -> str:
        return f"{type(self.net).__name__}, strength={self.strength}"

    def norms(self, parameters: Parameters, theta: Tensor) -> dict[str, Tensor]:
        """Each layer's operator norm, or the bound taken for it, in their order: [S, P] → [S] each."""
        named = parameters.unravel(theta)
        if not any(name in named for layer in self._layers for name in layer.tensors.values()):
            raise ValueError(f"LipschitzPrior: none of the tensors {parameters.names[:8]} belongs to its network")
        held = {name: tensor.detach().unsqueeze(0) for name, tensor in self.net.named_parameters()}
        values = {}
        for layer in self._layers:
            _check_mode(layer.name, layer.module, self.bounds)
            own = {local: named.get(name, held[name]) for local, name in layer.tensors.items()}
            norm = layer.rule(layer.module, own, layer.shape) if callable(layer.rule) else layer.rule
            values[layer.name] = torch.as_tensor(norm, dtype=theta.dtype, device=theta.device).expand(theta.shape[0])
        return values

    def forward(self, parameters: Parameters, theta: Tensor) -> Tensor:
        if not bool(torch.isfinite(theta).all()):
            return theta.new_full(theta.shape[:1], torch.nan)  # eigenvalues of such weights would fail to converge
        product = theta.new_ones(theta.shape[0])
        total = torch.zeros_like(product)
        for layer, norm in zip(self._layers, self.norms(parameters, theta).values(), strict=True):
            product = product * norm
            if layer.tensors:
                total = total + product
        return -self.strength * total


class _Layer(NamedTuple):
    name: str
    module: nn.Module
    rule: Rule
    shape: torch.Size  # of one input, without the batch axis
    tensors: Mapping[str, str]  # name in the module → name in the network


# --------------------------------------------------------------------------------------------------------- layers


def _linear(module: nn.Module, tensors: Tensors, shape: torch.Size) -> Tensor:
    return spectral_norm(tensors["weight"])


def _convolution(module: nn.Module, tensors: Tensors, shape: torch.Size) -> Tensor:
    without_bias = {"bias": torch.zeros_like(tensors["bias"][0])} if "bias" in tensors else {}

    def apply(weight: Tensor, x: Tensor) -> Tensor:
        return functional_call(module, {"weight": weight, **without_bias}, (x.unsqueeze(0),)).squeeze(0)

    return operator_norm(apply, tensors["weight"], shape)


def _average_pool(module: nn.Module, tensors: Tensors, shape: torch.Size) -> Tensor:
    return operator_norm(lambda _, x: module(x.unsqueeze(0)).squeeze(0), torch.zeros(1, dtype=torch.float64), shape)


def _batch_norm(module: nn.Module, tensors: Tensors, shape: torch.Size) -> Tensor:
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    assert isinstance(module.running_var, Tensor)
    scale = (module.running_var + module.eps).rsqrt()
    return (tensors["weight"] * scale if module.affine else scale.unsqueeze(0)).abs().amax(-1)


def _leaky_relu(module: nn.Module, tensors: Tensors, shape: torch.Size) -> float:
    assert isinstance(module, nn.LeakyReLU)
    return max(1.0, abs(module.negative_slope))


def _elu(module: nn.Module, tensors: Tensors, shape: torch.Size) -> float:
    assert isinstance(module, nn.ELU)
    return max(1.0, abs(module.alpha))


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    **dict.fromkeys([nn.Conv1d, nn.Conv2d, nn.Conv3d], _convolution),
    **dict.fromkeys([nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d], _convolution),
    **dict.fromkeys([nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d], _average_pool),
    **dict.fromkeys([nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d], _average_pool),
    **dict.fromkeys([nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d], 1.0),
    **dict.fromkeys([nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d], _batch_norm),
    **dict.fromkeys([nn.ReLU, nn.ReLU6, nn.Tanh, nn.Softplus, nn.Identity, nn.Flatten], 1.0),
    **dict.fromkeys([nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d], 1.0),
    nn.Sigmoid: 0.25,
    nn.GELU: GELU,
    nn.SiLU: SILU,
    nn.LeakyReLU: _leaky_relu,
    nn.ELU: _elu,
}
#: The same as functions and methods in a `forward`; reshaping one input leaves its length.
FUNCTIONS: dict[object, float] = {
    **dict.fromkeys([torch.relu, F.relu, "relu", torch.tanh, F.tanh, "tanh", F.softplus], 1.0),
    **dict.fromkeys([torch.flatten, "flatten", torch.reshape, "reshape", "view", "contiguous"], 1.0),
    **dict.fromkeys([torch.sigmoid, F.sigmoid, "sigmoid"], 0.25),
    F.gelu: GELU,
    F.silu: SILU,
}


def _refusal(module: nn.Module) -> str | None:
    """Why there is no rule for this layer."""
    if type(module) not in RULES:
        return f"the norm of a {type(module).__name__} is not known"
    if any(name not in dict(module.named_parameters(recurse=False)) for name in _weights(module)):
        return "its weight is computed from other tensors"
    if isinstance(module, nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d):
        sizes = [_triple(x) for x in (module.kernel_size, module.stride, module.dilation)]
        if any(stride < kernel or dilation != 1 for kernel, stride, dilation in zip(*sizes, strict=False)):
            return "its windows overlap"
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is None:
        return "it normalises by the batch"
    if isinstance(module, nn.GELU) and module.approximate != "none":
        return "only the exact GELU has a known constant"
    return None


def _weights(module: nn.Module) -> list[str]:
    return ["weight"] if RULES[type(module)] in (_linear, _convolution) else []


def _triple(x: int | tuple[int, ...]) -> tuple[int, ...]:
    return x if isinstance(x, tuple) else (x, x, x)


def _check_mode(name: str, module: nn.Module, bounds: Bounds) -> None:
    if name in bounds or type(module) in bounds or not module.training:
        return
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        raise ValueError(f"LipschitzPrior: {name!r} is a BatchNorm in train mode, which has no norm; {_REMEDY}")
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        raise ValueError(f"LipschitzPrior: {name!r} is a Dropout in train mode, which has no fixed norm; {_REMEDY}")


_REMEDY = "put it in eval mode (net.eval()), or give bounds={name: number}"


# ---------------------------------------------------------------------------------------------- the way through it


def _chain(net: nn.Module, example: Tensor, bounds: Bounds) -> list[_Layer]:
    """The layers in the order in which the input passes them; a network that is not a chain is refused."""
    modules = dict(net.named_modules())
    for key, bound in bounds.items():
        if not (key in modules or (isinstance(key, type) and any(type(m) is key for m in modules.values()))):
            raise ValueError(f"LipschitzPrior: bounds names {key!r}, but the network has no such module or class")
        if not callable(bound):
            number = isinstance(bound, int | float) and not isinstance(bound, bool) and 0 <= bound < inf
            if not number:
                raise ValueError(f"LipschitzPrior: the bound of {key!r} must be a number ≥ 0 or a function")
    if _Tracer(bounds).is_leaf_module(net, ""):
        return [_layer("", net, example.shape[1:], net, bounds)]
    twin = copy.deepcopy(net).eval()  # the example must not move the running statistics
    try:
        graph = _Tracer(bounds).trace(twin)
    except (TraceError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"LipschitzPrior cannot follow the network's forward ({str(error).splitlines()[0]}); "
            "write it as a chain of layers, or wrap what branches in a module and give bounds={name: ..}"
        ) from error
    steps = _steps(graph)
    for node in steps:
        if node.op == "call_module":
            name = str(node.target)
            _check_known(name, modules[name], bounds)
        elif node.target not in FUNCTIONS or node.kwargs.get("approximate", "none") != "none":
            raise ValueError(
                f"LipschitzPrior: the norm of the operation {node.name!r} is not known; use a layer for it, "
                "or wrap it in a module and give bounds={name: ..}"
            )
    recorder = _Shapes(fx.GraphModule(twin, graph))
    with torch.no_grad():
        recorder.run(example)
    layers = []
    for node in steps:
        shape = recorder.shapes[node.all_input_nodes[0]][1:]
        if node.op == "call_module":
            layers.append(_layer(str(node.target), modules[str(node.target)], shape, net, bounds))
        else:
            layers.append(_Layer(node.name, nn.Identity(), FUNCTIONS[node.target], shape, {}))
    return layers


def _layer(name: str, module: nn.Module, shape: torch.Size, net: nn.Module, bounds: Bounds) -> _Layer:
    _check_known(name, module, bounds)
    first: dict[int, str] = {}
    for full, tensor in net.named_parameters(remove_duplicate=False):
        first.setdefault(id(tensor), full)  # the name that a tied tensor has in the space
    tensors = {local: first[id(tensor)] for local, tensor in module.named_parameters(remove_duplicate=False)}
    bound = bounds.get(name, bounds.get(type(module)))
    if bound is not None:
        rule = partial(_told, name, bound) if callable(bound) else float(bound)
    elif RULES[type(module)] is _average_pool:
        rule = float(_average_pool(module, {}, shape))
    else:
        rule = RULES[type(module)]
    return _Layer(name, module, rule, shape, tensors)


def _told(name: str, bound: Callable[..., Tensor], module: nn.Module, tensors: Tensors, shape: torch.Size) -> Tensor:
    """The user's bound at each draw."""
    S = max((tensor.shape[0] for tensor in tensors.values()), default=1)
    rows = [{local: x[s if x.shape[0] > 1 else 0] for local, x in tensors.items()} for s in range(S)]
    values = [bound(module, row) for row in rows]
    for value in values:
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(f"LipschitzPrior: the bound of {name!r} must return a scalar tensor, got {value!r}")
    return torch.stack([value.reshape(()) for value in values])


def _check_known(name: str, module: nn.Module, bounds: Bounds) -> None:
    if name in bounds or type(module) in bounds:
        return
    if reason := _refusal(module):
        raise ValueError(
            f"LipschitzPrior cannot bound {f'the layer {name!r}' if name else 'the network'} "
            f"({type(module).__name__}): {reason}; "
            "say how with bounds={name or class: a number, or a function of the module and its tensors}"
        )
    _check_mode(name, module, bounds)


class _Tracer(fx.Tracer):
    """Stops at the layers with a rule and at those that the user bounds."""

    def __init__(self, bounds: Bounds):
        super().__init__()
        self.bounds = bounds

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        told = module_qualified_name in self.bounds or type(m) in self.bounds
        return told or super().is_leaf_module(m, module_qualified_name)


class _Shapes(fx.Interpreter):
    """Runs the graph and keeps the shapes of its tensors."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.shapes: dict[fx.Node, torch.Size] = {}

    def run_node(self, n: fx.Node):
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.shapes[n] = result.shape
        return result


def _steps(graph: fx.Graph) -> list[fx.Node]:
    """The operations on the one tensor that goes through the graph."""
    inputs = [node for node in graph.nodes if node.op == "placeholder" and (node.users or not node.args)]
    if len(inputs) != 1:
        raise ValueError(f"LipschitzPrior: the network takes {len(inputs)} inputs; a chain has one")
    steps: list[fx.Node] = []
    current, sizes = inputs[0], set()  # sizes: of tensors, as in x.view(x.size(0), -1)
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            raise ValueError(
                f"LipschitzPrior: the network uses its tensor {node.target!r} outside a layer that has a known norm; "
                "use such a layer, or give bounds={name of its module: ..}"
            )
        if node.target in ("size", "dim") or (node.target is getattr and node.args[1] in ("shape", "ndim")):
            sizes.add(node)
            continue
        tensors = [given for given in node.all_input_nodes if given not in sizes]
        if not tensors and node.op == "call_function":
            sizes.add(node)
            continue
        if tensors != [current]:
            raise ValueError(
                f"LipschitzPrior: the network is not a chain: {node.name!r} does not take just the output of "
                f"{current.name!r}, but {[given.name for given in tensors]} (a residual sum, a concatenation, a "
                "second branch); wrap the part that branches in a module and give bounds={name: ..}"
            )
        if node.op != "output":
            steps.append(node)
            current = node
    return steps
