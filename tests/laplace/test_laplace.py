"""`bayes.laplace`: conjugate truth, what is selected and said, and what stays as it was."""

import copy
from math import log, pi

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.laplace import curvature
from structvi.laplace.place import Candidate, TrainedNetwork

F64 = torch.float64


def data(n, seed, outputs=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    angle = torch.atan2(x[:, 1], x[:, 0]) + 0.7 * torch.randn(n, generator=generator)
    return x, ((angle + torch.pi) / (2 * torch.pi) * outputs).long().clamp(0, outputs - 1)


TRAIN, HELD_OUT, TEST = data(120, 0), data(300, 1), data(1000, 2)


def loader(pair, size=40):
    return DataLoader(TensorDataset(*pair), batch_size=size)


def trained(net, pair=TRAIN, steps=200, loss=nn.functional.cross_entropy):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(pair[0]), pair[1]).backward()
        optimizer.step()
    return net.eval()


@pytest.fixture(scope="module")
def dense():
    torch.manual_seed(0)
    return trained(nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)))


@pytest.fixture(scope="module")
def placed(dense):
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical())
    return bayes, bayes.laplace(loader(TRAIN), validation=loader(HELD_OUT), progress=False)


def nlpd(bayes, pair, **options):
    return (
        -bayes.predict(pair[0], generator=torch.Generator().manual_seed(0), **options).log_prob(pair[1]).mean().item()
    )


def test_a_linear_regression_has_its_posterior(monkeypatch):
    """The covariance is (ΦᵀΦ/σ² + π)⁻¹, up to the noise of the simulated labels."""
    monkeypatch.setattr(curvature, "GRADIENTS", 40)
    torch.manual_seed(0)
    x = torch.randn(40, 3, dtype=F64)
    t = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=F64) + 0.3 * torch.randn(40, 1, dtype=F64)
    net = nn.Linear(3, 1).double()
    phi = torch.cat([x, torch.ones(40, 1, dtype=F64)], 1)
    precision = phi.mT @ phi / 0.09 + torch.eye(4, dtype=F64) / 4
    with torch.no_grad():
        mean = torch.linalg.solve(precision, phi.mT @ t / 0.09).squeeze(-1)
        net.weight.copy_(mean[:3])
        net.bias.copy_(mean[3:])
    found = []
    for seed in range(60):
        bayes = vi.variationalize(net, vi.likelihoods.Gaussian(0.3), vi.FullNormal(), vi.priors.NormalPrior(2.0))
        bayes.laplace(loader((x, t), 7), seed=seed, progress=False)
        found.append(torch.linalg.inv(bayes.family().covariance()))
        assert torch.equal(bayes.family().mean, mean)
    error = torch.stack(found).std(0) / 60**0.5
    assert bool(((torch.stack(found).mean(0) - precision).abs() < 5 * error).all())


def test_families_are_placed_with_the_precision_of_data_and_prior():
    """Λ = G + π: in the precision form diagonal and columns, else a precision of the same diagonal."""
    net = nn.Linear(3, 2).double()
    W, prior = torch.randn(8, 3, dtype=F64), vi.priors.NormalPrior(0.5)
    diagonal = W.square().sum(1) + torch.rand(8, dtype=F64)
    for family in (vi.MeanField(), vi.LowRankPrecision(3), vi.LowRankPrecision(1), vi.FullNormal()):
        bayes = vi.variationalize(net, vi.likelihoods.Categorical(), family, prior)
        rank = 3 if family.rank == 0 and isinstance(family, vi.FullNormal) else family.rank
        known = curvature.Curvature(bayes.space.initial, diagonal, W)
        network = TrainedNetwork(bayes, bayes.model.likelihood, bayes.family, known)
        found = torch.linalg.inv(network.placed(Candidate(None, linearised=True))().covariance())
        expected = torch.diag(diagonal + 4 - W[:, :rank].square().sum(1)) + W[:, :rank] @ W[:, :rank].mT
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_it_is_better_than_an_over_fitted_network_and_says_so(dense, placed):
    bayes, result = placed
    own = nn.functional.cross_entropy(dense(TEST[0]), TEST[1]).item()
    assert result.network == pytest.approx(
        -nn.functional.cross_entropy(dense(HELD_OUT[0]), HELD_OUT[1]).item(), rel=1e-5
    )
    assert result.network_tempered > result.network + 0.1
    assert result.gain[0] == pytest.approx(result.held_out - result.network_tempered, abs=1e-9)
    assert result.held_out == pytest.approx(result.candidates[result.selected])
    assert nlpd(bayes, TEST) < own - 0.1
    assert nlpd(bayes, TEST) < nlpd(bayes, TEST, calibrated=False) + 0.01
    assert bayes.last_fit is result
    assert result.status is vi.Status.PLACED
    for word in (
        result.selected,
        f"{result.network:.4f}",
        f"{result.network_tempered:.4f}",
        "epochs of training",
        " s",
    ):
        assert word in str(result)


def test_without_a_validation_set(dense):
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical())
    result = bayes.laplace(loader(TRAIN), progress=False)
    assert result.selected == "linearised, prior width 0.24"
    assert result.network is None
    assert "give validation=" in str(result)
    assert bayes.model.linearised_at is not None
    prior = vi.priors.NormalPrior(0.3)
    own = vi.variationalize(dense, vi.likelihoods.Categorical(), vi.MeanField(), prior, linearise=False)
    assert own.laplace(loader(TRAIN), progress=False).selected == "drawn weights"
    assert own.model.prior is prior
    assert isinstance(own.family, vi.MeanField)
    assert own.model.linearised_at is None


def test_it_is_the_start_of_a_fit(dense):
    ends = []
    for warm in (True, False):
        bayes = vi.variationalize(
            dense, vi.likelihoods.Categorical(), vi.MeanField(), vi.priors.NormalPrior(0.5), linearise=True
        )
        if warm:
            bayes.laplace(loader(TRAIN), progress=False)
        ends.append(bayes.fit(loader(TRAIN), epochs=10, progress=False).elbo.value)
    assert ends[0] > ends[1] + 20


def test_the_network_is_selected_if_nothing_is_better():
    """A network that knows the truth: every spread around it only costs."""
    torch.manual_seed(0)
    net = nn.Linear(2, 2).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[3.0, 0.0], [-3.0, 0.0]]))
        net.bias.zero_()
    x = torch.randn(3000, 2, dtype=F64)
    t = torch.multinomial(net(x).softmax(1).detach(), 1).squeeze(1)
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), prior=vi.priors.NormalPrior(30.0))
    result = bayes.laplace(loader((x[:30], t[:30])), validation=loader((x[30:], t[30:])), progress=False)
    assert result.selected.startswith("the network")
    torch.testing.assert_close(
        bayes.predict(x[:9], calibrated=False).mean, net(x[:9]).softmax(1).detach(), atol=1e-7, rtol=0
    )


def test_a_temperature_above_and_below_one(tmp_path):
    torch.manual_seed(0)
    train, held_out = data(2000, 3), data(1000, 4)
    net = trained(nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)), train)
    for factor in (4.0, 0.2):
        own = copy.deepcopy(net)
        with torch.no_grad():
            own[-1].weight.mul_(factor)
            own[-1].bias.mul_(factor)
        bayes = vi.variationalize(own, vi.likelihoods.Categorical())
        result = bayes.laplace(loader(train, 500), validation=loader(held_out, 500), progress=False)
        found = bayes.calibration.applied
        assert found.value == pytest.approx(factor, rel=0.35)
        assert f"temperature {found.value:.3g}" in result.selected
        assert nlpd(bayes, TEST) == pytest.approx(nn.functional.cross_entropy(net(TEST[0]), TEST[1]).item(), abs=0.02)
        assert nlpd(bayes, TEST) < nlpd(bayes, TEST, calibrated=False) - 0.1
    bayes.save(tmp_path / "own.safetensors")
    assert nlpd(vi.load(tmp_path / "own.safetensors", own), TEST) == pytest.approx(nlpd(bayes, TEST), abs=1e-6)
    bayes.laplace(loader(train, 500), progress=False)  # without a validation set
    assert bayes.calibration is None


@pytest.mark.parametrize("likelihood", [vi.likelihoods.Gaussian("point"), vi.likelihoods.StudentT("point", df=5.0)])
def test_the_noise_of_a_regression_is_that_of_held_out_residuals(likelihood):
    """A network that fits its data twenty times better than the noise."""
    torch.manual_seed(0)
    truth, net = nn.Linear(3, 1), nn.Linear(3, 1)
    x = torch.randn(900, 3)
    t = truth(x).detach() + 0.5 * torch.randn(900, 1)
    net.load_state_dict(truth.state_dict())
    train = x[:300], truth(x[:300]).detach() + 0.02 * torch.randn(300, 1)
    bayes = vi.variationalize(net, likelihood)
    result = bayes.laplace(loader(train, 100), validation=loader((x[300:600], t[300:600]), 100), progress=False)
    residual = (net(x[300:600]) - t[300:600]).square().mean().sqrt().item()
    if isinstance(likelihood, vi.likelihoods.Gaussian):
        assert result.network_tempered == pytest.approx(-0.5 - log(residual) - 0.5 * log(2 * pi), abs=0.005)
        assert bayes.model.likelihood.log_noise.exp().item() == pytest.approx(residual, rel=0.1)
    assert nlpd(bayes, (x[600:], t[600:])) < 0.5 + log(0.5) + 0.5 * log(2 * pi) + 0.06


def test_outputs_that_are_many_are_measured_on_draws():
    torch.manual_seed(0)
    x = torch.randn(24, 1, 8, 8)
    t = (x + 0.5 * torch.randn_like(x) > 0).float()
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    trained(net, (x[:16], t[:16]), loss=nn.functional.binary_cross_entropy_with_logits, steps=60)
    bayes = vi.variationalize(net, vi.likelihoods.Bernoulli())
    mask = torch.rand(8, 1, 8, 8) < 0.7
    held_out = loader((x[16:], t[16:]), 8), [(x[16:], (t[16:].masked_fill(~mask, torch.nan), mask))]
    result = bayes.laplace(loader((x[:16], t[:16]), 8), validation=held_out[0], progress=False)
    own = -nn.functional.binary_cross_entropy_with_logits(net(x[16:]), t[16:]).item()
    assert result.network == pytest.approx(own, rel=1e-5)
    assert any(name.startswith("linearised") for name in result.candidates)
    assert result.lost is None or len(result.lost) == 2
    masked = vi.variationalize(net, vi.likelihoods.Bernoulli()).laplace(
        loader((x[:16], t[:16]), 8), validation=held_out[1], progress=False
    )
    own = -nn.functional.binary_cross_entropy_with_logits(net(x[16:])[mask], t[16:][mask]).item()
    assert masked.network == pytest.approx(own, rel=1e-5)


def test_weights_before_a_normalisation_may_have_any_scale():
    """Ten times the weights, bias and statistics of a layer before batch norm are the same network."""
    torch.manual_seed(0)
    net = trained(nn.Sequential(nn.Linear(2, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3)).train())
    scaled = copy.deepcopy(net)
    with torch.no_grad():
        for tensor in (scaled[0].weight, scaled[0].bias, scaled[1].running_mean):
            tensor.mul_(10)
        scaled[1].running_var.mul_(100).add_(99 * scaled[1].eps)
    moments = []
    for one in (net, scaled):
        bayes = vi.variationalize(one, vi.likelihoods.Categorical(), linearise=True)
        bayes.laplace(loader(TRAIN), progress=False)
        moments.append(bayes.output_moments(TEST[0][:50]))
    scale = moments[0].covariance.abs().amax()
    assert (moments[0].covariance - moments[1].covariance).abs().amax() < 1e-3 * scale  # float32 through a batch norm


# -------------------------------------------------------------------------------------- what must not happen


def test_a_fitted_posterior_is_not_placed_anew(dense, tmp_path):
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical(), vi.MeanField())
    bayes.fit(loader(TRAIN), epochs=1, progress=False)
    bayes.save(tmp_path / "fitted.safetensors")
    for one in (bayes, vi.load(tmp_path / "fitted.safetensors", dense)):  # a file knows too
        state = copy.deepcopy(one.family.state_dict())
        with pytest.raises(ValueError, match=r"was fitted before.*variationalize the network again"):
            one.laplace(loader(TRAIN), progress=False)
        assert all(torch.equal(one.family.state_dict()[name], value) for name, value in state.items())


@pytest.mark.parametrize("prior", [vi.priors.LaplacePrior(1.0), vi.priors.StudentTPrior(3.0, 0.01)])
def test_a_prior_without_curvature_around_a_dead_weight(prior):
    torch.manual_seed(0)
    net = trained(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)))
    with torch.no_grad():
        net[0].bias[0] = -100.0  # a unit that is never on: its weights have no curvature
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.LowRankPrecision(4), prior)
    bayes.laplace(loader(TRAIN), progress=False)
    assert bool(bayes.family().variance.isfinite().all())
    assert bool(bayes.predict(TEST[0][:5]).mean.isfinite().all())


@pytest.mark.parametrize("where", ["selection.score", "laplace._elbo"])
def test_an_interrupted_placement_leaves_everything_as_it_was(where, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    t = x[:, :1] + 0.1 * torch.randn(60, 1)
    prior, family = vi.priors.NormalPrior(0.3), vi.LowRankPrecision(2)
    bayes = vi.variationalize(nn.Linear(2, 1), vi.likelihoods.Gaussian("point"), family, prior)
    bayes.laplace(loader((x[:40], t[:40])), progress=False)
    state, model = copy.deepcopy(bayes.family.state_dict()), bayes.model
    noise, at, result = model.likelihood.log_noise.item(), model.linearised_at.clone(), bayes.last_fit
    with torch.no_grad():
        bayes.net.weight.mul_(2)  # trained on: the next placement would change all of it

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"structvi.laplace.{where}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bayes.laplace(loader((x[:40], t[:40])), validation=loader((x[40:], t[40:])), progress=False)
    assert all(torch.equal(bayes.family.state_dict()[name], value) for name, value in state.items())
    assert model.prior is prior
    assert model.likelihood.log_noise.item() == noise
    assert torch.equal(model.linearised_at, at)
    assert bayes.last_fit is result


def test_an_untrained_network_is_said(dense):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 3))
    with torch.no_grad():
        net[2].weight.mul_(20)
    result = vi.variationalize(net, vi.likelihoods.Categorical()).laplace(loader(TRAIN), progress=False)
    assert "is it trained?" in str(result).splitlines()[0]
    own = vi.variationalize(dense, vi.likelihoods.Categorical()).laplace(loader(TRAIN), progress=False)
    assert "is it trained?" not in str(own)


def test_a_network_that_cannot_be_linearised_has_drawn_weights_and_a_note():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.EmbeddingBag(9, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.words(x))

    torch.manual_seed(0)
    x = torch.randint(9, (100, 5))
    bayes = vi.variationalize(Bag(), vi.likelihoods.Categorical())
    held_out = loader((x[60:], x[60:, 0] % 3))
    result = bayes.laplace(loader((x[:60], x[:60, 0] % 3)), validation=held_out, progress=False)
    assert not any("linearised" in name for name in result.candidates)
    assert any("cannot be linearised" in note for note in result.notes)


def test_learned_variances_are_never_surer_than_the_tempered_network():
    """Every largest probability is at most that of the network with the temperature of the validation set."""
    torch.manual_seed(0)
    train, held_out = data(300, 5, outputs=5), data(1000, 6, outputs=5)
    net = trained(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 5)), train, 400)
    bayes = vi.variationalize(net, vi.likelihoods.Categorical())
    result = bayes.laplace(loader(train), validation=loader(held_out), progress=False)
    assert result.selected.startswith("linearised")
    assert bayes.learned_variance.least > 0
    temperature = float(next(name for name in result.candidates if name.startswith("the network")).split()[-1])
    for x in (TEST[0], 10 * TEST[0], torch.zeros(5, 2)):
        with torch.no_grad():
            limit = (net(x) / temperature).softmax(1).amax(1)
        assert bool((bayes.predict(x).mean.amax(1) <= limit + 2e-3).all())  # three digits are shown


@pytest.mark.parametrize("outputs", [2, 3, 5])
def test_the_selected_posterior_is_the_one_that_predicts(outputs):
    """What held-out rows selected is in the family afterwards: the same density, and more variance than a point.

    The reported density is cross-fitted, so that the two differ by the noise of one number fitted on 300 rows.
    """
    torch.manual_seed(0)
    train, held_out = data(100, 0, outputs), data(300, 1, outputs)
    bayes = vi.variationalize(trained(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, outputs)), train),
                              vi.likelihoods.Categorical())  # fmt: skip
    result = bayes.laplace(loader(train), validation=loader(held_out), progress=False)
    assert "linearised" in result.selected
    variance = bayes.predict(held_out[0]).function_variance.mean()
    exact = bayes.predict(held_out[0][:50], variance="exact").function_variance.mean()
    assert float(variance) > 1e-3
    assert 0.3 < float(exact / bayes.predict(held_out[0][:50]).function_variance.mean()) < 3
    assert float(bayes.predict(held_out[0]).log_prob(held_out[1]).mean()) == pytest.approx(result.held_out, abs=0.02)
