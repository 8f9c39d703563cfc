"""Priors against torch.distributions and quadrature in float64; learned scales against their closed forms."""

from functools import partial
from math import log, pi, sqrt

import pytest
import torch
from torch import nn
from torch.distributions import (
    Cauchy,
    Independent,
    Laplace,
    MultivariateNormal,
    Normal,
    StudentT,
)

import structvi as vi
from structvi.models.priors.base import log_prior
from structvi.util.configuration import configuration

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
        vi.priors.NormalPrior.fan_in(1.5),
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


def test_double_precision_values_to_rounding():
    space = vi.Parameters({"z": torch.zeros(2, dtype=torch.float64)})
    x = torch.tensor([[0.3, -1.2]], dtype=torch.float64)
    scale = torch.tensor(0.7, dtype=torch.float64)
    truths = {
        vi.priors.NormalPrior(0.7): Normal(torch.zeros_like(scale), scale),
        vi.priors.LaplacePrior(0.7): Laplace(torch.zeros_like(scale), scale),
        vi.priors.StudentTPrior(2.5, 0.7): StudentT(scale.new_tensor(2.5), torch.zeros_like(scale), scale),
    }
    for prior, truth in truths.items():
        torch.testing.assert_close(prior(space, x), total(truth, x), rtol=1e-13, atol=1e-13)


def test_learned_scales_have_the_gradient_of_the_density():
    for kind in (vi.priors.NormalPrior, vi.priors.LaplacePrior, partial(vi.priors.StudentTPrior, 3.0)):
        for per in ({}, {"per": "tensor"}) if isinstance(kind, partial) else ({},):
            prior = kind({"a.*": 2.0, "*": 0.3}, learn=True, **per).double()
            theta = draws(2)

            def value(log_scale, prior=prior, theta=theta):
                return torch.func.functional_call(prior, {"log_scale": log_scale}, (SPACE, theta))

            assert torch.autograd.gradcheck(value, (prior.log_scale.detach().clone().requires_grad_(),))


# -------------------------------------------------------------------------------------------------------- grouped t


@pytest.mark.parametrize("df", [0.5, 1.0, 4.0])
def test_the_grouped_t_integrates_to_one(df):
    """Polar double-exponential quadrature over ℝ^n: ∫ p(|x|) A_n |x|^(n−1) d|x|, for n = 1, 2."""
    prior = vi.priors.StudentTPrior(df, 0.6, per="tensor")
    t = torch.linspace(-4.5, 4.5, 20001, dtype=torch.float64)
    radius = torch.exp(pi / 2 * torch.sinh(t))
    volume = radius * pi / 2 * torch.cosh(t) * (t[1] - t[0])
    for n, sphere in ((1, 2.0), (2, 2 * pi)):
        space = vi.Parameters({"z": torch.zeros(n, dtype=torch.float64)})
        theta = torch.zeros(len(radius), n, dtype=torch.float64)
        theta[:, 0] = radius
        mass = (prior(space, theta).exp() * sphere * radius ** (n - 1) * volume).sum()
        torch.testing.assert_close(mass.item(), 1.0, rtol=1e-6, atol=0)


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


def test_one_weight_is_its_own_group_and_large_groups_are_finite():
    space = vi.Parameters({"z": torch.zeros(1, dtype=torch.float64)})
    theta = torch.tensor([[0.3], [5.0]], dtype=torch.float64)
    torch.testing.assert_close(
        vi.priors.StudentTPrior(1.5, 2.0, per="tensor")(space, theta), vi.priors.StudentTPrior(1.5, 2.0)(space, theta)
    )
    large = vi.Parameters({"z": torch.zeros(1_000_000)})
    theta = torch.randn(1, 1_000_000, generator=torch.Generator().manual_seed(0))
    value = vi.priors.StudentTPrior(1e6, 1.0, per="tensor")(large, theta)
    # as df → ∞ a normal; at df = n they are within a few nats
    assert abs(value - vi.priors.NormalPrior(1.0)(large, theta)) < 10


def test_small_df_is_nearly_scale_invariant():
    """p(cx) cⁿ = p(x) far above the scale: per weight and per group."""
    space = vi.Parameters({"z": torch.zeros(3, dtype=torch.float64)})
    theta = draws(2, space) + 1
    for per in ("weight", "tensor"):
        prior = vi.priors.StudentTPrior(1e-4, 1e-6, per=per)
        scaled = prior(space, 10 * theta) + 3 * torch.log(torch.tensor(10.0).double())
        torch.testing.assert_close(scaled, prior(space, theta), rtol=0, atol=2e-3)


# ------------------------------------------------------------------------------------------------ rules and sums


def test_fan_in_of_layers():
    net = nn.Sequential(nn.Conv2d(3, 8, (2, 5)), nn.Flatten(), nn.Linear(16, 4))
    scales = vi.priors.NormalPrior.fan_in(3.0).scales(vi.Parameters.of(net))
    assert scales == pytest.approx({"0.weight": 3 / sqrt(30), "0.bias": 3.0, "2.weight": 3 / 4, "2.bias": 3.0})
    learned = vi.priors.LaplacePrior.fan_in({"0.*": 3.0, "*": 1.0}, learn=True).scales(vi.Parameters.of(net))
    assert learned == pytest.approx({"0.weight": 3 / sqrt(30), "0.bias": 3.0, "2.weight": 1 / 4, "2.bias": 1.0})


def test_distributions_of_the_tensors_shape():
    covariance = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.2], [0.0, 0.2, 3.0]], dtype=torch.float64)
    whole = MultivariateNormal(torch.ones(3, dtype=torch.float64), covariance)
    scale = torch.rand(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    prior = vi.priors.DistributionPrior(
        {
            "a.bias": whole,
            "a.weight": Normal(torch.zeros_like(scale), scale),
            "b.*": Independent(Normal(scale[:2, :3], 1.0), 2),
        }
    )
    theta = draws()
    named = SPACE.unravel(theta)
    expected = whole.log_prob(named["a.bias"]) + total(Normal(torch.zeros_like(scale), scale), named["a.weight"])
    expected = expected + total(Normal(scale[:2, :3], 1.0), named["b.weight"])
    torch.testing.assert_close(prior(SPACE, theta), expected)


def test_sums():
    normal, laplace = vi.priors.NormalPrior(1.0), vi.priors.LaplacePrior(2.0)
    theta = draws()
    for prior in (normal + laplace, laplace.forward + normal, vi.priors.SumPrior([normal, laplace])):
        expected = normal(SPACE, theta) + laplace(SPACE, theta)
        torch.testing.assert_close(prior(SPACE, theta), expected)
        assert not prior.normalised
    three = normal + laplace + vi.priors.StudentTPrior(3.0)
    torch.testing.assert_close(three(SPACE, theta), expected + vi.priors.StudentTPrior(3.0)(SPACE, theta))


def test_configurations_rebuild_the_prior():
    theta = draws()
    for prior in (
        vi.priors.NormalPrior.fan_in(2.0),
        vi.priors.StudentTPrior(2.0, {"*": 0.3}, per="tensor"),
        vi.priors.LaplacePrior(2.0),
    ):
        again = type(prior)(**configuration(prior))
        assert torch.equal(again(SPACE, theta), prior(SPACE, theta))


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


# ---------------------------------------------------------------------------------------------------- learned scales


@pytest.mark.parametrize("kind", [vi.priors.NormalPrior, vi.priors.LaplacePrior])
def test_a_learned_scale_goes_to_its_closed_form(kind):
    """For fixed q the best scales are σ̂² = E_q mean θ² (normal) and b̂ = E_q mean |θ| (Laplace), per pattern."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    prior = kind({"0.*": 1.0, "2.*": 1.0}, learn=True).double()
    data = (torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64))
    model = vi.BayesianModel(net, vi.likelihoods.Gaussian(0.5), prior, 4)
    family = vi.MeanField(initial_scale=0.5).bind(model.space).requires_grad_(False)
    assert [name for name, _ in model.named_parameters() if name.startswith("prior")] == ["prior.log_scale"]
    optimizer = torch.optim.LBFGS([prior.log_scale], max_iter=100, tolerance_grad=1e-12, tolerance_change=1e-14)

    def closure():
        optimizer.zero_grad()
        loss = -vi.elbo(
            family, model, data, estimator=vi.Estimator(groups=2000), generator=torch.Generator().manual_seed(1)
        )
        loss.backward()
        return loss

    optimizer.step(closure)
    theta = family().draw(2000, vi.couplings.paired, torch.Generator().manual_seed(1)).theta
    q = family()
    for i, names in enumerate((["0.weight", "0.bias"], ["2.weight", "2.bias"])):
        columns = torch.cat([torch.arange(model.space.size)[model.space.slice(name)] for name in names])
        own = theta[:, columns]
        drawn = own.square().mean().sqrt() if kind is vi.priors.NormalPrior else own.abs().mean()
        torch.testing.assert_close(prior.log_scale[i].exp(), drawn, rtol=1e-6, atol=0)
        if kind is vi.priors.NormalPrior:
            exact = (q.mean.square() + q.variance)[columns].mean().sqrt()
            # 2000 pairs of 9 to 56 weights: the relative error of the scale is below 1/√(2·2000·9), times five
            torch.testing.assert_close(prior.log_scale[i].exp(), exact, rtol=5 / sqrt(36000), atol=0)


def test_the_prior_is_checked_when_the_model_is_built():
    net = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"\['haed.\*'\] are left without a tensor"):
        vi.BayesianModel(net, vi.likelihoods.Gaussian(1.0), vi.priors.NormalPrior({"haed.*": 1.0, "*": 1.0}), 10)


MULTI = MultivariateNormal(torch.zeros(5), torch.eye(5))
BAD = {
    "negative": (
        lambda: vi.priors.NormalPrior(-1.0),
        ValueError,
        "the scale of a NormalPrior must be a positive number",
    ),
    "infinite": (lambda: vi.priors.LaplacePrior(float("inf")), ValueError, "must be a positive number"),
    "text": (lambda: vi.priors.NormalPrior("wide"), ValueError, "or a dict of patterns and such numbers, got 'wide'"),
    "in dict": (lambda: vi.priors.NormalPrior({"*": 0.0}), ValueError, "must be a positive number"),
    "empty": (lambda: vi.priors.NormalPrior({}), ValueError, "at least one pattern"),
    "pattern": (lambda: vi.priors.NormalPrior({1: 1.0}), TypeError, "patterns must be strings"),
    "learn": (lambda: vi.priors.NormalPrior(1.0, learn="yes"), TypeError, "learn must be True or False"),
    "unmatched": (
        lambda: vi.priors.NormalPrior({"a.*": 1.0})(SPACE, draws()),
        ValueError,
        "NormalPrior: no pattern .* matches b.weight; add one",
    ),
    "overlap": (
        lambda: vi.priors.NormalPrior({"a.*": 1.0, "*.bias": 1.0, "*": 1.0})(SPACE, draws()),
        ValueError,
        "a.bias match several",
    ),
    "df": (
        lambda: vi.priors.StudentTPrior(0.0),
        ValueError,
        "df of a StudentTPrior must be a positive number, got 0.0",
    ),
    "t scale": (lambda: vi.priors.StudentTPrior(2.0, -3), ValueError, "scale of a StudentTPrior must be a positive"),
    "per": (lambda: vi.priors.StudentTPrior(2.0, per="layer"), ValueError, 'per must be "weight" or "tensor"'),
    "no dict": (
        lambda: vi.priors.DistributionPrior(Normal(0.0, 1.0)),
        TypeError,
        "expects a dict of patterns and torch",
    ),
    "no distribution": (
        lambda: vi.priors.DistributionPrior({"*": 1.0}),
        TypeError,
        "needs a torch distribution, got 1.0",
    ),
    "shape": (
        lambda: vi.priors.DistributionPrior({"*": MULTI})(SPACE, draws()),
        ValueError,
        r"a.weight has shape \(3, 4\), its MultivariateNormal \(5,\)",
    ),
    "sum of nothing": (lambda: vi.priors.SumPrior([]), ValueError, "expects a list of priors"),
    "sum with a number": (lambda: vi.priors.NormalPrior(1.0) + 3, TypeError, "expected a prior .* got 3"),
    "learned sum": (
        lambda: vi.priors.NormalPrior(1.0, learn=True) + vi.priors.LaplacePrior(1.0),
        ValueError,
        "its constant depends on the scale that NormalPrior learns",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_inputs(case):
    action, error, message = BAD[case]
    with pytest.raises(error, match=message):
        action()


@pytest.mark.parametrize("scale", [1.0, 0.25, 3])
def test_normal_equals_the_normal_density(scale):
    space = vi.Parameters({"a": torch.zeros(2, 3).double(), "b": torch.zeros(4).double()})
    theta = torch.randn(5, 10, dtype=torch.float64, requires_grad=True)
    value = vi.priors.NormalPrior(scale)(space, theta)
    zero = torch.zeros((), dtype=torch.float64)  # a number would make a float32 normal
    torch.testing.assert_close(value, Normal(zero, zero + scale).log_prob(theta).sum(-1), rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(value.sum(), theta)
    torch.testing.assert_close(gradient, -theta / scale**2, rtol=1e-12, atol=1e-12)


def test_normal_keeps_float32_and_is_exact_over_a_million_weights():
    space = vi.Parameters({"z": torch.zeros(1_000_000)})
    theta = torch.full((1, 1_000_000), 0.1)
    value = vi.priors.NormalPrior(1.0)(space, theta)
    assert value.dtype == torch.float32
    exact = -1_000_000 * (0.5 * float(theta[0, 0]) ** 2 + 0.5 * log(2 * pi))
    assert value.item() == pytest.approx(exact, rel=1e-6)  # summed naively in float32 it is off by 1e-4 and more


def test_repr():
    assert "2.0" in repr(vi.priors.NormalPrior(2.0))
