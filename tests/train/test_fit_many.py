"""Many fits as one computation: each is what it would be alone; and the members of a fit."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import structvi as vi
from structvi.train.batches import Batches
from structvi.train.stacked_batches import Feed


def data(n, seed=0, batch_size=16, classes=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    t = x[:, :1].sin() + 0.1 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    if classes:
        t = (t[:, 0] > 0).long()
    return DataLoader(TensorDataset(x, t), batch_size=batch_size, shuffle=True)


def made(count, family=None, likelihood=None, outputs=1, prior=None):
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
        own = copy.deepcopy(likelihood or vi.likelihoods.Gaussian("point")).double()
        prior = prior or vi.priors.NormalPrior.fan_in({"*": 1.0}, learn=True).double()
        found.append(vi.variationalize(net, own, copy.deepcopy(family or vi.MeanField()), copy.deepcopy(prior)))
    return found


def differ(a, b):
    """The largest difference of all that two posteriors have learned."""
    theirs = b.learned()
    return max(float((x.detach() - theirs[name].detach()).abs().max()) for name, x in a.learned().items())


def alone(posteriors, loaders, first=0, **given):
    """Single fits, with the seeds first, first + 1, .."""
    pairs = zip(posteriors, loaders, strict=True)
    return [one.fit(own, seed=first + m, progress=False, **given) for m, (one, own) in enumerate(pairs)]


def assert_same(at_once, alone, results, singles):
    for a, b, result, single in zip(at_once, alone, results, singles, strict=True):
        # float64: what another order of additions leaves after fifty steps
        assert differ(a, b) < 1e-11
        assert torch.allclose(result.history["elbo"], single.history["elbo"], rtol=1e-10, atol=0)
        assert torch.allclose(result.history["lr"], single.history["lr"], rtol=1e-14, atol=0)
        assert (result.steps, result.epochs, result.kept) == (single.steps, single.epochs, single.kept)
        assert result.elbo.value == pytest.approx(single.elbo.value, rel=1e-10)
        assert any("at once" in note for note in result.notes)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (vi.MeanField(), {}),
        (vi.LowRankNormal(2), {"estimator": vi.Estimator(groups=2)}),
        (vi.LowRankPrecision(2), {"estimator": vi.Estimator(coupling=vi.couplings.naive)}),
        (vi.LowRankPrecision(2), {"estimator": vi.Estimator(coupling=vi.couplings.unscented)}),
        (vi.Mixture(vi.MeanField(), components=2), {}),
        (vi.PerLayer({"2.*": vi.MeanField(), "*": vi.MAP()}), {}),
        (vi.MeanField(), {"estimator": vi.Estimator("entropy"), "kl_weight": 0.3}),
    ],
)
def test_fifty_steps_at_once_are_those_of_single_fits(family, options):
    """Data sets of three sizes, whose last batches are padded; staged, averaged, clipped."""
    prior = vi.priors.NormalPrior(1.0) if isinstance(family, vi.PerLayer) else None  # point masses learn no scale
    loaders = [data(n, seed=n) for n in (40, 33, 20)]
    a, b = (made(3, family, prior=prior) for _ in range(2))
    given = {"steps": 50, "clip": 1.0, **options}
    results = vi.fit_many(a, loaders, seeds=[5, 6, 7], at_once=True, progress=False, **given)
    singles = alone(b, loaders, 5, **given)
    assert_same(a, b, results, singles)


def test_dropout_and_points_at_once():
    """Families without a density, one with masks from the coupling's noise; classes for a target."""
    for family in (vi.MAP(), vi.MCDropout(keep=0.9)):
        a, b = (made(2, family, vi.likelihoods.Categorical(), 2, vi.priors.NormalPrior(1.0)) for _ in range(2))
        loaders = [data(n, seed=n, classes=True) for n in (20, 30)]
        results = vi.fit_many(a, loaders, steps=12, progress=False, at_once=True)
        singles = [
            one.fit(own, steps=12, progress=False, seed=m) for m, (one, own) in enumerate(zip(b, loaders, strict=True))
        ]
        assert_same(a, b, results, singles)


def test_each_stops_for_itself():
    """Epochs of unequal length, and an end that one comes to earlier than the others."""
    a, b = (made(3) for _ in range(2))
    loaders = [data(n, seed=n, batch_size=64) for n in (60, 60, 130)]
    given = {"epochs": 80, "lr": 0.1}
    results = vi.fit_many(a, loaders, at_once=True, progress=False, **given)
    singles = alone(b, loaders, **given)
    assert len({single.steps for single in singles}) > 1
    for a_one, b_one, result, single in zip(a, b, results, singles, strict=True):
        # rounding grows over hundreds of steps at a high rate; what is decided must be the same
        assert differ(a_one, b_one) < 1e-6
        assert (result.steps, result.kept, result.status) == (single.steps, single.kept, single.status)


class Items(Dataset):
    """Rows as dicts, with noise drawn from the global stream when they are read."""

    def __init__(self, n):
        self.x = torch.linspace(-1, 1, 3 * n, dtype=torch.float64).view(n, 3)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input": self.x[i] + 0.1 * torch.randn(3, dtype=torch.float64), "target": self.x[i, :1]}


def test_any_loader_and_data_that_are_made_anew():
    a, b = (made(2) for _ in range(2))
    loaders = [DataLoader(Items(n), batch_size=8, shuffle=True) for n in (12, 20)]
    results = vi.fit_many(a, loaders, steps=10, progress=False, at_once=True)
    singles = [
        one.fit(own, steps=10, progress=False, seed=m) for m, (one, own) in enumerate(zip(b, loaders, strict=True))
    ]
    assert_same(a, b, results, singles)


def test_a_fit_that_fails_leaves_the_others_alone():
    """Batches that are not finite are left out as alone; a fit to nothing else ends by itself, and says so."""
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    good, bad = (x, x[:, :1]), (x, torch.full((8, 1), torch.nan, dtype=torch.float64))
    a, b = (made(3) for _ in range(2))
    for one in (*a, *b):
        one.model.num_data = 8
    loaders = [[good], [good, bad, bad, good], [bad]]
    given = {"steps": 12}
    results = vi.fit_many(a, loaders, at_once=True, progress=False, **given)
    singles = alone(b[:2], loaders[:2], **given)
    for m, single in enumerate(singles):
        assert differ(a[m], b[m]) < 1e-12
        assert [one.index for one in results[m].skipped] == [one.index for one in single.skipped]
    assert len(results[1].skipped) == 6
    assert results[2].status is vi.Status.DIVERGED
    assert "5 batches in a row" in results[2].verdict
    with pytest.raises(vi.NonFiniteError, match="5 batches in a row"):
        b[2].fit(loaders[2], seed=2, progress=False, **given)


def test_what_cannot_be_at_once_is_one_after_another():
    a = made(2)
    results = vi.fit_many(a, data(20), steps=2, progress=False, optimizer=lambda p: torch.optim.SGD(p, 1e-4))
    assert any("one after another: optimizer=" in note for note in results[0].notes)
    with pytest.raises(ValueError, match="cannot be made at once: accumulate=2"):
        vi.fit_many(made(2), data(20), steps=2, progress=False, accumulate=2, at_once=True)


def test_forms_are_told_apart():
    """Two of mean field and two of a low rank: two groups, each at once, results in the order that was asked for."""
    a = [*made(2), *made(2, vi.LowRankNormal(1))]
    results = vi.fit_many([a[0], a[2], a[1], a[3]], data(20), steps=3, progress=False, at_once=True, seeds=[0, 0, 1, 1])
    assert all(any("one of 2 fits" in note for note in result.notes) for result in results)
    single = made(1)[0]
    single.fit(data(20), steps=3, progress=False, seed=0)
    assert differ(single, a[0]) < 1e-12


def test_a_padding_row_is_each_networks_own():
    """The first batch, on which at once and alone are compared, has no padding."""

    def networks():
        for seed in range(2):
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Embedding(5, 2, padding_idx=0), nn.Flatten(), nn.Linear(4, 1)).double()
            with torch.no_grad():
                net[0].weight[0] = torch.randn(2, dtype=torch.float64)
            yield vi.variationalize(net, vi.likelihoods.Gaussian(0.5), vi.MeanField())

    x, t = torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 1, dtype=torch.float64)
    loader = DataLoader(TensorDataset(torch.cat([x, 0 * x]), torch.cat([t, -t])), batch_size=2)
    many, singles = list(networks()), list(networks())
    vi.fit_many(many, loader, steps=8, progress=False)
    alone(singles, [loader] * 2, steps=8)
    assert all(differ(a, b) < 1e-11 for a, b in zip(many, singles, strict=True))


def test_what_is_held_is_not_learned_with_the_others():
    loader, starts = data(40), made(4)
    for held in starts[1:3]:
        held.model.prior.log_scale.requires_grad_(False).fill_(-1.0)
    at_once, one_by_one = copy.deepcopy(starts), copy.deepcopy(starts)
    results = vi.fit_many(at_once, loader, steps=20, progress=False)
    singles = alone(one_by_one, [loader] * 4, steps=20)
    assert float(at_once[1].model.prior.log_scale.detach()) == -1.0
    assert float(at_once[0].model.prior.log_scale.detach()) != 0.0
    assert_same(at_once, one_by_one, results, singles)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"checkpoint": vi.Checkpoint("somewhere")}, "checkpoint= is for one fit"),
        ({"callback": print}, "callback= is for one fit"),
        ({"seeds": [1]}, "one entry for each of the 2"),
        ({"stepps": 3}, "no option stepps"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        vi.fit_many(made(2), data(20), **{"steps": 2, "progress": False, **given})


def test_networks_of_their_own():
    one = made(1)[0]
    with pytest.raises(ValueError, match="a network of its own"):
        vi.fit_many([one, one], data(20), steps=2)


def test_feed_reads_what_single_fits_read():
    loaders = [data(n, seed=n) for n in (20, 33)]
    generators = [torch.Generator().manual_seed(m) for m in range(2)]
    feed = Feed([Batches(own, seed) for seed, own in enumerate(loaders)], generators)
    assert feed.uneven
    expected = [
        [batch for epoch in range(3) for batch in Batches(own, m).epoch(epoch)] for m, own in enumerate(loaders)
    ]
    for step in range(5):
        read = feed.read([True, True])
        for m in range(2):
            x, _ = expected[m][step]
            assert read.rows[m] == len(x)
            rows = read.batch[0][m, : len(x)]
            assert torch.equal(rows, x)


def test_the_curve_of_held_out_data_is_that_of_single_fits():
    loaders, held_out = [data(40), data(56, seed=1)], [list(data(20, seed=8)), list(data(20, seed=9))]
    posteriors, others = made(2), made(2)
    results = vi.fit_many(posteriors, loaders, validation=held_out, steps=20, at_once=True, progress=False)
    for m, (result, other) in enumerate(zip(results, others, strict=True)):
        single = other.fit(loaders[m], steps=20, seed=m, validation=held_out[m], progress=False)
        curve, alone_ = result.history["held_out"], single.history["held_out"]
        assert int(curve.isfinite().sum()) == (6, 4)[m]  # epochs of 3 and 4 steps that are whole and not the last
        assert torch.allclose(curve, alone_, rtol=1e-8, atol=0, equal_nan=True)


def test_a_long_curve_is_thinned():
    held_out = [list(data(20, seed=8))] * 2
    (result, _) = vi.fit_many(made(2), [data(16)] * 2, validation=held_out, steps=200, at_once=True, progress=False)
    points = result.history["held_out"].isfinite().nonzero().flatten()  # an epoch is a step
    assert 30 <= len(points) <= 34
    assert int(points.diff().max()) <= 7
