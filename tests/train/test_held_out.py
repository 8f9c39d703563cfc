"""The log density of held-out data: of networks, normals and draws, and how sure it is known."""

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.couplings import paired
from structvi.predict.temperature import GRID, ONE
from structvi.train.candidates import Candidate
from structvi.train.held_out import (
    SETS_APART,
    HeldOut,
    of_mixed_normals,
    of_network,
    of_networks,
    of_normals,
    of_posteriors,
)


def too_sure(networks, batches):
    return of_networks(networks, batches)[1] > 0


def two_networks():
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField(), num_data=40, linearise=True)
        found.append((bayes, bayes.space.initial))
    return found


def test_some_of_the_held_out_rows_are_the_first_of_all():
    count = torch.ones(4, dtype=torch.float64)
    whole, few = HeldOut(torch.tensor([-1.0, -2.0, -3.0, -9.0]).double(), count), HeldOut(-count[:3], count[:3])
    gain, error = few.gain_over(whole)
    assert gain == pytest.approx(1.0)
    assert error == pytest.approx(1 / 3**0.5)  # of 0, 1 and 2 the standard deviation is 1
    assert whole.gain_over(few) == pytest.approx((-1.0, error))
    one = Candidate("some", 0.1, True, 1.0)
    one.measured(few, whole)
    assert one.density == pytest.approx(whole.mean + 1)


@pytest.mark.parametrize("gain", [0.3, 3.0])
@pytest.mark.parametrize("labels", ["classes", "bits", "masked bits"])
def test_too_sure_is_what_a_temperature_would_mend(gain, labels):
    """The sign of the derivative of the held-out log-likelihood by the temperature, by a difference."""
    torch.manual_seed(0)
    x, net = torch.randn(300, 3).double(), nn.Linear(3, 4).double()
    truth = net(x).detach()
    with torch.no_grad():
        net.weight.mul_(gain)
        net.bias.mul_(gain)
    if labels == "classes":
        likelihood, t, mask = vi.likelihoods.Categorical(), torch.distributions.Categorical(logits=truth).sample(), None
    else:
        likelihood, t = vi.likelihoods.Bernoulli(), torch.bernoulli(truth.sigmoid())
        mask = torch.rand(t.shape) < 0.5 if labels == "masked bits" else None
    bayes = vi.variationalize(net, likelihood, vi.MeanField(), num_data=300)

    def log_likelihood(T):
        y = net(x).detach() / T
        if labels == "classes":
            return -nn.functional.cross_entropy(y, t)
        each = -nn.functional.binary_cross_entropy_with_logits(y, t, reduction="none")
        return each.sum() if mask is None else each[mask].sum()

    slope = log_likelihood(1.001) - log_likelihood(0.999)
    batch = (x, t if mask is None else (t, mask))
    assert too_sure([(bayes, bayes.space.initial)], [batch]) == bool(slope > 0) == (gain > 1)


def test_of_noise_and_functions_nothing_is_said():
    net, x = nn.Linear(3, 1), torch.randn(5, 3)
    bayes = vi.variationalize(net, vi.likelihoods.Gaussian(1.0), vi.MeanField(), num_data=5)
    assert too_sure([(bayes, bayes.space.initial)], [(x, torch.zeros(5, 1))])
    plain = vi.variationalize(net, lambda y, t: -(y - t).square().sum(-1), vi.MeanField(), num_data=5)
    assert too_sure([(plain, plain.space.initial)], [(x, torch.zeros(5, 1))])


def test_the_least_gain_is_a_quantile_of_the_bayesian_bootstrap():
    """Skewed gains of 60 rows with unequal counts; the drawn quantile's error is 0.7 % of the spread, Cornish and
    Fisher's at this skewness 2 %."""
    generator = torch.Generator().manual_seed(0)
    count = torch.randint(1, 5, (60,), generator=generator).double()
    gains = torch.empty(60, dtype=torch.float64).exponential_(generator=generator) - 0.9
    one, two = HeldOut((gains - 3) * count, count), HeldOut(-3 * count, count)
    weights = torch.empty(100_000, 60, dtype=torch.float64).exponential_(generator=generator)
    drawn = (weights @ (gains * count)) / (weights @ count)
    assert abs(one.least_gain_over(two) - drawn.quantile(0.05)) < 0.03 * drawn.std()
    gain, error = one.gain_over(two)
    assert one.least_gain_over(two) > gain - 1.6449 * error  # rare large gains are not held against it
    assert two.least_gain_over(one) < -gain - 1.6449 * error


def test_a_mixture_is_the_average_over_its_members():
    torch.manual_seed(0)
    networks, batches = two_networks(), [(torch.randn(30, 2).double(), torch.randint(3, (30,)))]
    normals = [[bayes.family] for bayes, _ in networks]
    (both,) = of_mixed_normals(networks, normals, batches, seed=0)
    each = [
        of_normals(bayes, theta, own, batches, seed=0)[0] for (bayes, theta), own in zip(networks, normals, strict=True)
    ]
    expected = torch.stack([one.total for one in each]).logsumexp(0) - torch.tensor(2.0).double().log()
    torch.testing.assert_close(both.total, expected)
    alone = [of_network(bayes, theta, batches) for bayes, theta in networks]
    expected = torch.stack([one.total for one in alone]).logsumexp(0) - torch.tensor(2.0).double().log()
    torch.testing.assert_close(of_networks(networks, batches)[0].total, expected)


def test_networks_that_disagree_are_less_sure_than_each():
    """Each network is sure of a random class: its labels, drawn from the average, are likelier under that."""
    x = torch.zeros(400, 2).double()
    networks = two_networks()
    for index, (_, theta) in enumerate(networks):
        with torch.no_grad():
            theta.zero_()
            theta[-3 + index] = 4.0
    p = (torch.tensor([4.0, 0.0, 0.0]).softmax(0) + torch.tensor([0.0, 4.0, 0.0]).softmax(0)) / 2
    t = torch.multinomial(p, 400, replacement=True, generator=torch.Generator().manual_seed(0))
    assert too_sure(networks[:1], [(x, t)])
    assert too_sure(networks[1:], [(x, t)])
    both = torch.stack([p.log()[t], -(p * p.log()).sum().expand(400)])
    assert too_sure(networks, [(x, t)]) == bool((-both[0]).mean() > both[1].mean())


def small(scale):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = [(torch.randn(200, 2).double(), torch.randint(3, (200,)))]
    return vi.variationalize(
        net, vi.likelihoods.Categorical(), vi.MeanField(initial_scale=scale), num_data=200
    ), data  # fmt: skip


def test_sets_of_draws_say_how_sure_their_mean_is():
    """Twenty seeds: the spread of their means is known to 16 %, the mean of their errors, of four sets each, to 9 %:
    40 % is twice of both.

    The average over 32 draws is nearer to that of many than over 8, which is too low by concavity.
    """
    bayes, data = small(1.0)
    truth = of_posteriors([bayes], data, 0, 4000, paired).mean
    few = torch.tensor([of_posteriors([bayes], data, seed, 8, paired).mean for seed in range(20)]).double()
    found = [of_posteriors([bayes], data, 10 + seed, 8, paired, times=4) for seed in range(20)]
    means, errors = torch.tensor([one.mean for one in found]), torch.tensor([one.error for one in found])
    assert errors.mean() / means.std() == pytest.approx(1, abs=0.4)
    assert few.mean() < means.mean() < truth + 2 * means.std() / 20**0.5
    _, error = found[0].gain_over(of_posteriors([bayes], data, 0, 8, paired))
    assert error >= found[0].error


def test_several_sets_of_draws_are_as_many_draws():
    """Without width the network; the draws of all sets together are one average."""
    bayes, data = small(1e-7)
    one = of_posteriors([bayes], data, 0, 8, paired, times=4)
    network = of_network(bayes, bayes.space.initial, data)
    torch.testing.assert_close(one.total, network.total, atol=1e-5, rtol=0)
    assert one.error < 1e-7
    bayes, data = small(1.0)
    each = torch.stack([of_posteriors([bayes], data, SETS_APART * k, 8, paired).total for k in range(3)])
    together = of_posteriors([bayes], data, 0, 8, paired, times=3)
    torch.testing.assert_close(together.total, each.logsumexp(0) - torch.tensor(3.0).double().log())
    assert together.losses.shape == (200, len(GRID))


@pytest.mark.parametrize("labels", ["classes", "bits", "masked bits", "ignored classes"])
def test_losses_are_those_at_each_temperature(labels):
    """Of one network: −log of softmax(y/T) at the labels, element by element; what is masked counts nothing."""
    torch.manual_seed(0)
    x, net, mask = torch.randn(20, 3).double(), nn.Linear(3, 4).double(), None
    if "classes" in labels:
        t = torch.randint(4, (20,))
        likelihood = vi.likelihoods.Categorical(ignore_index=-100 if labels.startswith("ignored") else None)
        if labels.startswith("ignored"):
            t[::3] = -100
    else:
        likelihood, t = vi.likelihoods.Bernoulli(), torch.randint(2, (20, 4)).double()
        mask = torch.rand(t.shape) < 0.5 if labels == "masked bits" else None
    bayes = vi.variationalize(net, likelihood, vi.MeanField(), num_data=20)
    found = of_network(bayes, bayes.space.initial, [(x, t if mask is None else (t, mask))])
    torch.testing.assert_close(found.losses[:, ONE], -found.total)
    for place in (3, 17, 30):
        y = net(x).detach() / GRID[place].exp()
        if "classes" in labels:
            expected = nn.functional.cross_entropy(y, t, reduction="none", ignore_index=-100)
        else:
            each = nn.functional.binary_cross_entropy_with_logits(y, t, reduction="none")
            expected = (each if mask is None else each * mask).sum(1)
        torch.testing.assert_close(found.losses[:, place], expected)
    torch.testing.assert_close(found.at(GRID[17].exp().item()).total, -found.losses[:, 17])


def test_losses_of_a_mixture_are_those_of_its_average():
    """Of p̄^(1/T), and not the average of p^(1/T)."""
    torch.manual_seed(0)
    networks, batches = two_networks(), [(torch.randn(30, 2).double(), torch.randint(3, (30,)))]
    x, t = batches[0]
    found, _ = of_networks(networks, batches)
    each = [torch.func.functional_call(one.net, one.space.unravel(theta), (x,)) for one, theta in networks]
    p = torch.stack(each).softmax(-1).mean(0)
    for place in (10, 25):
        expected = -(p.log() / GRID[place].exp()).log_softmax(-1).gather(-1, t.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(found.losses[:, place], expected)


def test_how_sure_is_in_standard_errors():
    """A hundred times the rows, all alike: ten times as many standard errors, up to the n − 1 of a spread."""
    torch.manual_seed(0)
    x, net = torch.randn(50, 3).double(), nn.Linear(3, 4).double()
    t = torch.randint(4, (50,))
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField(), num_data=50)
    one = of_networks([(bayes, bayes.space.initial)], [(x, t)])[1]
    many = of_networks([(bayes, bayes.space.initial)], [(x, t)] * 100)[1]
    assert many / one == pytest.approx(10, rel=0.02)
