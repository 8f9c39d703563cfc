"""Draws of the values: of q, and corrected to posteriors whose moments are known in closed form."""

import re
import sys
from math import sqrt

import arviz_stats as az
import pytest
import torch
from scipy.stats import multivariate_t
from torch.distributions import Beta, Dirichlet, Gamma, HalfCauchy, MultivariateNormal, Normal, Poisson

import structvi as vi
from structvi.density.importance import NU, each_log_prob, normals_of, tailed_draws
from structvi.density.mixture import log_density_of, mass_beside
from structvi.density.result import resampled
from structvi.density.targets import Counted
from structvi.diagnostics import Unavailable

N = 2_000


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


COUNTS = tensor([3.0, 0.0, 2.0, 4.0])


def gamma():
    """λ ~ Γ(0.5, 1), four Poisson counts: Γ(9.5, 5)."""
    space = vi.Parameters({"rate": vi.constraints.positive(1.0)})
    prior = Gamma(tensor(0.5), tensor(1.0))
    return vi.LogDensity(lambda p: prior.log_prob(p["rate"]) + Poisson(p["rate"]).log_prob(COUNTS).sum(), space), {
        "rate": (Gamma(tensor(9.5), tensor(5.0)), ())
    }


def beta():
    """Uniform p, 2 of 12: Beta(3, 11); and one that no data are about, 10 + 5·Beta(2, 2)."""
    space = vi.Parameters({"p": vi.constraints.interval(0, 1), "q": vi.constraints.interval(10, 15)})
    other = Beta(tensor(2.0), tensor(2.0))

    def log_density(v):
        return 2 * v["p"].log() + 10 * torch.log1p(-v["p"]) + other.log_prob((v["q"] - 10) / 5)

    return vi.LogDensity(log_density, space), {"p": (Beta(tensor(3.0), tensor(11.0)), ()), "q": (other, (10, 5))}


def dirichlet():
    """Uniform proportions, counts 5, 1, 0, 9."""
    space = vi.Parameters({"p": vi.constraints.simplex(4)})
    counts = tensor([5.0, 1.0, 0.0, 9.0])
    exact = Dirichlet(counts + 1)
    return vi.LogDensity(lambda v: (counts * v["p"].log()).sum(), space), {"p": (exact, ())}


@pytest.mark.parametrize("model", [gamma, beta, dirichlet])
@pytest.mark.parametrize("family", [vi.FullNormal(), vi.MeanField()], ids=["full", "mean field"])
def test_corrected_draws_have_the_moments_of_a_conjugate_posterior(model, family):
    target, exact = model()
    result = vi.fit_density(target, family, progress=False)
    draws = result.sample(N, corrected=True, generator=seeded())
    table = result.summary(corrected=True)
    for name, (posterior, shift) in exact.items():
        low, width = shift or (0, 1)
        mean, sd = low + width * posterior.mean, width * posterior.stddev
        # resampled evenly from weighted draws whose mean has the error mcse; four of both errors together
        error = (table.mcse[name].square() + sd.square() / N).sqrt()
        assert ((draws[name].mean(0) - mean).abs() < 4 * error).all()
        assert ((table.mean[name] - mean).abs() < 4 * table.mcse[name]).all()
        # the relative error of a standard deviation is √(kurtosis − 1)/2 of that of a mean: with a kurtosis of up to 9
        # that is 1.4 of it
        assert ((table.sd[name] - sd).abs() < 4 * 1.4 * table.mcse[name]).all()


def test_corrected_draws_of_a_hierarchy():
    """Eight schools, not centred, against integrals over a grid of log τ."""
    y, s = tensor([28.0, 8, -3, 7, -1, 1, 18, 12]), tensor([15.0, 10, 16, 11, 9, 11, 10, 18])

    def log_density(p):
        theta = p["mu"] + p["tau"] * p["z"]
        prior = Normal(0.0, 5.0).log_prob(p["mu"]) + HalfCauchy(5.0).log_prob(p["tau"])
        return prior + Normal(0.0, 1.0).log_prob(p["z"]).sum() + Normal(theta, s).log_prob(y).sum()

    space = vi.Parameters({"mu": torch.zeros(()), "tau": vi.constraints.positive(1.0), "z": torch.zeros(8)})
    result = vi.fit_density(vi.LogDensity(log_density, space), vi.FullNormal(), progress=False)
    draws = result.sample(6000, corrected=True, generator=seeded())
    theta = draws["mu"].unsqueeze(-1) + draws["tau"].unsqueeze(-1) * draws["z"]
    exact = exact_schools(y, s)
    for name, values in {"mu": draws["mu"], "tau": draws["tau"], "theta": theta}.items():
        mean, sd = exact[name]
        # 6000 of 60 000 weighted draws, of which some 33 000 are effective: four errors of a mean are 0.06 sd, and of a
        # standard deviation, with a kurtosis of up to 16, 0.11 of it
        assert ((values.mean(0) - mean).abs() < 0.06 * sd).all(), name
        assert ((values.std(0) / sd - 1).abs() < 0.11).all(), name


def exact_schools(y, s):
    """Given τ all is normal; τ itself on a grid."""
    u = torch.linspace(-12, 8, 4001, dtype=torch.float64)  # log τ
    tau = u.exp()
    v = s.square() + tau.square().unsqueeze(-1)  # y_j | μ, τ ~ N(μ, v)
    precision = (1 / v).sum(-1) + 1 / 25
    mu = (y / v).sum(-1) / precision
    log_p = HalfCauchy(5.0).log_prob(tau) + u
    log_p = log_p - 0.5 * (v.log() + y.square() / v).sum(-1) - 0.5 * precision.log() + 0.5 * precision * mu.square()
    w = log_p.softmax(0)
    shrink = tau.square().unsqueeze(-1) / v
    theta = shrink * y + (1 - shrink) * mu.unsqueeze(-1)
    theta_var = shrink * s.square() + (1 - shrink).square() / precision.unsqueeze(-1)

    def moments(mean, variance):
        first = torch.tensordot(w, mean, dims=1)
        return first, (torch.tensordot(w, variance + mean.square(), dims=1) - first.square()).sqrt()

    return {
        "mu": moments(mu, 1 / precision),
        "tau": moments(tau, torch.zeros_like(tau)),
        "theta": moments(theta, theta_var),
    }


@pytest.fixture(scope="module")
def fitted():
    """Of every constraint one, independent."""
    space = vi.Parameters(
        {
            "mu": torch.zeros(2),
            "sigma": vi.constraints.positive(1.0),
            "p": vi.constraints.simplex(3),
            "u": vi.constraints.interval(0, 1),
            "c": vi.constraints.ordered(3),
            "L": vi.constraints.cholesky_correlation(2),
        }
    )

    def log_density(v):
        free = -0.5 * v["mu"].square().sum() - v["sigma"] - 0.5 * v["c"].square().sum()
        return free + 3 * v["p"].log().sum() + 3 * (v["u"] * (1 - v["u"])).log() + 4 * v["L"][1, 1].log()

    return vi.fit_density(vi.LogDensity(log_density, space), vi.FullNormal(), progress=False)


SHAPES = {"mu": (2,), "sigma": (), "p": (3,), "u": (), "c": (3,), "L": (2, 2)}


@pytest.mark.parametrize("corrected", [False, True])
def test_draws_have_names_and_shapes_and_obey_the_constraints(fitted, corrected):
    draws = fitted.sample(50, corrected=corrected, generator=seeded())
    assert {name: tuple(x.shape) for name, x in draws.items()} == {n: (50, *s) for n, s in SHAPES.items()}
    assert (draws["sigma"] > 0).all()
    assert (draws["c"].diff(dim=-1) > 0).all()
    torch.testing.assert_close(draws["p"].sum(-1), torch.ones(50, dtype=torch.float64))
    torch.testing.assert_close(draws["L"].norm(dim=-1), torch.ones(50, 2, dtype=torch.float64))
    again = fitted.sample(50, corrected=corrected, generator=seeded())
    assert all(torch.equal(draws[name], again[name]) for name in draws)


def test_draws_of_q_are_its_own(fitted):
    draws = fitted.sample(N, generator=seeded())
    q = fitted.family()
    at = fitted.target.space.slice("sigma")
    # log-normal: its mean is e^(m + s²/2)
    expected = (q.mean[at] + q.variance[at] / 2).exp().item()
    spread = expected * sqrt(q.variance[at].exp().item() - 1)
    assert draws["sigma"].mean().item() == pytest.approx(expected, abs=4 * spread / sqrt(N))


@pytest.mark.parametrize("corrected", [False, True])
def test_arviz_has_the_values(fitted, corrected):
    data = fitted.to_arviz(100, corrected=corrected)
    assert {name: x.shape for name, x in data.posterior.items()} == {n: (1, 100, *s) for n, s in SHAPES.items()}
    assert float(data.posterior["sigma"].min()) > 0
    names = list(
        az.summary(  # pyright: ignore[reportPrivateImportUsage]
            fitted.to_arviz(100, select=["p", "sigma"]), kind="stats"
        ).index
    )
    assert names == ["sigma", "p[0]", "p[1]", "p[2]"]
    of_family = vi.diagnostics.to_arviz(fitted.family, draws=20)
    assert of_family.posterior["L"].shape == (1, 20, 2, 2)


def test_moments_of_a_function_are_those_of_values(fitted):
    weighted = vi.diagnostics.importance(fitted.family, fitted.target, draws=4000)
    moments = weighted.moments(lambda v: v["u"])  # Beta(4, 4)
    assert moments.mean.item() == pytest.approx(0.5, abs=4 * moments.standard_error.item())
    assert moments.sd.item() == pytest.approx(1 / 6, rel=0.05)


def test_draws_are_refused_where_weights_cannot_be_trusted():
    """Cauchy tails in every one of 40 numbers: no weights of normals reach them."""
    space = vi.Parameters({"s": vi.constraints.positive(1.0, shape=40)})
    target = vi.LogDensity(lambda p: (-torch.log1p(p["s"].log().square()) - p["s"].log()).sum(), space)
    result = vi.fit_density(target, vi.MeanField(), progress=False)
    for call in (lambda: result.sample(10, corrected=True), lambda: result.summary(corrected=True)):
        with pytest.raises(Unavailable, match=r"no corrected .*k̂ .* is \d\.\d\d, and from 0.7 on .*MCMC"):
            call()
    said = r"Of q: 500 draws. k̂ = \d\.\d\d, 0.7 or more: .* do not rely on this table"
    assert re.search(said, str(result.summary(draws=500)))
    assert result.sample(10)["s"].shape == (10, 40)


def test_what_has_no_weights_has_draws_and_a_table_all_the_same(monkeypatch):
    space = vi.Parameters({"a": torch.zeros(1), "s": vi.constraints.positive(1.0)})
    target = vi.LogDensity(lambda p: -0.5 * p["a"].square().sum() - p["s"], space)
    result = vi.fit_density(target, vi.MeanField(), progress=False)
    monkeypatch.setitem(sys.modules, "arviz_stats.base", None)
    assert "No k̂: k̂ and smoothed weights need arviz-stats" in str(result.summary())
    assert result.summary().k is None
    with pytest.raises(ImportError, match=r"structvi\[diagnostics\]"):
        result.sample(corrected=True)
    assert result.sample(3)["s"].shape == (3,)


def test_a_point_mass_is_drawn_as_a_value_and_has_no_k():
    space = vi.Parameters({"a": torch.zeros(2), "s": vi.constraints.positive(2.0)})
    target = vi.LogDensity(lambda p: -0.5 * p["a"].square().sum() - p["s"], space)
    result = vi.fit_density(target, vi.MeanField(), progress=False)
    result.family = vi.PerLayer({"s": vi.MAP(), "*": vi.MeanField()}).bind(space)
    assert (result.sample(5)["s"] - 2).abs().max() < 1e-12
    assert "No k̂: part of q is a point mass" in str(result.summary())
    with pytest.raises(Unavailable, match="point mass"):
        result.sample(5, corrected=True)


def test_float32_where_it_is_asked_for():
    space = vi.Parameters({"a": torch.zeros(2), "s": vi.constraints.positive(2.0)}, dtype=torch.float32)
    target = vi.LogDensity(lambda p: -0.5 * p["a"].square().sum() - p["s"], space)
    result = vi.fit_density(target, vi.MeanField(), progress=False)
    assert result.sample(5, corrected=True)["s"].dtype == torch.float32
    assert result.summary()["s"].mean == pytest.approx(1, abs=0.1)


def test_resampling_takes_each_as_often_as_it_weighs():
    weights = torch.rand(500, generator=seeded(), dtype=torch.float64)
    weights /= weights.sum()
    index = resampled(weights, 10_000, seeded(1))
    often = torch.bincount(index, minlength=500)
    assert ((often - 10_000 * weights).abs() < 1 + 1e-9).all()
    assert not torch.equal(index, index.sort().values)


def test_corrected_draws_of_a_mixture_have_tails_around_its_parts():
    """Two labels of one posterior: q has both modes, and its own weights, all within a factor of two, have k̂ = 2."""
    y = torch.cat([torch.linspace(-4, 0, 30), torch.linspace(0, 4, 30)]).double()

    def log_density(p):
        each = -0.5 * (y.unsqueeze(-1) - p["m"]).square()
        return each.logsumexp(-1).sum() - p["m"].square().sum() / 50

    target = vi.LogDensity(log_density, vi.Parameters({"m": torch.zeros(2, dtype=torch.float64)}))
    result = vi.fit_density(target, vi.Mixture(vi.FullNormal(), components=2), progress=False)
    table = result.summary(corrected=True)
    assert result.converged
    # labels may be exchanged: equal means, and by symmetry of the data about zero both are zero
    assert (table.mean["m"].abs() < 4 * table.mcse["m"]).all()
    assert abs(table.sd["m"][0] - table.sd["m"][1]) < 0.05
    assert (table.sd["m"] > 1.5).all()


def test_a_mixture_of_float32():
    """Limits of float64 are none of float32."""
    space = vi.Parameters({"z": torch.zeros(2)})
    target = vi.LogDensity(
        lambda p: torch.logaddexp(-0.5 * (p["z"] - 3).square().sum(), -0.5 * (p["z"] + 3).square().sum()), space
    )
    result = vi.fit_density(target, vi.Mixture(vi.FullNormal(), components="auto"), progress=False)
    assert result.converged
    assert len(result.modes) == 2


def test_modes_beside_a_normal_are_drawn_from():
    """Modes 10 of the first one's deviations away, half as wide, with 0.3 and 0.2 of the mass: draws of the normal,
    also with tails, do not meet them, and its own k̂ does not see them."""
    centres = tensor([[0.0] * 6, [10.0] + [0.0] * 5, [0.0, -10.0] + [0.0] * 4])
    weights, widths = tensor([0.5, 0.3, 0.2]), tensor([1.0, 0.5, 0.5])
    constant = weights.log() - 6 * widths.log()

    def log_density(p):
        squares = (p["z"] - centres).square().sum(-1) / widths.square()
        return (constant - 0.5 * squares).logsumexp(0)

    target = vi.LogDensity(log_density, vi.Parameters({"z": tensor([0.0] * 6)}))
    result = vi.fit_density(target, vi.FullNormal(), starts=1, progress=False)
    q = result.family().mean.detach()
    assert (q - centres).norm(dim=-1).min() < 0.1  # one of them
    table = result.summary(evaluations=40_000)
    assert result.correction().beside == 2
    mean = weights @ centres
    sd = (weights @ (widths.square().unsqueeze(-1) + (centres - mean).square())).sqrt()
    assert table.k is not None
    assert table.k < 0.7
    assert ((table.mean["z"] - mean).abs() / sd).max() < 0.05  # some 20,000 effective draws
    assert (table.sd["z"] / sd - 1).abs().max() < 0.05
    report = vi.diagnostics.diagnose(result.family, target, progress=False)
    assert not report.sound
    assert report["mean"].level == "bad"


def test_draws_around_a_correlated_mode_are_scored_by_their_own_density():
    """Roots of modes beside q come from climbs in any basis: the density of their draws is that of dense matrices."""
    A = torch.randn(3, 3, generator=seeded(), dtype=torch.float64)
    covariance = 0.3 * A @ A.mT + 0.05 * torch.eye(3).double()
    here = MultivariateNormal(torch.zeros(3).double(), torch.eye(3).double())
    there = MultivariateNormal(tensor([9.0, -6.0, 3.0]), covariance)
    target = vi.LogDensity(
        lambda p: torch.logaddexp(here.log_prob(p["z"]), there.log_prob(p["z"])),
        vi.Parameters({"z": torch.zeros(3).double()}),
    )
    q = vi.MeanField(initial_scale=1 / 3).bind(target.space)()  # scales of one
    parts = mass_beside(q, normals_of(q), Counted(target, 20_000, checked=True), seed=0)
    assert len(parts) == 2
    torch.testing.assert_close(parts[1].normal.root @ parts[1].normal.root.mT, covariance, rtol=1e-2, atol=1e-2)
    theta = tailed_draws(parts, 500, seeded())
    each, log_q = each_log_prob(parts, theta), log_density_of(parts)(theta)
    shares = torch.tensor([part.log_mass for part in parts]).double().log_softmax(0)
    for part, share, found in zip(parts, shares, each, strict=True):
        mean, shape = part.normal.mean, part.normal.root @ part.normal.root.mT
        exact = multivariate_t(mean.numpy(), shape.numpy(), df=NU).logpdf(theta.numpy())
        torch.testing.assert_close(found, share + torch.as_tensor(exact))
    normals = torch.stack(
        [part.log_mass + MultivariateNormal(part.normal.mean, part.normal.root @ part.normal.root.mT).log_prob(theta)
         for part in parts]
    )  # fmt: skip
    torch.testing.assert_close(log_q, normals.logsumexp(0))


def test_weights_that_end_at_a_bound_have_no_tail():
    """A mean and a variance, twelve rows: with tails no weight is 2.4 times their mean, and k̂ was 0.7 to 1.4."""
    y = tensor([2.3, 0.9, 3.1, 4.0, 1.2, 2.6, 0.1, 2.2, 3.6, 1.9, 2.8, 2.0])
    target = vi.LogDensity(
        lambda p: -8.0 * p["v"].log() - (2 + 0.5 * (y - p["mu"]).square().sum()) / p["v"] - p["v"].log(),
        vi.Parameters({"mu": tensor(0.0), "v": vi.constraints.positive(1.0)}),
    )
    a, b = 7.5, 2 + 0.5 * (y - y.mean()).square().sum().item()  # v is inverse gamma, of 8 + 1 − 1/2 − 1
    table = vi.fit_density(target, vi.FullNormal(), progress=False).summary()
    assert table.k is not None
    assert table.k < 0.7
    assert abs(table.mean["v"].item() / (b / (a - 1)) - 1) < 0.02
    assert abs(table.sd["v"].item() / (b / (a - 1) / sqrt(a - 2)) - 1) < 0.05
    assert abs(table.sd["mu"].item() / sqrt(b / (a - 1) / 12) - 1) < 0.05


def test_one_correction_within_its_budget_is_kept():
    """Ten times the evaluations of the fit, at least 1,000; it was 42,000 at every call."""
    target, _ = gamma()
    seen = 0

    class Counted:
        space = target.space

        def log_joint(self, theta, batch=None):
            nonlocal seen
            seen += len(theta)
            return target.log_joint(theta)

    result = vi.fit_density(Counted(), vi.FullNormal(), progress=False)
    before = seen
    table, allowed = result.summary(), max(1000, 10 * result.evaluations)
    spent = seen - before
    assert spent == result.correction().evaluations <= allowed
    result.sample(50, corrected=True)
    result.to_arviz(50, corrected=True)
    assert seen == before + spent
    assert f"{spent:,} evaluations" in str(table)
    assert result.correction(evaluations=5000).evaluations <= 5000
    assert seen > before + spent
    assert result.summary(corrected=False).k is None
