"""A prior on how much a network can stretch its input: `LipschitzPrior`."""

from collections.abc import Callable, Iterator, Mapping
from math import erf, exp, inf, pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from ...networks.call import alone_with, in_modes
from ...parameters import Parameters
from ...util.checks import check_positive
from .separable import PriorModule

#: max |d/dx x Φ(x)|, at x = √2
GELU = 0.5 * (1 + erf(1)) + exp(-1) / sqrt(pi)
#: max |d/dx x sigmoid(x)|, where x tanh(x/2) = 2
SILU = 1.0998393201288668
#: relative change of σ² by one search in a Krylov space at which the last one is taken
TOLERANCE = 1e-12
#: vectors in a Krylov space
KRYLOV = 24
#: searches before an operator norm is given up
RESTARTS = 200
#: relative length below which a new vector of the space is rounding
ROUNDING = 1e-14

Bound = float | Callable[[nn.Module, Mapping[str, Tensor]], Tensor]

LINEAR = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.AvgPool1d,
    nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
)  # fmt: skip
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
#: how much layers without weights stretch their input at most; dropout as in eval mode
CONSTANTS: dict[type[nn.Module], float | Callable[..., float]] = {
    **dict.fromkeys([nn.ReLU, nn.ReLU6, nn.Tanh, nn.Softplus, nn.Identity, nn.Flatten, nn.Unflatten], 1.0),
    **dict.fromkeys([nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d], 1.0),
    nn.Sigmoid: 0.25,
    nn.GELU: GELU,
    nn.SiLU: SILU,
    nn.LeakyReLU: lambda module: max(1.0, abs(module.negative_slope)),
    nn.ELU: lambda module: max(1.0, abs(module.alpha)),
}


class _Layer(NamedTuple):
    name: str
    module: nn.Module
    shape: torch.Size  # of one input, without the batch axis
    tensors: Mapping[str, str]  # name in the module → name in the network


class LipschitzPrior(PriorModule):
    """log p(θ) = −strength · Σ_l ∏_{k ≤ l} ‖layer_k‖: end-to-end Lipschitz regularisation of the feature maps.

    The product of the layers' operator norms (largest singular values) from the input to a layer bounds how much that
    layer's output moves with the input; it is summed over the outputs of all layers that have weights. For layers with
    norms L₁, L₂, .. and 1-Lipschitz activations that is L₁ + L₁L₂ + … . It is not normalised, and says nothing about
    biases: add a prior that does, `NormalPrior(1.0) + LipschitzPrior(..)`.

    Linear layers, convolutions, average pooling and BatchNorm in eval mode are measured as the linear maps they are, at
    the size of their input. Activations, dropout and max-pooling without overlap have constants: `CONSTANTS`.

    Args:
        net: an `nn.Sequential`, which may have others inside.
        example_input: [B, ..], for the size of the feature maps.
        strength: > 0.
        bounds: what to take for modules by name or by class: a number, or a function of the module and its tensors at
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
        bounds: Mapping[str | type[nn.Module], Bound] | None = None,
    ):
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"LipschitzPrior expects an nn.Module, got {type(net).__name__}")
        if not isinstance(example_input, Tensor) or example_input.ndim < 2:
            came = tuple(example_input.shape) if isinstance(example_input, Tensor) else type(example_input).__name__
            raise ValueError(f"LipschitzPrior: example_input must be a batch of inputs [B, ..], got {came}")
        check_positive(strength, "the strength of a LipschitzPrior")
        self.strength, self.bounds = strength, dict(bounds or {})
        known = {*dict(net.named_modules()), *map(type, net.modules())}
        for key, bound in self.bounds.items():
            if key not in known:
                raise ValueError(f"LipschitzPrior: bounds names {key!r}, but the network has no such module or class")
            if not callable(bound) and (isinstance(bound, bool) or not 0 <= bound < inf):
                raise ValueError(f"LipschitzPrior: the bound of {key!r} must be a number ≥ 0 or a function")
        self._net = (net,)  # in a tuple: its weights are not the prior's to learn
        names: dict[int, str] = {}
        for name, tensor in net.named_parameters(remove_duplicate=False):
            names.setdefault(id(tensor), name)  # the name that a tied tensor has in the space
        self._layers: list[_Layer] = []
        x = example_input
        with torch.no_grad(), in_modes(net, lambda module: False):
            for name, module in self._chain(net):
                own = {local: names[id(p)] for local, p in module.named_parameters(remove_duplicate=False)}
                self._layers.append(_Layer(name, module, x.shape[1:], own))
                x = module(x)
        if not any(layer.tensors for layer in self._layers):
            raise ValueError("LipschitzPrior: the network has no layer with weights, so there is nothing to bound")

    def _chain(self, module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
        """Give the layers in the order in which the input passes them."""
        kind = type(module)
        if kind is nn.Sequential and self._bound(name, module) is None:
            for key, part in module.named_children():
                yield from self._chain(part, f"{name}.{key}".removeprefix("."))
            return
        if self._bound(name, module) is None and (reason := _unknown(module)):
            what = f"the layer {name!r}" if name else "the network"
            raise ValueError(
                f"LipschitzPrior cannot bound {what} ({kind.__name__}): {reason}; say how with bounds={{name or class: "
                "a number, or a function of the module and its tensors}"
            )
        yield name, module

    def _bound(self, name: str, module: nn.Module) -> Bound | None:
        return self.bounds.get(name, self.bounds.get(type(module)))

    def extra_repr(self) -> str:
        return f"{type(self._net[0]).__name__}, strength={self.strength}"

    def norms(self, parameters: Parameters, theta: Tensor) -> dict[str, Tensor]:
        """Each layer's operator norm, or the bound taken for it, in their order: [S, P] → [S] each."""
        named, S = parameters.unravel(theta), len(theta)
        if not any(name in named for layer in self._layers for name in layer.tensors.values()):
            raise ValueError(f"LipschitzPrior: none of the tensors {parameters.names[:8]} belongs to its network")
        held = {name: p.detach().unsqueeze(0) for name, p in self._net[0].named_parameters() if name not in named}
        every = {**held, **named}
        found = {}
        with alone_with(self._net[0]):
            for layer in self._layers:
                own = {local: every[name].expand(S, *every[name].shape[1:]) for local, name in layer.tensors.items()}
                norm = torch.as_tensor(self._norm(layer, own, S), dtype=theta.dtype, device=theta.device)
                found[layer.name] = norm.expand(S)
        return found

    def _norm(self, layer: _Layer, own: dict[str, Tensor], S: int) -> Tensor | float:
        """One layer's norm at its tensors [S, ..]."""
        name, module, shape, _ = layer
        bound = self._bound(name, module)
        if callable(bound):
            values = [bound(module, {local: x[s] for local, x in own.items()}) for s in range(S)]
            if not all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
                raise ValueError(
                    f"LipschitzPrior: the bound of {name!r} must return a scalar tensor, got {values[0]!r}"
                )
            return torch.stack([value.reshape(()) for value in values])
        if bound is not None:
            return bound
        if type(module) is nn.Linear:
            return torch.linalg.matrix_norm(own["weight"], ord=2)
        if isinstance(module, BATCH_NORMS):
            scale = (module.running_var + module.eps).rsqrt()  # pyright: ignore[reportOptionalOperand]
            return (own["weight"] * scale if module.affine else scale).abs().amax(-1)
        if isinstance(module, LINEAR):
            return operator_norm(module, own, shape, S)
        constant = CONSTANTS.get(type(module), 1.0)
        return constant(module) if callable(constant) else constant

    def forward(self, parameters: Parameters, theta: Tensor) -> Tensor:
        if not bool(torch.isfinite(theta).all()):
            return theta.new_full(theta.shape[:1], torch.nan)  # singular values of such weights would fail to converge
        product = theta.new_ones(theta.shape[0])
        total = torch.zeros_like(product)
        for layer, norm in zip(self._layers, self.norms(parameters, theta).values(), strict=True):
            product = product * norm
            if layer.tensors:
                total = total + product
        return -self.strength * total


def _unknown(module: nn.Module) -> str:
    """Why there is no rule for this layer; empty where there is one."""
    kind = type(module)
    if kind in MAX_POOLS:
        three = [torch.as_tensor(getattr(module, name)) for name in ("kernel_size", "stride")]
        apart = bool((three[0] <= three[1]).all()) and torch.as_tensor(module.dilation).eq(1).all()
        return "" if apart else "its windows overlap"
    if isinstance(module, BATCH_NORMS) and module.running_var is None:
        return "it normalises by the batch"
    if isinstance(module, nn.GELU) and module.approximate != "none":
        return "only the exact GELU has a known constant"
    known = kind is nn.Linear or kind in LINEAR or kind in BATCH_NORMS or kind in CONSTANTS
    return "" if known else f"the norm of a {kind.__name__} is not known, nor the way through its forward"


def operator_norm(module: nn.Module, tensors: Mapping[str, Tensor], shape: torch.Size, S: int) -> Tensor:
    """Return the largest singular value of an affine layer at its tensors [S, ..], [S].

    Its right singular vector v is the best of a Krylov space of AᵀA (Lanczos), again and again from the last one; then
    σ = ‖Av‖, whose gradient at fixed v is that of uᵀAv.
    """
    tensors = {name: torch.zeros_like(x) if name == "bias" else x for name, x in tensors.items()}
    fixed = {name: x.detach().double() for name, x in tensors.items()}

    def image(own: Mapping[str, Tensor], v: Tensor) -> Tensor:
        return vmap(lambda own, x: functional_call(module, own, (x.unsqueeze(0),)))(own, v.view(S, *shape)).flatten(1)

    device = next((x.device for x in fixed.values()), torch.device("cpu"))
    start = torch.randn(shape.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v, last = start.to(device).expand(S, -1), torch.zeros(S, dtype=torch.float64, device=device)
    pull = vjp(lambda x: image(fixed, x), v)[1]
    for _ in range(RESTARTS):
        v, value = _best_in_krylov_space(lambda x: pull(image(fixed, x))[0], v)
        if bool(((value - last).abs() <= TOLERANCE * value).all()):
            break
        last = value
    else:
        raise ArithmeticError(f"an operator norm has not converged after {RESTARTS} searches in a Krylov space")
    Av = image(tensors, v.to(next(iter(tensors.values()), v)))
    length = Av.detach().norm(dim=-1, keepdim=True).clamp(min=torch.finfo(Av.dtype).tiny)
    return (Av.detach() / length * Av).sum(-1)  # has a gradient at zero too


@torch.no_grad()
def _best_in_krylov_space(gram: Callable[[Tensor], Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest Ritz vector, with its value, of S positive semidefinite operators, from v [S, n]."""
    basis, images = v.new_zeros(v.shape[0], 0, v.shape[1]), []
    for _ in range(min(KRYLOV, v.shape[1])):
        size = v.norm(dim=-1, keepdim=True)
        for _ in range(2):  # once more removes what rounding left
            v = v - torch.einsum("sj,sjn->sn", torch.einsum("sjn,sn->sj", basis, v), basis)
        length = v.norm(dim=-1, keepdim=True)
        v = torch.where(length > ROUNDING * size, v / length, 0.0)  # the space is exhausted: only rounding is left
        basis = torch.cat([basis, v.unsqueeze(1)], 1)
        v = gram(v)
        images.append(v)
    T = torch.einsum("sin,sjn->sij", basis, torch.stack(images, 1))
    values, vectors = torch.linalg.eigh(0.5 * (T + T.mT))
    return torch.einsum("sj,sjn->sn", vectors[..., -1], basis), values[:, -1]
