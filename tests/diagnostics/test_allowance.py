"""What a budget of passes allows: shares, least uses, and that no more is spent."""

from math import inf

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.diagnostics import diagnose
from structvi.diagnostics.allowance import Allowance
from structvi.diagnostics.problem import Problem
from structvi.util import budget

N, BATCH = 200, 10


def loader():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=g)
    return DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=BATCH, shuffle=True)


class Counting(nn.Module):
    """It counts the observations that it sees; one draw at a time."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.seen = [0]

    def forward(self, x):
        self.seen[0] += len(x)
        return self.layers(x)


def make():
    torch.manual_seed(0)
    return vi.variationalize(
        Counting(), vi.likelihoods.Gaussian("point"), vi.LowRankNormal(2), num_data=N, evaluation="loop"
    )


@pytest.fixture
def nothing_free(monkeypatch):
    monkeypatch.setattr(budget, "FREE", 0.0)


def passes_of(bayes, call):
    before = bayes.net.seen[0]
    result = call()
    return (bayes.net.seen[0] - before) / N, result


def test_the_passes_of_a_fit_are_counted(nothing_free):
    """200 steps of a pair of draws on 10 of 200 observations: 20 passes forward, three times that with backward."""
    bayes = make()
    seen, result = passes_of(
        bayes, lambda: bayes.fit(loader(), steps=200, progress=False, schedule=vi.Schedule(stop=False))
    )
    assert result.passes == pytest.approx(3 * 20)
    comparison = seen - 20 - 4 / N  # two items, twice, before the first step: which weights a gradient reaches
    # three candidates, 16 draws each: 48 draws of an eighth of the batches, 2 of 20
    assert result.comparison == "8 groups of draws, 2 of 20 batches"
    assert comparison == pytest.approx(48 * 2 / 20)
    assert comparison <= budget.SHARE * result.passes


def test_small_problems_are_free():
    """200 observations and 41 weights: over a thousand passes are 10⁷ products, and everything is read."""
    result = make().fit(loader(), steps=40, progress=False)
    assert result.comparison == "8 groups of draws, all data"
    assert budget.default_passes(1.0, N, 41) == pytest.approx(1e7 / (N * 41))


@pytest.mark.parametrize("passes", [10.0, 60.0, 400.0])
def test_a_diagnosis_spends_no_more_than_it_may(passes, nothing_free):
    """Forward passes, those with gradients three times; the least of each part, a batch, may be more than its share."""
    bayes = make()
    bayes.fit(loader(), steps=40, progress=False)
    forward, report = passes_of(bayes, lambda: bayes.diagnose(loader(), passes=passes, gradients=False))
    assert forward <= passes
    assert forward >= passes / 5  # and it uses it
    assert (report["k̂"].level == "not available") == (passes < 267)
    whole, _ = passes_of(bayes, lambda: bayes.diagnose(loader(), passes=passes))
    assert forward + budget.STEP * (whole - forward) <= passes
    assert "passes= for more" in report["ELBO"].meaning


def test_the_default_is_a_tenth_of_the_last_fit(nothing_free):
    bayes = make()
    result = bayes.fit(loader(), steps=200, progress=False, schedule=vi.Schedule(stop=False))
    own = Allowance.of(Problem.of(bayes, loader()), result, None, None)
    assert own.passes == pytest.approx(6.0)
    assert "a tenth of the 60 of the fit" in own.source
    assert Allowance.of(Problem.of(bayes, loader()), None, None, None).passes == inf
    report = bayes.diagnose(loader())
    assert "6 passes over the data, a tenth of the 60 of the fit" in report["ELBO"].meaning
    assert "give passes= for more" in report["k̂"].meaning
    assert report.sound is not False


def test_draws_that_are_asked_for_are_taken(nothing_free):
    bayes = make()
    bayes.fit(loader(), steps=40, progress=False)
    report = bayes.diagnose(loader(), draws=30, gradients=False, passes=5.0)
    assert "of 30 draws" in report["k̂"].value
    with pytest.raises(ValueError, match="passes must be a positive number"):
        bayes.diagnose(loader(), passes=-1)


def test_log_densities_have_no_budget():
    space = vi.Parameters({"z": torch.zeros(2)})
    target = vi.LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
    report = diagnose(vi.MeanField(initial_scale=1 / 3).bind(space), target, gradients=False)
    assert "passes" not in report["ELBO"].meaning
    assert "of 10000 draws" in report["k̂"].value
