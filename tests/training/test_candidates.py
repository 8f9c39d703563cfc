"""Candidates around a trained network: what is measured of them, at which price, and which is kept."""

from math import inf

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.couplings import naive, paired
from structvi.families.normal_parts import weighted_normals
from structvi.training import candidates
from structvi.training.candidates import Candidate, Rule
from structvi.training.held_out import (
    HeldOut,
    of_mixed_normals,
    of_network,
    of_networks,
    of_normals,
    of_posterior,
    of_posteriors,
)


def loader(pair, size=40):
    return DataLoader(TensorDataset(*pair), batch_size=size)


def too_sure(networks, batches):
    return of_networks(networks, batches)[1]


def held_out(*log_probs):
    return HeldOut(torch.tensor(log_probs).double(), torch.ones(len(log_probs)).double())


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


def test_a_candidate_on_draws_takes_part_of_a_pass(monkeypatch):
    """Of 500 held-out rows for 100 of training, with 8 draws: 15 rows, in batches of 5."""
    monkeypatch.setattr(candidates, "FEWEST", 10)
    seen = []
    monkeypatch.setattr(
        candidates, "of_posteriors", lambda posteriors, data, *rest: seen.append(rows_of(data)) or whole
    )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    x, t = torch.randn(100, 2), torch.randint(3, (100,))
    whole = HeldOut(torch.full((500,), -5.0).double(), torch.ones(500).double())
    held_out = loader((torch.randn(500, 2), t.repeat(5)), 5)
    vi.variationalize(net, vi.likelihoods.Categorical()).fit(loader((x, t)), validation=held_out, progress=False)
    assert seen[-1:] == [15]


def test_jacobians_of_held_out_rows_take_at_most_a_pass(monkeypatch):
    """Three outputs: a row takes 7 forwards of the 3·100 of a pass; 42 rows, in batches of 5."""
    monkeypatch.setattr(candidates, "FEWEST_EXACT", 10)
    seen = []
    before = candidates.of_mixed_normals
    monkeypatch.setattr(candidates, "of_mixed_normals", lambda *given: seen.append(rows_of(given[2])) or before(*given))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    x, t = torch.randn(100, 2), torch.randint(3, (100,))
    held_out = loader((torch.randn(500, 2), t.repeat(5)), 5)
    vi.variationalize(net, vi.likelihoods.Categorical()).fit(loader((x, t)), validation=held_out, progress=False)
    assert seen == [45]


def test_a_normal_that_is_kept_is_the_one_that_was_placed(monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x, t = torch.randn(60, 2).double(), torch.randn(60, 1).double()
    data, held_out, found = loader((x[:40], t[:40])), loader((x[40:], t[40:])), []
    for room in (2**27, 0):
        monkeypatch.setattr(candidates, "KEPT_NUMBERS", room)
        bayes = vi.variationalize(net, vi.likelihoods.Gaussian("point"))
        found.append(bayes.fit(data, validation=held_out, progress=False).held_out)
    assert found[0] == found[1]


def rows_of(data):
    return sum(len(batch[1]) for batch in data)


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


@pytest.mark.parametrize(("is_too_sure", "expected"), [(True, "wide"), (False, "narrow")])
def test_a_network_that_is_not_sure_enough_is_left_only_for_a_gain(is_too_sure, expected):
    """The wide one is as good as the best to within half a standard error, and gains nothing over the network."""
    alone = Candidate("the network", None, True, 1.0, held_out=held_out(*[-1.0] * 1600), density=-1.0)
    narrow, wide = Candidate("narrow", 0.1, True, 1.0), Candidate("wide", 0.3, True, 1.0)
    narrow.measured(held_out(*[-0.9996, -0.9998] * 800), alone.held_out)
    wide.measured(held_out(*[-0.9, -1.1, -0.99, -1.01] * 400), alone.held_out)
    rule = Rule(alone, is_too_sure, candidates.HARM)
    assert rule.widest([narrow, wide]).name == expected
    assert rule.best([narrow, wide]).name == "narrow"
    wide.measured(held_out(*[-1.1, -1.1, -1.1, -1.2] * 400), alone.held_out)
    assert rule.widest([wide]).name == rule.best([wide]).name == "the network"


def test_few_rows_do_not_let_a_posterior_be_worse_than_the_network():
    """Both are best by the mean; of four rows nobody can tell that the second is not .01 nats worse, of 400 anybody."""
    gains = torch.tensor([0.03, -0.025, 0.02, -0.015]).double()
    for copies, expected in ((1, "the network"), (100, "wide")):
        alone = Candidate("the network", None, True, 1.0, held_out=held_out(*[-1.0] * 4 * copies), density=-1.0)
        wide = Candidate("wide", 0.3, True, 1.0)
        wide.measured(held_out(*(gains - 1).repeat(copies)), alone.held_out)
        assert Rule(alone, is_too_sure=True, harm=candidates.HARM).widest([wide]).name == expected
        assert Rule(alone, is_too_sure=True, harm=inf).widest([wide]).name == "wide"  # a prior of the user's


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


def test_one_row_tells_of_no_other():
    """It has no spread: by its own figures a gain on it would be certain."""
    alone = Candidate("the network", None, True, 1.0, held_out=held_out(-1.0), density=-1.0)
    wide = Candidate("wide", 0.3, True, 1.0)
    wide.measured(held_out(-0.5), alone.held_out)
    for is_too_sure in (True, False):
        assert Rule(alone, is_too_sure, candidates.HARM).widest([wide]).name == "the network"


def two_networks():
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField(), num_data=40, linearise=True)
        found.append((bayes, bayes.space.initial))
    return found


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


@pytest.mark.parametrize(("gain", "expected"), [(0.004, "wide"), (0.001, "narrow")])
def test_what_gains_more_than_it_loses_is_as_good_as_the_best(gain, expected):
    """Of so many rows every difference is certain: the wide one is .003 below the best, and above the network."""
    alone = Candidate("the network", None, True, 1.0, held_out=held_out(*[-1.0] * 400), density=-1.0)
    narrow, wide = Candidate("narrow", 0.1, True, 1.0), Candidate("wide", 0.3, True, 1.0)
    narrow.measured(held_out(*[-0.997 + gain] * 400), alone.held_out)
    wide.measured(held_out(*[-0.9995 + gain, -1.0005 + gain] * 200), alone.held_out)
    assert Rule(alone, is_too_sure=True, harm=candidates.HARM).widest([narrow, wide]).name == expected
    # a gain of .0045 ± .0050 over the network, .004 below the best, is none for certain
    narrow.measured(held_out(*[-0.9915] * 400), alone.held_out)
    wide.measured(held_out(*[-0.8955, -1.0955] * 200), alone.held_out)
    assert Rule(alone, is_too_sure=True, harm=inf).widest([narrow, wide]).name == "narrow"


def test_few_draws_do_not_choose_between_those_that_need_none():
    """The drawn one is best, and on its two rows the wide one as good; what is exact is compared by itself."""
    alone = Candidate("the network", None, True, 1.0, held_out=held_out(*[-1.0] * 6), density=-1.0)
    narrow, wide, drawn = (Candidate(name, width, True, 1.0) for name, width in (("n", 0.1), ("w", 0.3), ("d", 0.1)))
    narrow.measured(held_out(-0.9, -0.9, -0.9, -0.9, -0.9, -0.9), alone.held_out)
    wide.measured(held_out(-0.7, -1.0, -1.0, -1.0, -1.0, -1.0), alone.held_out)
    drawn.measured(held_out(-0.7, -0.99), alone.held_out)
    narrow.is_exact = wide.is_exact = True
    rule = Rule(alone, is_too_sure=True, harm=inf)
    assert drawn.density > narrow.density > wide.density
    assert rule.widest([narrow, wide]).name == "n"
    drawn.measured(held_out(-0.7, -0.99), alone.held_out)  # better by less than two standard errors
    assert rule.widest([narrow, wide, drawn]).name == "n"
    drawn.measured(held_out(-0.6, -0.61), alone.held_out)
    assert rule.widest([narrow, wide, drawn]).name == "d"
    other = Candidate("o", 0.3, False, 1.0)  # better than that one, not for certain
    other.measured(held_out(-0.5, -0.65), alone.held_out)
    assert rule.widest([narrow, wide, drawn, other]).name == "o"
    careful = Rule(alone, is_too_sure=True, harm=candidates.HARM)
    drawn.measured(held_out(*[-0.5] * 5, -3.0), alone.held_out)  # no worse for certain than the network is asked of it
    assert careful.widest([drawn]).name == "the network"


def test_a_width_that_is_not_known_is_an_equal_mixture_of_widths():
    """Each part is the Laplace approximation of its own width, and so is the prior's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, t = torch.randn(60, 2).double(), torch.randint(3, (60,))
    bayes = vi.variationalize(net, vi.likelihoods.Categorical())
    bayes.fit(loader((x, t)), progress=False)
    parts = weighted_normals(bayes.family())
    assert [one.weight for one in parts] == pytest.approx([1 / candidates.PARTS] * candidates.PARTS)
    for k, (_, normal) in enumerate(parts):
        width = round(candidates.WIDTH / candidates.RATIO**k, 7)
        one = vi.variationalize(
            net, vi.likelihoods.Categorical(), vi.StructuredPrecision(25),  # the default rank is at most P/2
            candidates.relative_prior(bayes.model, bayes.space.initial, width), linearise=True,
        )  # fmt: skip
        one.fit(loader((x, t)), progress=False)
        torch.testing.assert_close(normal.mean, one.family().mean)
        torch.testing.assert_close(normal.precision_diagonal(), one.family().precision_diagonal(), rtol=0.05, atol=0)
        prior = bayes.model.prior.priors[k]
        assert prior.scale == one.model.prior.scale


def test_the_mixture_is_measured_as_it_predicts():
    """Held-out density of the choice, from 512 points of each normal, and of the family that is placed, from draws."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    x, t = torch.randn(120, 2), torch.randint(3, (120,))
    bayes, held_out = vi.variationalize(net, vi.likelihoods.Categorical(), linearise=True), loader((x[60:], t[60:]))
    result = bayes.fit(loader((x[:60], t[:60])), validation=held_out, progress=False)
    drawn = of_posterior(bayes, list(held_out), seed=0, draws=8000)
    assert "up to" in result.kept
    assert result.held_out[result.kept] == pytest.approx(drawn.mean, abs=0.004)  # 2000 draws of each part


def test_mixtures_share_their_normals(monkeypatch):
    """Neighbouring candidates have parts in common: each normal is made once."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    x, t = torch.randn(60, 2), torch.randint(3, (60,))
    seen, before = [], candidates.of_mixed_normals
    monkeypatch.setattr(candidates, "of_mixed_normals", lambda *given: seen.append(given) or before(*given))
    bayes = vi.variationalize(net, vi.likelihoods.Categorical())
    bayes.fit(loader((x, t)), validation=loader((torch.randn(60, 2), t)), progress=False)
    (given,) = seen
    assert len(given[4]) == len(candidates.WIDTHS)
    assert all(len(places) == candidates.PARTS for places in given[4])
    assert len(given[1][0]) == len(candidates.WIDTHS) + 2 * (candidates.PARTS - 1)


@pytest.mark.parametrize(("family", "deviations"), [(None, candidates.MIXED), (vi.MeanField(), candidates.ONE_WIDTH)])
def test_one_width_is_held_to_a_stricter_bound(monkeypatch, family, deviations):
    torch.manual_seed(0)
    x, t, seen, before = torch.randn(60, 2), torch.randint(3, (60,)), [], candidates.Rule
    monkeypatch.setattr(candidates, "Rule", lambda *given: seen.append(given) or before(*given))
    bayes = vi.variationalize(nn.Linear(2, 3), vi.likelihoods.Categorical(), family)
    bayes.fit(loader((x, t)), validation=loader((torch.randn(60, 2), t)), progress=False)
    assert [given[3] for given in seen] == [deviations]


@pytest.mark.parametrize(("gain", "expected"), [(0.1, [0.096, 0.24]), (-0.1, [0.096, 0.0384])])
def test_weights_are_drawn_narrower_than_the_linearised_network_bears(monkeypatch, gain, expected):
    """The best linearised width is 0.24: first 1/2.5 of it; where that gains, then the same, else narrower again."""
    torch.manual_seed(0)
    x, t, tried = torch.randn(60, 2), torch.randint(3, (60,)), []
    linear = {0.24: -0.9}

    def exactly(self, given):
        for one in given:
            one.measured(held_out(*[linear.get(one.width, -1.0)] * 60), self.network)

    def on_draws(self, given, data):
        for one in given:
            tried.append(one.width)
            one.measured(held_out(*[-0.9 + gain] * 60), self.network)

    monkeypatch.setattr(candidates.Measuring, "exactly", exactly)
    monkeypatch.setattr(candidates.Measuring, "on_draws", on_draws)
    bayes = vi.variationalize(nn.Linear(2, 3), vi.likelihoods.Categorical())
    bayes.fit(loader((x, t)), validation=loader((torch.randn(60, 2), t)), progress=False)
    assert tried == pytest.approx(expected)


def test_mirrored_pairs_tell_more_than_as_many_draws():
    """Of a narrow posterior: the mean density over 8 draws lacks what 800 have by more than over four pairs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = [(torch.randn(200, 2).double(), torch.randint(3, (200,)))]
    family = vi.MeanField(initial_scale=0.3)
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), family, num_data=200)
    truth = of_posteriors([bayes], data, 0, 2000).mean
    errors = {
        coupling: sum(abs(of_posteriors([bayes], data, seed, 8, coupling).mean - truth) for seed in range(10))
        for coupling in (naive, paired)
    }
    assert errors[paired] < 0.5 * errors[naive]
