"""Families of a user's own: one that says it is a normal is searched, grown, placed and saved as ours are."""

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal

import structvi as vi
from structvi.families import Diagonal, NormalForm
from structvi.families.gaussian import Gaussian, LowRankCovariance
from structvi.testing import check_family


class ByTorch(vi.Family):
    """A torch distribution, and the normal that it is."""

    def initialise(self, parameters, generator):
        self.loc = nn.Parameter(parameters.initial.clone())
        self.rho = nn.Parameter((0.1 * parameters.scale).log())

    def forward(self):
        return Independent(Normal(self.loc, self.rho.exp()), 1)

    @torch.no_grad()
    def normal(self):
        return NormalForm(self.loc.detach().clone(), Diagonal(self.rho.exp()))

    @torch.no_grad()
    def set_normal(self, form):
        self.loc.copy_(form.mean)
        self.rho.copy_(form.diagonal().scale.log())


class OwnDensity(Gaussian):
    """A shape of covariance of one's own: a location and six methods."""

    def __init__(self, mean, log_scale):
        self.location, self.log_scale = mean, log_scale

    def transform(self, diagonal, low_rank):
        return self.log_scale.exp() * diagonal

    def precision_product(self, x):
        return x * (-2 * self.log_scale).exp()

    def quadratic(self, x):
        return (x.double() * (-self.log_scale.double()).exp()).square().sum(-1)

    def half_log_det(self):
        return self.log_scale.double().sum()

    def low_rank(self):
        empty = self.location.new_zeros(self.P, 0)
        return LowRankCovariance((2 * self.log_scale).exp(), empty, empty.new_zeros(0, 0))

    def precision_diagonal(self):
        return (-2 * self.log_scale).exp()


class ByDensity(ByTorch):
    """The same parameters with a Gaussian density of one's own: draws are coupled, entropies exact."""

    def forward(self):
        return OwnDensity(self.loc, self.rho)


def loader(n=64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    t = x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, t), batch_size=16, shuffle=True)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def posterior(family):
    generator = torch.Generator().manual_seed(2)
    return vi.variationalize(network(), vi.likelihoods.Gaussian(0.3), family, generator=generator)


def target():
    """A correlated normal in four dimensions, with scales from 0.1 to 10."""
    A = torch.tensor([[1.0, 0, 0, 0], [0.5, 1, 0, 0], [0, 0.3, 1, 0], [0, 0, 0.7, 1]], dtype=torch.float64)
    scale = torch.tensor([0.1, 1.0, 3.0, 10.0], dtype=torch.float64)
    root = scale.unsqueeze(-1) * A
    precision = torch.linalg.inv(root @ root.mT)
    space = vi.Parameters({"z": torch.zeros(4, dtype=torch.float64)})
    fn = lambda p: -0.5 * (p["z"] - 5) @ precision @ (p["z"] - 5)  # noqa: E731
    return vi.LogDensity(fn, space), precision


@pytest.mark.parametrize("family", [ByTorch, ByDensity])
def test_a_search_finds_the_optimum_of_mean_field(family):
    """Coordinates and curvature are used: mean field's optimum, 1/√Λ_ii, is found, not only improved on."""
    density, precision = target()
    result = vi.fit_density(density, family(), seed=0, progress=False)
    assert result.status is vi.Status.CONVERGED
    scale = precision.diagonal().rsqrt()
    # the ELBO of a quadratic is exact on the fixed draws: what is left is the search's tolerance of 1e-3 nats
    assert ((result.family().mean - 5).abs() / scale).max() < 0.02
    assert (result.family().variance.sqrt() / scale - 1).abs().max() < 0.02


def test_grow_by_rank_and_by_components():
    bayes = posterior(ByTorch())
    bayes.fit(loader(), steps=60, progress=False)
    bayes.grow(loader(), rank=2, steps=40, progress=False)
    assert isinstance(bayes.family, vi.LowRankNormal | ByTorch)
    bayes.grow(loader(), components=2, steps=40, progress=False)
    assert isinstance(bayes.family, vi.Mixture | vi.LowRankNormal | ByTorch)


def test_save_and_load(tmp_path):
    bayes = posterior(ByDensity())
    bayes.fit(loader(), steps=20, progress=False)
    bayes.save(tmp_path / "own.safetensors")
    with pytest.raises(ValueError, match=r"the family \('ByDensity'\)"):
        vi.load(tmp_path / "own.safetensors", network())
    again = vi.load(tmp_path / "own.safetensors", network(), family=ByDensity())
    assert torch.equal(bayes.family().variance, again.family().variance)


def test_the_laws_hold():
    laws = ["normal", "unbiased", "path_zero", "score", "normalised"]
    assert set(check_family(ByDensity(), laws=laws).values()) == {"held"}
