"""Log densities in minibatches, against the exact posterior of a linear regression."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

N, NOISE = 240, 0.5


def problem():
    """x [N, 3], t, and the posterior N(m, Λ⁻¹) under a prior N(0, I)."""
    g = torch.Generator().manual_seed(0)
    x = (
        torch.randn(N, 3, generator=g, dtype=torch.float64)
        @ torch.tensor([[1.0, 0.8, 0], [0, 0.6, 0], [0, 0, 1]]).double()
    )
    t = x @ torch.tensor([1.0, -2.0, 0.5]).double() + NOISE * torch.randn(N, generator=g, dtype=torch.float64)
    precision = torch.eye(3).double() + x.mT @ x / NOISE**2
    return x, t, torch.linalg.solve(precision, x.mT @ t / NOISE**2), precision


def log_density(p, batch):
    x, t = batch
    likelihood = -0.5 * ((t - x @ p["w"]) / NOISE).square().sum()
    return -0.5 * p["w"].square().sum() + N / len(t) * likelihood


def fitted(family, steps, **settings):
    x, t, _, _ = problem()
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(x, t), batch_size=40, shuffle=True)
    target = vi.LogDensity(log_density, vi.Parameters({"w": torch.zeros(3, dtype=torch.float64)}))
    return vi.fit_density(target, family, loader, steps=steps, progress=False, **settings)


@pytest.fixture(scope="module")
def full():
    return fitted(vi.FullNormal(), steps=700, lr=0.1)


def test_the_posterior_of_a_regression(full):
    """Mean to 0.1 standard deviations, scales to 12 %: the last steps see one batch in six each, at a small rate."""
    _, _, mean, precision = problem()
    sd = torch.linalg.inv(precision).diagonal().sqrt()
    q = full.family()
    assert ((q.mean - mean).abs() < 0.1 * sd).all()
    assert ((q.variance.sqrt() / sd).log().abs() < 0.12).all()
    assert full.converged
    assert full.evaluations == 8 * 700


def test_the_whole_log_density_is_that_of_the_result(full):
    x, t, mean, precision = problem()
    theta = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = torch.stack([log_density({"w": row}, (x, t)) for row in theta])
    torch.testing.assert_close(full.target.log_joint(theta), exact)
    evidence = exact[0] - torch.distributions.MultivariateNormal(mean, precision_matrix=precision).log_prob(theta[0])
    assert full.elbo.value == pytest.approx(evidence.item(), abs=0.05)  # q is nearly the posterior
    draws = full.sample(4000, corrected=True, generator=torch.Generator().manual_seed(0))["w"]
    sd = torch.linalg.inv(precision).diagonal().sqrt()
    assert ((draws.mean(0) - mean).abs() < 5 * sd / 4000**0.5).all()


def test_a_factor_waits_and_then_learns():
    family = fitted(vi.LowRankPrecision(1), steps=20).family
    assert isinstance(family.factor, torch.Tensor)
    assert family.factor.requires_grad
    assert family.factor.abs().max() > 0


def test_too_few_steps_are_told():
    assert fitted(vi.MeanField(), steps=60, lr=0.005).status is vi.Status.IMPROVING


def test_what_it_needs():
    target = vi.LogDensity(log_density, vi.Parameters({"w": torch.zeros(3, dtype=torch.float64)}))
    x, t, _, _ = problem()
    with pytest.raises(ValueError, match="a loader and a number of steps"):
        vi.fit_density(target, vi.MeanField(), [(x, t)])
    with pytest.raises(ValueError, match="a loader and a number of steps"):
        vi.fit_density(target, vi.MeanField(), steps=100)
    with pytest.raises(ValueError, match="draws= is for fits of a whole"):
        vi.fit_density(target, vi.MeanField(), [(x, t)], steps=100, draws=64)
    with pytest.raises(TypeError, match="read only once"):
        vi.fit_density(target, vi.MeanField(), iter([(x, t)]), steps=100)
    with pytest.raises(ValueError, match="gives no batch"):
        vi.fit_density(target, vi.MeanField(), [], steps=100)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_smaller_last_batch_counts_as_its_rows_do(shuffle):
    """100 numbers in batches of 32, the last four far off: equal weights of batches would move the mean by 11 sd.

    The posterior of the mean is N(x̄, 1/100); Adam's last steps are small, and a hundredth of a standard deviation is
    ten times what seeds differ by.
    """
    x = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[96:] += 5
    batches = TensorDataset(x)
    loader = DataLoader(batches, batch_size=32, shuffle=shuffle, generator=torch.Generator().manual_seed(1))

    def of_batch(p, batch):
        return -0.5 * 100 / len(batch[0]) * (batch[0] - p["m"]).square().sum()

    target = vi.LogDensity(of_batch, vi.Parameters({"m": torch.tensor(1.0, dtype=torch.float64)}))
    result = vi.fit_density(target, vi.FullNormal(), loader, steps=800, progress=False)
    assert abs(result.family().mean.item() - x.mean().item()) < 0.01 * 0.1
    theta = torch.tensor([[0.3]], dtype=torch.float64)
    torch.testing.assert_close(result.target.log_joint(theta), -0.5 * (x - 0.3).square().sum().view(1))
    evidence = -0.5 * (x - x.mean()).square().sum() + 0.5 * torch.tensor(2 * torch.pi / 100).log()
    assert result.elbo.value == pytest.approx(evidence.item(), abs=0.01)
