"""Real architectures the whole way: variationalize, fit, predict, save and load; the user's network stays as it is."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

CATEGORICAL = vi.likelihoods.Categorical()


class Recurrent(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.lstm = nn.LSTM(3, 6, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    """An encoder layer, with its own dropout of 0.1, and attention by itself."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.encoder(self.embed(x))
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.head(x.mean(1))


class Tied(nn.Module):
    """The embedding is the output layer's weight, as in language models."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.body(self.embed(x))))


class Segmenter(nn.Module):
    """Down, up and a skip connection."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x):
        skip = self.down(x)
        return self.head(torch.cat([skip, self.up(self.deep(skip))], 1))


def batch_norm():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 2),
    )


def images(n, generator):
    return torch.randn(n, 1, 6, 6, generator=generator)


def sequences(n, generator):
    return torch.randn(n, 5, 3, generator=generator)


def tokens(n, generator):
    return torch.randint(7, (n,), generator=generator)


#: network, inputs, shape of the targets, family, and further arguments of variationalize
ARCHITECTURES = {
    "batch norm, frozen": (batch_norm, images, (), vi.LowRankNormal(rank=2), {}),
    "batch norm, deterministic": (batch_norm, images, (), vi.MeanField(), {"batch_norm": "deterministic"}),
    "batch norm, re-estimated": (batch_norm, images, (), vi.MeanField(), {"batch_norm": "reestimated"}),
    "LSTM, dropout on": (lambda: Recurrent(0.3), sequences, (), vi.LowRankPrecision(rank=2), {"dropout": "on"}),
    "attention": (Attention, sequences, (), vi.LowRankNormal(rank=2), {}),
    "attention, dropout on": (Attention, sequences, (), vi.MAP(), {"dropout": "on"}),
    "tied weights": (Tied, tokens, (), vi.Mixture(vi.MeanField(), components=2), {}),
    "segmentation": (Segmenter, images, (6, 6), vi.PerLayer({"head.*": vi.FullNormal(), "*": vi.MAP()}), {}),
}


def trained(make, seed=0):
    """A network in train mode whose batch norms have seen data."""
    torch.manual_seed(seed)
    net = make()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return net


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_whole_way(tmp_path, name):
    make, inputs, target, family, options = ARCHITECTURES[name]
    net = trained(make)
    x, t = inputs(24, generator()), torch.randint(2, (24, *target), generator=generator())
    reference = {"reference": inputs(16, generator(1))} if options.get("batch_norm") == "reestimated" else {}
    state, modes = copy.deepcopy(net.state_dict()), [module.training for module in net.modules()]

    posterior = vi.variationalize(net, CATEGORICAL, family, **options)
    start = [parameter.detach().clone() for parameter in posterior.parameters()]
    posterior.fit(DataLoader(TensorDataset(x, t), batch_size=8), steps=4, progress=False)
    assert any(not torch.equal(a, b) for a, b in zip(start, posterior.parameters(), strict=True))
    pred = posterior.predict(x, draws=4, generator=generator(), **reference)
    torch.testing.assert_close(pred.mean.sum(1), torch.ones(24, *target))
    assert torch.isfinite(pred.log_prob(t)).all()
    posterior.save(tmp_path / "q")
    assert [key for key, value in net.state_dict().items() if not torch.equal(value, state[key])] == []
    assert [module.training for module in net.modules()] == modes
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())

    again = vi.load(tmp_path / "q", trained(make, seed=1)).predict(x, draws=4, generator=generator(), **reference)
    assert torch.equal(again.outputs, pred.outputs)
    assert torch.equal(again.log_prob(t), pred.log_prob(t))


# Dropout


# Batch norm


def test_frozen_batch_norm_uses_the_running_statistics():
    net = trained(batch_norm)
    x = images(5, generator())
    posterior = vi.variationalize(net, CATEGORICAL, vi.MAP(), num_data=5)
    assert {"1.weight", "5.bias"} <= set(posterior.space.names)  # the affine weights are random as all others
    with torch.no_grad():
        expected = copy.deepcopy(net).eval()(x)
    torch.testing.assert_close(posterior.predict(x).outputs[0], expected)
    # one input alone gives what it gives in a batch
    torch.testing.assert_close(posterior.predict(x[:1]).outputs[0], expected[:1])


def test_reestimated_batch_norm_uses_the_statistics_of_the_reference():
    net = trained(batch_norm)
    x, reference = images(5, generator()), images(20, generator(1))
    posterior = vi.variationalize(net, CATEGORICAL, vi.MAP(), num_data=5, batch_norm="reestimated")
    with pytest.raises(ValueError, match="reference="):
        posterior.predict(x)
    got = posterior.predict(x, reference=reference).outputs[0]
    with torch.no_grad():
        expected = copy.deepcopy(net).train()(torch.cat([reference, x]))[20:]
        running = copy.deepcopy(net).eval()(x)
    torch.testing.assert_close(got, expected)
    assert not torch.allclose(got, running, atol=1e-2)
