"""A program of `torch.export` says what the posterior said, at any batch size, and without structvi."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.integrations.export import export_predictive

DRAWS = 6


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x, z):
        return self.head(torch.tanh(self.a(x) + self.b(z)))


def mlp(outputs=2):
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, outputs))


def convolutional():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


def pixels():
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 3, 1))


def rows(n):
    return torch.randn(n, 3, generator=generator(n))


CATEGORICAL, GAUSSIAN = vi.likelihoods.Categorical(), vi.likelihoods.Gaussian(0.5)
#: network, likelihood, family, inputs of n rows
CASES = {
    "labels": (mlp, CATEGORICAL, vi.LowRankNormal(rank=2), rows),
    "yes or no": (lambda: mlp(1), vi.likelihoods.Bernoulli(), vi.LowRankPrecision(rank=2), rows),
    "learned noise": (lambda: mlp(1), vi.likelihoods.Gaussian("point"), vi.FullNormal(), rows),
    "random noise": (lambda: mlp(1), vi.likelihoods.Gaussian("random"), vi.MeanField(), rows),
    "noise from a head": (mlp, vi.likelihoods.Gaussian("head"), vi.MeanField(), rows),
    "masks": (mlp, CATEGORICAL, vi.MCDropout(keep=0.8), rows),
    "a mixture": (mlp, CATEGORICAL, vi.Mixture(vi.MeanField(), components=2), rows),
    "a random head": (mlp, CATEGORICAL, vi.PerLayer({"3.*": vi.FullNormal(), "*": vi.MAP()}), rows),
    "images": (convolutional, CATEGORICAL, vi.MeanField(), lambda n: torch.randn(n, 1, 6, 6, generator=generator(n))),
    "LSTM": (Recurrent, CATEGORICAL, vi.MeanField(), lambda n: torch.randn(n, 5, 3, generator=generator(n))),
    "two inputs": (TwoInputs, CATEGORICAL, vi.MAP(), lambda n: (rows(n), rows(n)[:, :2])),
    "keywords": (TwoInputs, CATEGORICAL, vi.MeanField(), lambda n: {"x": rows(n), "z": rows(n)[:, :2]}),
}


#: tier one; the others are slow
QUICK = ("yes or no", "random noise", "noise from a head", "masks", "a random head", "images", "keywords")
SLOW = pytest.mark.slow


def posterior(make=mlp, likelihood=CATEGORICAL, family=None, **options):
    torch.manual_seed(0)
    return vi.variationalize(make(), likelihood, family or vi.MeanField(initial_scale=1.0), num_data=20, **options)


def called(program, x):
    module = program.module()
    if isinstance(x, dict):
        return module(**x)
    return module(*x) if isinstance(x, tuple) else module(x)


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in CASES])
def test_the_program_says_what_the_posterior_says(name):
    make, likelihood, family, inputs = CASES[name]
    bayes = posterior(make, likelihood, family)
    state = {key: tensor.clone() for key, tensor in bayes.state_dict().items()}
    program = export_predictive(bayes, inputs(4), DRAWS, generator=generator())
    for n in (1, 4, 9):
        pred = bayes.predict(inputs(n), DRAWS, generator=generator())
        got = called(program, inputs(n))
        expected = pred.mean if isinstance(likelihood, vi.likelihoods.Categorical | vi.likelihoods.Bernoulli) else (
            pred.mean, pred.variance
        )  # fmt: skip
        torch.testing.assert_close(got, expected)
    assert all(torch.equal(tensor, bayes.state_dict()[key]) for key, tensor in state.items())


def test_it_is_saved_without_the_users_data_and_runs_without_structvi(tmp_path):
    """The example is a view of a data set; draws of several chunks."""
    bayes = posterior(lambda: mlp(1), vi.likelihoods.Gaussian("random"))
    data = 10 + torch.randn(50_000, 3)
    torch.export.save(export_predictive(bayes, data[:4], DRAWS, generator=generator()), tmp_path / "q.pt2")
    stored = (tmp_path / "q.pt2").read_bytes()
    assert len(stored) < 300_000  # of 600 kB of data
    assert not any(data[row].numpy().tobytes() in stored for row in range(4))
    torch.save(rows(7), tmp_path / "x.pt")
    code = (
        "import sys, torch\n"
        "sys.modules['structvi'] = None\n"
        "mean, variance = torch.export.load('q.pt2').module()(torch.load('x.pt'))\n"
        "torch.save((mean, variance), 'out.pt')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    mean, variance = torch.load(tmp_path / "out.pt")
    pred = bayes.predict(rows(7), DRAWS, generator=generator())
    torch.testing.assert_close((mean, variance), (pred.mean, pred.variance))


LEARNED = {
    "labels": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)), CATEGORICAL, rows, (5,)),
    "numbers": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)), GAUSSIAN, rows, None),
    "pixels": (pixels, CATEGORICAL, lambda n: torch.randn(n, 1, 6, 6, generator=generator(n)), (3, 6, 6)),
}


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")  # torch's own
@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_variance_is_one_pass_at_any_batch_size(name, tmp_path):
    make, likelihood, inputs, classes = LEARNED[name]
    torch.manual_seed(0)
    net, x = make(), inputs(200)
    t = torch.randn(200, 5) if classes is None else torch.randint(classes[0], (200, *classes[1:]))
    bayes = vi.variationalize(net, likelihood)
    bayes.laplace(DataLoader(TensorDataset(x, t), 50), progress=False)
    assert bayes.learned_variance is not None
    program = export_predictive(bayes, inputs(4))
    torch.export.save(program, tmp_path / "q.pt2")
    for one in (program, torch.export.load(tmp_path / "q.pt2"), program.run_decompositions()):
        for n in (1, 7):
            pred = bayes.predict(inputs(n))
            expected = (pred.mean, pred.variance) if classes is None else pred.mean
            torch.testing.assert_close(called(one, inputs(n)), expected)


class Different(nn.Linear):
    """As networks do that leave something out for deployment."""

    def forward(self, x):
        return super().forward(x) * (1.0 if torch.compiler.is_exporting() else 2.0)


def plain(output, target):
    return torch.zeros(len(target))


@pytest.mark.parametrize(
    ("options", "x", "message"),
    [
        ({"likelihood": plain}, rows(4), "plain function"),
        ({"forward": lambda net, batch: (net(batch), None)}, rows(4), "wrap the network"),
        ({"dropout": "on"}, rows(4), 'use dropout="off"'),
        ({"make": convolutional, "batch_norm": "reestimated"}, rows(4), "reference batch"),
        ({"make": lambda: Different(3, 2)}, rows(4), "the exported program differs from predict by up to"),
        ({}, (rows(4), rows(3)), "one B"),
        ({"linearise": True}, rows(4), "draws of a linearised network"),
    ],
)
def test_what_cannot_be_exported_is_said(options, x, message):
    with pytest.raises(ValueError, match=message):
        export_predictive(posterior(**options), x, 2)
