"""Log densities that cannot be normalised are called so, with the numbers that run away; others are left alone."""

import pytest
import torch

import structvi as vi
from benchmarks.improper import (
    IMPROPER,
    PROPER,
    fit,
    gaussian,
)
from structvi.density.lowrank import LowRankMatrix
from structvi.density.properness import plane_mass
from structvi.density.targets import View


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


@pytest.mark.parametrize("seed", [0, 5])  # at 5 a normal became singular
def test_a_normal_that_loses_its_digits_ends_the_search(seed):
    log_density, P, *_ = IMPROPER["exp"]
    assert fit(log_density, P, seed=seed).status is vi.Status.DIVERGED


@pytest.mark.parametrize("family", ["covariance", "precision", "mixture"])
@pytest.mark.parametrize("name", ["a rotated one of five flat", "funnel, 10"])
def test_other_families_say_so_too(name, family):
    log_density, P, *_ = IMPROPER[name]
    result = fit(log_density, P, family, max_evaluations=8_000)
    assert result.status is vi.Status.DIVERGED
    assert "cannot be normalised" in result.verdict


@pytest.mark.parametrize("family", ["mean field", "full"])
@pytest.mark.parametrize("name", PROPER)
def test_what_can_be_normalised_is_left_alone(name, family):
    result = fit(PROPER[name][0], PROPER[name][1], family)
    assert result.converged, result.verdict
    assert result.check_evaluations < 10_000


@pytest.mark.parametrize("family", ["covariance", "precision", "mixture"])
@pytest.mark.parametrize("name", ["condition 1e8", "banana", "modes far away"])
def test_other_families_leave_it_alone_too(name, family):
    result = fit(PROPER[name][0], PROPER[name][1], family, max_evaluations=15_000)
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
    monkeypatch.setattr("structvi.density.api.runaway", lambda *_: None)
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
    assert "nothing stops b → " in vi.fit_density(target, vi.FullNormal(), progress=False).verdict
    target = vi.LogDensity(lambda p: -0.5 * (p["slope"].square().sum() - p["slope"][1, 0] ** 2 + p["b"] ** 2), space)
    assert "nothing stops slope[1, 0] → " in vi.fit_density(target, vi.FullNormal(), progress=False).verdict


@pytest.mark.parametrize("number", [0, 2])
def test_the_mass_of_a_plane_is_that_of_a_normal(number):
    """The integral of a normal over θ_i = c, against its marginal density there."""
    root = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tril() + torch.eye(3)
    covariance = root @ root.mT
    space = vi.Parameters({"z": torch.zeros(3, dtype=torch.float64)})
    exact = torch.distributions.MultivariateNormal(torch.zeros(3, dtype=torch.float64), covariance)
    target = vi.LogDensity(lambda p: exact.log_prob(p["z"]), space)
    marginal = torch.distributions.Normal(0.0, covariance[number, number].sqrt())
    masses = []
    for c in (0.5, 2.0):
        theta = c * covariance[number] / covariance[number, number]
        masses.append(plane_mass(View(target, torch.zeros_like(theta), root), number, theta)[0])
    expected = marginal.log_prob(torch.tensor(2.0)) - marginal.log_prob(torch.tensor(0.5))
    assert masses[1] - masses[0] == pytest.approx(expected.item(), abs=1e-6)
    low_rank = View(target, torch.zeros_like(theta), LowRankMatrix.diag(covariance.diagonal()))
    assert plane_mass(low_rank, number, theta)[0] <= masses[1] + 1
