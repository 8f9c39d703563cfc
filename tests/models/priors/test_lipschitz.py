"""LipschitzPrior: operator norms against dense matrices, the way through a network, and what it does in training."""

import copy

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.models.priors.lipschitz import operator_norm


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def dense(module, shape):
    """The matrix of an affine layer without its shift, from its values at basis vectors."""
    n = torch.Size(shape).numel()
    with torch.no_grad():
        columns = module(torch.eye(n, dtype=torch.float64).view(n, *shape)).flatten(1)
        shift = module(torch.zeros(1, *shape, dtype=torch.float64)).flatten(1)
    return (columns - shift).mT


LAYERS = {
    "linear": (nn.Linear(5, 7), (5,)),
    "linear on rows": (nn.Linear(3, 4), (2, 3)),
    "conv1d": (nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 9)),
    "conv2d": (nn.Conv2d(2, 3, 3), (2, 6, 5)),
    "conv2d, same": (nn.Conv2d(2, 3, 3, padding="same"), (2, 6, 5)),
    "conv2d, stride": (nn.Conv2d(3, 4, 3, stride=(2, 1), padding=1), (3, 7, 6)),
    "conv2d, groups": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 5)),
    "conv2d, reflect": (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (2, 5, 6)),
    "conv3d": (nn.Conv3d(1, 2, 2, padding=1), (1, 4, 3, 4)),
    "transposed": (nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 4, 4)),
    "average": (nn.AvgPool2d(3, stride=2, padding=1), (2, 7, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_norms_equal_those_of_dense_matrices(name):
    layer, shape = LAYERS[name]
    net = nn.Sequential(copy.deepcopy(layer), nn.Flatten(), nn.Linear(1, 1)).double()
    width = net[:2](torch.zeros(1, *shape, dtype=torch.float64)).shape[1]
    net[2] = nn.Linear(width, 1).double()
    space = vi.Parameters.of(net)
    theta = torch.randn(3, space.size, generator=generator(), dtype=torch.float64)
    norms = vi.priors.LipschitzPrior(net, torch.zeros(1, *shape, dtype=torch.float64), 1.0).norms(space, theta)
    for s in range(3):
        drawn = copy.deepcopy(net)
        drawn.load_state_dict({**net.state_dict(), **space.unravel(theta[s])})
        for index, inner in (("0", shape), ("2", (width,))):
            truth = torch.linalg.matrix_norm(dense(drawn[int(index)], inner), ord=2)
            torch.testing.assert_close(norms[index][s], truth, rtol=1e-6, atol=0)


def test_convolutions_on_larger_maps_with_a_crowded_spectrum():
    """16 × 16 maps: neighbouring singular values within a percent of each other."""
    conv = nn.Conv2d(2, 2, 3, padding=1, bias=False).double()
    truth = torch.linalg.svdvals(dense(conv, (2, 16, 16)))
    assert truth[1] / truth[0] > 0.98
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        got = operator_norm(conv, {"weight": conv.weight.detach().to(dtype)[None]}, torch.Size((2, 16, 16)), 1)
        torch.testing.assert_close(got[0].double(), truth[0], rtol=tolerance, atol=0)


@pytest.mark.parametrize("layer", [nn.Linear(3, 4, bias=False), nn.Conv1d(3, 4, 1, bias=False)])
def test_gradients_of_the_norms(layer):
    """uvᵀ, of a matrix and of a map that is only known by what it does; at zero it is finite."""
    net, x = nn.Sequential(layer, nn.Flatten()).double(), torch.zeros(1, 3, dtype=torch.float64)
    prior = vi.priors.LipschitzPrior(net, x.unsqueeze(-1) if isinstance(layer, nn.Conv1d) else x, 1.0)
    space = vi.Parameters.of(net)
    W = torch.randn(2, 12, generator=generator(), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(-prior(space, W).sum(), W)
    U, _, Vh = torch.linalg.svd(W.detach().view(2, 4, 3), full_matrices=False)
    torch.testing.assert_close(gradient.view(2, 4, 3), U[:, :, :1] @ Vh[:, :1], rtol=1e-6, atol=1e-6)
    zero = torch.zeros_like(W).requires_grad_()
    assert torch.isfinite(torch.autograd.grad(prior(space, zero).sum(), zero)[0]).all()


def small_convnet():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.Tanh(), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2)
    ).double().eval()  # fmt: skip


def test_the_gradient_of_the_prior_against_finite_differences():
    net = small_convnet()
    net[2].running_var.copy_(torch.tensor([0.5, 2.0]))
    prior = vi.priors.LipschitzPrior(net, torch.zeros(1, 1, 4, 4, dtype=torch.float64), strength=0.3)
    space = vi.Parameters.of(net)
    theta = torch.randn(1, space.size, generator=generator(), dtype=torch.float64, requires_grad=True)
    # the singular vectors are found to 1e-6 at least: so are the finite differences of the norms
    assert torch.autograd.gradcheck(lambda x: prior(space, x), (theta,), eps=1e-5, atol=1e-5, rtol=1e-4, fast_mode=True)


def test_the_formula():
    net = nn.Sequential(
        nn.Linear(3, 4), nn.Sigmoid(), nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 2)
    ).double()
    space = vi.Parameters.of(net)
    theta = torch.randn(4, space.size, generator=generator(), dtype=torch.float64)
    prior = vi.priors.LipschitzPrior(net, torch.zeros(1, 3, dtype=torch.float64), 0.7, {nn.Sigmoid: 0.25})
    named = space.unravel(theta)
    a, b, c = (torch.linalg.matrix_norm(named[f"{n}.weight"], ord=2) for n in ("0", "2.0", "3"))
    torch.testing.assert_close(prior(space, theta), -0.7 * (a + a / 4 * b + a / 4 * b * c))
    assert list(prior.norms(space, theta)) == ["0", "1", "2.0", "2.1", "3"]
    assert not prior.normalised
    assert not list(prior.parameters())


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Strange(nn.Linear):
    def forward(self, input):
        return super().forward(10 * input)


def test_tied_held_and_bare_layers():
    tied = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight
    space = vi.Parameters.of(tied)
    norms = vi.priors.LipschitzPrior(tied, torch.zeros(1, 3), 1.0).norms(space, 2 * space.initial[None])
    torch.testing.assert_close(norms["2"], norms["0"])
    torch.testing.assert_close(norms["0"][0], 2 * torch.linalg.matrix_norm(tied[0].weight, ord=2))

    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    head = vi.Parameters.of(net, "2.*")
    norms = vi.priors.LipschitzPrior(net, torch.zeros(1, 3), 1.0).norms(head, 3 * head.initial.expand(2, -1))
    torch.testing.assert_close(norms["0"], torch.linalg.matrix_norm(net[0].weight.detach(), ord=2).expand(2))
    torch.testing.assert_close(norms["2"][1], 3 * torch.linalg.matrix_norm(net[2].weight, ord=2))

    bare = nn.Linear(3, 2)
    value = vi.priors.LipschitzPrior(bare, torch.zeros(1, 3), 1.0)(vi.Parameters.of(bare), torch.ones(1, 8))
    torch.testing.assert_close(value, -torch.tensor([6.0]).sqrt())


def test_bounds_tell_how():
    net = nn.Sequential(Residual(nn.Linear(3, 3)), nn.LayerNorm(3), nn.Linear(3, 1))
    space = vi.Parameters.of(net)

    def residual(module, tensors):
        return 1 + torch.linalg.matrix_norm(tensors["inner.weight"], ord=2)

    prior = vi.priors.LipschitzPrior(net, torch.zeros(1, 3), 1.0, bounds={Residual: residual, "1": 2.5})
    theta = torch.randn(4, space.size, generator=generator())
    norms = prior.norms(space, theta)
    expected = 1 + torch.linalg.matrix_norm(space.unravel(theta)["0.inner.weight"], ord=2)
    torch.testing.assert_close(norms["0"], expected)
    assert norms["1"].tolist() == [2.5] * 4


def test_the_network_is_left_alone():
    net = small_convnet()
    before = copy.deepcopy(net.state_dict())
    prior = vi.priors.LipschitzPrior(net, torch.randn(3, 1, 4, 4, dtype=torch.float64), 1.0)
    space = vi.Parameters.of(net)
    prior(space, space.initial[None] + 1)
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    expected = prior(space, space.initial[None])
    net.train()  # the norms are those of eval mode
    assert torch.equal(prior(space, space.initial[None]), expected)
    vi.priors.LipschitzPrior(net, torch.randn(3, 1, 4, 4, dtype=torch.float64), 1.0)
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    assert all(module.training for module in net.modules())
    assert torch.isnan(prior(space, space.initial[None] / 0)).all()


LINE, IMAGE = torch.zeros(1, 4), torch.zeros(1, 1, 4, 4)
UNKNOWN = {
    "LayerNorm": (nn.LayerNorm(4), LINE),
    "MaxPool2d": (nn.MaxPool2d(3, stride=2), IMAGE),
    "BatchNorm1d": (nn.BatchNorm1d(4, track_running_stats=False), LINE),
    "Residual": (Residual(nn.Linear(4, 4)), LINE),
    "Strange": (Strange(4, 4), LINE),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_layers_without_a_norm_are_named(kind):
    layer, x = UNKNOWN[kind]
    with pytest.raises(ValueError, match=rf"knows no norm of the layer '1' \({kind}.*give bounds="):
        vi.priors.LipschitzPrior(nn.Sequential(nn.Identity(), layer), x, 1.0)
