"""The everyday walks, each once from its first line to its last."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi


def classes(rows=192, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    t = (x[:, 0] * x[:, 1] > 0).long()
    flip = torch.rand(rows, generator=generator) < 0.1
    return x, torch.where(flip, 1 - t, t)


def loader(rows=192, seed=0):
    return DataLoader(TensorDataset(*classes(rows, seed)), batch_size=32)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def trained():
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(40):
        for x, t in loader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), t).backward()
            optimizer.step()
    return net


def test_a_network_is_trained_as_a_posterior_saved_and_loaded(tmp_path):
    bayes = vi.variationalize(network(), vi.likelihoods.Categorical(), vi.LowRankNormal(rank=2))
    first = bayes.fit(loader(), epochs=1, progress=False)
    result = bayes.fit(loader(), epochs=60, progress=False)
    assert result.elbo.value > first.elbo.value
    x, t = classes(seed=1)
    metrics = bayes.evaluate([(x, t)])
    assert metrics.nlpd < 0.69  # a constant predictor
    bayes.save(tmp_path / "posterior.safetensors")
    again = vi.load(tmp_path / "posterior.safetensors", network())
    draw = {"generator": torch.Generator().manual_seed(0)}
    mean = bayes.predict(x, 8, **draw).mean
    draw["generator"].manual_seed(0)
    assert torch.equal(again.predict(x, 8, **draw).mean, mean)


def test_a_posterior_around_a_trained_network_is_not_worse_than_the_network():
    net = trained()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    bayes = vi.variationalize(net, vi.likelihoods.Categorical())
    result = bayes.laplace(loader(), validation=loader(400, seed=2), progress=False)
    assert result.status is vi.Status.PLACED
    x, t = classes(1000, seed=3)
    network_alone = nn.functional.cross_entropy(net(x), t).item()
    assert bayes.evaluate([(x, t)]).nlpd < network_alone + 0.01
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_a_last_layer():
    bayes = vi.variationalize_head(trained(), vi.likelihoods.Categorical())
    bayes.fit_head(loader())
    assert bayes.predict(classes()[0]).mean.shape == (192, 2)


def test_a_log_density():
    def log_density(p):
        return -0.5 * (p["a"].square().sum() / 4 + (p["b"] - 1).square())

    space = vi.Parameters({"a": torch.zeros(2), "b": torch.zeros(())})
    result = vi.fit_density(vi.LogDensity(log_density, space), vi.FullNormal(), progress=False)
    assert result.family().mean.tolist() == pytest.approx([0, 0, 1], abs=1e-4)
    assert result.family().variance.tolist() == pytest.approx([4, 4, 1], rel=1e-3)
