"""A posterior as a BoTorch model: its joint normal, conditioning as an update, and BoTorch's own loop."""

import pytest
import torch
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.acquisition.knowledge_gradient import qKnowledgeGradient
from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.optim import optimize_acqf
from botorch.sampling.normal import SobolQMCNormalSampler
from torch import nn

import structvi as vi
from structvi import likelihoods
from structvi.integrations.botorch import PosteriorModel

F64 = torch.float64


def network(outputs, width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, outputs)).double()


def data(outputs, rows=30):
    x = torch.rand(rows, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    t = torch.stack([(3 * x).sin().sum(1), (2 * x).cos().sum(1)], 1)
    return x, t[:, :outputs]


def fitted(outputs=1):
    bayes = vi.variationalize_head(network(outputs), likelihoods.Gaussian(noise=0.1), vi.priors.NormalPrior(1.0))
    bayes.fit_head([data(outputs)], progress=False)
    return bayes


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_joint_posterior_is_that_of_drawn_layers_with_gradients(outputs):
    bayes = fitted(outputs)
    X = torch.rand(4, 3, 2, generator=torch.Generator().manual_seed(2), dtype=F64, requires_grad=True)
    found = PosteriorModel(bayes).posterior(X)
    assert found.mean.shape == found.variance.shape == (4, 3, outputs)
    theta = bayes.family().draw(40_000, generator=torch.Generator().manual_seed(0)).theta.detach()
    with torch.no_grad():
        phi = bayes.net[:-1](X)
        W, b = theta[:, : 8 * outputs].view(-1, outputs, 8), theta[:, 8 * outputs :]
        y = torch.einsum("bqd,smd->sbqm", phi, W) + b[:, None, None, :]
    torch.testing.assert_close(found.mean, y.mean(0), atol=0.01, rtol=0.01)
    flat = y[:, 1].flatten(1)
    torch.testing.assert_close(found.distribution.covariance_matrix[1], flat.T.cov(), atol=5e-4, rtol=0.05)
    noisy = PosteriorModel(bayes).posterior(X, observation_noise=True)
    torch.testing.assert_close(noisy.variance, found.variance + 0.01)
    assert torch.autograd.gradcheck(lambda X: PosteriorModel(bayes).posterior(X).variance, X, atol=1e-6)


@pytest.mark.parametrize("outputs", [1, 2])
def test_conditioning_is_the_update_of_the_posterior(outputs):
    bayes = fitted(outputs)
    X, more = torch.rand(4, 2, dtype=F64), (torch.rand(7, 2, dtype=F64), torch.rand(7, outputs, dtype=F64))
    model = PosteriorModel(bayes).condition_on_observations(more[0][:3], more[1][:3])
    found = model.condition_on_observations(more[0][3:], more[1][3:]).posterior(X)
    before = PosteriorModel(bayes).posterior(X)
    bayes.update(more)
    wanted = PosteriorModel(bayes).posterior(X)
    torch.testing.assert_close(found.mean, wanted.mean)
    torch.testing.assert_close(
        found.distribution.covariance_matrix, wanted.distribution.covariance_matrix, atol=1e-7, rtol=1e-4
    )
    assert (found.variance < before.variance).all()


def test_outputs_are_scalarised():
    model, X = PosteriorModel(fitted(2)), torch.rand(3, 2, dtype=F64)
    summed = model.posterior(X, posterior_transform=ScalarizedPosteriorTransform(torch.ones(2, dtype=F64)))
    torch.testing.assert_close(summed.mean.squeeze(-1), model.posterior(X).mean.sum(1))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_botorchs_own_loop_finds_the_top():
    def truth(x):
        return -(x - 0.3).square().sum(-1, keepdim=True)

    torch.manual_seed(0)
    x = torch.rand(8, 2, dtype=F64)
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=F64)
    bayes = vi.variationalize_head(network(1, width=40), likelihoods.Gaussian(noise=0.02), vi.priors.NormalPrior(1.0))
    bayes.fit_head([(x, truth(x))], progress=False)
    start = truth(x).max()
    for _ in range(4):
        acquisition = qLogExpectedImprovement(
            PosteriorModel(bayes), truth(x).max(), sampler=SobolQMCNormalSampler(torch.Size([32]), seed=0)
        )
        more, _ = optimize_acqf(acquisition, bounds, q=2, num_restarts=2, raw_samples=16)
        x = torch.cat([x, more])
        bayes.update((more, truth(more)))
    assert truth(x).max() > max(float(start), -0.005)
    more, value = optimize_acqf(
        LogExpectedImprovement(PosteriorModel(bayes), truth(x).max()), bounds, q=1, num_restarts=2, raw_samples=16
    )
    assert torch.isfinite(value)
    fantasies = qKnowledgeGradient(PosteriorModel(bayes), num_fantasies=2)
    assert torch.isfinite(fantasies(torch.rand(3, 4, 2, dtype=F64))).all()


def test_what_is_no_regression_is_refused():
    with pytest.raises(ValueError, match="BoTorch optimises numbers"):
        PosteriorModel(vi.variationalize_head(network(3), likelihoods.Categorical()))
