"""f(x; θ₀) + J(x)(θ − θ₀) against dense Jacobians, for the operations that networks are made of."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.functional import affine_grid, grid_sample, scaled_dot_product_attention

from structvi.networks.linearised import Linearised


class Sine(torch.autograd.Function):
    """A custom function in the older style, without rules for transforms."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class Calls(nn.Module):
    """Layers, and what is done with them."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *x):
        return self.run(self, *x)


def attention(net, x):
    return net.out(scaled_dot_product_attention(*net.qkv(x).chunk(3, -1)))


def sampled(net, x):
    grid = affine_grid(torch.eye(2, 3).expand(len(x), 2, 3).to(x), list(x.shape), align_corners=False)
    return grid_sample(net.conv(x), grid, align_corners=False)


def image(channels=1, side=6):
    return lambda: torch.randn(4, channels, side, side)


NETWORKS = {
    "dense": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), lambda: torch.randn(4, 3)),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()).eval(),
        image(),
    ),
    "batch norm in training": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 2)).train(),
        image(),
    ),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten()), image()),
    "embedding": (
        lambda: Calls(lambda net, x: net.out(net.words(x).mean(1)), words=nn.Embedding(7, 3), out=nn.Linear(3, 2)),
        lambda: torch.randint(7, (4, 5)),
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(),
        lambda: torch.randn(4, 3, 4),
    ),
    "fused attention": (
        lambda: Calls(attention, qkv=nn.Linear(4, 12), out=nn.Linear(4, 2)),
        lambda: torch.randn(4, 3, 4),
    ),
    "LSTM": (
        lambda: Calls(lambda net, x: net.lstm(x)[0], lstm=nn.LSTM(3, 4, batch_first=True)),
        lambda: torch.randn(4, 3, 3),
    ),
    "grid_sample": (lambda: Calls(sampled, conv=nn.Conv2d(1, 2, 3, padding=1)), image()),
    "custom function": (
        lambda: Calls(lambda net, x: Sine.apply(net.out(x)), out=nn.Linear(3, 2)),
        lambda: torch.randn(4, 3),
    ),
}


def samples_twice():
    """Whether this torch has what grid_sample needs here, the derivative of its backward: torch 2.6 has not."""
    x = torch.zeros(1, 1, 2, 2, requires_grad=True)
    (slope,) = torch.autograd.grad(
        grid_sample(x, torch.zeros(1, 1, 1, 2), align_corners=False).square().sum(), x, create_graph=True
    )
    try:
        torch.autograd.grad(slope.sum(), x)
    except RuntimeError:
        return False
    return True


def network(name, dtype):
    if name == "grid_sample" and not samples_twice():
        pytest.skip("this torch cannot differentiate grid_sample twice")
    make, inputs = NETWORKS[name]
    x = inputs()
    return make().to(dtype), x.to(dtype) if x.is_floating_point() else x


def pieces(net):
    at = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    return at, buffers


def dense_jacobian(net, at, buffers, x):
    """By reverse mode one output at a time, without transforms."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in at.items()}
    copies = {name: buffer.clone() for name, buffer in buffers.items()}
    y = functional_call(net, {**copies, **leaves}, (x,))
    rows = []
    for value in y.flatten():
        gradients = torch.autograd.grad(value, list(leaves.values()), retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return y.detach(), torch.stack(rows)


@pytest.mark.parametrize("name", NETWORKS)
def test_values_and_gradients_are_those_of_the_dense_jacobian(name):
    net, x = network(name, torch.float64)
    at, buffers = pieces(net)
    y, J = dense_jacobian(net, at, buffers, x)
    theta = {name: (tensor + torch.randn_like(tensor)).requires_grad_() for name, tensor in at.items()}
    step = torch.cat([(theta[name] - at[name]).detach().flatten() for name in at])
    found = Linearised(at)(net, {**buffers, **theta}, (x,))
    assert torch.allclose(found.flatten(), y.flatten() + J @ step, rtol=1e-9, atol=1e-9)
    u = torch.randn_like(found)
    gradients = torch.autograd.grad((u * found).sum(), list(theta.values()), materialize_grads=True)
    gradient = torch.cat([gradient.flatten() for gradient in gradients])
    assert torch.allclose(gradient, J.mT @ u.flatten(), rtol=1e-9, atol=1e-9)
    with torch.no_grad():  # where fast paths without derivatives are taken
        again = Linearised(at)(net, {**buffers, **theta}, (x,))
    assert torch.allclose(again, found, rtol=1e-9, atol=1e-9)


def test_under_vmap_as_one_by_one():
    net, x = network("dense", torch.float64)
    at, _ = pieces(net)
    call = Linearised(at)
    theta = {name: tensor + torch.randn(3, *tensor.shape, dtype=tensor.dtype) for name, tensor in at.items()}
    together = vmap(lambda row: call(net, row, (x,)))(theta)
    one_by_one = [call(net, {name: rows[s] for name, rows in theta.items()}, (x,)) for s in range(3)]
    assert torch.allclose(together, torch.stack(one_by_one), rtol=0, atol=1e-12)


def test_an_operation_without_derivatives_is_named():
    net = Calls(lambda net, x: net.bag(x), bag=nn.EmbeddingBag(5, 2))
    at, _ = pieces(net)
    with pytest.raises(NotImplementedError, match=r"cannot be linearised.*_embedding_bag.*linearise=False"):
        Linearised(at)(net, at, (torch.randint(5, (2, 3)),))


def test_what_is_wrong_with_the_input_is_told_as_it_is():
    net, _ = network("dense", torch.float32)
    at, _ = pieces(net)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Linearised(at)(net, at, (torch.zeros(2, 7),))
