"""Networks and loaders that are legal but odd: what is found is right, or an error says what to do."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

import structvi as vi
from structvi.train.checks import RANDOM

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=GENERATOR)
T = (X[:, 0] + 0.5 * torch.randn(60, generator=GENERATOR) > 0).long()
Y = X[:, :1] + 0.3 * torch.randn(60, 1, generator=GENERATOR)


def loaders(x=X, t=T, size=20):
    whole = TensorDataset(x, t)
    return DataLoader(Subset(whole, range(40)), size), DataLoader(Subset(whole, range(40, 60)), size)


def classifier():
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    return net


class Numbers(nn.Module):
    """A regression whose output has the form that is asked for."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.form, self.mean, self.noise = form, nn.Linear(3, 1), nn.Linear(3, 1)
        with torch.no_grad():
            self.mean.weight.copy_(torch.tensor([[1.0, 0.0, 0.0]]))

    def forward(self, x):
        mean, noise = self.mean(x), 0.1 * self.noise(x) - 1.0
        forms = {
            "[B, 1]": lambda: mean, "squeeze()": lambda: mean.squeeze(),
            "pair": lambda: (mean, noise), "dict": lambda: {"mean": mean, "log_scale": noise},
            "[B, 2]": lambda: torch.cat([mean, noise], 1),
        }  # fmt: skip
        return forms[self.form]()


def placed(net, likelihood, train, held_out, **options):
    bayes = vi.variationalize(net, likelihood, **options)
    return bayes, bayes.laplace(train, validation=held_out, progress=False)


@pytest.mark.parametrize("form", ["pair", "dict", "[B, 2]"])
def test_two_heads_in_every_form(form):
    train, held_out = loaders(t=Y)
    net = Numbers(form)
    _, result = placed(net, vi.likelihoods.Gaussian("head"), train, held_out)
    mean, log_scale = Numbers("pair")(X[40:])
    expected = torch.distributions.Normal(mean, log_scale.exp()).log_prob(Y[40:]).mean().item()
    assert result.network == pytest.approx(expected, rel=1e-4)
    assert result.held_out > expected - 0.05


class Frozen(nn.Module):
    """A backbone that is kept from learning in forward, and weights that nothing uses."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.backbone, self.head, self.unused = way, nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(3, 3)

    def forward(self, x):
        if self.way == "no_grad":
            with torch.no_grad():
                features = self.backbone(x).tanh()
        else:
            features = self.backbone(x).tanh()
        return self.head(features.detach() if self.way == "detach" else features)


@pytest.mark.parametrize("way", ["no_grad", "detach"])
def test_weights_that_no_gradient_reaches_are_named(way):
    train, _ = loaders()
    bayes = vi.variationalize(Frozen(way), vi.likelihoods.Categorical(), vi.MeanField())
    with pytest.warns(UserWarning, match=r"depends on backbone.weight, backbone.bias, but no gradient"):
        bayes.fit(train, steps=2, progress=False)
    for quiet in (Frozen("plain"), Frozen(way)):
        quiet.backbone.requires_grad_(quiet.way == "plain")
        bayes = vi.variationalize(quiet, vi.likelihoods.Categorical(), vi.MeanField())
        bayes.fit(train, steps=2, progress=False)  # a warning would be an error


class AlwaysDropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = classifier()

    def forward(self, x):
        return self.net(nn.functional.dropout(x, 0.5))


def test_random_numbers_in_forward_are_noted():
    train, _ = loaders()
    for net, noted in ((AlwaysDropping(), True), (nn.Sequential(nn.Dropout(0.5), classifier()), False)):
        bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField())
        assert (RANDOM in bayes.fit(train, steps=2, progress=False).notes) is noted


class Twenty(nn.Module):
    """A network for batches of one size: two items, on which it is looked at before a fit, do not suit it."""

    def __init__(self, error):
        super().__init__()
        self.net, self.error = classifier(), error

    def forward(self, x):
        if len(x) != 20:
            raise self.error("batches of 20")
        return self.net(x)


@pytest.mark.parametrize("error", [AssertionError, AttributeError, ZeroDivisionError])
def test_a_network_that_two_items_do_not_suit_is_fitted(error):
    bayes = vi.variationalize(Twenty(error), vi.likelihoods.Categorical(), vi.MeanField())
    assert bayes.fit(loaders()[0], steps=2, progress=False).steps == 2


class ReadByWorkers(Dataset):
    """Its data are opened in worker processes."""

    data = None

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return tuple(column[index] for column in self.data)


def opened(_):
    get_worker_info().dataset.data = (X, T)


def test_data_that_worker_processes_alone_can_read():
    loader = DataLoader(ReadByWorkers(), batch_size=20, num_workers=1, worker_init_fn=opened)
    bayes = vi.variationalize(classifier(), vi.likelihoods.Categorical(), vi.MeanField())
    assert bayes.fit(loader, steps=2, progress=False).steps == 2
    with pytest.raises(TypeError, match="not iterable"):  # without workers that is the loader's own error
        bayes.fit(DataLoader(ReadByWorkers(), batch_size=20), steps=2, progress=False)


class Shuffled:
    """Held-out rows in another order at each reading."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self):
        for rows in (40 + torch.randperm(20, generator=self.generator)).split(5):
            yield X[rows], T[rows]


def test_candidates_are_compared_row_by_row_whatever_the_order():
    train, held_out = loaders(size=5)
    _, expected = placed(classifier(), vi.likelihoods.Categorical(), train, held_out)
    _, found = placed(classifier(), vi.likelihoods.Categorical(), train, Shuffled())
    assert found.network == pytest.approx(expected.network, rel=1e-6)
    assert found.network_tempered == pytest.approx(expected.network_tempered, abs=0.03)  # folds of other rows
    watched = vi.variationalize(classifier(), vi.likelihoods.Categorical(), vi.MeanField())
    result = watched.fit(train, epochs=2, validation=Shuffled(), progress=False)
    again = vi.variationalize(classifier(), vi.likelihoods.Categorical(), vi.MeanField())
    same = again.fit(train, epochs=2, validation=held_out, progress=False)
    assert result.held_out == pytest.approx(same.held_out, rel=1e-4)


class Stream(IterableDataset):
    def __init__(self, *rows, endless=False):
        self.rows, self.endless = rows, endless

    def __iter__(self):
        yield from ((X[i], T[i]) for i in range(*self.rows))
        while self.endless:
            yield from ((X[i], T[i]) for i in range(*self.rows))


def with_nan(tensor, row):
    changed = tensor.clone()
    changed[row] = math.nan
    return changed


CATEGORICAL, POINT = vi.likelihoods.Categorical, lambda: vi.likelihoods.Gaussian("point")
REFUSED = {
    "all axes squeezed": (lambda: (Numbers("squeeze()"), POINT(), *loaders(t=Y.squeeze(-1))), r"write squeeze\(-1\)"),
    "NaN in inputs": (lambda: (classifier(), CATEGORICAL(), *loaders(with_nan(X, 3))), "output is NaN on its training"),
    "NaN in targets": (lambda: (Numbers("[B, 1]"), POINT(), *loaders(t=with_nan(Y, 50))), "residuals .* not finite"),
    "NaN held out": (lambda: (classifier(), CATEGORICAL(), *loaders(with_nan(X, 50))), "NaN for 1 of the 20 rows"),
    "no label held out": (
        lambda: (classifier(), CATEGORICAL(-1), loaders()[0], [(X[40:], torch.full((20,), -1))]), "no observation",
    ),
    "an empty stream": (
        lambda: (classifier(), CATEGORICAL(), loaders()[0], DataLoader(Stream(0, 0), 5)), "validation= gives no batch",
    ),
    "half precision": (lambda: (classifier().half(), CATEGORICAL(), *loaders(X.half())), r"net.float\(\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_to_do(name):
    make, words = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=words):
        placed(*make(), num_data=40)


def test_held_out_data_that_say_nothing_are_noted():
    train, held_out = loaders(with_nan(X, 50))
    bayes = vi.variationalize(classifier(), vi.likelihoods.Categorical(), vi.MeanField())
    notes = bayes.fit(train, epochs=2, validation=held_out, progress=False).notes
    assert any("held-out log density is not finite" in note for note in notes)


def test_rows_that_are_fitted_are_found_in_subsets():
    data = TensorDataset(X, T)
    train = DataLoader(Subset(data, range(40)), 20, shuffle=True)
    for held_out, words in (
        (DataLoader(Subset(data, range(30, 50)), 5), "50%"),
        (DataLoader(Subset(Subset(data, range(20, 60)), range(20)), 5), "are the data that are fitted"),
    ):
        bayes = vi.variationalize(classifier(), vi.likelihoods.Categorical(), vi.MeanField())
        with pytest.warns(UserWarning, match=words):
            bayes.fit(train, steps=2, validation=held_out, progress=False)
    bayes.fit(train, steps=2, validation=[(X[40:], T[40:])], progress=False)  # a warning would be an error


def test_of_a_stream_without_an_end_as_many_rows_as_there_are_data_are_read():
    endless = DataLoader(Stream(0, 40, endless=True), 20)
    _, result = placed(classifier(), CATEGORICAL(), endless, loaders()[1], num_data=40)
    _, expected = placed(classifier(), CATEGORICAL(), loaders()[0], loaders()[1])
    assert result.network == expected.network
    assert result.selected == expected.selected
