"""Hamiltonian Monte Carlo against moments that are known, and the sections of the benchmark in small."""

import pytest
import torch

from benchmarks import hard_densities, normalised
from benchmarks.hmc import hmc, r_hat


def gaussian():
    root = torch.tensor([[1.0, 0.0], [0.8, 0.5]], dtype=torch.float64)
    inverse = torch.linalg.inv(root @ root.mT)
    return hard_densities.Known(2, lambda theta: -0.5 * ((theta - 1) @ inverse * (theta - 1)).sum(-1)), root @ root.mT


def test_hmc_has_the_moments_of_a_gaussian():
    target, covariance = gaussian()
    chains = hmc(target, torch.zeros(16, 2, dtype=torch.float64), draws=400, warm_up=150, leaps=8, seed=0)
    drawn = chains.theta.flatten(0, 1)
    assert 0.6 < chains.accepted < 0.95
    # of 6400 draws at least 1500 are independent: a standard error of 0.026 sd of the mean, 0.037 of the covariance
    assert (drawn.mean(0) - 1).abs().max() < 0.1
    assert (drawn.mT.cov() - covariance).abs().max() < 0.15
    assert r_hat(chains.theta).max() < 1.03
    values = target.log_joint(drawn).view(400, 16)
    torch.testing.assert_close(values, chains.log_p)


def test_r_hat_sees_chains_that_stay_apart():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    assert r_hat(values) < 1.02
    assert r_hat(values + torch.tensor([0.0, 0.0, 0.0, 3.0])) > 1.5


def test_sections_say_how_far_off_each_fit_is(capsys):
    rows = hard_densities.main(["collinear", "rank", "--seeds", "1"])
    assert max(row["kl"] for row in rows["collinear"]) < 1e-6
    assert max(abs(row["short"]) for row in rows["rank"]) < 0.01
    assert "| full | 1 |" in capsys.readouterr().out


def test_the_network_has_46_weights_and_its_gradient_is_batched():
    target = hard_densities.Network(0)
    theta = torch.randn(3, target.space.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert theta.shape[1] == 46
    one = torch.cat([target.log_joint(row.unsqueeze(0)) for row in theta])
    torch.testing.assert_close(target.log_joint(theta), one)
    assert target.predictive(theta).shape == (200,)


@pytest.mark.parametrize("kind", ["factors", "columns"])
def test_columns_of_the_logistic_regressions(kind):
    X, y = hard_densities.logistic_data(kind)
    assert X.shape == (1600, 124)
    assert set(X[:, 4:].unique().tolist()) == {0.0, 1.0}
    assert set(y.tolist()) == {0.0, 1.0}


def test_a_name_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        hard_densities.main(["nothing"])
    assert "got nothing" in capsys.readouterr().err


def test_the_check_tells_a_gaussian_from_a_number_without_a_prior():
    cases = normalised.cases()
    rows = normalised.run([cases[0], cases[-1]], seed=0)
    assert [row["called improper"] for row in rows] == [False, True]
    assert rows[0]["of the check"] < rows[0]["evaluations"] < 200
