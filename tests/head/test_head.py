"""`fit_head`: the conjugate posterior exactly, the best normal of class labels as `vi.fit_density` finds it."""

import copy

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi import likelihoods
from structvi.head import head, layer_data

F64 = torch.float64


def network(outputs, width=6, dtype=F64, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, outputs, bias=bias)).to(dtype)


def regression(outputs=2, rows=50):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 3, generator=generator, dtype=F64)
    return x, x[:, :1] + 0.5 * torch.randn(rows, outputs, generator=generator, dtype=F64)


def classes(count, rows=80):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, 3, generator=generator, dtype=F64)
    if count == 1:
        return x, (torch.rand(rows, 1, generator=generator, dtype=F64) < (2 * x[:, :1]).sigmoid()).to(F64)
    return x, torch.multinomial((2 * x).softmax(-1), 1, generator=generator).squeeze(-1)


def augmented(net, x):
    with torch.no_grad():
        return torch.cat([net[:-1](x), x.new_ones(len(x), 1)], -1)


def moments(posterior):
    with torch.no_grad():
        q = posterior.family()
        return q.mean.detach(), q.covariance()


@pytest.mark.parametrize("size", [50, 7, 1])
def test_gaussian_noise_gives_the_posterior_however_the_data_are_cut(size):
    net, (x, t) = network(2), regression()
    before = copy.deepcopy(net.state_dict())
    bayes = vi.variationalize_head(net, likelihoods.Gaussian(noise=0.5), vi.priors.NormalPrior(2.0))
    result = bayes.fit_head(DataLoader(TensorDataset(x, t), batch_size=size, shuffle=True), progress=False)
    phi = augmented(net, x)
    covariance = torch.linalg.inv(phi.mT @ phi / 0.25 + torch.eye(7, dtype=F64) / 4)
    mean = covariance @ phi.mT @ t / 0.25  # [7, 2]
    found, spread = moments(bayes)
    order = torch.cat([torch.arange(6), torch.tensor([12])]), torch.cat([torch.arange(6, 12), torch.tensor([13])])
    for c in (0, 1):
        torch.testing.assert_close(found[order[c]], mean[:, c], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(spread[order[c]][:, order[c]], covariance, rtol=1e-10, atol=1e-10)
    assert spread[order[0]][:, order[1]].abs().max() == 0
    evidence = MultivariateNormal(torch.zeros(50, dtype=F64), 4 * phi @ phi.mT + 0.25 * torch.eye(50)).log_prob(t.mT)
    assert result.converged
    assert result.status is vi.Status.CONVERGED
    assert result.elbo.value == pytest.approx(float(evidence.sum()), abs=1e-8)
    assert bayes.model.num_data == 50
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize(("count", "loss"), [(1, 0.01), (3, 1.0)])
def test_labels_have_nearly_the_elbo_of_the_best_full_normal(count, loss, monkeypatch):
    """One output has the best normal itself; several lose what Kronecker axes cannot tell."""
    monkeypatch.setattr(head, "TOLERANCE", 1e-6)
    monkeypatch.setattr(layer_data, "DRAWN", 50_000)
    net, (x, t) = network(count, width=4), classes(count)
    likelihood = likelihoods.Bernoulli() if count == 1 else likelihoods.Categorical()
    bayes = vi.variationalize_head(net, likelihood, vi.priors.NormalPrior(1.5))
    result = bayes.fit_head(DataLoader(TensorDataset(x, t), batch_size=30), progress=False)
    phi = augmented(net, x)[:, :-1]
    prior = torch.distributions.Normal(0.0, 1.5)

    def log_joint(p):
        own = prior.log_prob(p["w"]).sum() + prior.log_prob(p["b"]).sum()
        return likelihood(phi @ p["w"].mT + p["b"], t).sum() + own

    space = vi.Parameters({"w": torch.zeros(count, 4, dtype=F64), "b": torch.zeros(count, dtype=F64)})
    searched = vi.fit_density(vi.LogDensity(log_joint, space), vi.FullNormal(), progress=False)
    ours = bayes.elbo([(x, t)], groups=10_000)
    assert ours.value > searched.elbo.value - loss - 3 * ours.standard_error
    assert result.elbo.value == pytest.approx(ours.value, abs=0.02 + 3 * result.elbo.standard_error)
    if count == 1:
        q, (mean, covariance) = searched.family(), moments(bayes)
        scale = covariance.diagonal().sqrt()
        assert ((q.mean - mean) / scale).abs().max() < 0.02
        assert (q.variance.sqrt() / scale - 1).abs().max() < 0.02


def test_what_was_not_observed_does_not_count(monkeypatch):
    monkeypatch.setattr(layer_data, "DRAWN", 100_000)
    (x, t), prior = classes(3), vi.priors.NormalPrior(1.0)

    def fitted(likelihood, data, net):
        bayes = vi.variationalize_head(net, likelihood, prior)
        bayes.fit_head([data], progress=False)
        return moments(bayes)

    every = fitted(likelihoods.Categorical(), (x, t), network(3))
    fewer = fitted(likelihoods.Categorical(), (x[:60], t[:60]), network(3))
    some = t.clone()
    some[60:] = 255
    ignoring = fitted(likelihoods.Categorical(ignore_index=255), (x, some), network(3))
    masked = fitted(likelihoods.Categorical(), (x, (t, torch.arange(80) < 60)), network(3))
    torch.testing.assert_close(ignoring, masked)
    torch.testing.assert_close(ignoring[0], fewer[0], atol=0.01, rtol=0.01)  # other draws
    assert (every[0] - fewer[0]).abs().max() > 0.05


def test_masked_numbers_and_the_network_as_float32():
    net, (x, t) = network(2, dtype=torch.float32), regression()
    x, t = x.float(), t.float()
    mask = torch.rand(t.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    bayes = vi.variationalize_head(net, likelihoods.Gaussian(noise=0.5), vi.priors.NormalPrior(2.0))
    bayes.fit_head([(x, (t.masked_fill(~mask, torch.nan), mask))], progress=False)
    phi = augmented(net, x).double()[mask[:, 1]]
    precision = phi.mT @ phi / 0.25 + torch.eye(7, dtype=F64) / 4
    mean = torch.linalg.solve(precision, phi.mT @ t[mask[:, 1], 1].double() / 0.25)
    torch.testing.assert_close(moments(bayes)[0][6:12].double(), mean[:6], rtol=1e-4, atol=1e-4)


def test_n_scales_the_data_against_the_prior():
    net, (x, t) = network(1), regression(1)
    four = vi.variationalize_head(net, likelihoods.Gaussian(noise=1.0), vi.priors.NormalPrior(1.0), num_data=200)
    result = four.fit_head([(x, t)], progress=False)
    narrow = vi.variationalize_head(net, likelihoods.Gaussian(noise=0.5), vi.priors.NormalPrior(1.0))
    narrow.fit_head([(x, t)], progress=False)
    torch.testing.assert_close(moments(four), moments(narrow))
    assert four.model.num_data == 200
    assert four.elbo([(x, t)]).value == pytest.approx(result.elbo.value, abs=1e-6)


class Pictures(nn.Module):
    """A convolutional backbone with batch norm, and a head of one's choice."""

    def __init__(self, head, flat):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head, self.flat = head, flat

    def forward(self, x):
        y = self.body(x)
        return self.head(y.mean((-2, -1)) if self.flat else y)


def test_a_convolutional_network_with_batch_norm(tmp_path):
    torch.manual_seed(0)
    net = Pictures(nn.Linear(4, 3), True).double()
    x = torch.randn(40, 1, 6, 6, dtype=F64)
    net(x)  # in training mode: running statistics
    before = copy.deepcopy(net.state_dict())
    t = torch.randint(0, 3, (40,))
    bayes = vi.variationalize_head(net, likelihoods.Categorical())
    result = bayes.fit_head(DataLoader(TensorDataset(x, t), batch_size=16), progress=False)
    assert result.converged
    assert net.training
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    assert bayes.elbo([(x, t)], groups=2000).value == pytest.approx(result.elbo.value, abs=0.05)
    mean, covariance = bayes.output_moments(x[:5])
    generator = torch.Generator().manual_seed(0)
    draws = bayes.predict(x[:5], draws=4000, generator=generator).outputs
    torch.testing.assert_close(draws.mean(0), mean, atol=0.05, rtol=0.05)
    torch.testing.assert_close(draws.var(0), covariance.diagonal(dim1=-2, dim2=-1), atol=0.02, rtol=0.15)
    bayes.save(tmp_path / "head.safetensors")
    again = vi.load(tmp_path / "head.safetensors", Pictures(nn.Linear(4, 3), True).double())
    torch.testing.assert_close(again.output_moments(x[:5]), (mean, covariance))
    assert again.model.prior.scales(again.space) == bayes.model.prior.scales(bayes.space)


@pytest.mark.parametrize("head", [nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 3, padding=1, bias=False)])
def test_a_convolution_as_the_head_is_a_regression_on_its_patches(head):
    torch.manual_seed(0)
    net = Pictures(head, False).double()
    x, t = torch.randn(8, 1, 5, 5, dtype=F64), torch.randn(8, 2, 5, 5, dtype=F64)
    bayes = vi.variationalize_head(net, likelihoods.Gaussian(noise=0.7), vi.priors.NormalPrior(1.0))
    result = bayes.fit_head([(x, t)], progress=False)
    assert bayes.elbo([(x, t)], groups=2).per_group.std() < 1e-8  # q is the posterior: every draw gives the evidence
    assert bayes.elbo([(x, t)], groups=2).value == pytest.approx(result.elbo.value, abs=1e-7)


def tied():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    return net


def with_fixed_bias():
    net = nn.Linear(3, 3)
    net.bias.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("make", "likelihood", "prior", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()), likelihoods.Categorical(), None, "nonlinearity"),
        (tied, likelihoods.Categorical(), None, "no other layer shares"),
        (with_fixed_bias, likelihoods.Categorical(), None, "bias, if any, is trainable"),
        (lambda: nn.Linear(3, 3), likelihoods.Gaussian("random"), None, "fit_head is for likelihoods.Gaussian"),
        (lambda: nn.Linear(3, 3), likelihoods.Categorical(), vi.priors.LaplacePrior(1.0), "needs a NormalPrior"),
    ],
)
def test_what_has_no_linear_head_is_refused(make, likelihood, prior, message):
    net, (x, t) = make().double(), classes(3)
    bayes = vi.variationalize_head(net, likelihood, prior)
    before = copy.deepcopy(bayes.family.state_dict())
    with pytest.raises(ValueError, match=message):
        bayes.fit_head([(x, t)], progress=False)
    assert all(torch.equal(bayes.family.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("shift", [0.0, 100.0])
@pytest.mark.parametrize("seed", range(2))
def test_a_target_that_the_features_tell_exactly_has_the_noise_of_rounding(dtype, shift, seed):
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    t = x[:, :1] + shift
    bayes = vi.variationalize_head(nn.Linear(3, 1).to(dtype), likelihoods.Gaussian("point"))
    bayes.fit_head([(x, t)], progress=False)
    noise, size = bayes.model.likelihood.log_noise.exp().item(), t.square().mean().sqrt().item()
    # from √(10 ε) of sums in float64, 5e-8, on, to a few roundings of a number in float32, 1.2e-7
    assert 4e-8 * size < noise < 1e-6 * size
    assert (bayes.predict(x).mean - t).abs().max() < 1e-4 * size
