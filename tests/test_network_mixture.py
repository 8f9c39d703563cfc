"""A mixture of posteriors around networks of their own: with point masses it is the deep ensemble."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.files.file import write
from structvi.models.calibration import Adjustment
from structvi.network_mixture import stacking

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
T = (X[:, 0] + X[:, 1] > 0).long()


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


def seeded():
    return torch.Generator().manual_seed(0)


def test_of_point_masses_it_is_the_deep_ensemble():
    nets = networks()
    mixture = vi.Ensemble.of(nets, vi.likelihoods.Categorical(), vi.MAP(), num_data=40)
    with torch.no_grad():
        outputs = torch.stack([net(X) for net in nets])
    found = mixture.predict(X)
    assert torch.equal(found.outputs, outputs)
    assert torch.allclose(found.mean, outputs.softmax(-1).mean(0), rtol=0, atol=4e-7)  # thirds, in float32
    metrics = mixture.evaluate(loader(40, 60))
    expected = nn.functional.nll_loss(outputs[:, 40:].softmax(-1).mean(0).log(), T[40:]).item()
    assert metrics.nlpd == pytest.approx(expected, rel=1e-5)


def test_around_trained_networks():
    nets = networks()
    before = [copy.deepcopy(net.state_dict()) for net in nets]
    mixture = vi.Ensemble.of(nets, vi.likelihoods.Categorical())
    # half of the labels are wrong: the networks are too sure, and every spread gains
    wrong = DataLoader(TensorDataset(X[40:], T[40:] ^ (torch.arange(20) % 2)), batch_size=20)
    result = mixture.laplace(loader(), validation=wrong, progress=False)
    assert result.weights == [1 / 3] * 3
    assert [one.status for one in result.members] == [vi.Status.PLACED] * 3
    draws = mixture.predict(X, draws=30, generator=seeded())
    assert draws.draws == 3 * 12  # ten of each network, in groups of four widths
    assert float(draws.weights.sum()) == pytest.approx(1.0)
    average = torch.stack([member.predict(X, 2000).mean for member in mixture.posteriors]).mean(0)
    # 6000 draws: a probability has a standard error of at most 0.5/√2000 for each member
    assert (mixture.predict(X, 6000).mean - average).abs().max() < 0.03
    for net, state in zip(nets, before, strict=True):
        assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())
    lines = str(result).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("3 networks")
    assert lines[3].startswith("next: result.mixture.predict(x)")
    assert all(f"network {c}: placed" in result.details for c in range(3))


def test_a_member_does_not_ask_for_held_out_data_that_the_mixture_had():
    mixture = vi.Ensemble.of(networks(2), vi.likelihoods.Categorical())
    result = mixture.laplace(loader(), validation=loader(40, 60), progress=False)
    assert all("validation=" not in str(one) and "the mixture's result" in str(one) for one in result.members)
    assert "validation=" in str(mixture.laplace(loader(), progress=False).members[0])


def test_the_density_that_is_told_is_that_of_predictions():
    """In function space both. The error of 32 points of each part is .0015 nats here, that of drawn weights .0038."""
    mixture = vi.Ensemble.of(networks(), vi.likelihoods.Categorical(), linearise=True)
    wrong = DataLoader(TensorDataset(X[40:], T[40:] ^ (torch.arange(20) % 2)), batch_size=20)
    result = mixture.laplace(loader(), validation=wrong, progress=False)
    assert "up to" in result.members[0].kept
    expected = torch.cat([mixture.predict(x, generator=seeded()).log_prob(t) for x, t in wrong]).mean().item()
    assert result.held_out == pytest.approx(expected, abs=0.0025)


def too_sure():
    """Three classes in float64, a fifth of the labels wrong, networks whose logits are then made 2.5 times as large."""
    x = torch.randn(500, 4, generator=seeded(), dtype=torch.float64)
    t = (x[:, 0] > 0).long() + (x[:, 0] + x[:, 1] > 1).long()
    t = torch.where(torch.rand(500, generator=seeded()) < 0.2, (t + 1) % 3, t)
    nets = []
    for seed in range(3):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer = torch.optim.Adam(net.parameters(), 0.02)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[:200]), t[:200]).backward()
            optimizer.step()
        with torch.no_grad():
            net[2].weight *= 2.5
            net[2].bias *= 2.5
        nets.append(net)
    return nets, *(DataLoader(TensorDataset(x[part], t[part]), 50) for part in (slice(200), slice(200, 500)))


def test_a_temperature_is_the_mixtures_and_told_with_it(tmp_path):
    nets, train, held_out = too_sure()
    mixture = vi.Ensemble.of(nets, vi.likelihoods.Categorical())
    result = mixture.laplace(train, validation=held_out, progress=False)
    value = mixture.calibration.applied.value
    assert value > 1.2
    assert result.calibration is mixture.calibration
    line = str(result).splitlines()[2]
    gain, error = result.against_networks
    assert f"{gain:+.4f} ± {error:.4f} over the average of the networks" in line
    assert line.endswith(f"with a temperature of {value:.3g} on top")
    assert "a recalibration by the same held-out data" in result.notes[0]
    for one in result.members:  # they predict without it
        assert one.calibration is None
        assert "temperature" not in one.details + one.kept
    x, t = held_out.dataset.tensors
    average = torch.stack([net(x).softmax(-1) for net in nets]).mean(0).log()
    of_average = -nn.functional.nll_loss(average, t).item()
    assert result.held_out - gain == pytest.approx(of_average, abs=1e-9)
    assert mixture.predict(x, generator=seeded()).log_prob(t).mean().item() == pytest.approx(result.held_out, abs=2e-3)
    mixture.save(tmp_path)
    loaded = vi.load_mixture(tmp_path, [copy.deepcopy(net) for net in nets])
    assert str(value) == str(loaded.calibration.applied.value)
    for calibrated in (True, False):
        one, other = (m.predict(x, generator=seeded(), calibrated=calibrated).mean for m in (mixture, loaded))
        assert torch.equal(one, other)


def test_stacked_weights_have_the_width_that_suits_them_without_a_temperature():
    """That which is chosen with a temperature, on top of which it is none, would be too wide by itself."""
    nets, train, held_out = too_sure()
    mixture = vi.Ensemble.of(nets, vi.likelihoods.Categorical())
    result = mixture.laplace(train, validation=held_out, weights="stacked", progress=False)
    x, t = held_out.dataset.tensors
    average = torch.stack([net(x).softmax(-1) for net in nets]).mean(0).log()
    assert result.held_out > -nn.functional.nll_loss(average, t).item() - 0.005
    assert mixture.calibration is None
    assert "temperature" not in result.details


def test_networks_of_several_forms():
    """Each is called with its own weights; those whose outputs differ are refused."""
    torch.manual_seed(0)
    nets = [
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
        nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.GELU(), nn.Linear(3, 2)),
    ]
    mixture = vi.Ensemble.of(nets, vi.likelihoods.Categorical())
    result = mixture.laplace(loader(), validation=loader(40, 60), progress=False)
    average = torch.stack([net(X[40:]).softmax(-1) for net in nets]).mean(0).log()
    of_average = -nn.functional.nll_loss(average, T[40:]).item()
    assert result.held_out - result.against_networks[0] == pytest.approx(of_average, abs=1e-6)
    other = vi.Ensemble.of([nets[0], nn.Linear(4, 3)], vi.likelihoods.Categorical())
    with pytest.raises(ValueError, match="outputs of one shape and dtype"):
        other.laplace(loader(), validation=loader(40, 60), progress=False)


def test_weights_of_a_fit_before_do_not_stay():
    nets = networks()
    with torch.no_grad():
        nets[2][3].weight.mul_(-3)  # a member that is wrong
    mixture = vi.Ensemble.of(nets, vi.likelihoods.Categorical())
    mixture.laplace(loader(), validation=loader(40, 60), weights="stacked", progress=False)
    assert float(mixture.weights[2]) < 0.1
    result = mixture.laplace(loader(), validation=loader(40, 60), progress=False)
    assert result.weights == mixture.weights.tolist() == [1 / 3] * 3


def test_the_bound_is_that_of_part_and_weights():
    """With equal weights, the mean of the members' bounds: the part costs nothing."""
    mixture = vi.Ensemble.of(networks(), vi.likelihoods.Categorical(), vi.MeanField(), vi.priors.NormalPrior(1.0))
    result = mixture.fit(loader(), steps=3, progress=False)
    assert result.elbo.value == pytest.approx(sum(one.elbo.value for one in result.members) / 3)
    mixture.weights.copy_(torch.tensor([1.0, 0.0, 0.0]))
    one_hot = mixture._elbo(result.members).value
    assert one_hot == pytest.approx(result.members[0].elbo.value - torch.tensor(3.0).log().item(), rel=1e-6)


def test_weights_by_stacking_are_the_best_of_all():
    generator = seeded()
    log_probs = torch.randn(3, 200, generator=generator, dtype=torch.float64)

    def value(w):
        return (w.log().unsqueeze(-1) + log_probs).logsumexp(0).sum().item()

    best = stacking(log_probs)
    for other in torch.distributions.Dirichlet(torch.ones(3, dtype=torch.float64)).sample((200,)):
        assert value(best) >= value(other) - 1e-6


def test_stacked_weights_gain_on_the_data_that_chose_them():
    nets = networks()
    with torch.no_grad():
        nets[2][3].weight.mul_(-3)  # a member that is wrong
    mixture = vi.Ensemble.of(nets, vi.likelihoods.Categorical(), vi.MeanField(), linearise=True)
    equal = mixture.laplace(loader(), validation=loader(40, 60), progress=False).held_out
    result = mixture.laplace(loader(), validation=loader(40, 60), weights="stacked", progress=False)
    assert result.held_out > equal
    assert result.weights[2] < 0.1
    assert "optimistic" in result.details
    with pytest.raises(ValueError, match="give validation="):
        mixture.laplace(loader(), weights="stacked")


def test_one_width_is_chosen_for_the_mixture():
    """Not worse on the held-out data than the average over the networks; of every member the same prior's width."""
    nets = networks()
    mixture = vi.Ensemble.of(nets, vi.likelihoods.Categorical())
    result = mixture.laplace(loader(), validation=loader(40, 60), progress=False)
    ensemble = torch.stack([net(X[40:60]).softmax(-1) for net in nets]).mean(0).log()
    of_ensemble = -nn.functional.nll_loss(ensemble, T[40:60]).item()
    assert f"average over the networks {of_ensemble:.4f}" in result.details
    assert result.held_out > of_ensemble - 0.02  # 0.005 and the noise of 32 draws of each member
    assert len({one.kept for one in result.members}) == 1
    assert {one.status for one in result.members} == {vi.Status.PLACED}
    assert all(one.last_fit is kept for one, kept in zip(mixture.posteriors, result.members, strict=True))


def test_priors_that_are_given_stay():
    mixture = vi.Ensemble.of(networks(), vi.likelihoods.Categorical(), prior=vi.priors.NormalPrior(0.3))
    result = mixture.laplace(loader(), validation=loader(40, 60), progress=False)
    assert "placed for the mixture" not in result.details
    assert all(one.model.prior.scale == 0.3 for one in mixture.posteriors)


def test_members_have_a_noise_of_their_own():
    nets = networks(2, outputs=1)
    mixture = vi.Ensemble.of(nets, vi.likelihoods.Gaussian("point"), vi.MAP(), num_data=40)
    first, second = mixture.posteriors
    with torch.no_grad():
        first.model.likelihood.log_noise.fill_(0.0)
        second.model.likelihood.log_noise.fill_(1.0)
    assert mixture.predict(X[:3]).aleatoric[0].item() == pytest.approx((1 + torch.tensor(2.0).exp().item()) / 2)


def test_saved_and_loaded(tmp_path):
    mixture = vi.Ensemble.of(networks(), vi.likelihoods.Categorical())
    mixture.laplace(loader(), validation=loader(40, 60), weights="stacked", progress=False)
    mixture.save(tmp_path / "mixture")
    again = vi.load_mixture(tmp_path / "mixture", [copy.deepcopy(net) for net in networks()[::-1]])
    assert torch.equal(again.predict(X, generator=seeded()).mean, mixture.predict(X, generator=seeded()).mean)
    assert torch.equal(again.weights, mixture.weights)
    with pytest.raises(ValueError, match="of 3 networks, got 2"):
        vi.load_mixture(tmp_path / "mixture", networks(2))
    (tmp_path / "mixture" / "network-0.safetensors").rename(tmp_path / "mixture" / "mixture.safetensors")
    with pytest.raises(vi.CheckpointError, match="does not describe a mixture"):
        vi.load_mixture(tmp_path / "mixture", networks())


def test_a_calibration_is_saved_with_the_mixture(tmp_path):
    mixture = vi.Ensemble.of(networks(2), vi.likelihoods.Categorical(), vi.MAP(), num_data=40)
    found = mixture.calibrate(loader(40, 60), conformal=True)
    mixture.calibration = replace(found, adjustment=Adjustment("temperature", 2.0, gain=0.1, error=0.01, cases=10))
    mixture.save(tmp_path)
    again = vi.load_mixture(tmp_path, networks(2))
    assert again.calibration.described() == mixture.calibration.described()
    assert torch.equal(again.predict(X).mean, mixture.predict(X).mean)
    assert not torch.allclose(again.predict(X).mean, mixture.predict(X, calibrated=False).mean, atol=1e-3)
    assert torch.equal(again.predict(X).conformal(0.8), mixture.predict(X).conformal(0.8))


@pytest.mark.parametrize(
    ("tensors", "calibration"),
    [
        ({}, {"adjustment": None, "conformal": ["label", 3], "draws": 1}),
        ({"scores": torch.zeros(3).double()}, {"adjustment": None, "conformal": None, "draws": 1}),
        ({"scores": torch.zeros(3).double()}, None),
        ({"scores": torch.full((3,), 2.0).double()}, {"adjustment": None, "conformal": ["label", 3], "draws": 1}),
        ({}, {"adjustment": ["scale", 2.0, 0.1, 0.01, 10], "conformal": None, "draws": 1}),
        ({}, "no calibration"),
    ],
)
def test_a_calibration_that_cannot_be_is_refused(tmp_path, tensors, calibration):
    mixture = vi.Ensemble.of(networks(2), vi.likelihoods.Categorical(), vi.MAP(), num_data=40)
    mixture.save(tmp_path)
    description = {"kind": "mixture of networks", "networks": 2, "calibration": calibration}
    write(tmp_path / "mixture.safetensors", {"weights": mixture.weights, **tensors}, description)
    with pytest.raises(vi.CheckpointError, match=r"mixture\.safetensors"):
        vi.load_mixture(tmp_path, networks(2))


def test_what_is_no_mixture_of_networks():
    net = networks(1)[0]
    with pytest.raises(TypeError, match="a list of networks"):
        vi.Ensemble.of(net, vi.likelihoods.Categorical())
    with pytest.raises(ValueError, match="a network of its own"):
        vi.Ensemble.of([net, net], vi.likelihoods.Categorical())
    with pytest.raises(TypeError, match="a list of posteriors"):
        vi.Ensemble([net])


def test_a_mixture_without_held_out_data_says_how_its_members_ended():
    mixture = vi.Ensemble.of(networks(), vi.likelihoods.Categorical(), vi.MeanField())
    lines = str(mixture.fit(loader(), steps=2, progress=False)).splitlines()
    assert len(lines) == 4
    assert lines[2] == "they ended: 3 too short"
    assert lines[3].startswith("next: fit longer")
