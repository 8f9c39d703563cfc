"""The posterior does not depend on how the data are cut into batches: against the conjugate truth.

t = Xw + b + noise with known noise and a normal prior: the posterior is normal and known. Data are sorted by their
target, so that a batch says something else than the whole: wrong weights of batches show as a wrong mean.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import structvi as vi
from structvi.train.data import Batches

NOISE, PRIOR = 0.5, 1.0


def data(N: int, D: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    t = x @ torch.tensor([[0.7], [-1.2]], dtype=torch.float64) + 0.3
    t = t + 2 * NOISE * torch.randn(N, 1, generator=generator, dtype=torch.float64)  # more than the model thinks
    order = t[:, 0].argsort()
    return x[order], t[order]


def truth(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean [3] and covariance [3, 3] of (w, b)."""
    X = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    precision = X.mT @ X / NOISE**2 + torch.eye(X.shape[1], dtype=X.dtype) / PRIOR**2
    covariance = torch.linalg.inv(precision)
    return (covariance @ X.mT @ t / NOISE**2).squeeze(-1), covariance


def posterior() -> vi.Posterior:
    torch.manual_seed(0)
    net = nn.Linear(2, 1).double()
    return vi.variationalize(net, vi.likelihoods.Gaussian(NOISE), vi.FullNormal(), vi.priors.NormalPrior(PRIOR))


def fitted(loader, steps: int = 600, **options) -> vi.Posterior:
    bayes = posterior()
    bayes.fit(loader, steps=steps, lr=0.05, progress=False, seed=1, **options)
    return bayes


def assert_true(bayes: vi.Posterior, x: torch.Tensor, t: torch.Tensor, tolerance: float = 0.25) -> None:
    """Mean within a quarter of a posterior standard deviation, deviations within 10 %.

    What is left is Adam's noise at the end of its schedule; equal weights of ragged batches are off by 3 to 20
    standard deviations, an N five times too large by a factor of 2.2 in the deviations.
    """
    mean, covariance = truth(x, t)
    sd = covariance.diagonal().sqrt()
    q = bayes.family()
    assert ((q.mean - mean).abs() / sd).max() < tolerance
    assert (q.variance.sqrt() / sd - 1).abs().max() < 0.1


class Rows(TensorDataset):
    """Many items at once: a DataLoader that puts rows together one by one would take all the time."""

    def __getitems__(self, indices):
        return self[torch.tensor(indices)]


def as_they_are(items):
    return items


X, T = data(1000)


@pytest.mark.parametrize(
    ("B", "shuffle", "accumulate"),
    [
        (333, True, 2),
    ],
)
def test_ragged_batches(B, shuffle, accumulate):
    """Whole fits; other cuts by the gradient of an epoch, below, which is sharper."""
    loader = DataLoader(Rows(X, T), batch_size=B, shuffle=shuffle, collate_fn=as_they_are)
    assert_true(fitted(loader, accumulate=accumulate), X, T)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X[:100], T[:100], strict=True))


def test_a_stream_whose_last_batch_is_short():
    """How many rows a step has on average is learned on the way."""
    bayes = posterior()
    bayes.model.num_data = 100
    bayes.fit(DataLoader(Stream(), batch_size=33), steps=800, lr=0.05, progress=False)
    assert_true(bayes, X[:100], T[:100])


class OwnSampler(Sampler):
    """A user's own: some indices, in an order of their own."""

    def __init__(self, indices, shuffle=False):
        self.indices, self.shuffle = list(indices), shuffle

    def __iter__(self):
        order = torch.randperm(len(self.indices)).tolist() if self.shuffle else range(len(self.indices))
        return iter([self.indices[i] for i in order])

    def __len__(self):
        return len(self.indices)


class Lists:
    """A batch sampler of a user's own."""

    def __init__(self, lists):
        self.lists = lists

    def __iter__(self):
        return iter(self.lists)

    def __len__(self):
        return len(self.lists)


SOME = list(range(5, 101, 5))  # 20 of 101
CUT = [SOME[:9], SOME[9:18], SOME[18:]]
SMALL_X, SMALL_T = data(101)
SMALL = TensorDataset(SMALL_X, SMALL_T)


def loaders() -> dict[str, DataLoader]:
    whole = SMALL
    return {
        "a list": DataLoader(whole, batch_size=7, sampler=SOME),
        "a tensor": DataLoader(whole, batch_size=7, sampler=torch.tensor(SOME)),
        "a subset": DataLoader(Subset(whole, SOME), batch_size=7, shuffle=True),
        "torch's subset sampler": DataLoader(whole, batch_size=7, sampler=SubsetRandomSampler(SOME)),
        "a sampler of one's own": DataLoader(whole, batch_size=7, sampler=OwnSampler(SOME)),
        "one that shuffles": DataLoader(whole, batch_size=7, sampler=OwnSampler(SOME, shuffle=True)),
        "a batch sampler": DataLoader(whole, batch_sampler=Lists(CUT)),
        "a list of lists": DataLoader(whole, batch_sampler=CUT),
    }


@pytest.mark.parametrize("name", loaders())
def test_N_is_what_the_sampler_can_give(name):
    loader = loaders()[name]
    batches = Batches(loader)
    assert batches.num_data == 20
    seen = torch.cat([t for _, t in batches.everything()])
    chosen = SMALL_T[SOME]
    assert torch.equal(seen.flatten().sort().values, chosen.flatten().sort().values)  # none that is held out


@pytest.mark.parametrize("name", [name for name in loaders() if "batch" not in name and "lists" not in name])
def test_the_gradient_of_an_epoch_of_what_the_sampler_gives(name):
    x, t = SMALL_X[SOME], SMALL_T[SOME]
    cut = epoch_gradient(loaders()[name], None, 3)
    for name, expected in epoch_gradient([(x, t)], 20, 1).items():
        torch.testing.assert_close(cut[name], expected, rtol=1e-8, atol=1e-10)


def test_torchs_samplers_that_give_all():
    whole = SMALL
    for sampler in (
        RandomSampler(whole, replacement=True),
        RandomSampler(whole, num_samples=20),
        DistributedSampler(whole, num_replicas=4, rank=1),
    ):
        assert Batches(DataLoader(whole, batch_size=7, sampler=sampler)).num_data == 101
    some = WeightedRandomSampler([1.0] * 50 + [0.0] * 51, 30)
    with pytest.warns(UserWarning, match="more often than others"):
        assert Batches(DataLoader(whole, batch_size=7, sampler=some)).num_data == 50


class Changing(OwnSampler):
    def __iter__(self):
        return iter(torch.randperm(101)[:20].tolist())


class Crops(Dataset):
    """An item is four crops of one image."""

    def __len__(self):
        return 25

    def __getitem__(self, index):
        return SMALL_X[4 * index : 4 * index + 4], SMALL_T[4 * index : 4 * index + 4]


def flat(items):
    x, t = zip(*items, strict=True)
    return torch.cat(x), torch.cat(t)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            DataLoader(SMALL, batch_size=7, sampler=Changing(SOME)),
            "other observations in each",
        ),
        (DataLoader(SMALL, batch_size=7, sampler=SOME + SOME), "20 observations 40 times"),
        (DataLoader(Crops(), batch_size=5, collate_fn=flat), "2 items of the data set has 8 rows"),
    ],
    ids=["others each time", "twice each", "crops"],
)
def test_what_cannot_be_known_is_asked_for(loader, message):
    with pytest.raises(ValueError, match=rf"{message}.*Give num_data="):
        posterior().fit(loader, steps=1, progress=False)
    bayes = posterior()
    bayes.model.num_data = 100
    bayes.fit(loader, steps=2, progress=False)  # told, it goes on


def epoch_gradient(loader, n: int | None, steps: int, accumulate: int = 1, **options) -> dict[str, torch.Tensor]:
    """The mean over the steps of an epoch of what the optimizer is given, at weights that do not move."""
    bayes = posterior()
    if n is not None:
        bayes.model.num_data = n
    total = {name: torch.zeros_like(p) for name, p in bayes.named_parameters()}

    class Sum(torch.optim.SGD):
        def step(self, closure=None):
            for name, p in bayes.named_parameters():
                total[name] += p.grad

    bayes.fit(
        loader, steps=steps, accumulate=accumulate, optimizer=lambda p: Sum(p, lr=1e-3), progress=False, clip=None,
        schedule=vi.Schedule(kl_warmup=0), estimator=vi.Estimator(coupling=exact), **options,
    )  # fmt: skip
    return {name: x / steps for name, x in total.items()}


def assert_same_gradient(cut: dict[str, torch.Tensor], n: int) -> None:
    """To rounding that of all data at once; with equal weights of ragged batches it is off by its own size."""
    for name, expected in epoch_gradient([(X[:n], T[:n])], n, 1).items():
        torch.testing.assert_close(cut[name], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("B", [333, 999, 1000])
def test_the_gradient_of_an_epoch_of_ragged_batches(B, shuffle, accumulate):
    loader = DataLoader(Rows(X, T), batch_size=B, shuffle=shuffle, collate_fn=as_they_are)
    assert_same_gradient(epoch_gradient(loader, 1000, -(-len(loader) // accumulate), accumulate), 1000)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[999, 1], [1, 499, 500], [700, 100, 100, 99, 1]])
def test_the_gradient_of_an_epoch_of_a_list(sizes, accumulate):
    batches = list(zip(X.split(sizes), T.split(sizes), strict=True))
    assert_same_gradient(epoch_gradient(batches, 1000, -(-len(sizes) // accumulate), accumulate), 1000)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_the_gradient_of_an_epoch_does_not_depend_on_the_cut(sizes, accumulate):
    n = sum(sizes)
    batches = list(zip(X[:n].split(sizes), T[:n].split(sizes), strict=True))
    assert_same_gradient(epoch_gradient(batches, n, -(-len(sizes) // accumulate), accumulate), n)


def exact(groups, P, K, generator=None, dtype=None, device=None):
    """The same few rows at every call: the noise is not what is tested."""
    rows = torch.linspace(-1, 1, 4 * P, dtype=dtype).reshape(4, P)
    return vi.couplings.Noise(rows, rows.new_zeros(4, K))
