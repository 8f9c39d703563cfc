"""What more rank, draws and parts are worth, where the answer is known."""

import pytest
import torch

import structvi as vi
from structvi.diagnostics import Trial, Worth, worth
from structvi.objective import Estimate


def test_a_rank_pays_on_a_correlated_posterior_and_nothing_is_changed(linear):
    # mean field at its optimum has precisions Λ_ii: KL = ½ (Σ log Λ_ii − log det Λ), which a full rank recovers
    precision = torch.linalg.inv(linear.covariance)
    gap = 0.5 * (precision.diagonal().log().sum() - torch.linalg.slogdet(precision).logabsdet).item()
    bayes = linear.another(vi.MeanField())
    with torch.no_grad():
        bayes.family.mean.copy_(linear.mean)
        bayes.family.log_scale.copy_(-0.5 * precision.diagonal().log())
    before = {name: value.clone() for name, value in bayes.state_dict().items()}
    result = worth(bayes, [(linear.x, linear.t)], ranks=[3], groups=[4], steps=300, lr=0.05, compared_on=256)
    assert [trial.name for trial in result.trials] == ["longer", "rank=3", "groups=4"]
    assert result.elbo.value == pytest.approx(linear.log_evidence - gap, abs=4 * result.elbo.standard_error)
    longer, rank, groups = result.trials
    # no more than the gap can be gained; 300 steps close half of it at least
    assert 0.5 * gap < rank.gain < gap + 4 * rank.standard_error
    assert result.best == "rank=3"
    assert result.answers["longer"] == "the fit had ended"
    assert result.answers["groups=4"].startswith("not worth it")
    for trial in (longer, groups):
        assert abs(trial.gain) < 0.1 + 4 * trial.standard_error
    assert all(torch.equal(before[name], value) for name, value in bayes.state_dict().items())
    assert isinstance(bayes.family, vi.MeanField)


def told(*trials):
    return Worth(Estimate(-10.0, 0.1, torch.zeros(2)), [Trial(*trial) for trial in trials])


def test_gains_are_held_against_fitting_longer():
    unfinished = told(("longer", 5.0, 0.1, 2.0), ("rank=4", 5.1, 0.1, 3.0), ("components=2", 9.0, 0.1, 4.0))
    assert unfinished.answers == {
        "longer": "the fit had not ended: fit longer first",
        "rank=4": "not worth it: fitting longer gains as much",
        "components=2": "worth it: 4 nats that fitting longer does not give",
    }
    assert unfinished.best == "components=2"
    nothing = told(("longer", -0.2, 0.1, 2.0), ("rank=4", 0.15, 0.1, 3.0))
    assert nothing.answers["rank=4"] == "not worth it: no gain seen"
    assert nothing.best is None
    assert unfinished.trials[2].per_second == 2.25
    assert "fitting longer does not give" in str(unfinished)


def test_the_plot_has_a_point_for_each_trial():
    ax = told(("longer", 1.0, 0.1, 2.0), ("rank=4", 5.1, 0.1, 3.0)).plot()
    assert [text.get_text() for text in ax.texts] == ["longer", "rank=4"]
    assert ax.get_xlabel() == "seconds"


def test_point_masses_have_no_gain(linear):
    with pytest.raises(ValueError, match="point mass"):
        worth(linear.another(vi.MAP()), linear.loader, groups=[2], steps=1)
