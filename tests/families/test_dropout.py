"""MC dropout against enumeration and the closed form of the linear Gaussian model."""

from itertools import product

import pytest
import torch
from torch import nn

import structvi as vi

SIGMA = 0.5
COUPLINGS = {
    "naive": vi.couplings.naive,
    "paired": vi.couplings.paired,
    "unscented": vi.couplings.unscented,
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def data(M, seed=0):
    """Features Π [20, M] and observations t [20] of a linear model."""
    features = torch.randn(20, M, generator=generator(seed), dtype=torch.float64)
    true = torch.randn(M, generator=generator(seed + 1), dtype=torch.float64)
    return features, features @ true + SIGMA * torch.randn(20, generator=generator(seed + 2), dtype=torch.float64)


def linear_target(M):
    """log N(t | Πθ, σ²) + log N(θ | 0, I), as a log density over a free vector."""
    features, t = data(M)
    space = vi.Parameters({"z": 0.5 + torch.arange(M, dtype=torch.float64) / M})

    def log_joint(p):
        return -0.5 * ((t - features @ p["z"]) / SIGMA).square().sum() - 0.5 * p["z"].square().sum()

    return vi.LogDensity(log_joint, space)


def all_masks(M):
    return torch.tensor(list(product([0.0, 1.0], repeat=M)), dtype=torch.float64)


def mask_probability(z, keep):
    return (z * keep + (1 - z) * (1 - keep)).prod(-1)


def scatter(family, seed=5, size=0.3):
    """Moves every parameter off its starting value."""
    with torch.no_grad():
        for parameter in family.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator(seed)).to(parameter))
    return family


def flat(gradients):
    return torch.cat([g.reshape(-1) for g in gradients])


def assert_unbiased(samples, expected, what):
    """5 standard errors: with up to 40 comparisons a right estimator fails with probability below 3e-5."""
    error = samples.std(0) / len(samples) ** 0.5
    worst = ((samples.mean(0) - expected).abs() / (error + 1e-10)).max().item()
    assert worst < 5, f"{what}: {worst:.1f} standard errors"


def elbo_gradients(family, target, batch, repeats, **options):
    parameters = list(family.parameters())
    g = generator(11)
    rows = []
    for _ in range(repeats):
        value = vi.elbo(family, target, batch, vi.Estimator(**options), g)
        rows.append(torch.cat([value.detach().reshape(1), flat(torch.autograd.grad(value, parameters))]))
    return torch.stack(rows)


def maximise(objective, parameters):
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = -objective()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_support_lists_every_state_with_its_probability():
    space = vi.Parameters({"z": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)})
    density = vi.MCDropout(keep=0.8).bind(space)()
    theta, probability = density.support()
    z = (theta != 0).double()
    assert len({tuple(row) for row in z.tolist()}) == 8
    torch.testing.assert_close(probability, mask_probability(z, 0.8))
    torch.testing.assert_close(theta, z * space.initial)
    torch.testing.assert_close(probability.sum().item(), 1.0)
    torch.testing.assert_close(probability @ theta, density.mean)
    centred = theta - density.mean
    torch.testing.assert_close(centred.mT @ (probability.unsqueeze(-1) * centred), density.covariance())
    torch.testing.assert_close(density.covariance().diagonal(), density.variance)


@pytest.mark.parametrize(("per", "M"), [("weight", 3 * 2 + 2 * 4 * 4), ("input", 2 + 4), ("output", 3 + 2)])
def test_masks_are_shared_by_units_of_a_network_and_biases_are_exempt(per, M):
    net = nn.Sequential(nn.Linear(2, 3), nn.Conv2d(4, 2, 2), nn.BatchNorm2d(2)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.5)
    space = vi.Parameters.of(net)
    density = vi.MCDropout(keep=0.5, per=per).bind(space)()
    assert density.layout.M == M
    draws = density.draw(200, vi.couplings.paired, generator())
    named = space.unravel(draws.theta.detach())
    for name in ("0.bias", "1.bias", "2.weight", "2.bias"):
        assert (named[name] == 1.5).all()
    for name in ("0.weight", "1.weight"):
        tensor = named[name]
        assert ((tensor == 0) | (tensor == 1.5)).all()
        axes = {"weight": (), "input": (1,), "output": (0,)}[per]
        if axes:  # one value along all other axes, and the units apart
            units = tensor.movedim(1 + axes[0], 1).flatten(2)
            assert (units == units[..., :1]).all()
            assert (units[:, 0, 0] != units[:, 1, 0]).any()


def test_keep_one_holds_where_the_normal_distribution_function_rounds_to_one():
    def far(groups, P, K, generator, dtype, device):
        return vi.couplings.Noise(torch.full((groups, P), 9.0, dtype=dtype), torch.zeros(groups, K, dtype=dtype))

    density = vi.MCDropout(keep=1.0).bind(vi.Parameters({"z": torch.ones(3)}))()
    assert (density.draw(1, far).theta == 1).all()


@pytest.mark.parametrize("keep", [0.3, 0.9, 1.0])
def test_optimum_on_a_linear_model_is_the_closed_form(keep):
    M = 8
    target = linear_target(M)
    family = vi.MCDropout(keep=keep).bind(target.space)

    def objective():
        theta, probability = family().support()
        return (probability * target.log_joint(theta)).sum()

    maximise(objective, [family.point])
    features, t = data(M)
    G, b = features.mT @ features / SIGMA**2, features.mT @ t / SIGMA**2
    closed = torch.linalg.solve(keep * G + (1 - keep) * torch.diag(G.diagonal()) + torch.eye(M), b)
    torch.testing.assert_close(family.point.detach(), closed, rtol=0, atol=1e-8)


@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
def test_stochastic_objective_and_gradient_are_unbiased(coupling):
    target = linear_target(6)
    family = scatter(vi.MCDropout(keep=0.7).bind(target.space))
    z = all_masks(6)
    exact = (mask_probability(z, 0.7) * target.log_joint(family.point * z)).sum()
    expected = torch.cat([exact.detach().reshape(1), torch.autograd.grad(exact, family.point)[0]])
    samples = elbo_gradients(family, target, None, 200, groups=20, coupling=coupling)
    assert_unbiased(samples, expected, "MC dropout")
