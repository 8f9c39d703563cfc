"""Problems with known answers: Gaussian targets, and a linear regression with its posterior and evidence."""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.families import NormalForm, Triangle

plt.switch_backend("Agg")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def gaussian_target(mean, covariance):
    """log N(z; mean, covariance) + 3, so that its log integral is 3."""
    mean, covariance = (torch.as_tensor(x, dtype=torch.float64) for x in (mean, covariance))
    space = vi.Parameters({"z": torch.zeros_like(mean)})
    exact = MultivariateNormal(mean, covariance)
    return vi.LogDensity(lambda p: exact.log_prob(p["z"]) + 3, space)


def full_normal(space, mean, covariance):
    """A `FullNormal` with this mean and covariance."""
    q = vi.FullNormal().bind(space)
    mean, covariance = (torch.as_tensor(x, dtype=torch.float64) for x in (mean, covariance))
    q.set_normal(NormalForm(mean, Triangle(torch.linalg.cholesky(covariance))))
    return q


@dataclass
class Linear:
    """t = w·x + b + N(0, 0.5²) with a standard normal prior, and its exact posterior as a `FullNormal`."""

    posterior: vi.Posterior
    loader: DataLoader
    x: torch.Tensor
    t: torch.Tensor
    mean: torch.Tensor
    covariance: torch.Tensor
    log_evidence: float

    def another(self, family):
        """A posterior of the same model with this family."""
        return vi.variationalize(self.posterior.net, vi.likelihoods.Gaussian(0.5), family, num_data=len(self.x))


@pytest.fixture
def linear():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    x[:, 1] = 0.9 * x[:, 0] + 0.3 * x[:, 1]  # correlated inputs: a correlated posterior
    t = (x.sum(-1, keepdim=True) - 0.5) + 0.5 * torch.randn(60, 1, generator=generator, dtype=torch.float64)
    design = torch.cat([x, torch.ones(60, 1)], dim=-1)
    covariance = torch.linalg.inv(torch.eye(3) + design.mT @ design / 0.25)
    mean = (covariance @ design.mT @ t / 0.25).squeeze(-1)
    marginal = MultivariateNormal(torch.zeros(60, dtype=torch.float64), design @ design.mT + 0.25 * torch.eye(60))
    net = nn.Linear(2, 1, dtype=torch.float64)
    space = vi.Parameters.of(net)
    posterior = vi.variationalize(net, vi.likelihoods.Gaussian(0.5), full_normal(space, mean, covariance), num_data=60)
    loader = DataLoader(TensorDataset(x, t), batch_size=16, shuffle=True)
    return Linear(posterior, loader, x, t, mean, covariance, marginal.log_prob(t.squeeze(-1)).item())


@pytest.fixture(name="gaussian_target")
def _gaussian_target():
    return gaussian_target


@pytest.fixture(name="full_normal")
def _full_normal():
    return full_normal
