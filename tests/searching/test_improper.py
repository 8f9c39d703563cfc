"""Log densities that cannot be normalised are called so, with the numbers that run away; others are left alone."""

from math import log

import pytest
import torch
from torch.distributions import StudentT
from torch.nn.functional import logsigmoid, softplus

import structvi as vi
from structvi.searching.improper import RADII, Runaway

FAMILIES = {
    "mean field": vi.MeanField(),
    "full": vi.FullNormal(),
    "covariance": vi.StructuredNormal(1),
    "precision": vi.StructuredPrecision(1),
    "mixture": vi.Mixture(vi.MeanField(), 2),
}


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def normals(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fit(function, P, family="full", **options):
    space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})
    target = vi.LogDensity(lambda p: function(p["z"]), space)
    return vi.fit(target, FAMILIES[family], progress=False, **options)


def logistic(X, up, prior=None):
    signs = 2 * up.double() - 1

    def log_density(z):
        value = logsigmoid(signs * (X @ z)).sum()
        return value if prior is None else value - 0.5 * (z / prior).square().sum()

    return log_density


def separable(P, prior=None):
    X = normals(60, P)
    return logistic(X, X[:, 0] + 0.3 * X[:, -1] > 0, prior)


def quasi_separable(prior=None):
    """The intercept is determined, by the two at zero; the slope is not."""
    x = tensor(-2, -1, 0, 0, 1, 2)
    return logistic(torch.stack([torch.ones_like(x), x], dim=-1), tensor(0, 0, 0, 1, 1, 1), prior)


def overlapping(z):
    X = normals(60, 3)
    return logistic(X, normals(60, seed=1) < X[:, 0], 10.0)(z)


ROTATION = torch.linalg.qr(normals(5, 5, seed=5))[0]
Y = tensor(28, 8, -3, 7, -1, 1, 18, 12)
S = tensor(15, 10, 16, 11, 9, 11, 10, 18)


def flat(log_tau):
    return 0 * log_tau


def half_cauchy(log_tau):
    return log_tau - softplus(2 * (log_tau - log(5)))


def schools(prior, centred=True, groups=8, mu_scale=5.0):
    y, s = Y[:groups], S[:groups]

    def log_density(z):
        mu, log_tau, rest = z[0], z[1], z[2:]
        value = prior(log_tau) - 0.5 * (mu / mu_scale).square()
        if centred:
            value = value - (0.5 * ((rest - mu) * (-log_tau).exp()).square() + log_tau).sum()
            return value - 0.5 * ((y - rest) / s).square().sum()
        return value - 0.5 * rest.square().sum() - 0.5 * ((y - mu - log_tau.exp() * rest) / s).square().sum()

    return log_density


def funnel(prior):
    return lambda z: prior(z[0]) - 0.5 * ((z[1:] * (-z[0] / 2).exp()).square() + z[0]).sum()


def gaussian(P, low, high):
    """Scales 10^low to 10^high along rotated axes."""
    axes = torch.linalg.qr(normals(P, P, seed=3))[0] / torch.logspace(low, high, P, dtype=torch.float64)
    return lambda z: -0.5 * (z @ axes).square().sum()


#: log density, P, and what the verdict names; a limit where the search would go far
IMPROPER = {
    "separable, 2": (separable(2), 2, "z[0] → +∞", 5_000),
    "separable, 10": (separable(10), 10, "z[0] → +∞", 10_000),
    "quasi-separable": (quasi_separable(), 2, "z[1] → +∞", 5_000),
    "flat": (lambda z: 0 * z.sum(), 3, "z[0] → +∞", None),
    "one of five flat": (lambda z: -0.5 * z[1:].square().sum(), 5, "z[0] → ", None),
    "a rotated one of five flat": (lambda z: -0.5 * (z @ ROTATION)[1:].square().sum(), 5, "z[4] → ", 10_000),
    "a sum alone": (lambda z: -0.5 * ((z[0] + z[1] - 1).square() + z[2:].square().sum()), 4, "z[1] → ", 10_000),
    "funnel": (funnel(flat), 3, "z[0] → −∞", 10_000),
    "funnel, 10": (funnel(flat), 10, "z[0] → −∞", None),
    "exp": (lambda z: z.exp().sum(), 1, "z → +∞", None),
    "exp and normals": (lambda z: z[0].exp() - 0.5 * z[1:].square().sum(), 3, "z[0] → +∞", None),
    "rising": (lambda z: z[0] - 0.5 * z[1:].square().sum(), 4, "z[0] → +∞", None),
    "log τ flat, τ → 0": (schools(flat), 10, "z[1] → −∞", None),
    "log τ flat, not centred": (schools(flat, centred=False), 10, "z[1] → −∞", 10_000),
    "τ flat, one group, τ → ∞": (schools(lambda v: v, False, groups=1), 3, "z[1] → +∞", 10_000),
    "τ flat, two groups, μ flat": (schools(lambda v: v, groups=2, mu_scale=1e300), 4, "z[0] → ", 10_000),
    "a tail of 1/x": (lambda z: -0.5 * torch.log1p(z.square()).sum(), 1, "z → ", None),
    "a product alone": (lambda z: -0.5 * (z[0] * z[1] - 1).square(), 2, "∞", None),
}

PROPER = {
    "scale 1e-3": (lambda z: -0.5 * (z / 1e-3).square().sum(), 3),
    "scale 1e4": (lambda z: -0.5 * (z / 1e4).square().sum(), 3),
    "scales 1e-3 to 1e4": (lambda z: -0.5 * (z / tensor(1e-3, 1, 1e4)).square().sum(), 3),
    "mean 1e6": (lambda z: -0.5 * (z - 1e6).square().sum(), 2),
    "condition 1e8": (gaussian(5, -2, 2), 5),
    "30 numbers": (gaussian(30, -1, 1), 30),
    "Student-t, 3": (lambda z: StudentT(3.0).log_prob(z).sum(), 3),
    "Student-t, 3, of a radius": (lambda z: -3.5 * torch.log1p(z.square().sum() / 3), 4),
    "Cauchy": (lambda z: -torch.log1p(z.square()).sum(), 2),
    "Laplace": (lambda z: -z.abs().sum(), 3),
    "banana": (lambda z: -0.5 * ((z[0] / 2).square() + ((z[1] - z[0].square()) / 0.5).square()), 2),
    "Neal's funnel": (funnel(lambda v: -v.square() / 18), 10),
    "logistic": (overlapping, 3),
    "separable with a prior, 2": (separable(2, 10.0), 2),
    "separable with a prior, 10": (separable(10, 10.0), 10),
    "quasi-separable with a prior": (quasi_separable(10.0), 2),
    "eight schools": (schools(half_cauchy), 10),
    "eight schools, not centred": (schools(half_cauchy, centred=False), 10),
    "eight schools, τ flat": (schools(lambda v: v), 10),
    "log τ ~ N(0, 10²)": (schools(lambda v: -0.5 * (v / 10).square()), 10),
    "log τ ~ N(0, 100²)": (schools(lambda v: -0.5 * (v / 100).square()), 10),
    "two modes": (lambda z: torch.logaddexp(-0.5 * (z + 3).square().sum(), -(z - 3).square().sum()), 2),
    "modes far away": (lambda z: torch.logaddexp(-0.5 * (z + 10).square().sum(), -0.5 * (z - 10).square().sum()), 2),
}


@pytest.mark.parametrize("family", ["mean field", "full"])
@pytest.mark.parametrize("name", IMPROPER)
def test_what_cannot_be_normalised_is_called_so(name, family):
    log_density, P, named, limit = IMPROPER[name]
    result = fit(log_density, P, family, max_evaluations=limit)
    assert result.status is vi.Status.DIVERGED
    assert not result.converged
    assert "cannot be normalised" in result.verdict
    assert "grows without bound" in result.verdict
    assert "give these numbers a prior" in result.verdict
    assert named in result.verdict


@pytest.mark.parametrize("seed", range(6))  # at 5 a normal became singular
def test_a_normal_that_loses_its_digits_ends_the_search(seed):
    log_density, P, *_ = IMPROPER["exp"]
    assert fit(log_density, P, seed=seed).status is vi.Status.DIVERGED


@pytest.mark.parametrize("family", ["covariance", "precision", "mixture"])
@pytest.mark.parametrize("name", ["one of five flat", "a rotated one of five flat", "rising", "funnel, 10"])
def test_other_families_say_so_too(name, family):
    log_density, P, *_ = IMPROPER[name]
    result = fit(log_density, P, family, max_evaluations=8_000)
    assert result.status is vi.Status.DIVERGED
    assert "cannot be normalised" in result.verdict


@pytest.mark.parametrize("family", ["mean field", "full"])
@pytest.mark.parametrize("name", PROPER)
def test_what_can_be_normalised_is_left_alone(name, family):
    result = fit(*PROPER[name], family)
    assert result.converged, result.verdict
    assert result.check_evaluations < 10_000


@pytest.mark.parametrize("family", ["covariance", "precision", "mixture"])
@pytest.mark.parametrize("name", ["condition 1e8", "Cauchy", "banana", "Neal's funnel", "modes far away"])
def test_other_families_leave_it_alone_too(name, family):
    result = fit(*PROPER[name], family, max_evaluations=15_000)
    assert result.status is not vi.Status.DIVERGED, result.verdict


@pytest.mark.parametrize("family", ["mean field", "full"])
@pytest.mark.parametrize("P", [1, 5, 30])
def test_a_gaussian_costs_a_few_evaluations_for_each_number(P, family):
    result = fit(gaussian(P, -0.5, 0.5), P, family)
    # least_draws for the curvature, at most 4P and at least 16; the centre; two points on each of two rays
    assert result.check_evaluations <= max(16, 4 * P) + 1 + 4 * P


def test_the_check_leaves_fit_and_global_stream_alone(monkeypatch):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    log_density, P = PROPER["Neal's funnel"]
    checked = fit(log_density, P)
    assert torch.equal(before, torch.get_rng_state())
    monkeypatch.setattr("structvi.searching.fit.runaway", lambda *_: None)
    alone = fit(log_density, P)
    assert alone.check_evaluations == 0 < checked.check_evaluations
    assert checked.elbo.value == alone.elbo.value
    assert checked.evaluations == alone.evaluations
    for a, b in zip(checked.family.parameters(), alone.family.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_limit_holds_for_the_check_too():
    log_density, P, *_ = IMPROPER["separable, 10"]
    result = fit(log_density, P, max_evaluations=2000)
    assert result.check_evaluations <= 2000
    assert result.status is vi.Status.STOPPED


def test_many_numbers_of_which_one_is_free():
    P = 300
    result = fit(lambda z: -0.5 * z[1:].square().sum(), P, "mean field", starts=1, max_evaluations=40_000)
    assert result.status is vi.Status.DIVERGED
    assert "z[0] → " in result.verdict


def test_names_are_those_of_the_tensors():
    space = vi.Parameters({"slope": torch.zeros(2, 2, dtype=torch.float64), "b": torch.zeros((), dtype=torch.float64)})
    target = vi.LogDensity(lambda p: -0.5 * p["slope"].square().sum() + 0 * p["b"], space)
    assert "nothing stops b → " in vi.fit(target, vi.FullNormal(), progress=False).verdict
    target = vi.LogDensity(lambda p: -0.5 * (p["slope"].square().sum() - p["slope"][1, 0] ** 2 + p["b"] ** 2), space)
    assert "nothing stops slope[1, 0] → " in vi.fit(target, vi.FullNormal(), progress=False).verdict


@pytest.mark.parametrize(
    ("change", "words"), [(0.0, "as high as here"), (-3.0, "3 nats lower"), (1234.0, "1.23e+03 nats higher")]
)
def test_words(change, words):
    said = Runaway(("a → +∞", "b → −∞"), RADII[-1], change).words()
    assert "nothing stops a → +∞, b → −∞. 1,000,000 standard deviations away" in said
    assert f"the log density is {words}" in said
