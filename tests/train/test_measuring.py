"""How candidates around a trained network are measured on held-out data, and at which price."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.train import candidates, measuring, rule
from structvi.train.held_out import HeldOut, of_posterior


def loader(pair, size=40):
    return DataLoader(TensorDataset(*pair), batch_size=size)


def held_out(*log_probs):
    return HeldOut(torch.tensor(log_probs).double(), torch.ones(len(log_probs)).double())


def rows_of(data):
    return sum(len(batch[1]) for batch in data)


def test_a_candidate_on_draws_takes_part_of_a_pass(monkeypatch):
    """Of 500 held-out rows for 100 of training, with 8 draws: 15 rows, in batches of 5."""
    monkeypatch.setattr(measuring, "FEWEST", 10)
    seen = []
    monkeypatch.setattr(measuring, "of_posteriors", lambda posteriors, data, *rest: seen.append(rows_of(data)) or whole)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    x, t = torch.randn(100, 2), torch.randint(3, (100,))
    whole = HeldOut(torch.full((500,), -5.0).double(), torch.ones(500).double())
    held_out = loader((torch.randn(500, 2), t.repeat(5)), 5)
    vi.variationalize(net, vi.likelihoods.Categorical()).laplace(loader((x, t)), validation=held_out, progress=False)
    assert seen[-1:] == [15]


def test_jacobians_of_held_out_rows_take_at_most_a_pass(monkeypatch):
    """Three outputs: a row takes 7 forwards of the 3·100 of a pass; 42 rows, in batches of 5."""
    monkeypatch.setattr(measuring, "FEWEST_EXACT", 10)
    seen = []
    before = measuring.of_mixed_normals
    monkeypatch.setattr(measuring, "of_mixed_normals", lambda *given: seen.append(rows_of(given[2])) or before(*given))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    x, t = torch.randn(100, 2), torch.randint(3, (100,))
    held_out = loader((torch.randn(500, 2), t.repeat(5)), 5)
    vi.variationalize(net, vi.likelihoods.Categorical()).laplace(loader((x, t)), validation=held_out, progress=False)
    assert seen == [45]


def test_the_mixture_is_measured_as_it_predicts():
    """Held-out density of the choice, from 512 points of each normal, and of the family that is placed, from draws."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    x, t = torch.randn(120, 2), torch.randint(3, (120,))
    bayes, held_out = vi.variationalize(net, vi.likelihoods.Categorical(), linearise=True), loader((x[60:], t[60:]))
    result = bayes.laplace(loader((x[:60], t[:60])), validation=held_out, progress=False)
    drawn = of_posterior(bayes, list(held_out), seed=0, draws=8000)
    assert "up to" in result.kept
    assert result.held_out[result.kept] == pytest.approx(drawn.mean, abs=0.004)  # 2000 draws of each part


def test_mixtures_share_their_normals(monkeypatch):
    """Neighbouring candidates have parts in common: each normal is made once."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    x, t = torch.randn(60, 2), torch.randint(3, (60,))
    seen, before = [], measuring.of_mixed_normals
    monkeypatch.setattr(measuring, "of_mixed_normals", lambda *given: seen.append(given) or before(*given))
    bayes = vi.variationalize(net, vi.likelihoods.Categorical())
    bayes.laplace(loader((x, t)), validation=loader((torch.randn(60, 2), t)), progress=False)
    (given,) = seen
    assert len(given[4]) == len(candidates.WIDTHS)
    assert all(len(places) == candidates.PARTS for places in given[4])
    assert len(given[1][0]) == len(candidates.WIDTHS) + 2 * (candidates.PARTS - 1)


@pytest.mark.parametrize(("family", "deviations"), [(None, rule.MIXED), (vi.MeanField(), rule.ONE_WIDTH)])
def test_one_width_is_held_to_a_stricter_bound(monkeypatch, family, deviations):
    torch.manual_seed(0)
    x, t, seen, before = torch.randn(60, 2), torch.randint(3, (60,)), [], measuring.Rule
    monkeypatch.setattr(measuring, "Rule", lambda *given: seen.append(given) or before(*given))
    bayes = vi.variationalize(nn.Linear(2, 3), vi.likelihoods.Categorical(), family)
    bayes.laplace(loader((x, t)), validation=loader((torch.randn(60, 2), t)), progress=False)
    assert [given[3] for given in seen] == [deviations]


@pytest.mark.parametrize(("gain", "expected"), [(0.1, [0.096, 0.24, 0.096]), (-0.1, [0.096, 0.0384])])
def test_weights_are_drawn_narrower_than_the_linearised_network_bears(monkeypatch, gain, expected):
    """The best linearised width is 0.24: first 1/2.5 of it; where that gains, then the same, else narrower again.

    What looks better than the linearised ones is measured once more.
    """
    torch.manual_seed(0)
    x, t, tried = torch.randn(60, 2), torch.randint(3, (60,)), []
    linear = {0.24: -0.9}

    def exactly(self, given):
        for one in given:
            one.measured(held_out(*[linear.get(one.width, -1.0)] * 60), self.network)

    def on_draws(self, given, data, *rest):
        for one in given:
            tried.append(one.width)
            one.measured(held_out(*[-0.9 + gain] * 60), self.network)

    monkeypatch.setattr(measuring.Measuring, "exactly", exactly)
    monkeypatch.setattr(measuring.Measuring, "on_draws", on_draws)
    bayes = vi.variationalize(nn.Linear(2, 3), vi.likelihoods.Categorical())
    bayes.laplace(loader((x, t)), validation=loader((torch.randn(60, 2), t)), progress=False)
    assert tried == pytest.approx(expected)
