"""Mean and covariance of outputs, J(μ − θ₀) and J Σ Jᵀ, of networks of linear layers, without their Jacobians.

Of a linear layer u = W a + b the Jacobian of an output is an outer product, δ aᵀ with δ = ∂y/∂u. So with
Σ = diag(d) + V C Vᵀ nothing larger than V a is needed: (J diag(d) Jᵀ)_op = Σ_i δ_oi δ_pi Σ_j d_ij a_j², and
(J V)_ok = Σ_i δ_oi (V_k a)_i. A row takes a backward pass for each output and K + 1 forward passes, where its Jacobian
would be O·P numbers. The scale and shift of a normalisation are elementwise, δ ∘ û and δ.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from ..families.gaussian import Gaussian
from ..parameters import Parameters
from .draws import on_device

if TYPE_CHECKING:
    from ..posterior import Posterior

#: layers that this knows, exactly these types
LAYERS = (nn.Linear, nn.BatchNorm1d, nn.LayerNorm)
#: columns of V; more are no low rank
MOST_COLUMNS = 128
#: so many numbers of V a, and of δ, are held at once
NUMBERS = 2**24


class Moments(NamedTuple):
    mean: Tensor  # [b, ..]
    covariance: Tensor  # [b, O, O]


class LayerMoments:
    """What `jacobians` and `Gaussian.between` give, for a network whose random tensors are those of `LAYERS`.

    Args:
        posterior: one that `has_layers` says yes to.
        theta: θ₀ [P].
        normals: over the weights; the network is called for all of them at once.
        outputs: O.
    """

    def __init__(self, posterior: "Posterior", theta: Tensor, normals: Sequence[Gaussian], outputs: int):
        self.posterior, self.theta = posterior, theta.detach()
        self.normals = [_Named.of(density, theta, posterior.space) for density in normals]
        self.layers = {name.rpartition(".")[0] for name in posterior.space.names}
        shapes = zip(posterior.space.names, posterior.space.shapes, strict=True)
        widths = {name.rpartition(".")[0]: shape[0] for name, shape in shapes}.values()
        columns = max(len(one.C) for one in self.normals)
        self.rows = max(1, NUMBERS // max(columns * max(widths), outputs * sum(widths)))

    def __call__(self, x: Any) -> Iterator[list[Moments]]:
        """Of the outputs at x, some rows at a time, under each normal."""
        x = on_device(x, self.theta.device)
        for start in range(0, len(tree_leaves(x)[0]), self.rows):
            yield self._of(tree_map(lambda leaf, start=start: leaf[start : start + self.rows], x))

    def _of(self, rows: Any) -> list[Moments]:
        y, seen = self._called(rows)
        ends, every = [out for _, _, out in seen], range(y[0].numel())
        with torch.enable_grad():
            sums = y.reshape(len(y), -1).sum(0)  # rows do not depend on each other
            slopes = [torch.autograd.grad(sums[o], ends, retain_graph=o < every[-1]) for o in every]
        with torch.no_grad():
            layers = [
                (name, a, torch.stack([one[place] for one in slopes], 1))  # δ [b, O, n]
                for place, (name, a, _) in enumerate(seen)
            ]
            return [_moments(normal, y.detach(), layers) for normal in self.normals]

    def is_whole(self, rows: Any) -> bool:
        """Whether random tensors reach the output through these layers alone: where these hold them, it is constant."""
        theta = self.theta.clone().requires_grad_()
        return not self._run(theta, rows, lambda _, module, *call: _held(module, _argument(*call[:2]))).requires_grad

    def _called(self, rows: Any) -> tuple[Tensor, list[tuple[str, Tensor, Tensor]]]:
        """The output, and of every layer that has random tensors its name, input and output."""
        seen: list[tuple[str, Tensor, Tensor]] = []

        def keep(name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Tensor) -> Tensor:
            end = out if out.requires_grad else out.detach().requires_grad_()
            seen.append((name, _input(module, _argument(given, named).detach()), end))
            return end.clone()  # what follows may change it in place

        y = self._run(self.theta, rows, keep)
        names = [name for name, _, _ in seen]
        if len(set(names)) < len(names) or set(names) != self.layers or any(a.ndim != 2 for _, a, _ in seen):
            raise ValueError("a layer was called twice, not at all, or with inputs that are not [B, n]")
        return y, seen

    def _run(self, theta: Tensor, rows: Any, hook: Callable[..., Tensor]) -> Tensor:
        """The output at θ [P], where the layers that have random tensors give what the hook makes of their output."""
        posterior = self.posterior
        with ExitStack() as stack:
            net = stack.enter_context(posterior.network_mode())
            stack.enter_context(posterior.model.linearised_around(None))
            for name, module in net.named_modules():
                if name in self.layers:
                    handle = module.register_forward_hook(partial(hook, name), with_kwargs=True)
                    stack.callback(handle.remove)
            with torch.enable_grad():
                return posterior.model.outputs(theta.unsqueeze(0), rows)[0]


class _Named(NamedTuple):
    """A normal with Σ = diag(d) + V C Vᵀ, by the names of its tensors."""

    #: of every random tensor: d, V with its columns last, and μ − θ₀
    tensors: dict[str, tuple[Tensor, Tensor, Tensor]]
    C: Tensor  # [K, K]

    @classmethod
    def of(cls, density: Gaussian, theta: Tensor, space: Parameters) -> "_Named":
        d, V, C = density.low_rank()
        shift, named_d = space.unravel(density.mean - theta), space.unravel(d)
        tensors = {
            name: (named_d[name], V[space.slice(name)].unflatten(0, shift[name].shape), shift[name])
            for name in space.names
        }
        return cls(tensors, C)


def _moments(normal: _Named, y: Tensor, layers: Sequence[tuple[str, Tensor, Tensor]]) -> Moments:
    """Of outputs y at θ₀, from the name, the input and δ of every layer."""
    mean, covariance, W = 0.0, 0.0, 0.0
    for name, a, delta in layers:
        for kind in ("weight", "bias"):
            if (found := normal.tensors.get(f"{name}.{kind}".removeprefix("."))) is not None:
                own = _matrix(delta, a, *found) if found[0].ndim == 2 else _vector(delta, a, kind, *found)
                mean, covariance, W = mean + own[0], covariance + own[1], W + own[2]
    assert isinstance(W, Tensor)
    return Moments(y + torch.as_tensor(mean).reshape(y.shape), covariance + W @ normal.C @ W.mT)


def has_layers(posterior: "Posterior", density: Gaussian) -> bool:
    """Whether the random tensors are those of `LAYERS`, and Σ is a diagonal with few columns.

    It does not see weights that are used elsewhere too, for which `LayerMoments.is_whole` is to be asked, nor layers
    that do something else than their type: the moments of some rows are to be compared with those of Jacobians.
    """
    if type(density).between is not Gaussian.between or density.low_rank().V.shape[1] > MOST_COLUMNS:
        return False
    with posterior.network_mode() as net:
        modules = dict(net.named_modules())
        owners = [name.rpartition(".") for name in posterior.space.names]
        return all(type(modules.get(owner)) in LAYERS and kind in ("weight", "bias") for owner, _, kind in owners)


def _argument(given: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """Of layer(x), or layer(input=x)."""
    (a,) = (*given, *named.values())
    return a


def _held(module: nn.Module, a: Tensor) -> Tensor:
    """What a layer makes of its input, with tensors that have no gradient."""
    weight, bias = (x.detach() if isinstance(x, Tensor) else None for x in (module.weight, module.bias))
    if isinstance(module, nn.Linear):
        assert weight is not None
        return F.linear(a, weight, bias)
    a = _input(module, a)
    a = a if weight is None else a * weight
    return a if bias is None else a + bias


def _input(module: nn.Module, a: Tensor) -> Tensor:
    """What a layer's weight multiplies."""
    if isinstance(module, nn.BatchNorm1d):
        return F.batch_norm(a, module.running_mean, module.running_var, eps=module.eps)
    return F.layer_norm(a, module.normalized_shape, eps=module.eps) if isinstance(module, nn.LayerNorm) else a


def _matrix(delta: Tensor, a: Tensor, d: Tensor, V: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """J(μ − θ₀) [b, O], J diag(d) Jᵀ [b, O, O] and J V [b, O, K] of a weight [n, m], V [n, m, K]."""
    n, m, K = V.shape
    Va = (a @ V.permute(1, 0, 2).reshape(m, n * K)).reshape(len(a), n, K)
    spread = (a.square() @ d.mT).unsqueeze(1)  # [b, 1, n]
    return (delta @ (a @ shift.mT).unsqueeze(-1)).squeeze(-1), (delta * spread) @ delta.mT, delta @ Va


def _vector(delta: Tensor, a: Tensor, kind: str, d: Tensor, V: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same of a bias, or of the weight of a normalisation: [n], V [n, K]."""
    own = delta * a.unsqueeze(1) if kind == "weight" else delta
    return own @ shift, (own * d) @ own.mT, own @ V
