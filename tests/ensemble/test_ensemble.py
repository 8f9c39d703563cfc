"""An ensemble of posteriors around several networks: with point masses it is the deep ensemble."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.models.calibration import Adjustment

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
T = (X[:, 0] + X[:, 1] > 0).long()
CATEGORICAL = vi.likelihoods.Categorical()


def loader(start=0, stop=40):
    return DataLoader(TensorDataset(X[start:stop], T[start:stop]), batch_size=20)


def networks(count=3, outputs=2):
    """Trained a little, each with batch norm statistics of its own."""
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))
        optimizer = torch.optim.Adam(net.parameters(), 0.02)
        for _ in range(20):
            optimizer.zero_grad()
            y = net(X[:40])
            loss = nn.functional.cross_entropy(y, T[:40]) if outputs > 1 else (y[:, 0] - X[:40, 0]).square().mean()
            loss.backward()
            optimizer.step()
        found.append(net.eval())
    return found


def average_density(nets, x, t):
    average = torch.stack([net(x).softmax(-1) for net in nets]).mean(0).log()
    return -nn.functional.nll_loss(average, t).item()


def test_of_point_masses_it_is_the_deep_ensemble():
    nets = networks()
    ensemble = vi.Ensemble.of(nets, CATEGORICAL, vi.MAP(), num_data=40)
    with torch.no_grad():
        outputs = torch.stack([net(X) for net in nets])
    found = ensemble.predict(X)
    assert torch.equal(found.outputs, outputs)
    assert torch.allclose(found.mean, outputs.softmax(-1).mean(0), rtol=0, atol=4e-7)  # thirds, in float32
    assert ensemble.evaluate(loader(40, 60)).nlpd == pytest.approx(-average_density(nets, X[40:], T[40:]), rel=1e-5)


# ------------------------------------------------------------------------------------------------------------ trained


def test_members_are_single_fits():
    nets = [nn.Linear(4, 2) for _ in range(3)]
    ensemble = vi.Ensemble.of(copy.deepcopy(nets), CATEGORICAL, vi.MeanField())
    given = {"steps": 20, "progress": False}
    result = ensemble.fit(loader(), seed=4, validation=loader(40, 60), **given)
    for c, (one, net) in enumerate(zip(ensemble.posteriors, nets, strict=True)):
        single = vi.variationalize(net, CATEGORICAL, vi.MeanField())
        single.fit(loader(), seed=4 + c, validation=loader(40, 60), **given)
        torch.testing.assert_close(one.family.mean, single.family.mean, atol=1e-5, rtol=0)
    lines = str(result).splitlines()
    assert lines[0] == "3 networks: 3 too short"
    assert result.held_out == pytest.approx(-ensemble.evaluate(loader(40, 60)).nlpd, abs=0.02)


def test_the_bound_is_the_mean_of_the_members():
    ensemble = vi.Ensemble.of(networks(), CATEGORICAL, vi.MeanField(), vi.priors.NormalPrior(1.0))
    result = ensemble.fit(loader(), steps=3, progress=False)
    assert result.elbo.value == pytest.approx(sum(one.elbo.value for one in result.members) / 3)


# ------------------------------------------------------------------------------------------------------------- placed


def test_around_trained_networks():
    """Half of the labels are wrong: the networks are too sure, and every spread gains."""
    nets = networks()
    states = [copy.deepcopy(net.state_dict()) for net in nets]
    ensemble = vi.Ensemble.of(nets, CATEGORICAL)
    wrong = DataLoader(TensorDataset(X[40:], T[40:] ^ (torch.arange(20) % 2)), batch_size=20)
    result = ensemble.laplace(loader(), validation=wrong, progress=False)
    assert {one.status for one in result.members} == {vi.Status.PLACED}
    of_average = average_density(nets, X[40:], wrong.dataset.tensors[1])
    assert result.members[0].network == pytest.approx(of_average, abs=1e-6)
    assert result.held_out > of_average
    assert result.gain[0] > -2 * result.gain[1]  # over their average with a temperature
    average = torch.stack([one.predict(X, 2000).mean for one in ensemble.posteriors]).mean(0)
    # 6000 draws: a probability has a standard error of at most 0.5/√2000 for each member
    assert (ensemble.predict(X, 6000, calibrated=False).mean - average).abs().max() < 0.03
    for net, state in zip(nets, states, strict=True):
        assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())
    assert "over the average of the networks" in str(result)
    assert all(f"network {c}: placed" in result.details for c in range(3))
    assert all(one.last_fit is placed for one, placed in zip(ensemble.posteriors, result.members, strict=True))


# -------------------------------------------------------------------------------------------------------------- files


def test_saved_and_loaded(tmp_path):
    ensemble = vi.Ensemble.of(networks(), CATEGORICAL, vi.MAP(), num_data=40)
    found = ensemble.calibrate(conformal=loader(40, 60))
    ensemble.calibration = replace(found, adjustment=Adjustment("temperature", 2.0, gain=0.1, error=0.01, cases=10))
    ensemble.save(tmp_path / "ensemble")
    again = vi.load(tmp_path / "ensemble", [copy.deepcopy(net) for net in networks()])
    assert again.calibration.described() == ensemble.calibration.described()
    assert torch.equal(again.predict(X).mean, ensemble.predict(X).mean)
    assert not torch.allclose(again.predict(X).mean, ensemble.predict(X, calibrated=False).mean, atol=1e-3)
    assert torch.equal(again.predict(X).conformal(0.8), ensemble.predict(X).conformal(0.8))
    with pytest.raises(ValueError, match="of 3 networks, got 2"):
        vi.load(tmp_path / "ensemble", networks(2))
    (tmp_path / "ensemble" / "network-0.safetensors").rename(tmp_path / "ensemble" / "ensemble.safetensors")
    with pytest.raises(vi.CheckpointError, match="does not describe an ensemble"):
        vi.load(tmp_path / "ensemble", networks())


def test_a_second_save_leaves_nothing_of_the_first(tmp_path, monkeypatch):
    three, two = (vi.Ensemble.of(networks(C), CATEGORICAL, vi.MAP(), num_data=40) for C in (3, 2))
    three.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(two.posteriors[1], "save", lambda path: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space"):
            two.save(tmp_path)
    assert len(vi.load(tmp_path, networks(3)).members) == 3
    two.save(tmp_path)
    names = ["ensemble.safetensors", "network-0.safetensors", "network-1.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
