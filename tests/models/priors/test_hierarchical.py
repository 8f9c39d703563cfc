"""`HierarchicalNormalPrior`: a bound of its marginal for every q(σ²), and equal to it at the best."""

import pytest
import torch
from torch import nn
from torch.distributions import Gamma, Independent, InverseGamma, Normal
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi import Parameters, likelihoods
from structvi.models.priors import HierarchicalNormalPrior, StudentTPrior
from structvi.models.priors.separable import log_prior

F64 = torch.float64
SPACE = Parameters({"w": torch.zeros(3, 4, dtype=F64), "b": torch.zeros(3, dtype=F64)})


def draws(count=7, scale=0.6):
    return scale * torch.randn(count, SPACE.size, generator=torch.Generator().manual_seed(0), dtype=F64)


def set_best(prior, theta):
    """Put q(σ²) to its best for draws θ."""
    prior.check(SPACE)
    square = torch.stack([x.square().flatten(1).sum(-1).mean() for x in SPACE.unravel(theta).values()])
    with torch.no_grad():
        prior.log_rate.copy_((prior.first + 0.5 * square).log())


@pytest.mark.parametrize("df", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("by_fan_in", [False, True])
def test_a_bound_for_every_q_and_the_marginal_at_the_best(df, by_fan_in):
    prior = HierarchicalNormalPrior(df, 0.7, by_fan_in)
    marginal = StudentTPrior(df, 0.7, per="tensor", by_fan_in=by_fan_in)
    theta = draws()
    for shift in (-3.0, -0.5, 0.0, 0.5, 3.0):
        set_best(prior, theta)
        with torch.no_grad():
            prior.log_rate += shift
        assert (prior(SPACE, theta) <= marginal(SPACE, theta) + 1e-10).all()
    for row in theta:
        set_best(prior, row.unsqueeze(0))
        torch.testing.assert_close(prior(SPACE, row.unsqueeze(0)), marginal(SPACE, row.unsqueeze(0)))
        (slope,) = torch.autograd.grad(prior(SPACE, row.unsqueeze(0)).sum(), prior.log_rate)
        torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-10, rtol=0)  # a stationary point


def test_the_value_is_that_of_its_definition():
    prior, theta = HierarchicalNormalPrior(3.0, 0.7), draws(1)
    value = prior(SPACE, theta)
    expected = torch.zeros(1, dtype=F64)
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(0)
    for name, x in SPACE.unravel(theta).items():
        a, b = (3.0 + x[0].numel()) / 2, prior.log_rate[prior.names.index(name)].detach().exp()
        variance = 1 / Gamma(a, b).sample((400_000,))
        likelihood = Independent(Normal(torch.zeros((), dtype=F64), variance.sqrt().unsqueeze(-1)), 1)
        rest = InverseGamma(1.5, 1.5 * 0.49).log_prob(variance) - InverseGamma(a, b).log_prob(variance)
        expected += (likelihood.log_prob(x.reshape(1, -1)) + rest).mean()
    torch.random.set_rng_state(generator_state)
    torch.testing.assert_close(value.detach(), expected, atol=0.02, rtol=0)


def test_gradients():
    prior = HierarchicalNormalPrior(2.0)
    prior.check(SPACE)
    theta = draws(3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: prior(SPACE, x), theta)
    (slope,) = torch.autograd.grad(prior(SPACE, theta).sum(), theta)
    scales = prior.scales(SPACE)  # of a normal prior
    sizes = zip(SPACE.names, SPACE.numels, strict=True)
    unit = torch.cat([torch.full((n,), scales[name], dtype=F64) for name, n in sizes])
    torch.testing.assert_close(slope, -theta / unit.square())


def test_shared_tensors_and_other_networks():
    prior, theta = HierarchicalNormalPrior(2.0), draws(1)
    whole = prior(SPACE, theta)
    named = SPACE.unravel(theta)
    apart = log_prior(prior, SPACE, named["w"].reshape(1, -1), {"b": named["b"][0]})
    torch.testing.assert_close(apart, whole)
    with pytest.raises(ValueError, match="make another for another network"):
        prior(Parameters({"z": torch.zeros(2)}), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="df of a StudentTPrior must be a positive number"):
        HierarchicalNormalPrior(0.0)


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator)
    return x, torch.sin(2 * x[:, :1]) + 0.1 * torch.randn(60, 1, generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))


def fitted(prior, steps=500):
    bayes = vi.variationalize(network(), likelihoods.Gaussian(noise=0.1), vi.MeanField(), prior)
    bayes.fit(DataLoader(TensorDataset(*data()), batch_size=60), steps=steps, progress=False)
    return bayes


def elbo(bayes):
    return bayes.elbo([data()], groups=500, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_a_fit_agrees_with_its_marginal_and_scales_stay(tmp_path):
    marginal, bayes = fitted(StudentTPrior(1.0, per="tensor")), fitted(HierarchicalNormalPrior(1.0))
    there, here = elbo(marginal), elbo(bayes)
    noise = 3 * (there.standard_error**2 + here.standard_error**2) ** 0.5
    assert abs(there.value - here.value) < noise + 1.0  # q(σ²) is a point less than the weights' own spread
    scales = bayes.model.prior.scales(bayes.space)
    assert min(scales.values()) > 0.05
    q = bayes.family()
    square = {name: float(x.sum()) for name, x in bayes.space.unravel((q.mean**2 + q.variance).detach()).items()}
    for name, n in zip(bayes.space.names, bayes.space.numels, strict=True):
        assert scales[name] == pytest.approx(((1.0 + square[name]) / (1.0 + n)) ** 0.5, rel=0.1)  # the closed form
    bayes.save(tmp_path / "it")
    again = vi.load(tmp_path / "it", network())
    assert again.model.prior.scales(again.space) == pytest.approx(scales)
    assert elbo(again).value == pytest.approx(here.value, abs=1e-3)
