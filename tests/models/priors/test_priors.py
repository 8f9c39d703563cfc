"""Priors against torch.distributions and quadrature in float64; learned scales against their closed forms."""

from functools import partial
from math import pi, sqrt

import pytest
import torch
from torch.distributions import (
    Cauchy,
    Laplace,
    Normal,
    StudentT,
)

import structvi as vi
from structvi.models.priors.separable import log_prior

SPACE = vi.Parameters({"a.weight": torch.zeros(3, 4), "a.bias": torch.zeros(3), "b.weight": torch.zeros(2, 3)})
SPACE = vi.Parameters({name: x.double() for name, x in SPACE.unravel(SPACE.initial).items()})


def draws(S=5, space=SPACE):
    return torch.randn(S, space.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def total(distribution, x):
    return distribution.log_prob(x).flatten(1).sum(-1)


PRIORS = {
    "normal": (vi.priors.NormalPrior(0.7), {"": Normal(0.0, 0.7)}),
    "normal by pattern": (
        vi.priors.NormalPrior({"*.bias": 2.0, "*": 0.3}),
        {"a.bias": Normal(0.0, 2.0), "": Normal(0.0, 0.3)},
    ),
    "normal by fan-in": (
        vi.priors.NormalPrior(1.5, by_fan_in=True),
        {
            "a.weight": Normal(0.0, 1.5 / sqrt(4)),
            "a.bias": Normal(0.0, 1.5),
            "b.weight": Normal(0.0, 1.5 / sqrt(3)),
        },
    ),
    "learned normal": (
        vi.priors.NormalPrior({"a.*": 2.0, "b.*": 0.3}, learn=True).double(),
        {"b.weight": Normal(0.0, 0.3), "": Normal(0.0, 2.0)},
    ),
    "laplace": (vi.priors.LaplacePrior(0.4), {"": Laplace(0.0, 0.4)}),
    "student t": (vi.priors.StudentTPrior(2.5, 0.4), {"": StudentT(2.5, 0.0, 0.4)}),
    "student t, small df": (vi.priors.StudentTPrior(0.01, 0.4), {"": StudentT(0.01, 0.0, 0.4)}),
    "distributions": (
        vi.priors.DistributionPrior({"b.*": Cauchy(0.0, 0.5), "*": Normal(0.1, 2.0)}),
        {"b.weight": Cauchy(0.0, 0.5), "": Normal(0.1, 2.0)},
    ),
}


@pytest.mark.parametrize("name", PRIORS)
def test_values_equal_torch_distributions(name):
    prior, truth = PRIORS[name]
    theta = draws()
    expected = sum(total(truth.get(n, truth.get("")), x) for n, x in SPACE.unravel(theta).items())
    got = prior(SPACE, theta)
    # torch.distributions keeps float parameters in float32: Normal(0.0, 0.7) has a scale of 0.7 to 1e-8
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert prior.normalised


@pytest.mark.parametrize("name", PRIORS)
def test_gradients_by_finite_differences(name):
    prior = PRIORS[name][0]
    theta = draws(2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: prior(SPACE, x), (theta,))


def test_learned_scales_have_the_gradient_of_the_density():
    for kind in (vi.priors.NormalPrior, vi.priors.LaplacePrior, partial(vi.priors.StudentTPrior, 3.0)):
        for per in ({}, {"per": "tensor"}) if isinstance(kind, partial) else ({},):
            prior = kind({"a.*": 2.0, "*": 0.3}, learn=True, **per).double()
            theta = draws(2)

            def value(log_scale, prior=prior, theta=theta):
                return torch.func.functional_call(prior, {"log_scale": log_scale}, (SPACE, theta))

            assert torch.autograd.gradcheck(value, (prior.log_scale.detach().clone().requires_grad_(),))


# -------------------------------------------------------------------------------------------------------- grouped t


def test_the_grouped_t_is_a_normal_with_a_shared_inverse_gamma_variance():
    df, scale = 3.0, 0.6
    space = vi.Parameters({"u": torch.zeros(3, dtype=torch.float64), "v": torch.zeros(2, dtype=torch.float64)})
    theta = draws(4, space)
    got = vi.priors.StudentTPrior(df, scale, per="tensor")(space, theta)
    # ∫ N(x; 0, v I) InverseGamma(v; df/2, df scale²/2) dv by quadrature over log v
    log_v = torch.linspace(-12, 14, 40001, dtype=torch.float64)
    a, b = torch.tensor(df / 2, dtype=torch.float64), torch.tensor(df * scale**2 / 2, dtype=torch.float64)
    mixing = torch.distributions.InverseGamma(a, b).log_prob(log_v.exp()) + log_v
    expected = torch.zeros(4, dtype=torch.float64)
    for x in space.unravel(theta).values():
        normal = -0.5 * x.square().sum(-1, keepdim=True) / log_v.exp() - 0.5 * x.shape[-1] * (
            log_v + torch.tensor(2 * pi).double().log()
        )
        expected += torch.logsumexp(normal + mixing, -1) + (log_v[1] - log_v[0]).log()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------------ rules and sums


def test_sums():
    normal, laplace = vi.priors.NormalPrior(1.0), vi.priors.LaplacePrior(2.0)
    theta = draws()
    for prior in (normal + laplace, laplace.forward + normal, vi.priors.SumPrior([normal, laplace])):
        expected = normal(SPACE, theta) + laplace(SPACE, theta)
        torch.testing.assert_close(prior(SPACE, theta), expected)
        assert not prior.normalised
    three = normal + laplace + vi.priors.StudentTPrior(3.0)
    torch.testing.assert_close(three(SPACE, theta), expected + vi.priors.StudentTPrior(3.0)(SPACE, theta))


EVERY = {
    **{name: prior for name, (prior, _) in PRIORS.items()},
    "grouped t": vi.priors.StudentTPrior(2.0, 0.5, per="tensor"),
    "sum": vi.priors.NormalPrior(1.0) + vi.priors.StudentTPrior(2.0, 0.5, per="tensor"),
    "callable": lambda parameters, theta: -theta.abs().amax(-1),
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("fixed_names", [[], ["a.bias"], ["a.weight", "b.weight"], ["a.weight", "a.bias", "b.weight"]])
def test_tensors_that_all_draws_share(name, fixed_names):
    """Value and gradients equal those at the joined weights."""
    prior = EVERY[name]
    values = SPACE.unravel(draws(1)[0])
    fixed = {n: values[n].clone().requires_grad_() for n in fixed_names}
    free = SPACE.size - sum(x.numel() for x in fixed.values())
    random = (2 * draws(4)[:, :free] - 0.1).requires_grad_()
    got = log_prior(prior, SPACE, random, fixed)
    joined = SPACE.ravel(fixed).expand(4, -1) if len(fixed) == len(SPACE) else SPACE.join(random, fixed)
    expected = prior(SPACE, joined)
    torch.testing.assert_close(got, expected)
    inputs = list(fixed.values()) + ([random] if random.numel() else [])
    for a, b in zip(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True):
        torch.testing.assert_close(a, b)
