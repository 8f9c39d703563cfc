"""PerLayer against the dense block-diagonal truth, and what becomes of point-estimated blocks."""

import copy

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import structvi as vi


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def interleaved(dtype=torch.float64):
    """Two blocks that alternate in θ."""
    shapes = {"a.weight": (2, 2), "a.bias": (2,), "b.weight": (3,), "b.bias": (1,)}
    return vi.Parameters(
        {name: torch.randn(shape, generator=generator(), dtype=dtype) for name, shape in shapes.items()}
    )


def shaken(family, space, seed=1):
    """Bound, with every variational parameter moved off its start."""
    bound = family.bind(space, generator(seed))
    with torch.no_grad():
        for parameter in bound.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype))
    return bound


def dense_truth(bound):
    """Mean and covariance from the blocks themselves, scattered to their places."""
    space = bound.space
    mean = torch.zeros(space.size, dtype=space.dtype)
    covariance = torch.zeros(space.size, space.size, dtype=space.dtype)
    for b, part in enumerate(bound.parts()):
        names = [name for name, owner in zip(space.names, bound.owners, strict=True) if owner == b]
        index = torch.cat([torch.arange(space.size)[space.slice(name)] for name in names])
        mean[index] = part().mean.detach()
        covariance[index.unsqueeze(-1), index] = part().covariance().detach()
    return mean, covariance


def test_interleaved_blocks_equal_the_dense_block_diagonal_gaussian():
    space = interleaved()
    bound = shaken(vi.PerLayer({"*.weight": vi.LowRankNormal(3), "*.bias": vi.LowRankNormal(2)}), space)
    q = bound()
    mean, covariance = dense_truth(bound)
    truth = MultivariateNormal(mean, covariance)
    theta = q.draw(16, vi.couplings.naive, generator()).theta.detach()
    torch.testing.assert_close(q.mean, mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(q.covariance(), covariance, rtol=0, atol=1e-12)
    torch.testing.assert_close(q.variance, covariance.diagonal(), rtol=0, atol=1e-12)
    torch.testing.assert_close(q.log_prob(theta), truth.log_prob(theta), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(q.entropy(), truth.entropy(), rtol=1e-10, atol=1e-10)
    expected = -torch.linalg.solve(covariance, (theta - mean).mT).mT
    torch.testing.assert_close(q.score(theta), expected, rtol=1e-9, atol=1e-9)
    assert q.covariance("a.weight", "b.weight").abs().max() > 0, "one block correlates across layers"
    assert torch.equal(q.covariance("a.weight", "b.bias"), torch.zeros(4, 1, dtype=torch.float64))
    other = shaken(vi.FullNormal(), space, seed=5)()
    dense_kl = torch.distributions.kl_divergence(truth, MultivariateNormal(other.mean, other.covariance()))
    torch.testing.assert_close(vi.kl(q, other), dense_kl, rtol=1e-9, atol=1e-9)
    reverse = torch.distributions.kl_divergence(MultivariateNormal(other.mean, other.covariance()), truth)
    torch.testing.assert_close(vi.kl(other, q), reverse, rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------------- point estimates


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh())
        self.head = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.head(self.backbone(x))


def regression(prior=None, **settings):
    torch.manual_seed(0)
    net = Net().double()
    data = (torch.randn(10, 3, dtype=torch.float64), torch.randn(10, 2, dtype=torch.float64))
    model = vi.BayesianModel(net, vi.likelihoods.Gaussian(0.5), prior or vi.priors.NormalPrior(1.0), 40, **settings)
    return net, model, data


BLOCKS = {"backbone.*": vi.MAP(), "head.*": vi.LowRankNormal(2)}


def test_point_blocks_stay_out_of_theta_and_are_marked():
    _, model, _ = regression()
    q = vi.PerLayer(BLOCKS).bind(model.space, generator())()
    theta, weight, fixed = q.draw(3, vi.couplings.unscented, generator())
    assert theta.shape == (3 * 8, 10)
    torch.testing.assert_close(weight, torch.full((24,), 1 / 24, dtype=torch.float64))
    assert list(fixed) == [name for name in model.space.names if name.startswith("backbone")]
    assert q.has_density
    assert not q.bound
    assert q.mean.shape == q.variance.shape == (model.space.size,)
    assert not q.covariance("backbone.0.weight").any()
    assert not q.covariance("backbone.0.weight", "head.bias").any()
    head = vi.LowRankNormal(2).bind(model.space.subset(["head.weight", "head.bias"]), generator())()
    torch.testing.assert_close(q.entropy(), head.entropy())
    torch.testing.assert_close(q.log_prob(theta), head.log_prob(theta))
    torch.testing.assert_close(q.score(theta), head.score(theta))
    assert vi.PerLayer({"*": vi.LowRankNormal(2)}).bind(model.space)().bound


@pytest.mark.parametrize(("evaluation", "estimator"), [("vmap", "path"), ("loop", "entropy"), ("vmap", "log_q")])
def test_the_objective_is_that_of_the_joined_weights(evaluation, estimator):
    by_pattern = vi.priors.NormalPrior({"head.*": 0.5, "*": 2.0})
    _, model, data = regression(by_pattern + vi.priors.LaplacePrior(3.0), evaluation=evaluation)
    family = shaken(vi.PerLayer(BLOCKS), model.space)
    value = vi.elbo(family, model, data, vi.Estimator(estimator, groups=2), generator(4))
    gradients = torch.autograd.grad(value, list(family.parameters()))
    # by hand, from [S, P] of all weights
    q, frozen = family(), copy.deepcopy(family).requires_grad_(False)()
    theta, _, fixed = q.draw(2, vi.couplings.paired, generator(4))
    joint = model.log_joint(model.space.join(theta, fixed), data)
    log_q = {
        "entropy": lambda: -q.entropy(),
        "log_q": lambda: q.log_prob(theta),
        "path": lambda: frozen.log_prob(theta),
    }
    expected = (joint - log_q[estimator]()).mean()
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    for got, want in zip(gradients, torch.autograd.grad(expected, list(family.parameters())), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


def test_vmap_passes_the_backbone_once():
    _, model, data = regression(evaluation="vmap")
    family = vi.PerLayer(BLOCKS).bind(model.space)
    shapes = []
    hook = model.net.backbone.register_forward_hook(
        lambda module, inputs, output: shapes.append(torch._C._functorch.is_batchedtensor(output))
    )
    vi.elbo(family, model, data, estimator=vi.Estimator(groups=8))
    hook.remove()
    assert shapes == [False], "one call of the backbone, on a tensor without an axis of draws"
