"""Held-out log densities of candidates: exactly and on draws, of mixtures, with a temperature; and the rule."""

import copy
from math import exp

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.laplace import selection
from structvi.laplace.curvature import Curvature
from structvi.laplace.place import NETWORK, Candidate, TrainedNetwork
from structvi.laplace.selection import HeldOut, Selection, of_posteriors
from structvi.models.calibration import Adjustment
from structvi.predict.calibration import GRID

F64 = torch.float64
ZERO = torch.zeros(1, dtype=F64)


def network_of(likelihood, outputs=3, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    prior = vi.priors.NormalPrior(0.3)
    bayes = vi.variationalize(net, likelihood, vi.LowRankPrecision(2), prior, num_data=40)
    theta = bayes.space.initial
    columns = torch.randn(len(theta), 2, dtype=F64)
    known = Curvature(theta, columns.square().sum(1) + 1, columns)
    return TrainedNetwork(bayes, copy.deepcopy(likelihood), bayes.family, known)


def labels(n=30):
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(n, 2, generator=generator, dtype=F64), torch.randint(3, (n,), generator=generator))]


def around(networks, batches, is_exact=True):
    return of_posteriors(networks, Candidate(None, linearised=True), batches, 0, is_exact)


def alone(networks, batches):
    return of_posteriors(networks, NETWORK, batches, 0, is_exact=False)


def test_every_noise_has_its_density():
    """N(t; f, JΣJᵀ + σ²) with Λ = G + π, against the dense covariance."""
    network = network_of(vi.likelihoods.Gaussian("point"), 1)
    x, t = labels()[0][0], torch.randn(30, 1, dtype=F64)
    found = around([network], [(x, t)])
    net, theta = network.posterior.net, network.theta
    named = {name: p.detach() for name, p in net.named_parameters()}
    J = torch.func.jacrev(lambda at: torch.func.functional_call(net, at, (x,)))(named)
    J = torch.cat([J[name].flatten(1) for name in named], 1).reshape(30, len(theta))
    W = network.curvature.columns
    G = torch.diag(network.curvature.diagonal - W.square().sum(1)) + W @ W.mT
    spread = (J @ torch.linalg.inv(G + torch.eye(len(theta), dtype=F64) / 0.09) * J).sum(1)
    for g, u in enumerate(found.grid.tolist()):
        sigma = float(network.likelihood.log_noise.detach().exp()) * exp(u)
        normal = torch.distributions.Normal(net(x).detach()[:, 0], (spread + sigma**2).sqrt())
        torch.testing.assert_close(-found.losses[:, g], normal.log_prob(t[:, 0]))


@pytest.mark.parametrize("likelihood", [vi.likelihoods.Categorical(), vi.likelihoods.Gaussian(0.5)], ids=repr)
def test_exact_densities_are_those_of_many_draws(likelihood, monkeypatch):
    is_labels = isinstance(likelihood, vi.likelihoods.Categorical)
    network = network_of(likelihood, 3 if is_labels else 1)
    batches = labels() if is_labels else [(labels()[0][0], torch.randn(30, 1, dtype=F64))]
    exact = around([network], batches)
    monkeypatch.setattr("structvi.laplace.selection.WEIGHT_DRAWS", 20_000)
    drawn = around([network], batches, is_exact=False)
    torch.testing.assert_close(exact.losses, drawn.losses, atol=0.05, rtol=0.03)
    assert exact.untempered.mean == pytest.approx(drawn.untempered.mean, abs=0.005)


def test_a_mixture_is_the_average_over_its_networks():
    networks = [network_of(vi.likelihoods.Categorical(), seed=seed) for seed in range(2)]
    (x, t), *_ = batches = labels()
    each = [torch.log_softmax(one.posterior.net(x), 1).detach() for one in networks]
    average = torch.stack(each).logsumexp(0) - torch.tensor(2.0, dtype=F64).log()
    found = alone(networks, batches)
    torch.testing.assert_close(found.plain, average[torch.arange(30), t])
    cold = (average / GRID[70].exp()).log_softmax(1)
    torch.testing.assert_close(-found.losses[:, 70], cold[torch.arange(30), t])
    both, *own = (around(some, batches).plain for some in (networks, *([n] for n in networks)))
    torch.testing.assert_close(both, torch.stack(own).logsumexp(0) - torch.tensor(2.0, dtype=F64).log())


def test_a_temperature_is_cross_fitted_and_stays_at_one_without_a_gain():
    network = network_of(vi.likelihoods.Categorical())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, dtype=F64, generator=generator)
    p = (network.posterior.net(x).detach() / 0.2).softmax(1)  # far surer than the network
    t = torch.multinomial(p, 1, generator=generator).squeeze(1)
    found = alone([network], [(x, t)])
    assert found.value == pytest.approx(torch.tensor(0.2).log().item(), abs=0.3)
    best = -found.losses.sum(0).min().item() / 400
    assert found.untempered.mean < found.mean < best  # a row does not choose its own
    t = torch.multinomial(network.posterior.net(x).detach().softmax(1), 1, generator=generator).squeeze(1)
    own = alone([network], [(x[:30], t[:30])])
    assert own.value == 0.0 or own.mean > own.untempered.mean
    assert alone([network], [(x[:9], t[:9])]).value == 0.0


def held_out(log_prob):
    return HeldOut(-log_prob.double().unsqueeze(1), torch.ones(len(log_prob), dtype=F64), ZERO)


def test_the_rule_is_the_widest_that_is_not_worse_as_far_as_the_set_can_tell():
    base = torch.randn(400, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(400, generator=torch.Generator().manual_seed(1))
    noise = (noise - noise.mean()) / noise.std()  # a difference with a paired standard error of 1/20 of its size

    def worse_by(loss, error):
        return held_out(base - loss + 20 * error * noise)

    def selected(*candidates, network=base):
        tried = {NETWORK: held_out(network)}
        for width, loss, error in sorted(candidates):
            tried[Candidate(width, linearised=True)] = worse_by(loss * selection.MARGIN, error * selection.MARGIN)
        return Selection(tried).selected.width

    known = [(0.1, 0.2, 0.1), (0.2, 0.4, 0.5), (0.4, 0.7, 0.5), (0.8, -2.0, 4.0)]
    assert selected(*known) == 0.2  # the widest gains most, but the set cannot tell whether
    assert selected(*known, (0.3, -2.0, 0.1)) == 0.3
    assert selected(*known, (0.3, -2.0, 0.1), (0.05, -4.0, 0.1)) == 0.05
    assert selected(*known, network=base + 1) == 0.0
    assert selected(*known, (0.9, torch.nan, 0.0), network=base + 1) == 0.0


@pytest.mark.parametrize(("sign", "applied"), [(1.0, True), (-1.0, False)])
def test_a_temperature_above_one_needs_no_gain_on_left_out_rows(sign, applied):
    """One row of ten asks for e^±2, the others for e^∓0.1: the optimum of all rows loses on left-out ones."""
    wanted = sign * torch.tensor([2.0] + [-0.1] * 9, dtype=torch.float64)
    found = HeldOut((GRID - wanted.unsqueeze(1)).square(), torch.ones(10, dtype=torch.float64), GRID)
    assert (found.value != 0) == applied
    if applied:
        assert found.value == pytest.approx(float(wanted.mean()), abs=0.03)  # a step of the grid is 0.05
        assert found.gain_over(found.untempered)[0] < 0
        assert Adjustment("temperature", 1.1, -0.1, 0.1, 10).is_applied
    else:
        assert not Adjustment("temperature", 0.9, -0.1, 0.1, 10).is_applied
