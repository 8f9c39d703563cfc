"""Many fits as one computation: each is what it would be alone, and what cannot be stacked is fitted by itself."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

GAUSSIAN, CATEGORICAL = vi.likelihoods.Gaussian("point"), vi.likelihoods.Categorical()


def data(n, seed=0, batch_size=16, classes=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    t = x[:, :1].sin() + 0.1 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    if classes:
        t = (t[:, 0] > 0).long()
    return DataLoader(TensorDataset(x, t), batch_size=batch_size, shuffle=True)


def mlp(outputs=1):
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs))


def made(count, family=None, likelihood=GAUSSIAN, prior=None, net=mlp, **options):
    """Posteriors around networks of their own, in float64."""
    found = []
    prior = prior or vi.priors.NormalPrior({"*": 1.0}, learn=True, by_fan_in=True).double()
    for seed in range(count):
        torch.manual_seed(seed)
        parts = (copy.deepcopy(part) for part in (likelihood, family or vi.MeanField(), prior))
        found.append(vi.variationalize(net().double(), next(parts).double(), *parts, **options))
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
        assert torch.allclose(result.history["gradient_norm"], single.history["gradient_norm"], rtol=1e-8, atol=0)
        assert (result.steps, result.epochs, result.kept) == (single.steps, single.epochs, single.kept)
        assert result.elbo.value == pytest.approx(single.elbo.value, rel=1e-10)
        assert any("at once" in note for note in result.notes)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (vi.MeanField(), {"each": {"kl_weight": [1.0, 0.3, 0.1], "lr": [0.02, 0.01, 0.03]}}),
        (vi.LowRankNormal(2), {"estimator": vi.Estimator(groups=2)}),
        (vi.LowRankPrecision(2), {"estimator": vi.Estimator(coupling=vi.couplings.unscented)}),
        (vi.Mixture(vi.MeanField(), components=2), {}),
        (vi.PerLayer({"2.*": vi.MeanField(), "*": vi.MAP()}), {}),
        (vi.MeanField(), {"estimator": vi.Estimator("entropy", coupling=vi.couplings.naive)}),
        (vi.MCDropout(keep=0.9), {}),
    ],
)
def test_fifty_steps_at_once_are_those_of_single_fits(family, options):
    """Data sets of three sizes, whose last batches are padded; staged, averaged, clipped."""
    point = isinstance(family, vi.PerLayer | vi.MCDropout)  # point masses learn no scale
    prior = vi.priors.NormalPrior(1.0) if point else None
    loaders = [data(n, seed=n) for n in (40, 33, 20)]
    a, b = (made(3, family, prior=prior) for _ in range(2))
    each = options.pop("each", {})
    given = {"steps": 50, "clip": 1.0, **options}
    results = vi.fit_many(a, loaders, progress=False, each={"seed": [5, 6, 7], **each}, **given)
    singles = [
        one.fit(own, seed=5 + m, progress=False, **{name: values[m] for name, values in each.items()}, **given)
        for m, (one, own) in enumerate(zip(b, loaders, strict=True))
    ]
    assert_same(a, b, results, singles)


def test_labels_and_held_out_data():
    a, b = (made(2, likelihood=CATEGORICAL, net=lambda: mlp(2)) for _ in range(2))
    loaders = [data(n, seed=n, classes=True) for n in (20, 30)]
    held_out = [list(data(20, seed=seed, classes=True)) for seed in (8, 9)]
    results = vi.fit_many(a, loaders, each={"validation": held_out}, steps=12, progress=False)
    singles = [
        one.fit(own, steps=12, progress=False, seed=m, validation=held_out[m])
        for m, (one, own) in enumerate(zip(b, loaders, strict=True))
    ]
    assert_same(a, b, results, singles)
    assert all(
        result.held_out == pytest.approx(single.held_out) for result, single in zip(results, singles, strict=True)
    )


def test_each_stops_for_itself():
    """An end that one comes to earlier than the others; another length is another group."""
    linear = {"net": lambda: nn.Linear(3, 1), "likelihood": vi.likelihoods.Gaussian(1.0)}
    a, b = (made(4, prior=vi.priors.NormalPrior(1.0), **linear) for _ in range(2))
    loaders = [data(n, seed=n, batch_size=64) for n in (60, 60, 40, 70)]
    given = {"epochs": 160, "lr": 0.1}
    results = vi.fit_many(a, loaders, progress=False, **given)
    singles = alone(b, loaders, **given)
    assert len({single.steps for single in singles[:3]}) > 1
    assert "no other has its form" in results[3].details
    for a_one, b_one, result, single in zip(a, b, results, singles, strict=True):
        assert differ(a_one, b_one) < 1e-9
        assert (result.steps, result.kept, result.status) == (single.steps, single.kept, single.status)


def test_a_fit_that_fails_leaves_the_others_alone():
    """A batch that is not finite is skipped as alone; a fit to nothing else ends by itself, and says so."""
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    good, bad = (x, x[:, :1]), (x, torch.full((8, 1), torch.nan, dtype=torch.float64))
    a, b = (made(3, num_data=8) for _ in range(2))
    loaders = [[good], [good, bad, good, good], [bad]]
    results = vi.fit_many(a, loaders, progress=False, steps=12)
    (first,) = alone(b[:1], loaders[:1], steps=12)
    assert_same(a[:1], b[:1], results[:1], [first])
    single = b[1].fit(loaders[1], seed=1, progress=False, steps=12)
    assert [one.index for one in results[1].skipped] == [one.index for one in single.skipped] == [1, 1, 1]
    assert 1e-6 < differ(a[1], b[1]) < 0.1  # Adam's moments are older
    assert results[2].status is vi.Status.DIVERGED
    assert "5 batches in a row" in results[2].verdict
    untouched = made(3, num_data=8)[2]
    assert differ(a[2], untouched) == 0
    with pytest.raises(vi.NonFiniteError, match="5 batches in a row"):
        b[2].fit(loaders[2], seed=2, progress=False, steps=12)


def test_tensors_that_are_not_learned_are_each_networks_own():
    """Padding rows, held weights, batch norm's statistics."""

    def net():
        layers = nn.Embedding(5, 2, padding_idx=0), nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)
        with torch.no_grad():
            layers[0].weight[0] = torch.randn(2)
            layers[3].running_mean.normal_()
        return nn.Sequential(*layers)

    x, t = torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 1, dtype=torch.float64)
    loader = DataLoader(TensorDataset(torch.cat([x, 0 * x]), torch.cat([t, -t])), batch_size=2)
    a, b = (made(2, net=net, prior=vi.priors.NormalPrior(1.0), exclude="4.*") for _ in range(2))
    results = vi.fit_many(a, loader, steps=8, progress=False)
    assert_same(a, b, results, alone(b, [loader] * 2, steps=8))


# ------------------------------------------------------------------------------------------------ one after another


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
    [([Columns([0, 1]), Columns([1, 2])], (40, 40)), ([over_the_batch(), over_the_batch()], (40, 27))],
    ids=["other columns", "statistics of the batch"],
)
def test_networks_that_differ_in_what_no_tensor_shows(nets, sizes):
    """And padding that would change the other rows."""
    loaders = [data(n, batch_size=8) for n in sizes]
    a, b = ([made(1, net=lambda net=net: copy.deepcopy(net))[0] for net in nets] for _ in range(2))
    results = vi.fit_many(a, loaders, steps=12, progress=False)
    assert all("on its own rows" in result.details for result in results)
    alone(b, loaders, steps=12)
    assert all(differ(one, other) == 0 for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("posteriors", "given", "reason"),
    [
        ({}, {"optimizer": lambda p: torch.optim.SGD(p, 1e-4)}, "optimizer is your own"),
        ({}, {"accumulate": 2}, "accumulate=2"),
        ({"net": lambda: nn.Sequential(mlp(), nn.Dropout()), "dropout": "on"}, {}, "random"),
        ({"linearise": True}, {}, "linearised"),
        ({"net": lambda: nn.Sequential(nn.Linear(3, 2**16), nn.Linear(2**16, 1))}, {}, "a draw takes"),
    ],
)
def test_what_cannot_be_at_once_says_so(posteriors, given, reason):
    results = vi.fit_many(made(2, **posteriors), [data(20), data(25)], steps=2, progress=False, **given)
    assert all("one after another" in result.details and reason in result.details for result in results)
