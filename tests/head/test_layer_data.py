"""`fit_head` of any size: exact for Gaussian noise, the dense curvature's diagonal for labels, selected on held-out data."""

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi import likelihoods
from structvi.head import head
from structvi.head.layer_data import LayerData
from structvi.head.rows import Rows

F64 = torch.float64


def network(outputs, width=6, dtype=F64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, outputs)).to(dtype)


def regression(outputs=3, rows=50):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 3, generator=generator, dtype=F64)
    return x, x[:, :1] + 0.5 * torch.randn(rows, outputs, generator=generator, dtype=F64)


def classes(count=4, rows=80, seed=2):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=F64)
    return x, torch.multinomial(
        (2 * x @ torch.ones(3, count, dtype=F64).cumsum(1).sin()).softmax(-1), 1, generator=generator
    ).squeeze(-1)


def over_head(net, likelihood, prior=None):
    bayes = vi.variationalize(net, likelihood, vi.MatrixNormal(), prior, select="2.*")
    return bayes


def moments(posterior):
    with torch.no_grad():
        return posterior.family().mean.detach(), posterior.family().covariance()


def test_width_and_noise_maximise_the_evidence(monkeypatch):
    monkeypatch.setattr(head, "TOLERANCE", 1e-9)
    (x, t), net = regression(), network(3)
    bayes = over_head(net, likelihoods.Gaussian("point"))
    result = bayes.fit_head([(x, t)], progress=False)
    assert result.converged
    with torch.no_grad():
        phi = torch.cat([net[:-1](x), x.new_ones(len(x), 1)], -1)
    rms = torch.cat(
        [net[2].weight.detach().square().mean().sqrt().expand(6), net[2].bias.detach().square().mean().sqrt().expand(1)]
    )

    def evidence(log_width, log_noise):
        root = phi * rms * log_width.exp()
        return (
            MultivariateNormal(
                torch.zeros(50, dtype=F64), root @ root.mT + (2 * log_noise).exp() * torch.eye(50, dtype=F64)
            )
            .log_prob(t.mT)
            .sum()
        )

    width = bayes.model.prior.scales(bayes.model.net_space)["2.weight"] / float(rms[0])
    at = [
        torch.tensor(width, dtype=F64).log().requires_grad_(),
        bayes.model.likelihood.log_noise.detach().double().requires_grad_(),
    ]
    value = evidence(*at)
    assert result.elbo.value == pytest.approx(float(value.detach()), abs=1e-4)
    assert all(g.abs() < 0.05 for g in torch.autograd.grad(value, at))


def dense_curvature(T, phi, weight):
    """Σ_n w_n (diag p − ppᵀ) ⊗ φφᵀ: [C·D, C·D]."""
    p = (phi @ T.mT).softmax(-1)
    H = weight.unsqueeze(-1) * (torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(1))
    return torch.einsum("nij,nd,ne->idje", H, phi, phi).reshape(T.numel(), T.numel())


def test_the_diagonal_along_the_axes_is_that_of_the_dense_curvature():
    (x, t), generator = classes(), torch.Generator().manual_seed(0)
    T, unit = torch.randn(4, 3, generator=generator, dtype=F64), torch.tensor([1.0, 2.0, 0.5], dtype=F64)
    weight = torch.rand(80, 1, generator=generator, dtype=F64)
    data = LayerData([Rows(x, nn.functional.one_hot(t, 4).double(), weight)], likelihoods.Categorical(), unit, 1.0)
    axes = data.axes(T)
    basis = torch.kron(axes.left, unit.unsqueeze(-1) * axes.right)
    truth = dense_curvature(T, x, weight)
    torch.testing.assert_close(axes.curvature.flatten(), (basis.mT @ truth @ basis).diagonal())
    log_joint, gradient = data.log_joint(T, 0.8)
    at = T.clone().requires_grad_()
    value = (weight.squeeze(-1) * (x @ at.mT).log_softmax(-1).gather(1, t.unsqueeze(1)).squeeze(1)).sum() - 0.5 * (
        at / (0.8 * unit)
    ).square().sum()
    assert log_joint == pytest.approx(float(value.detach()))
    torch.testing.assert_close(gradient, torch.autograd.grad(value, at)[0])
    best = data.maximum(data.maximum(T, axes, 0.8), data.axes(T), 0.8)
    assert data.log_joint(best, 0.8)[1].abs().max() < 0.05
    # the best normal with these axes is near the best of all, and nearer than independent weights
    prior = torch.diag((0.8 * unit).pow(-2).repeat(4))
    truth = MultivariateNormal(torch.zeros(12, dtype=F64), precision_matrix=truth + prior)
    scaled = torch.kron(axes.left, 0.8 * unit.unsqueeze(-1) * axes.right) * axes.scale(0.8).flatten()
    ours = torch.distributions.kl_divergence(MultivariateNormal(torch.zeros(12, dtype=F64), scaled @ scaled.mT), truth)
    diagonal = torch.diag(truth.precision_matrix.diagonal().reciprocal())
    independent = torch.distributions.kl_divergence(MultivariateNormal(torch.zeros(12, dtype=F64), diagonal), truth)
    assert ours < 0.2 * independent


def test_a_layer_of_many_numbers_is_fitted_predicted_and_saved(tmp_path):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 150)), torch.randn(600, 8)
    t = net(x).argmax(-1)
    bayes = vi.variationalize_head(net, likelihoods.Categorical(), vi.priors.NormalPrior(1.0))
    result = bayes.fit_head(DataLoader(TensorDataset(x, t), batch_size=200), progress=False)
    assert result.converged
    assert isinstance(bayes.family, vi.MatrixNormal)
    found = bayes.predict(x[:20])
    assert found.by_input
    drawn = bayes.predict(x[:20], draws=2000)
    torch.testing.assert_close(found.probabilities, drawn.probabilities, atol=0.02, rtol=0.1)
    torch.testing.assert_close(found.function_variance, drawn.function_variance, rtol=0.6, atol=0.02)
    bayes.save(tmp_path / "head.safetensors")
    again = vi.load(tmp_path / "head.safetensors", net)
    torch.testing.assert_close(again.predict(x[:20]).probabilities, found.probabilities)


@pytest.mark.parametrize(
    "family",
    [vi.MatrixNormal(), vi.FullNormal(), vi.MeanField(), vi.LowRankPrecision(3)],
    ids=lambda f: type(f).__name__,
)
def test_a_prediction_is_normal_and_takes_one_pass(family):
    (x, t), calls = regression(2), []
    net = network(2)
    net[0].register_forward_hook(lambda *_: calls.append(1))
    bayes = vi.variationalize(net, likelihoods.Gaussian(noise=0.5), family, vi.priors.NormalPrior(1.0), select="2.*")
    bayes.fit(DataLoader(TensorDataset(x, t), batch_size=25), epochs=2, progress=False)
    bayes.predict(x[:5])
    calls.clear()
    pred = bayes.predict(x[:5])
    assert len(calls) == 1
    mean, covariance = bayes.output_moments(x[:5])
    torch.testing.assert_close(pred.function_mean, mean)
    torch.testing.assert_close(pred.function_variance, covariance.diagonal(dim1=-2, dim2=-1))
    bayes.family.mean.data.add_(1.0)  # what a prediction knows of q follows it
    assert not torch.allclose(bayes.predict(x[:5]).function_mean, mean)


def trained(seed=0):
    """A network that is too sure of itself: fitted to 60 noisy labels."""
    x, t = classes(rows=60)
    net = network(4, width=40)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), t).backward()
        optimizer.step()
    return net, (x, t)


def test_what_is_selected_is_not_worse_than_temperature_scaling():
    net, data = trained()
    held_out, test = classes(rows=400, seed=3), classes(rows=2000, seed=4)
    bayes = vi.variationalize_head(net, likelihoods.Categorical())
    result = bayes.fit_head([data], validation=[held_out], progress=False)
    assert isinstance(bayes.family, vi.MatrixNormal)
    assert result.selected in result.candidates
    assert len(result.candidates) == 5
    assert result.gain[0] >= -0.003
    scaled = vi.variationalize(net, likelihoods.Categorical(), vi.MAP())
    scaled.calibrate([held_out])
    assert bayes.evaluate([test]).nlpd < scaled.evaluate([test]).nlpd + 0.003
    assert bayes.chosen_on is not None


def test_what_else_a_posterior_does():
    """Draws, one page, a diagnosis, an ensemble, and a fit that goes on."""
    (x, t), net = classes(), network(4)
    bayes = over_head(net, likelihoods.Categorical(), vi.priors.NormalPrior(1.0))
    loader = DataLoader(TensorDataset(x, t), batch_size=20)
    found = bayes.fit_head(loader, progress=False)
    assert bayes.sample(3)["2.weight"].shape == (3, 4, 6)
    assert bayes.diagnose(loader, progress=False)
    other = over_head(network(4), likelihoods.Categorical(), vi.priors.NormalPrior(1.0))
    other.fit_head(loader, progress=False)
    both = vi.Ensemble([bayes, other]).predict(x)
    torch.testing.assert_close(both.mean, (bayes.predict(x).mean + other.predict(x).mean) / 2)
    assert bayes.evaluate(loader).nlpd < 1.4
    assert bayes.fit(loader, epochs=30, progress=False).elbo.value > found.elbo.value - 1.0


def test_numbers_with_a_validation_set_have_the_exact_posterior_of_the_selected_width():
    (x, t), (held, values) = regression(2), regression(2, rows=400)
    noise = torch.randn(400, 2, generator=torch.Generator().manual_seed(5), dtype=F64)
    bayes = vi.variationalize_head(network(2), likelihoods.Gaussian("point"))
    result = bayes.fit_head([(x, t)], validation=[(held, values + 0.1 * noise)], progress=False)
    assert "prior width" in result.selected
    sigma = float(bayes.model.likelihood.log_noise.exp().detach())
    prior = vi.priors.NormalPrior(bayes.model.prior.scales(bayes.model.net_space))
    exact = vi.variationalize_head(network(2), likelihoods.Gaussian(noise=sigma), prior)
    exact.fit_head([(x, t)], progress=False)
    torch.testing.assert_close(moments(bayes), moments(exact), rtol=1e-6, atol=1e-6)
    assert result.elbo.value == pytest.approx(exact.last_fit.elbo.value, abs=1e-5)


def test_inputs_unlike_the_data_have_a_score():
    net, data = trained()
    bayes = vi.variationalize_head(net, likelihoods.Categorical())
    held_out = classes(rows=400, seed=3)
    bayes.fit_head([data], validation=[held_out], progress=False)
    assert 0.02 < bayes.predict(held_out[0]).is_ood.double().mean() < 0.08
    assert bayes.predict(100 + held_out[0]).ood_score.median() > bayes.predict(held_out[0]).ood_score.median()
