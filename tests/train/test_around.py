"""`fit(loader, validation=held_out)` around a trained network: what is chosen, what is said, what stays as it was."""

import copy
from functools import partial
from math import log, pi

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.diagnostics.low_rank_spectrum import spectrum
from structvi.diagnostics.what_was_learned import learned
from structvi.families.growth import with_rank
from structvi.families.normal_parts import weighted_normals
from structvi.train.candidates import FEW_WIDTHS, WIDTH, WIDTHS
from structvi.train.held_out import HeldOut, of_network, of_normals, of_posterior
from structvi.train.noise import PULL
from structvi.train.validation import MARGIN, as_good

GENERATOR = torch.Generator().manual_seed(0)


def data(n, outputs=3):
    x = torch.randn(n, 2, generator=GENERATOR)
    noise = 0.7 * torch.randn(n, generator=GENERATOR)
    angle = torch.atan2(x[:, 1], x[:, 0]) + noise
    return x, ((angle + torch.pi) / (2 * torch.pi) * outputs).long().clamp(0, outputs - 1)


TRAIN, HELD_OUT = data(120), data(200)


def loader(pair, size=40):
    return DataLoader(TensorDataset(*pair), batch_size=size)


def trained(net, pair=TRAIN, steps=300, loss=nn.functional.cross_entropy):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    net.train()
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
def normalised():
    torch.manual_seed(0)
    return trained(nn.Sequential(nn.Linear(2, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3)))


def seeded():
    return torch.Generator().manual_seed(0)


def test_the_default_call_is_better_than_an_over_fitted_network(dense):
    before = copy.deepcopy(dense.state_dict())
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical())
    result = bayes.laplace(loader(TRAIN), validation=loader(HELD_OUT), progress=False)
    assert result.status is vi.Status.PLACED
    assert result.steps == 0
    gain, error = result.against_network
    assert gain > 2 * error > 0
    assert result.held_out[result.kept] >= max(result.held_out.values()) - MARGIN
    assert "better" in str(result)
    assert "Laplace approximation" in result.details
    # on data used for nothing
    x, t = data(2000)
    own = nn.functional.cross_entropy(dense(x), t).item()
    assert -bayes.predict(x, generator=seeded()).log_prob(t).mean().item() < own - 0.1
    assert all(torch.equal(before[name], tensor) for name, tensor in dense.state_dict().items())


def width_of(name):
    """That of the rest times that of the last layer, of a candidate's name."""
    numbers = [float(part.split(" ")[-1]) for part in name.split(", ")[1:]]
    return numbers[0] * numbers[-1]


def test_the_densities_that_are_told_differ_by_the_gain(dense):
    """Of drawn weights too, which are measured on some of the held-out rows."""
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical())
    result = bayes.laplace(loader(TRAIN), validation=loader(HELD_OUT), progress=False)
    assert result.kept.startswith("drawn weights")
    assert result.held_out[result.kept] == pytest.approx(result.network + result.against_network[0], abs=1e-9)


def test_what_is_kept_is_what_the_notes_say(dense):
    """A network that is kept is no Laplace approximation, and a weighted likelihood has no bound."""
    x = HELD_OUT[0]
    held_out = loader((x, dense(x).argmax(1)))  # labels that the network is right and sure about: any spread is worse
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical(class_weights=[1.0, 2.0, 3.0]))
    result = bayes.laplace(loader(TRAIN), validation=held_out, progress=False)
    assert result.kept == "the network"
    assert "Laplace" not in result.details
    assert "predictions are the network's own" in result.details
    assert "its ELBO is no bound" in result.details
    result = vi.variationalize(dense, vi.likelihoods.Categorical()).laplace(loader(TRAIN), progress=False)
    assert "Laplace" in result.details
    assert "no bound" not in result.details


def test_the_widest_within_the_margin_or_the_best(dense):
    found = {}
    for keep in ("widest", "best"):
        bayes = vi.variationalize(dense, vi.likelihoods.Categorical())
        found[keep] = bayes.laplace(loader(TRAIN), validation=loader(HELD_OUT), keep=keep, progress=False)
    assert found["best"].held_out == found["widest"].held_out
    densities = found["best"].held_out
    assert densities[found["best"].kept] == max(densities.values())
    widths = {name: width_of(name) for name in densities}
    assert widths[found["widest"].kept] >= widths[found["best"].kept]
    assert densities[found["widest"].kept] >= max(densities.values()) - MARGIN


def test_the_network_is_kept_where_nothing_is_better_than_it():
    """Labels without noise, and a network far from certain: every spread makes its predictions worse."""
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    t = (x[:, 0] > 0).long()
    net = trained(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)), (x[:100], t[:100]), steps=40)
    bayes = vi.variationalize(net, vi.likelihoods.Categorical())
    result = bayes.laplace(loader((x[:100], t[:100])), validation=loader((x[100:], t[100:])), progress=False)
    assert result.against_network[0] > -MARGIN
    assert result.held_out[f"linearised, prior up to {WIDTHS[-1]:.3g}"] < result.network - MARGIN


def test_weights_before_a_normalisation_may_have_any_scale(normalised):
    """Ten times the weights, bias and statistics of a layer before batch norm are the same network."""
    scaled = copy.deepcopy(normalised)
    with torch.no_grad():
        scaled[0].weight.mul_(10)
        scaled[0].bias.mul_(10)
        scaled[1].running_mean.mul_(10)
        scaled[1].running_var.mul_(100).add_(99 * scaled[1].eps)
    x = data(50)[0]
    assert torch.allclose(normalised(x), scaled(x), atol=1e-4)
    predictions = []
    for net in (normalised, scaled):
        bayes = vi.variationalize(net, vi.likelihoods.Categorical(), linearise=True)
        result = bayes.laplace(loader(TRAIN), validation=loader(HELD_OUT), progress=False)
        predictions.append((result.kept, bayes.output_moments(x)))
    (kept, first), (again, second) = predictions
    assert kept == again
    assert torch.allclose(first.mean, second.mean, atol=1e-3)
    scale = first.covariance.abs().amax()
    assert (first.covariance - second.covariance).abs().amax() < 1e-3 * scale  # float32 through a batch norm


def test_without_held_out_data(dense):
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical())
    result = bayes.laplace(loader(TRAIN), progress=False)
    assert result.kept == f"linearised, prior up to {WIDTH:.3g}"
    assert result.network is None
    assert not result.held_out
    assert "without held-out data" in result.details
    assert bayes.model.linearised_at is not None


def test_what_the_user_asked_for_stays(dense):
    prior = vi.priors.NormalPrior(0.3)
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical(), vi.MeanField(), prior, linearise=False)
    result = bayes.laplace(loader(TRAIN), validation=loader(HELD_OUT), progress=False)
    assert bayes.model.prior is prior
    assert isinstance(bayes.family, vi.MeanField)
    assert bayes.model.linearised_at is None
    assert list(result.held_out) == ["drawn weights"]


def test_the_held_out_data_take_no_part(dense):
    """Other labels of the held-out rows change which posterior is kept, and nothing of the posteriors themselves."""
    x, t = HELD_OUT
    found = {}
    for name, labels in (("own", t), ("other", (t + 1) % 3)):
        bayes = vi.variationalize(dense, vi.likelihoods.Categorical(), prior=vi.priors.NormalPrior(0.1), linearise=True)
        bayes.laplace(loader(TRAIN), validation=loader((x, labels)), progress=False)
        found[name] = bayes.family().mean.detach(), bayes.family().variance.detach()
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))


def test_regression_with_an_unknown_noise():
    torch.manual_seed(0)
    x = torch.rand(60, 1) * 4 - 2
    t = (2 * x).sin() + 0.2 * torch.randn(60, 1)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    trained(net, (x[:40], t[:40]), loss=nn.functional.mse_loss)
    bayes = vi.variationalize(net, vi.likelihoods.Gaussian("point"))
    result = bayes.laplace(loader((x[:40], t[:40])), validation=loader((x[40:], t[40:])), progress=False)
    assert result.against_network[0] > -MARGIN
    seen, held_out = ((net(x[part]) - t[part]).square().mean().sqrt().item() for part in (slice(0, 40), slice(40, 60)))
    noise = bayes.model.likelihood.log_noise.exp().item()
    # from the residuals on the data that were seen to those on others; at the ends a tenth beyond is looked at
    assert min(seen, held_out) / 1.1 < noise < 1.1 * held_out
    # the network's own noise is that of its held-out residuals and, as these are smaller, of PULL rows as those seen:
    # −log noise − ½ log 2π − ½ (held_out/noise)²; its slope in log noise is below one, and that is known to 5e-4
    assert held_out < seen
    own = ((20 * held_out**2 + PULL * seen**2) / (20 + PULL)) ** 0.5
    assert result.network == pytest.approx(-log(own) - 0.5 * log(2 * pi) - 0.5 * (held_out / own) ** 2, abs=5e-4)
    assert bayes.predict(torch.zeros(3, 1)).std.shape == (3, 1)


def test_saved_and_loaded(dense, tmp_path):
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical())
    bayes.laplace(loader(TRAIN), validation=loader(HELD_OUT), progress=False)
    bayes.save(tmp_path / "posterior.safetensors")
    other = copy.deepcopy(dense)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    again = vi.load(tmp_path / "posterior.safetensors", other)
    x = HELD_OUT[0]
    assert torch.equal(bayes.predict(x, generator=seeded()).mean, again.predict(x, generator=seeded()).mean)


def test_a_posterior_that_was_fitted_is_not_thrown_away(dense):
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical(), vi.MeanField())
    bayes.fit(loader(TRAIN), steps=3, progress=False)
    with pytest.raises(ValueError, match=r"was fitted before.*goes on from it"):
        bayes.laplace(loader(TRAIN), progress=False)


def test_a_network_that_knows_nothing_is_noticed():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 3))
    with torch.no_grad():
        net[2].weight.mul_(20)
    bayes = vi.variationalize(net, vi.likelihoods.Categorical())
    result = bayes.laplace(loader(TRAIN), progress=False)
    assert "is it trained? give epochs=" in result.details


def test_outputs_that_are_many_are_compared_on_draws():
    torch.manual_seed(0)
    x = torch.randn(24, 1, 8, 8)
    t = (x + 0.5 * torch.randn_like(x) > 0).float()
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    trained(net, (x[:16], t[:16]), loss=nn.functional.binary_cross_entropy_with_logits, steps=60)
    bayes = vi.variationalize(net, vi.likelihoods.Bernoulli())
    result = bayes.laplace(loader((x[:16], t[:16]), 8), validation=loader((x[16:], t[16:]), 8), progress=False)
    tried = [name for name in result.held_out if name != "the network"]
    ways = ("linearised", "drawn weights")
    first = [f"{way}, prior up to {FEW_WIDTHS[0]:.3g}" for way in ways]
    better = max(ways, key=lambda way: result.held_out[f"{way}, prior up to {FEW_WIDTHS[0]:.3g}"])
    rest = [f"{better}, prior up to {width:.3g}" for width in FEW_WIDTHS[1:]]
    assert set(first) <= set(tried) <= {*first, *rest}
    assert result.against_network[0] > -MARGIN


def test_exact_and_drawn_held_out_densities_agree():
    """4000 draws of the weights, 512 of the outputs: over seeds either density has a standard deviation below 0.001."""
    net = trained(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)), steps=30)
    bayes = vi.variationalize(
        net, vi.likelihoods.Categorical(), vi.MeanField(), vi.priors.NormalPrior(0.5), linearise=True
    )
    bayes.laplace(loader(TRAIN), progress=False)
    theta, batches = bayes.space.initial, list(loader(HELD_OUT))
    (exact,) = of_normals(bayes, theta, [bayes.family], batches, seed=0)
    drawn = of_posterior(bayes, batches, seed=0, draws=4000)
    assert exact.mean == pytest.approx(drawn.mean, abs=0.004)


def test_the_density_of_the_network_is_its_own(dense):
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical(), vi.MeanField(), num_data=120)
    found = of_network(bayes, bayes.space.initial, list(loader(HELD_OUT)))
    expected = -nn.functional.cross_entropy(dense(HELD_OUT[0]), HELD_OUT[1]).item()
    assert found.mean == pytest.approx(expected, rel=1e-5)


def test_masked_pixels_do_not_count():
    total, count = torch.tensor([-2.0, -9.0]).double(), torch.tensor([1.0, 3.0]).double()
    assert HeldOut(total, count).mean == -11 / 4


def columns(count, dtype=torch.float32, rows=20):
    return loader((torch.ones(rows, count, dtype=dtype), torch.arange(rows) % 3))


@pytest.mark.parametrize("steps", [{}, {"epochs": 1}])
@pytest.mark.parametrize(
    ("held_out", "words"),
    [
        (columns(3), r"\[3\] torch.float32, of the training data \[2\] torch.float32.*Prepare both alike"),
        (columns(2, torch.float64), r"\[2\] torch.float64, of the training data \[2\] torch.float32"),
    ],
    ids=["columns", "dtype"],
)
def test_held_out_inputs_that_the_network_cannot_take_are_told_before_the_work(held_out, words, steps):
    calls = []
    bayes = vi.variationalize(nn.Linear(2, 3), vi.likelihoods.Categorical())
    call = partial(bayes.fit, callback=calls.append, **steps) if steps else bayes.laplace
    with pytest.raises(ValueError, match=words):
        call(columns(2), validation=held_out, progress=False)
    assert not calls


def test_networks_of_two_dtypes_in_a_mixture_are_refused():
    mixture = vi.Ensemble.of([nn.Linear(2, 3), nn.Linear(2, 3).double()], vi.likelihoods.Categorical())
    with pytest.raises(ValueError, match=r"one dtype, got torch.float32, torch.float64: give net.float\(\)"):
        mixture.laplace(columns(2), validation=columns(2), progress=False)


def test_held_out_inputs_of_another_form_that_the_network_takes_are_fine():
    """Images of another size, and numbers that the network casts itself."""

    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(1, 3)

        def forward(self, x):
            return self.head(x.float().mean(1, keepdim=True))

    bayes = vi.variationalize(Casting(), vi.likelihoods.Categorical())
    result = bayes.laplace(columns(2, torch.float64), validation=columns(5), progress=False)
    assert result.network is not None


class Bag(nn.Module):
    """With an operation that has no derivative of the kind that linearising needs."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(9, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.words(x))


def bags(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(9, (rows, 5), generator=generator)
    return loader((x, x[:, 0] % 3))


@pytest.mark.parametrize("held_out", [None, bags(40, 1)], ids=["without", "held out"])
@pytest.mark.parametrize("count", [1, 2], ids=["one", "mixture"])
def test_a_network_that_cannot_be_linearised_has_drawn_weights_and_a_note(held_out, count):
    torch.manual_seed(0)
    if count == 1:
        bayes = vi.variationalize(Bag(), vi.likelihoods.Categorical())
        results = [bayes.laplace(bags(60, 0), validation=held_out, progress=False)]
    else:
        bayes = vi.Ensemble.of([Bag(), Bag()], vi.likelihoods.Categorical())
        results = bayes.laplace(bags(60, 0), validation=held_out, progress=False).members
    for result in results:
        assert any("weights are drawn" in note and "_embedding_bag" in note for note in result.notes)
        assert "linearised" not in result.kept
        assert not any("linearised" in name for name in result.held_out)
    assert bayes.predict(torch.zeros(2, 5, dtype=torch.long)).mean.shape == (2, 3)


def test_a_network_that_cannot_be_linearised_says_so_where_that_is_asked_for():
    bayes = vi.variationalize(Bag(), vi.likelihoods.Categorical(), linearise=True)
    with pytest.raises(NotImplementedError, match="cannot be linearised"):
        bayes.laplace(bags(60, 0), progress=False)


def test_equal_is_what_neither_the_margin_nor_the_noise_tells_apart():
    count = torch.ones(100, dtype=torch.float64)
    noise = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = noise - noise.mean()
    best = HeldOut(-0.5 * count, count)
    assert as_good(HeldOut(best.total - 0.004 + 0.1 * noise, count), best)  # an error of 0.01: the margin decides
    assert not as_good(HeldOut(best.total - 0.006 + 0.1 * noise, count), best)
    assert not as_good(HeldOut(best.total - 0.004 + 0.01 * noise, count), best)  # an error of 0.001
    assert as_good(best, best)


def test_a_head_with_its_prior_chosen_on_held_out_data():
    torch.manual_seed(0)
    net = trained(nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 3)), steps=200)
    bayes = vi.variationalize_head(net, vi.likelihoods.Categorical())
    result = bayes.laplace(loader(TRAIN), validation=loader(HELD_OUT), progress=False)
    assert result.against_network[0] > -MARGIN
    assert bayes.space.names == ("2.weight", "2.bias")
    covariance = bayes.family().covariance().detach()
    assert (covariance - torch.diag(covariance.diagonal())).abs().max() > 0


@pytest.fixture(scope="module")
def too_sure():
    """A network of few weights that says far more than it knows, and data that tell so."""
    torch.manual_seed(0)
    train = data(2000)
    net = trained(nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)), train, steps=200)
    with torch.no_grad():
        net[-1].weight.mul_(4)
        net[-1].bias.mul_(4)
    return net, train, data(1000), data(4000)


def test_a_temperature_is_put_on_top_where_no_spread_does_as_much(too_sure, tmp_path):
    net, train, held_out, (x, t) = too_sure
    bayes = vi.variationalize(net, vi.likelihoods.Categorical())
    result = bayes.laplace(loader(train), validation=loader(held_out), progress=False)
    found = bayes.calibration.applied
    assert result.calibration is bayes.calibration
    assert 1.5 < found.value < 5
    assert f"temperature {found.value:.3g}" in result.kept
    assert f"temperature of {found.value:.3g}" in result.details
    assert "no part of the posterior" in result.details
    assert result.held_out[result.kept] >= max(result.held_out.values()) - MARGIN
    own = nn.functional.cross_entropy(net(x), t).item()
    pred = bayes.predict(x, generator=seeded())
    loss = -pred.log_prob(t).mean().item()
    assert loss < own - 0.1
    assert loss < -bayes.predict(x, calibrated=False, generator=seeded()).log_prob(t).mean().item() - 0.01
    bayes.save(tmp_path / "own.safetensors")
    again = vi.load(tmp_path / "own.safetensors", net).predict(x, generator=seeded())
    torch.testing.assert_close(again.mean, pred.mean)
    others = bayes.calibrate(conformal=loader(data(200)))  # sets on top of it
    assert others.applied is found
    torch.testing.assert_close(bayes.predict(x, generator=seeded()).mean, pred.mean)
    bayes.laplace(loader(train), progress=False)  # without held-out data
    assert bayes.calibration is None


def test_members_of_a_mixture_have_one_temperature(too_sure):
    net, train, held_out, (x, t) = too_sure
    mixture = vi.Ensemble.of([net, copy.deepcopy(net)], vi.likelihoods.Categorical())
    result = mixture.laplace(loader(train), validation=loader(held_out), progress=False)
    assert 1.5 < mixture.calibration.applied.value < 5
    assert all(one.calibration is None for one in mixture.posteriors)
    assert "temperature" in result.notes[0]
    own = nn.functional.cross_entropy(net(x), t).item()
    assert -mixture.predict(x, generator=seeded()).log_prob(t).mean().item() < own - 0.1
    density = mixture.predict(held_out[0], generator=seeded()).log_prob(held_out[1]).mean().item()
    assert result.held_out == pytest.approx(density, abs=0.05)  # of 320 rows: ± .024
    mixture.laplace(loader(train), validation=loader(held_out), weights="stacked", progress=False)
    assert mixture.calibration is None


def test_a_network_that_is_not_sure_enough_gets_no_temperature(too_sure):
    """One below one would make strange inputs surer too."""
    net, train, held_out, _ = too_sure
    unsure = copy.deepcopy(net)
    with torch.no_grad():
        unsure[-1].weight.mul_(0.07)
        unsure[-1].bias.mul_(0.07)
    bayes = vi.variationalize(unsure, vi.likelihoods.Categorical())
    result = bayes.laplace(loader(train), validation=loader(held_out), progress=False)
    assert result.kept == "the network"
    assert bayes.calibration is None
    assert bayes.calibrate(loader(held_out)).applied.value < 0.6


def test_a_prior_of_the_users_gets_no_temperature(too_sure):
    net, train, held_out, _ = too_sure
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), prior=vi.priors.NormalPrior(0.3))
    bayes.laplace(loader(train), validation=loader(held_out), progress=False)
    assert bayes.calibration is None


def test_the_network_is_kept_where_a_prior_of_the_users_is_worse(dense):
    x = HELD_OUT[0]
    certain = dense(x).argmax(1)  # labels that the network is right and sure about: any spread is worse
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical(), prior=vi.priors.NormalPrior(3.0), linearise=True)
    result = bayes.laplace(loader(TRAIN), validation=loader((x, certain)), progress=False)
    assert result.kept == "the network"
    assert "prefer the network" in result.details
    assert torch.allclose(bayes.predict(x, 16).mean, dense(x).softmax(-1), atol=0.02)


def test_a_network_that_is_kept_has_the_noise_that_suits_it():
    """Residuals on its own data of a tenth of the noise: held-out data say how much larger it is."""
    torch.manual_seed(0)
    x = torch.randn(400, 3)
    t = x[:, :1] + 0.5 * torch.randn(400, 1)
    net = nn.Linear(3, 1)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 0.0, 0.0]]))
        net.bias.zero_()
    small = (x[:200], x[:200, :1] + 0.1 * (t[:200] - x[:200, :1]))
    bayes = vi.variationalize(net, vi.likelihoods.Gaussian("point"), prior=vi.priors.NormalPrior(100.0), linearise=True)
    result = bayes.laplace(loader(small), validation=loader((x[200:], t[200:])), progress=False)
    assert bayes.model.likelihood.log_noise.exp().item() == pytest.approx(0.5, rel=0.25)
    assert result.against_network[0] > -MARGIN


def test_a_factor_that_the_curvature_does_not_give_is_none(dense):
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical(), vi.LowRankNormal(4), vi.priors.NormalPrior(0.1))
    bayes.laplace(loader(TRAIN), progress=False)
    plain = vi.variationalize(dense, vi.likelihoods.Categorical(), vi.MeanField(), vi.priors.NormalPrior(0.1))
    plain.laplace(loader(TRAIN), progress=False)
    assert torch.allclose(bayes.family().variance, plain.family().variance, rtol=1e-5)
    assert all(parameter.requires_grad for parameter in bayes.family.parameters())


def test_a_fit_that_goes_on_keeps_the_directions(dense):
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical(), linearise=True)
    bayes.laplace(loader(TRAIN), progress=False)
    before = bayes.family.part.factor.detach().clone()
    assert before.abs().max() > 0
    bayes.fit(loader(TRAIN), steps=12, lr=1e-9, progress=False)
    assert torch.allclose(bayes.family.part.factor.detach(), before, atol=1e-6)


def test_a_plain_function_is_told_of():
    net = trained(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)), steps=30)

    def likelihood(y, t):
        return -nn.functional.cross_entropy(y, t, reduction="none")

    bayes = vi.variationalize(net, likelihood)
    result = bayes.laplace(loader(TRAIN), validation=loader(HELD_OUT), progress=False)
    assert "of which no labels can be drawn" in result.details
    assert result.against_network[0] > -MARGIN


def test_a_density_that_is_no_number_is_the_worst():
    count = torch.ones(2, dtype=torch.float64)
    assert HeldOut(torch.tensor([-1.0, torch.nan]).double(), count).mean == -torch.inf


def test_what_the_default_call_places_can_be_grown_and_looked_at(dense):
    """A scale mixture: more columns in all parts, the spectrum of its directions, tensors still at their prior."""
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical(), linearise=True)
    bayes.laplace(loader(TRAIN), progress=False)
    assert bayes.family().mean.equal(bayes.family.part.mean)
    rank = bayes.family.rank
    assert len(spectrum(bayes).eigenvalues) == rank
    assert set(learned(bayes, loader(TRAIN)).tensors) == set(bayes.space.names)
    grown = with_rank(bayes.family, rank + 2, torch.Generator().manual_seed(0))
    assert grown.rank == grown.part.rank == rank + 2
    # new columns are small: the same normals to first order
    for a, b in zip(weighted_normals(grown()), weighted_normals(bayes.family()), strict=True):
        torch.testing.assert_close(a.normal.variance, b.normal.variance, rtol=0.01, atol=0.0)


def test_the_parts_of_a_scale_mixture_have_noise_of_their_own():
    q = vi.ScaleMixture(1, 4).bind(vi.Parameters({"z": torch.zeros(5).double()}))
    theta = q().draw(groups=1, generator=torch.Generator().manual_seed(0)).theta.detach()
    turned = theta / theta.norm(dim=1, keepdim=True)
    assert (turned @ turned.mT - torch.eye(4)).abs().max() < 0.99  # with one noise all would point the same way


def test_what_the_default_call_places_is_kept_in_a_file(dense, tmp_path):
    bayes = vi.variationalize(dense, vi.likelihoods.Categorical())
    bayes.laplace(loader(TRAIN), progress=False)
    bayes.save(tmp_path / "posterior.safetensors")
    again = vi.load(tmp_path / "posterior.safetensors", copy.deepcopy(dense))
    x = HELD_OUT[0]
    assert isinstance(again.family, vi.ScaleMixture)
    one, two = (own.predict(x, generator=torch.Generator().manual_seed(1)).mean for own in (again, bayes))
    assert torch.equal(one, two)
    theta = bayes.family().draw(generator=torch.Generator().manual_seed(0)).theta
    assert torch.equal(again.model.log_prior(theta), bayes.model.log_prior(theta))


def test_the_default_call_takes_a_pass_for_the_curvature():
    """Diagonal and directions are of the same gradients: rows with a backward pass, with a few of the ELBO's proof."""
    torch.manual_seed(0)
    net, passes = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)), []
    net.register_forward_hook(lambda module, inputs, output: passes.append(len(output) * output.requires_grad))
    x, t = torch.randn(600, 2), torch.randint(3, (600,))
    vi.variationalize(net, vi.likelihoods.Categorical()).laplace(DataLoader(TensorDataset(x, t), 100), progress=False)
    assert sum(passes) <= 1.05 * 600  # rows with a backward pass
