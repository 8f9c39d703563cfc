"""Fits at once that may not be: networks that differ in what no parameter shows, rows that padding would change."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import structvi as vi
from structvi.result import Status

G = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=G)
T = X[:, 1:].sum(1, keepdim=True)


def loader(n, size=8):
    return DataLoader(TensorDataset(X[:n], T[:n]), size, shuffle=True)


def posteriors(nets, **options):
    return [vi.variationalize(net, vi.likelihoods.Gaussian("point"), vi.MeanField(), **options) for net in nets]


class Columns(nn.Module):
    """Which columns it reads is no parameter, and not in its `repr`."""

    def __init__(self, columns):
        super().__init__()
        self.columns, self.linear = columns, nn.Linear(2, 1)

    def forward(self, x):
        return self.linear(x[:, self.columns])


def over_the_batch():
    return nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Tanh(), nn.Linear(6, 1)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("nets", "sizes"),
    [
        (lambda: [Columns([0, 1]), Columns([1, 2])], (40, 40)),
        (lambda: [over_the_batch(), over_the_batch()], (40, 27)),
    ],
    ids=["other columns", "statistics of the batch"],
)
def test_they_are_fitted_one_after_another(nets, sizes):
    torch.manual_seed(0)
    nets = nets()
    together, alone = posteriors(copy.deepcopy(nets)), posteriors(nets)
    results = vi.fit_many(together, [loader(n) for n in sizes], epochs=3, progress=False)
    assert all("on its own rows" in result.details for result in results)
    for seed, (one, n, found) in enumerate(zip(alone, sizes, results, strict=True)):
        assert one.fit(loader(n), epochs=3, seed=seed, progress=False).elbo.value == pytest.approx(found.elbo.value)


def test_a_forward_that_looks_at_the_target():
    def forward(net, batch):
        return net(batch[0]), batch[1].squeeze(-1).unsqueeze(-1)

    made = posteriors([nn.Linear(3, 1), nn.Linear(3, 1)], forward=forward)
    results = vi.fit_many(made, [loader(40), loader(33)], steps=4, progress=False)
    assert all("forward= alone knows" in result.details for result in results)


class WithPaths(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"image": X[i], "label": (X[i].sum() > 0).long(), "path": f"p{i}"}


def test_batches_with_words_in_them():
    nets = [nn.Linear(3, 2) for _ in range(3)]
    likelihood = vi.likelihoods.Categorical()
    made = [vi.variationalize(net, likelihood, vi.MeanField(), keys=("image", "label")) for net in nets]
    results = vi.fit_many(made, [DataLoader(WithPaths(n), 8) for n in (30, 21, 13)], epochs=2, progress=False)
    assert [result.steps for result in results] == [8, 6, 4]


def test_what_is_shared_and_validation_of_no_use_are_refused():
    likelihood = vi.likelihoods.Gaussian("point")
    shared = [vi.variationalize(nn.Linear(3, 1), likelihood, vi.MeanField()) for _ in range(2)]
    with pytest.raises(ValueError, match="share something that is learned"):
        vi.fit_many(shared, [loader(20), loader(20)], steps=2, progress=False)
    with pytest.raises(ValueError, match="share something that is learned"):
        vi.Ensemble(shared).fit(loader(20), steps=2, progress=False)
    made = posteriors([nn.Linear(3, 1), nn.Linear(3, 1)])
    with pytest.raises(TypeError, match="validation must be a list"):
        vi.fit_many(made, [loader(20), loader(20)], validation=loader(20), steps=2, progress=False)


def test_a_mixture_is_as_good_as_its_worst_member():
    nets = [nn.Linear(3, 1), nn.Linear(3, 1)]
    with torch.no_grad():
        nets[1].weight.fill_(80.0)
    mixture = vi.Ensemble([vi.variationalize(net, vi.likelihoods.Gaussian(1.0), vi.MeanField()) for net in nets])
    result = mixture.fit(loader(60, 60), steps=600, progress=False)
    assert {one.status for one in result.members} == {Status.CONVERGED, Status.IMPROVING}
    assert result.status is Status.IMPROVING
    with torch.no_grad():
        nets[1].weight.fill_(1e25)
    wide = [
        vi.variationalize(n, vi.likelihoods.Gaussian(1.0), vi.MeanField(), vi.priors.NormalPrior(1e26)) for n in nets
    ]
    with pytest.raises(ValueError, match="these diverged: 1"):
        vi.Ensemble(wide).fit(loader(60, 60), steps=20, progress=False)


def test_a_linearised_network_with_a_part_that_is_a_point():
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    blocks = vi.PerLayer({"0.*": vi.MAP(), "*": vi.MeanField()})
    bayes = vi.variationalize(net, vi.likelihoods.Gaussian(0.1), blocks, linearise=True)
    assert torch.isfinite(bayes.fit(loader(60, 16), steps=3, progress=False).history["elbo"]).all()
