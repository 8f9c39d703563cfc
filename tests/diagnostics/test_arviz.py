"""A posterior in arviz: its summaries and leave-one-out work, and say what the posterior is."""

import sys

import arviz_stats as az
import pytest
import torch
from torch import nn

import structvi as vi
from structvi import likelihoods as lk
from structvi.diagnostics import to_arviz


def test_summary(linear):
    data = linear.posterior.to_arviz(draws=2000)
    assert data.posterior["weight"].dims == ("chain", "draw", "weight_dim_0", "weight_dim_1")
    summary = az.summary(data, kind="stats", round_to="none")
    assert list(summary.index) == ["weight[0, 0]", "weight[0, 1]", "bias[0]"]
    # four standard errors of the mean of 2000 independent draws, and of their standard deviation
    sd = linear.covariance.diagonal().sqrt()
    for index, (mean, spread) in enumerate(zip(linear.mean.tolist(), sd.tolist(), strict=True)):
        assert summary["mean"].iloc[index] == pytest.approx(mean, abs=4 * spread / 2000**0.5)
        assert summary["sd"].iloc[index] == pytest.approx(spread, rel=4 / 4000**0.5)


def test_log_likelihood_and_replicated_data(linear):
    data = to_arviz(linear.posterior, linear.loader, draws=50)
    t = torch.as_tensor(data.observed_data["t"].values)
    torch.testing.assert_close(t.sort(0).values, linear.t.sort(0).values)
    assert data.posterior_predictive["t"].shape == (1, 50, 60, 1)
    # the sum over data of each draw's log likelihood is the model's, at the draw that is in the posterior group
    theta = torch.cat(
        [torch.as_tensor(data.posterior[name].values[0]).reshape(50, -1) for name in ("weight", "bias")], dim=-1
    )
    expected = linear.posterior.model.batch_log_likelihood(theta, (linear.x, linear.t))[0]
    found = torch.as_tensor(data.log_likelihood["t"].values[0]).sum((1, 2))
    torch.testing.assert_close(found, expected.detach())
    assert az.loo(to_arviz(linear.posterior, linear.loader, draws=400)).elpd < 0


def test_tensors_are_chosen_and_blocks_joined():
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    family = vi.PerLayer({"0.*": vi.MAP(), "2.*": vi.MeanField()})
    bayes = vi.variationalize(net, lk.Categorical(), family, num_data=5)
    data = bayes.to_arviz(draws=20, select="*.weight")
    assert set(data.posterior.data_vars) == {"0.weight", "2.weight"}
    assert (data.posterior["0.weight"].values == net[0].weight.detach().numpy()).all()
    assert data.posterior["2.weight"].values.std() > 0


def test_a_likelihood_that_is_a_function_has_no_replicated_data():
    bayes = vi.variationalize(nn.Linear(2, 1), lambda y, t: -(y - t).square(), vi.MeanField(), num_data=5)
    data = bayes.to_arviz([(torch.zeros(5, 2), torch.zeros(5, 1))], draws=30)
    assert "posterior_predictive" not in data.children
    assert data.log_likelihood["t"].shape == (1, 30, 5, 1)


def test_enumerated_masks_are_drawn_with_their_probabilities():
    space = vi.Parameters({"z": torch.ones(1)})
    data = to_arviz(vi.MCDropout(keep=0.8).bind(space), draws=4000)
    # a fraction of 0.8 has a standard error of 0.0063
    assert (data.posterior["z"].values != 0).mean() == pytest.approx(0.8, abs=0.025)


def test_arviz_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    with pytest.raises(ImportError, match=r"structvi\[diagnostics\]"):
        to_arviz(vi.MeanField().bind(vi.Parameters({"z": torch.zeros(3)})))
