"""`HierarchicalNormalPrior`: a bound of its marginal for every q(σ²), and equal to it at the best."""

import pytest
import torch
from torch.distributions import Gamma, Independent, InverseGamma, Normal

from structvi import Parameters
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
