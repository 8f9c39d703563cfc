"""What predictions explain of the targets, and noise that explains everything."""

import pytest
import torch
from torch import nn

import structvi as vi
from structvi import likelihoods as lk
from structvi.diagnostics import learned
from structvi.diagnostics.learned import Learned

BATCH = torch.randn(8, 2), torch.randn(8, 1)


def network(likelihood=None, family=None, prior=None):
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    return vi.variationalize(net, likelihood or lk.Gaussian(1.0), family or vi.MeanField(), prior, num_data=8)


@pytest.mark.parametrize("noise", ["point", "random"])
def test_noise_is_held_against_the_targets_spread(noise):
    likelihood = lk.Gaussian(noise, initial=0.5)
    bayes = network(likelihood)
    t = torch.tensor([1.0, 3.0]).repeat(4).unsqueeze(-1)  # sd 1 about 2
    found = learned(bayes, [(BATCH[0][:5], t[:5]), (BATCH[0][5:], t[5:])])
    spread = t.double().std(correction=0).item()
    assert found.noise == pytest.approx(0.5 / spread, rel=1e-5)
    assert learned(network(), [BATCH]).noise is None


def test_what_predictions_explain():
    bayes = network(family=vi.MeanField(initial_scale=1e-4))
    x = torch.randn(50, 2)
    y = bayes.net(x).detach()
    t = y + 2 * y.std() * torch.randn(50, 1)
    # the posterior is narrow at the network: its predictive mean is y, to a thousandth
    expected = (y.var(correction=0) / t.var(correction=0)).item()
    assert learned(bayes, [(x[:20], t[:20]), (x[20:], t[20:])]).explained == pytest.approx(expected, rel=1e-2)
    mask = torch.rand(50, 1) > 0.3
    expected = (y[mask].var(correction=0) / t[mask].var(correction=0)).item()
    assert learned(bayes, [(x, (t, mask))]).explained == pytest.approx(expected, rel=1e-2)


def test_what_probabilities_explain():
    net = nn.Linear(2, 3)
    bayes = vi.variationalize(net, lk.Categorical(), vi.MeanField(initial_scale=1e-4), num_data=50)
    x = torch.randn(50, 2)
    p = net(x).softmax(-1).detach()
    expected = (p.var(0, correction=0).sum() / (p.mean(0) * (1 - p.mean(0))).sum()).item()
    found = learned(bayes, [(x, torch.zeros(50, dtype=torch.long))])
    assert found.explained == pytest.approx(expected, rel=1e-2)
    assert found.noise is None


def test_stuck_is_nothing_explained_or_all_noise():
    assert Learned(0.5, 0.3).stuck is None
    assert Learned(None, None).stuck is None
    assert Learned(0.001, None).stuck == "predictions hardly depend on the input"
    assert Learned(0.5, 0.97).stuck == "the noise is 0.97 of the targets' standard deviation"


def test_point_masses_explain_too():
    assert learned(network(family=vi.MAP()), [BATCH]).explained is not None


def test_of_a_plain_function_nothing_is_explained():
    assert learned(network(lambda y, t: -(y - t).square()), [BATCH]).explained is None
