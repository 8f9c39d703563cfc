"""The step's gradient, with a graph of the network alone, against that of the whole objective by autograd."""

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.train import by_hand
from structvi.train.adam import Adam
from structvi.train.step import Step

N, WEIGHT, TEMPERATURE, GROUPS = 20, 0.4, 0.3, 2


class Wide(vi.priors.NormalPrior):
    """A prior of the user's own, with another density than the one it derives from."""

    def log_density(self, x, scale, log_scale):
        return -x.double().abs().sum(-1)


FAMILIES = [vi.MeanField(), vi.LowRankNormal(3), vi.LowRankPrecision(3), vi.LowRankNormal(0)]
PRIORS = {
    "normal": lambda: vi.priors.NormalPrior(0.7),
    "by fan-in": lambda: vi.priors.NormalPrior.fan_in(0.7),
    "learned": lambda: vi.priors.NormalPrior(0.7, learn=True),
    "Laplace": lambda: vi.priors.LaplacePrior(0.5),
    "of the user's own": lambda: Wide(0.7),
    "a function": lambda: lambda parameters, theta: -theta.square().square().sum(-1),
}


def made(family, prior, likelihood=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    likelihood = vi.likelihoods.Gaussian("point") if likelihood is None else likelihood
    bayes = vi.variationalize(net, likelihood, family, prior, num_data=N, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for factor in bayes.family.factors():
            factor.parameter.mul_(5)
        if family.rank:
            bayes.family.log_scale.add_(0.3 * torch.randn(bayes.family.log_scale.shape))
    return bayes.double()


def batch(rows=5):
    generator = torch.Generator().manual_seed(2)
    x, t = (torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    return x, t


def by_autograd(bayes, batches):
    """The gradient of −Σ weight (E log lik − λ KL)/N, and ELBO and log likelihood of each group."""
    generator, loss, elbo, fit = torch.Generator().manual_seed(3), 0.0, 0.0, 0.0
    for one in batches:
        terms = bayes.terms(one, estimator=vi.Estimator(groups=GROUPS), generator=generator)
        loss = loss - WEIGHT * (terms.fit - TEMPERATURE * terms.complexity).mean() / N
        elbo = elbo + WEIGHT * (terms.fit - terms.complexity).detach()
        fit = fit + WEIGHT * terms.fit.detach()
    parameters = dict(bayes.named_parameters())
    return (elbo, fit), dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def by_step(bayes, batches):
    generator = torch.Generator().manual_seed(3)
    adam = Adam(bayes.parameters(), lr=0.01, factors=bayes.family.factors())
    step = Step(bayes, adam, generator, estimator=vi.Estimator(groups=GROUPS))
    (elbo, fit), norm, thin = step._gradient(batches, [WEIGHT] * len(batches), TEMPERATURE, generator)
    return (elbo, fit), norm, {n: thin[p].dense() if p in thin else p.grad for n, p in bayes.named_parameters()}


def check(bayes, batches):
    expected_told, expected = by_autograd(bayes, batches)
    told, norm, gradients = by_step(bayes, batches)
    torch.testing.assert_close(told, expected_told)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(norm, torch.stack([g.norm() for g in expected.values()]).norm())


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_the_gradient_is_that_of_the_objective(family, prior):
    check(made(family, PRIORS[prior]()), [batch()])


def test_of_several_batches_it_is_the_sum():
    check(made(vi.LowRankNormal(3), vi.priors.NormalPrior(0.7)), [batch(), batch(3)])


def test_with_random_noise_in_the_likelihood():
    check(made(vi.LowRankNormal(3), vi.priors.NormalPrior(0.7), vi.likelihoods.Gaussian("random")), [batch()])


@pytest.mark.parametrize(("groups", "S"), [(1, 1), (1, 2), (3, 6)])
def test_numbers_of_draws_in_python_are_those_of_tensors(groups, S):
    values = torch.randn(3, S, generator=torch.Generator().manual_seed(0))
    given = *values, torch.full((S,), 1 / S), 12.5, groups
    torch.testing.assert_close(by_hand._Numbers.told(*given), by_hand._Terms.told(*given), rtol=1e-6, atol=1e-6)
