"""`vi.fit_density`: exact where the family has the target."""

import copy
from math import log, pi

import pytest
import torch
from torch import nn
from torch.distributions import HalfCauchy, Independent, Normal, StudentT

import structvi as vi
from structvi.density.fixed_draws import FixedDraws, least_draws
from structvi.density.result import FRESH
from structvi.families.full import FullNormalDensity
from structvi_paper.optima import best_kl, random_gaussians


def space(P=2, value=0.0, dtype=torch.float64):
    return vi.Parameters({"z": torch.full((P,), value, dtype=dtype)})


def target(function, P=2, value=0.0):
    return vi.LogDensity(lambda p: function(p["z"]), space(P, value))


class Gaussian:
    """N(mean, covariance), counting the points it is asked for."""

    def __init__(self, mean, covariance):
        self.space = space(len(mean))
        self.exact = FullNormalDensity(mean, torch.linalg.cholesky(covariance))
        self.evaluations = 0

    def log_joint(self, theta, batch=None):
        self.evaluations += len(theta)
        return self.exact.log_prob(theta)


def gaussian(P=6, seed=0):
    means, covariances = random_gaussians(1, P, torch.Generator().manual_seed(seed))
    return Gaussian(means[0], covariances[0])


def fit(*arguments, **options):
    return vi.fit_density(*arguments, progress=False, **options)


def funnel(z):
    """log τ ~ N(0, 1), θ | τ ~ N(0, τ²)."""
    return -0.5 * z[0].square() - z[0] - 0.5 * (z[1] / z[0].exp()).square()


def two_modes(z):
    """⅓ N(3, ½ I) + ⅔ N(−3, I)."""
    left, right = -0.5 * (z + 3).square().sum(), -0.5 * (z - 3).square().sum() / 0.5
    return torch.logaddexp(log(2 / 3) + left - log(2 * pi), log(1 / 3) + right - log(pi))


class Heavy(vi.Family):
    """A user's own family, of which nothing is known but its draws and density."""

    def initialise(self, parameters, generator):
        self.loc = nn.Parameter(parameters.initial.clone())
        self.log_scale = nn.Parameter((0.1 * parameters.scale).log())

    def forward(self):
        return Independent(StudentT(5.0, self.loc, self.log_scale.exp()), 1)


@pytest.mark.parametrize(("draws", "P", "K"), [(16, 5, 3), (64, 5, 3), (8, 4, 0)])
def test_fixed_draws_have_exact_moments_and_stay(draws, P, K):
    coupling = FixedDraws(draws, seed=0)
    noise = coupling(1, P, K, dtype=torch.float64)
    rows = torch.cat(noise, dim=-1)
    assert rows.shape == (draws, P + K)
    torch.testing.assert_close(rows.mean(0), torch.zeros(P + K, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(rows.mT @ rows / draws, torch.eye(P + K, dtype=torch.float64))
    assert coupling(1, P, K, dtype=torch.float64) is noise
    again = FixedDraws(draws, seed=1)(1, P, K, dtype=torch.float64)
    assert not torch.equal(again.diagonal, noise.diagonal)


@pytest.mark.parametrize("family", [vi.LowRankNormal(2), vi.LowRankPrecision(2)])
@pytest.mark.parametrize("estimator", ["entropy", "log_q"])
def test_fixed_draws_give_the_elbo_of_a_gaussian_exactly(family, estimator):
    p = gaussian(4)
    q = family.bind(p.space, torch.Generator().manual_seed(0))
    value = vi.elbo(q, p, estimator=vi.Estimator(estimator, coupling=FixedDraws(12, seed=0)))
    torch.testing.assert_close(value, -vi.kl(q(), p.exact))


@pytest.mark.parametrize(
    "recipe", [vi.FullNormal(), vi.LowRankNormal(6), vi.LowRankPrecision(6)], ids=lambda r: type(r).__name__
)
def test_a_family_that_holds_the_target_finds_it(recipe):
    p = gaussian()
    result = fit(p, recipe)
    assert result.converged
    q = result.family()
    # 10⁻³ nats are the default tolerance
    assert vi.kl(q, p.exact).item() < 1e-3
    torch.testing.assert_close(q.covariance(), p.exact.covariance(), atol=0.1, rtol=0.05)
    assert abs(result.elbo.value) < 1e-2


@pytest.mark.parametrize(
    ("recipe", "form"),
    [
        (vi.MeanField(), "covariance"),
        (vi.LowRankNormal(2), "covariance"),
        (vi.LowRankPrecision(2), "precision"),
    ],
    ids=["mean field", "covariance", "precision"],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_smaller_families_come_to_their_best(recipe, form, seed):
    p = gaussian(seed=seed)
    best = best_kl(p.exact.covariance().unsqueeze(0), getattr(recipe, "rank", 0), form, starts=8, steps=300).item()
    result = fit(p, recipe, seed=seed)
    assert vi.kl(result.family(), p.exact).item() < best + 0.01
    # fresh draws: three standard errors of the truth
    assert abs(result.elbo.value + best) < 3 * result.elbo.standard_error + 0.01


def test_evaluations_are_those_that_the_target_saw():
    p = gaussian()
    result = fit(p, vi.LowRankNormal(2))
    assert result.evaluations + result.verdict_evaluations + result.check_evaluations == p.evaluations
    assert result.verdict_evaluations == FRESH
    assert result.trace[-1].evaluations <= result.evaluations
    assert {step.stage for step in result.trace} == {"start", "family"}


def test_a_seed_gives_the_same_fit_and_leaves_the_global_stream_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    results = [fit(gaussian(), vi.LowRankNormal(2), seed=3) for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(*(result.family.parameters() for result in results), strict=True):
        assert torch.equal(a, b)
    other = fit(gaussian(), vi.LowRankNormal(2), seed=4)
    assert not torch.equal(other.family().mean, results[0].family().mean)


def test_scales_that_differ_by_many_orders():
    # a regression as it comes: an intercept near 10³, a slope near 10⁻³, noise on a logarithmic scale
    x = torch.linspace(0, 1e6, 50, dtype=torch.float64)
    t = 1000 + 1e-3 * x + 30 * torch.cos(7 * torch.arange(50.0, dtype=torch.float64))

    def log_density(z):
        return -0.5 * ((t - z[0] - 1e-3 * z[1] * x) * (-z[2]).exp()).square().sum() - 50 * z[2]

    result = fit(target(log_density, P=3), vi.FullNormal())
    assert result.converged
    X = torch.stack([torch.ones_like(x), 1e-3 * x], dim=-1)
    solution = torch.linalg.lstsq(X, t.unsqueeze(-1)).solution.squeeze(-1)
    q = result.family()
    # E_q of the quadratic is minimal where least squares are, whatever the noise
    assert ((q.mean[:2] - solution).abs() < 0.01 * q.variance[:2].sqrt()).all()


def test_a_funnel_is_fitted_and_needs_more_draws_than_a_normal():
    result = fit(target(funnel), vi.FullNormal(), seed=1)
    assert result.converged
    assert result.draws > fit(gaussian(2), vi.FullNormal()).draws
    # on 10⁵ fresh draws no coordinate's ascent is left beyond the noise: E ∂ELBO/∂mean = 0 at the optimum
    q = result.family()
    theta = q.draw(100_000, generator=torch.Generator().manual_seed(9)).theta.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(target(funnel).log_joint(theta).sum(), theta)
    assert ((gradient.mean(0) * q.variance.sqrt()).abs() < 0.05).all()


def test_of_two_modes_a_normal_finds_the_larger():
    single = fit(target(two_modes), vi.FullNormal())
    torch.testing.assert_close(single.family().mean, torch.full((2,), -3.0, dtype=torch.float64), atol=0.05, rtol=0)


def test_a_family_of_ones_own():
    def log_density(z):
        return StudentT(5.0, 2.0, 0.5).log_prob(z).sum()

    result = fit(target(log_density), Heavy())
    assert result.converged
    # plain draws, a few hundred: their error, 1/√256 of a scale of 0.5, and some
    torch.testing.assert_close(result.family().mean, torch.full((2,), 2.0, dtype=torch.float64), atol=0.1, rtol=0)


def test_a_bound_family_goes_on_from_where_it_is_and_is_left_alone():
    p = gaussian()
    q = vi.FullNormal().bind(p.space)
    before = copy.deepcopy(q.state_dict())
    result = fit(p, q)
    assert result.converged
    assert vi.kl(result.family(), p.exact).item() < 1e-3
    assert all(torch.equal(value, before[name]) for name, value in q.state_dict().items())


def test_float32_parameters():
    p = vi.LogDensity(lambda p: -0.5 * (p["z"] - 1).square().sum(), space(dtype=torch.float32))
    result = fit(p, vi.LowRankNormal(1))
    assert result.converged
    assert result.family().mean.dtype == torch.float32
    torch.testing.assert_close(result.family().mean, torch.ones(2), atol=1e-2, rtol=0)


def test_the_limit_of_evaluations_is_kept_and_said():
    limit = FRESH + 16 * least_draws(2)
    result = fit(target(funnel), vi.FullNormal(), max_evaluations=limit)
    assert result.evaluations + result.verdict_evaluations <= limit
    assert not result.converged
    assert "stopped at the limit of evaluations" in result.verdict
    assert "max_evaluations=" in result.verdict
    assert isinstance(result.family, vi.FullNormal)


@pytest.mark.parametrize("recipe", [vi.MeanField(), vi.LowRankNormal(1), vi.FullNormal()])
def test_a_limit_before_there_is_an_elbo_is_said(recipe):
    edge = target(lambda z: (0.1 * z.log() - z).sum(), value=1.0)
    result = fit(edge, recipe, max_evaluations=FRESH + 16 * least_draws(2))
    assert not result.converged
    assert "before an ELBO could be estimated" in result.verdict
    assert "raise max_evaluations=" in result.verdict
    assert "nan" not in str(result)


def test_too_few_draws_are_called_over_fitted():
    # the tails of Student-t with one degree of freedom above the normal's: sigma points do not see them
    result = fit(target(lambda z: StudentT(3.0).log_prob(z).sum(), P=8), vi.LowRankNormal(8), draws=32)
    assert not result.converged
    assert "the draws are over-fitted" in result.verdict
    assert "raise draws=" in result.verdict


@pytest.mark.parametrize(
    ("recipe", "limit"), [(vi.FullNormal(), None), (vi.Mixture(vi.MeanField(), 2), FRESH + 16 * least_draws(2))]
)
def test_a_density_that_cannot_be_normalised(recipe, limit):
    result = fit(target(lambda z: z.sum()), recipe, max_evaluations=limit)
    assert not result.converged
    assert "grows without bound" in result.verdict


def test_an_elbo_without_maximum_leaves_finite_numbers():
    # scales grow until exp overflows
    result = fit(target(lambda z: 1e3 * z.sum() + z.square().sum()), vi.LowRankNormal(1))
    assert not result.converged
    assert torch.isfinite(result.family().mean).all()


def test_a_density_with_an_edge():
    result = fit(target(lambda z: (z.log() - z).sum(), value=1.0), vi.FullNormal())
    assert not result.converged
    assert "not finite at some draws" in result.verdict


def test_a_density_that_is_nowhere_finite():
    with pytest.raises(vi.NonFiniteError, match="not finite around any of 2 starts"):
        fit(target(lambda z: z.sum() * torch.nan), vi.MeanField(), starts=2)


@pytest.mark.parametrize("recipe", [vi.MeanField(), vi.FullNormal(), vi.LowRankNormal(2), vi.LowRankPrecision(2)])
def test_a_gaussian_costs_few_evaluations(recipe):
    # four climbs, 2P draws of a first step, 4P to see that it was the last; 16 and 32 here
    assert fit(gaussian(8), recipe).evaluations < 300


@pytest.mark.parametrize("recipe", [vi.FullNormal(), vi.LowRankNormal(3), vi.LowRankPrecision(3)])
def test_columns_that_are_nearly_the_same(recipe):
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)
    X = torch.stack([torch.ones_like(x), x, x + 1e-3 * torch.cos(50 * x)], dim=-1)
    t = X.sum(-1) + 0.1 * torch.sin(9 * x)
    precision = 100 * X.mT @ X + 1e-4 * torch.eye(3, dtype=torch.float64)
    p = target(lambda z: -0.5 * ((t - X @ z) / 0.1).square().sum() - 0.5e-4 * z.square().sum(), P=3)
    result = fit(p, recipe)
    assert result.converged
    exact = FullNormalDensity(torch.linalg.solve(precision, 100 * X.mT @ t), torch.linalg.cholesky(precision.inverse()))
    theta = result.family().draw(1, FixedDraws(12, seed=0)).theta
    # exact on these draws; 10⁻³ is the tolerance
    assert (result.family().log_prob(theta) - exact.log_prob(theta)).mean().abs() < 1e-3


def test_what_a_limit_ends_is_no_wreck():
    # on few draws a full normal fits the draws of a small network, which mean field on more does not
    x = torch.linspace(-2, 2, 20, dtype=torch.float64).unsqueeze(-1)
    t = torch.sin(2 * x)

    def network(w):
        outputs = torch.tanh(x * w[:5] + w[5:10]) @ w[10:15].unsqueeze(-1) + w[15]
        return -0.5 * ((t - outputs) / 0.1).square().sum() - 0.5 * w.square().sum()

    wide, narrow = (
        fit(target(network, P=16), family, max_evaluations=30_000) for family in (vi.FullNormal(), vi.MeanField())
    )
    assert wide.elbo.value > narrow.elbo.value - 5
    assert wide.elbo.standard_error < 5


def test_an_edge_is_told_as_one():
    """Half a normal, −∞ below zero: climbs end at the edge. It was called improper, after up to 724 thousand points."""
    space = vi.Parameters({"z": torch.ones(1, dtype=torch.float64)})
    target = vi.LogDensity(lambda p: torch.where(p["z"] > 0, -0.5 * p["z"].square(), -torch.inf).sum(), space)
    result = vi.fit_density(target, vi.FullNormal(), progress=False)
    assert result.status is vi.Status.DIVERGED
    assert "not given as positive" in result.verdict
    assert result.evaluations < 50_000


def test_a_funnel_that_no_normal_fits_is_said_early_and_is_not_called_improper():
    """A horseshoe regression of ten predictors: 45,000 evaluations, and of sixty "not sound" after up to 852,000."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(20, 10, generator=generator, dtype=torch.float64)
    y = 2 * X[:, 0] - X[:, 1] + torch.randn(20, generator=generator, dtype=torch.float64)
    scales = {name: vi.constraints.positive(1.0, shape=n) for name, n in (("lam", 10), ("tau", ()), ("sigma", ()))}

    def log_density(p):
        prior = sum(HalfCauchy(1.0).log_prob(p[name]).sum() for name in scales)
        prior = prior + Normal(0.0, p["tau"] * p["lam"]).log_prob(p["beta"]).sum()
        return prior + Normal(X @ p["beta"], p["sigma"]).log_prob(y).sum()

    target = vi.LogDensity(log_density, vi.Parameters({"beta": torch.zeros(10), **scales}))
    result = vi.fit_density(target, vi.FullNormal(), progress=False)
    assert result.status is vi.Status.NO_OPTIMUM
    assert "a normal does not fit this log density" in result.verdict
    assert 'corrected="annealed"' in result.verdict
    assert result.evaluations <= 20_000
    assert result.check_evaluations <= 20_000


def test_float32_is_polished_too():
    """Two classes apart with Cauchy priors: L-BFGS follows Newton's steps, and was given two precisions."""
    x = torch.linspace(-2, 2, 20)

    def log_density(p):
        prior = -torch.log1p((p["a"] / 10).square()) - torch.log1p((p["b"] / 2.5).square())
        return prior + torch.nn.functional.logsigmoid(x.sign() * (p["a"] + p["b"] * x)).sum()

    space = vi.Parameters({"a": torch.zeros(()), "b": torch.zeros(())}, dtype=torch.float32)
    assert vi.fit_density(vi.LogDensity(log_density, space), vi.FullNormal(), progress=False).elbo.value > -10
