"""The exact family is cleared, point masses get the verdict of the paper, and broken methods are caught."""

import re

import pytest
import torch
from torch.distributions import MultivariateNormal

import structvi as vi
from structvi_check import problem, run
from structvi_check.methods import ours

EXACT = ["correlated", "gaussian-50-10000", "linear-regression", "rbf-regression"]


class Drawn:
    """A method that is handed its distribution."""

    name = "drawn"

    def __init__(self, distribution, with_density=True):
        self.distribution = distribution
        if with_density:
            self.log_prob = distribution.log_prob

    def fit(self, problem, seed):
        pass

    def draw(self, n, generator):
        return self.distribution.sample((n,))


def exact(name):
    """The posterior itself, a normal."""
    (normal,) = problem(name).modes
    return MultivariateNormal(normal.mean, normal.covariance())


def one(method, name):
    (row,) = run(method, [name]).rows
    return row


@pytest.mark.parametrize("name", EXACT)
def test_the_exact_family_is_cleared(name):
    row = one(vi.FullNormal(), name)
    assert row.bayesian
    assert row.findings == ()
    assert row.verdict.startswith("Bayesian here: the posterior of the model, 90 % intervals hold")
    assert row.measures.kl_q_p.value < 1e-3
    assert row.measures.log_q_true == pytest.approx(row.measures.log_p_true, abs=1e-3)


@pytest.mark.parametrize("with_density", [True, False])
@pytest.mark.parametrize("name", ["gaussian-50-10000", "linear-regression"])
def test_the_posterior_itself_is_cleared(name, with_density):
    assert one(Drawn(exact(name), with_density), name).bayesian


def test_a_mixture_finds_both_modes_and_is_cleared():
    row = one("mixture", "bimodal")
    assert row.bayesian
    assert (row.measures.modes_found, row.measures.modes_there) == (2, 2)


@pytest.mark.parametrize("name", ["bimodal", "rbf-regression"])
@pytest.mark.parametrize("method", ["map", "mc-dropout"])
def test_point_masses_get_the_verdict_of_the_paper(method, name):
    row = one(method, name)
    assert re.match(r"not a posterior: (\d+) of \1 weights are points, which gives the true model", row.verdict)
    assert row.grade == "not a posterior"
    assert row.measures.log_q_true == -torch.inf
    assert row.measures.kl_p_q.value == torch.inf


def test_mc_dropout_is_where_its_closed_form_is():
    """θ̂ of the paper's regression against (pG + (1 − p) diag G + I)⁻¹ b, up to the 512 masks of the fit."""
    from structvi_paper.methods import KEEP
    from structvi_paper.regression import data_set
    from structvi_paper.settings import Settings

    method = ours()["mc-dropout"]
    method.fit(problem("rbf-regression"), 0)
    expected = data_set(Settings(), 0).dropout_optimum(KEEP)
    assert (method.density.point - expected).abs().max() < 0.1 * expected.abs().max()


def test_mean_field_is_told_its_intervals():
    row = one("mean-field", "correlated")
    assert not row.bayesian
    assert row.findings[0] == "intervals too narrow and too wide: 90 % intervals hold 50 % to 97 %"


# methods broken on purpose


@pytest.mark.parametrize("name", ["gaussian-10-100", "rbf-regression"])
@pytest.mark.parametrize("with_density", [True, False])
def test_a_halved_variance_is_caught(name, with_density):
    right = exact(name)
    row = one(Drawn(MultivariateNormal(right.mean, 0.5 * right.covariance_matrix), with_density), name)
    assert not row.bayesian
    assert row.findings[0].startswith("intervals too narrow: 90 % intervals hold 7")  # 75.5 %, 74.8 % at worst


@pytest.mark.parametrize("name", ["gaussian-50-10000", "rbf-regression"])
@pytest.mark.parametrize("with_density", [True, False])
def test_a_mean_biased_by_three_tenths_is_caught(name, with_density):
    """Along one axis only, all else exact."""
    right = exact(name)
    values, axes = torch.linalg.eigh(right.covariance_matrix)
    moved = right.mean + 0.3 * values[0].sqrt() * axes[:, 0]
    row = one(Drawn(MultivariateNormal(moved, right.covariance_matrix), with_density), name)
    assert not row.bayesian
    assert row.findings[0].startswith("biased: a mean is off by 0.")


def test_a_density_that_is_not_normalised_is_caught():
    right = exact("gaussian-10-100")
    method = Drawn(right)
    method.log_prob = lambda theta: right.log_prob(theta) + 1.0
    row = one(method, "gaussian-10-100")
    assert row.findings[0].startswith("log_prob is not the density of the draws: KL[p‖q] comes out as -1.00")
