"""What a network has learned: nats beyond the prior, units that are off, noise that explains everything."""

from math import sqrt

import pytest
import torch
from torch import nn
from torch.distributions import Cauchy, Normal, Uniform

import structvi as vi
from structvi import likelihoods as lk
from structvi.diagnostics import learned
from structvi.diagnostics.learned import Learned, prior_moments

BATCH = torch.randn(8, 2), torch.randn(8, 1)


def network(likelihood=None, family=None, prior=None):
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    return vi.variationalize(net, likelihood or lk.Gaussian(1.0), family or vi.MeanField(), prior, num_data=8)


def test_nats_are_the_divergence_of_normals():
    bayes = network(prior=vi.priors.NormalPrior({"0.*": 2.0, "*": 0.5}))
    found = learned(bayes, [BATCH])
    q = bayes.space.unravel(bayes.family().mean), bayes.space.unravel(bayes.family().variance.sqrt())
    for name, scale in (("0.weight", 2.0), ("2.bias", 0.5)):
        kl = torch.distributions.kl_divergence(Normal(q[0][name], q[1][name]), Normal(0.0, scale)).mean()
        assert found.tensors[name] == pytest.approx(kl.item(), rel=1e-5)


def test_tensors_at_the_prior_are_named():
    bayes = network(prior=vi.priors.NormalPrior(1.0))
    with torch.no_grad():
        rows = bayes.space.slice("0.weight")
        bayes.family.mean[rows] = 0.0
        bayes.family.log_scale[rows] = 0.0
    assert learned(bayes, [BATCH]).at_prior == ["0.weight"]


def test_units_are_off_where_nothing_reads_them():
    bayes = network()
    with torch.no_grad():
        bayes.family.mean[bayes.space.slice("2.weight")] = torch.tensor([0.0, 0.5, 0.0, 3.0])
        bayes.family.log_scale[bayes.space.slice("2.weight")] = torch.tensor([1e-3, 1.0, 1.0, 1.0]).log()
    assert learned(bayes, [BATCH]).units_off == {"0.weight": 0.75}


def test_channels_that_are_flattened_are_units():
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    bayes = vi.variationalize(net, lk.Categorical(), vi.MeanField(), num_data=8)
    with torch.no_grad():
        reading = bayes.space.unravel(bayes.family.mean)["3.weight"]  # [2, 12]: four numbers to a channel
        reading.fill_(5.0)
        reading[:, 4:8] = 0.0
    batch = torch.zeros(8, 1, 4, 4), torch.zeros(8, dtype=torch.long)
    assert learned(bayes, [batch]).units_off == {"0.weight": pytest.approx(1 / 3)}


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
    assert Learned(0.5, 0.3, {}, {"0.weight": 1.0}).stuck is None
    assert Learned(None, None, {}, {}).stuck is None
    assert Learned(0.001, None, {}, {}).stuck == "predictions hardly depend on the input"
    assert Learned(0.5, 0.97, {}, {}).stuck == "the noise is 0.97 of the targets' standard deviation"


@pytest.mark.parametrize(
    ("prior", "sd"),
    [
        (vi.priors.NormalPrior(0.3), 0.3),
        (vi.priors.LaplacePrior(0.3), 0.3 * sqrt(2)),
        (vi.priors.StudentTPrior(df=4.0, scale=0.3), 0.3 * sqrt(2)),
        (vi.priors.DistributionPrior({"*": Uniform(-1.0, 1.0)}), 2 / sqrt(12)),
    ],
)
def test_priors_whose_moments_are_known(prior, sd):
    mean, found = prior_moments(network(prior=prior).model)
    torch.testing.assert_close(found, torch.full_like(found, sd), rtol=1e-6, atol=0)
    assert not mean.any()


@pytest.mark.parametrize(
    "prior",
    [
        vi.priors.StudentTPrior(df=1.0),
        vi.priors.DistributionPrior({"*": Cauchy(0.0, 1.0)}),
        vi.priors.NormalPrior() + vi.priors.NormalPrior(),
    ],
)
def test_priors_whose_moments_are_not_known_leave_the_tensors_out(prior):
    found = learned(network(prior=prior), [BATCH])
    assert found.tensors == {}
    assert set(found.units_off) == {"0.weight"}


def test_point_masses_know_no_nats_but_explain():
    found = learned(network(family=vi.MAP()), [BATCH])
    assert (found.tensors, found.units_off) == ({}, {})
    assert found.explained is not None


def test_of_a_plain_function_nothing_is_explained():
    assert learned(network(lambda y, t: -(y - t).square()), [BATCH]).explained is None
