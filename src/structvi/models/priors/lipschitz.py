"""A prior on how much a network can stretch its input: `LipschitzPrior`."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from ...networks.call import in_modes
from ...parameters import Parameters
from ...util.checks import check_positive
from .separable import PriorModule

#: relative change of σ² by one search in a Krylov space at which the last one is taken
TOLERANCE = 1e-12
#: vectors in a Krylov space
KRYLOV = 16

Bound = float | Callable[[nn.Module, Mapping[str, Tensor]], Tensor]

#: affine maps, if their class is torch's own
AFFINE = (
    nn.Linear, nn.modules.conv._ConvNd, nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.batchnorm._BatchNorm,
)  # fmt: skip
#: layers without weights that never stretch their input; dropout as in eval mode
SHORT = (
    nn.ReLU, nn.ReLU6, nn.Tanh, nn.Softplus, nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd,
)  # fmt: skip


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

    Linear layers, convolutions, average pooling and BatchNorm in eval mode are measured as linear maps, at the size of
    their input. ReLU, tanh, softplus, dropout and max-pooling without overlap never stretch; of others give `bounds`.

    Args:
        net: an `nn.Sequential`, which may have others inside.
        example_input: [B, ..], for the size of the feature maps.
        strength: > 0.
        bounds: a bound for modules by name or by class: a number, or a function of the module and its tensors at one
            draw, by name, that gives a scalar. A module with a bound may contain anything (a residual block, say).

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
        check_positive(strength, "the strength of a LipschitzPrior")
        self.strength, self.bounds = strength, dict(bounds or {})
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

    def _chain(self, module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
        """Yield the layers in the order in which the input passes them."""
        if self._bound(name, module) is not None or _is_affine(module):
            yield name, module
        elif type(module) is nn.Sequential:
            for key, part in module.named_children():
                yield from self._chain(part, f"{name}.{key}".removeprefix("."))
        else:
            raise ValueError(
                f"LipschitzPrior knows no norm of the layer {name!r} ({type(module).__name__}): give bounds={{name or "
                "class: a number, or a function of the module and its tensors}. Max-pooling must be without overlap, "
                "and BatchNorm with running statistics"
            )

    def _bound(self, name: str, module: nn.Module) -> Bound | None:
        own = self.bounds.get(name, self.bounds.get(type(module)))
        return 1.0 if own is None and _never_stretches(module) else own

    def extra_repr(self) -> str:
        return f"{type(self._net[0]).__name__}, strength={self.strength}"

    def norms(self, parameters: Parameters, theta: Tensor) -> dict[str, Tensor]:
        """Return each layer's operator norm, or the bound taken for it, in their order: [S, P] → [S] each."""
        net, S = self._net[0], len(theta)
        every = {name: p.detach().unsqueeze(0) for name, p in net.named_parameters()} | parameters.unravel(theta)
        found = {}
        with in_modes(net, lambda module: False):
            for layer in self._layers:
                own = {local: every[name].expand(S, *every[name].shape[1:]) for local, name in layer.tensors.items()}
                norm = torch.as_tensor(self._norm(layer, own, S), dtype=theta.dtype, device=theta.device)
                found[layer.name] = norm.expand(S)
        return found

    def _norm(self, layer: _Layer, own: dict[str, Tensor], S: int) -> Tensor | float:
        """Return one layer's norm at its tensors [S, ..]."""
        name, module, shape, _ = layer
        bound = self._bound(name, module)
        if callable(bound):
            return torch.stack([bound(module, {local: x[s] for local, x in own.items()}).reshape(()) for s in range(S)])
        if bound is not None:
            return bound
        if type(module) is nn.Linear:
            return torch.linalg.matrix_norm(own["weight"], ord=2)
        return operator_norm(module, own, shape, S)

    def forward(self, parameters: Parameters, theta: Tensor) -> Tensor:
        if not bool(torch.isfinite(theta).all()):
            return theta.new_full(theta.shape[:1], torch.nan)  # singular values of such weights would fail to converge
        norms = torch.stack(list(self.norms(parameters, theta).values()))  # [layers, S]
        has_weights = [bool(layer.tensors) for layer in self._layers]
        return -self.strength * norms.cumprod(0)[has_weights].sum(0)


def _is_affine(module: nn.Module) -> bool:
    is_torchs = isinstance(module, AFFINE) and type(module).__module__.startswith("torch.nn.")
    return is_torchs and not (isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is None)


def _never_stretches(module: nn.Module) -> bool:
    """Return whether a layer without weights has a Lipschitz constant of one."""
    if not isinstance(module, nn.modules.pooling._MaxPoolNd):
        return isinstance(module, SHORT)
    size, stride, dilation = (torch.as_tensor(getattr(module, x)) for x in ("kernel_size", "stride", "dilation"))
    return bool((size <= stride).all() and (dilation == 1).all())


def operator_norm(module: nn.Module, tensors: Mapping[str, Tensor], shape: torch.Size, S: int) -> Tensor:
    """Return the largest singular value of an affine layer at its tensors [S, ..], [S].

    Its right singular vector v is the best of a Krylov space of AᵀA, again and again from the last one; then σ = ‖Av‖,
    whose gradient at fixed v is the gradient of uᵀAv.
    """
    fixed = {name: x.detach().double() for name, x in tensors.items()}

    def image(own: Mapping[str, Tensor], v: Tensor) -> Tensor:
        call = vmap(lambda own, x: functional_call(module, own, (x.unsqueeze(0),)).flatten())
        return call(own, v.view(S, *shape)) - call(own, v.new_zeros(S, *shape))

    device = next((x.device for x in fixed.values()), torch.device("cpu"))
    start = torch.randn(shape.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v, last = start.to(device).expand(S, -1), torch.zeros(S, dtype=torch.float64, device=device)
    pull = vjp(lambda x: image(fixed, x), v)[1]
    for _ in range(shape.numel()):  # far fewer: the largest values converge first
        v, value = _best_in_krylov_space(lambda x: pull(image(fixed, x))[0], v)
        if bool(((value - last).abs() <= TOLERANCE * value).all()):
            break
        last = value
    Av = image(tensors, v.to(next(iter(tensors.values()), v)))
    length = Av.detach().norm(dim=-1, keepdim=True).clamp(min=torch.finfo(Av.dtype).tiny)
    return (Av.detach() / length * Av).sum(-1)  # has a gradient at zero too


@torch.no_grad()
def _best_in_krylov_space(gram: Callable[[Tensor], Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest Ritz vector, with its value, of S positive semidefinite operators, from v [S, n]."""
    space = [v / v.norm(dim=-1, keepdim=True)]
    while len(space) < min(KRYLOV, v.shape[1]):
        basis, v = torch.stack(space, -1), gram(space[-1])
        v = v - (basis @ (basis.mT @ v.unsqueeze(-1))).squeeze(-1)
        space.append(v / v.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny))
    basis = torch.linalg.qr(torch.stack(space, -1)).Q  # if the space is exhausted, vectors of rounding are completed
    T = basis.mT @ torch.stack([gram(one) for one in basis.unbind(-1)], -1)
    values, vectors = torch.linalg.eigh(T)
    return (basis @ vectors[..., -1:]).squeeze(-1), values[:, -1]
