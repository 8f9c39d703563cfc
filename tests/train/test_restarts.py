"""A fit that learns nothing is recognised and begun again; one that learns is left alone."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

X = torch.linspace(-1, 1, 60).unsqueeze(-1)
DATA = TensorDataset(X, 2 * X + 0.05 * torch.randn(60, 1, generator=torch.Generator().manual_seed(0)))


def posterior(family: vi.Family, dead: bool) -> vi.Posterior:
    """Rectified units far below zero at every input have no gradient: such a fit can never leave its start."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    if dead:
        with torch.no_grad():
            net[0].weight.zero_()
            net[0].bias.fill_(-50.0)
    return vi.variationalize(net, vi.likelihoods.Gaussian("point"), family, generator=torch.Generator().manual_seed(1))


def fit(bayes: vi.Posterior, **options) -> vi.FitResult:
    return bayes.fit(DataLoader(DATA, batch_size=30, shuffle=True), steps=200, lr=0.05, progress=False, **options)


def restarted(result: vi.FitResult) -> list[str]:
    return [note for note in result.notes if note.startswith("stuck")]


@pytest.mark.parametrize("family", [vi.MeanField(), vi.LowRankNormal(2)], ids=["mean field", "low rank"])
def test_a_stuck_fit_is_begun_again(family):
    alone = fit(posterior(family, dead=True), restarts=0)
    assert not restarted(alone)
    bayes = posterior(family, dead=True)
    result = fit(bayes)
    (note,) = restarted(result)
    assert "predictions hardly depend on the input" in note
    assert "begun again 1 times" in note
    assert "was left for a better one" in note
    assert result.elbo.value > alone.elbo.value + 20  # the noise is 0.05 and not 1.2, for 60 observations
    assert bayes.predict(X).mean[-1] - bayes.predict(X).mean[0] > 3
    # what is handed back is what the posterior holds
    assert bayes.elbo(DataLoader(DATA, batch_size=60)).value == pytest.approx(result.elbo.value, abs=3)


def test_a_fit_that_learns_is_left_alone():
    assert not restarted(fit(posterior(vi.MeanField(), dead=False)))


def test_the_best_is_kept_where_nothing_helps():
    """Targets without a signal: what comes out is the best of all fits, and says so."""
    noise = torch.randn(60, 1, generator=torch.Generator().manual_seed(3))
    bayes = posterior(vi.MeanField(), dead=False)
    result = bayes.fit(DataLoader(TensorDataset(X, noise), batch_size=30), steps=200, restarts=2, progress=False)
    (note,) = restarted(result)
    assert "begun again 2 times" in note
    assert bayes.elbo(DataLoader(TensorDataset(X, noise), batch_size=60)).value == pytest.approx(
        result.elbo.value, abs=3
    )


def test_an_optimizer_of_ones_own_is_not_used_twice():
    bayes = posterior(vi.MeanField(), dead=True)
    optimizer = torch.optim.Adam(bayes.parameters(), lr=0.05)
    loader = DataLoader(DATA, batch_size=30, shuffle=True)
    assert not restarted(bayes.fit(loader, steps=200, optimizer=optimizer, progress=False))
