"""Small posteriors of every kind, for the tests of a GPU."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

#: 21 = 8 + 8 + 5: batches of two shapes, two graphs
N, D, BATCH, CLASSES = 21, 5, 8, 3


def data(dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=g, dtype=torch.float64).to(dtype)
    return TensorDataset(x, (x[:, :3] * 2).argmax(1))


def images():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, 1, 8, 8, generator=g)
    return TensorDataset(x, torch.randint(CLASSES, (N,), generator=g))


def loader(data=None, size=1):
    return DataLoader(globals()["data"]() if data is None else data, batch_size=BATCH // size, shuffle=True)


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(D, 16), nn.Dropout(dropout), nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.body(x))))


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)).mean((-2, -1)))


class ReadsValues(Net):
    """It waits for a number on the host: no CUDA graph can hold that."""

    def forward(self, x):
        return super().forward(x) if x.abs().sum().item() < 1e9 else x[:, :CLASSES]


#: name → network, family, further arguments of variationalize
CASES = {
    "mean field": (Net, vi.MeanField(), {}),
    "mean field, in a loop": (Net, vi.MeanField(), {"evaluation": "loop"}),
    "covariance": (Net, vi.LowRankNormal(3), {}),
    "precision": (Net, vi.LowRankPrecision(3), {}),
    "covariance, rank 17": (Net, vi.LowRankNormal(17), {}),
    "full": (Net, vi.FullNormal(), {}),
    "mixture": (Net, vi.Mixture(vi.LowRankNormal(2), 2), {}),
    "blocks": (Net, vi.PerLayer({"head.*": vi.LowRankPrecision(2), "*": vi.LowRankNormal(2)}), {}),
    "head on a point": (Net, vi.PerLayer({"head.*": vi.FullNormal(), "*": vi.MAP()}), {}),
    "linearised": (Net, vi.MeanField(), {"linearise": True}),
    "linearised, covariance": (Net, vi.LowRankNormal(3), {"linearise": True}),
    "rotated": (Net, vi.Rotated(vi.MeanField()), {}),
    "rotated precision": (Net, vi.Rotated(vi.LowRankPrecision(2)), {}),
    "MC dropout": (Net, vi.MCDropout(keep=0.8), {}),
    "dropout layers": (lambda: Net(0.3), vi.MeanField(), {"dropout": "on"}),
    "convolutional": (Convolutional, vi.LowRankNormal(2), {}),
}


def data_of(name, dtype=torch.float32):
    return images() if name == "convolutional" else data(dtype)


def make(name, dtype=torch.float32, **options):
    network, family, own = CASES[name]
    torch.manual_seed(0)
    net = network().to(dtype)
    generator = torch.Generator().manual_seed(1)
    settings = {"evaluation": "vmap", **own, **options}  # no clock decides
    likelihood = vi.likelihoods.Categorical()
    return vi.variationalize(net, likelihood, family, generator=generator, num_data=N, **settings).to(dtype)


def fitted(bayes, device, data, steps=9, capture=True, precision=None, **options):
    settings = {"progress": False, "schedule": vi.Schedule(stop=False), "seed": 3, **options}
    compute = vi.Compute(capture=capture, precision=precision)
    return bayes.to(device).fit(loader(data), steps=steps, compute=compute, **settings)


def values(bayes):
    return {name: parameter.detach().cpu().clone() for name, parameter in bayes.named_parameters()}


def check_same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), f"{name}: differs by {(one[name] - other[name]).abs().max():.2e}"


def was_captured(result):
    return not any("not captured" in note for note in result.notes)
