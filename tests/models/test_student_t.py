"""Student-t noise: against torch and scipy in float64, and what outliers do to a fit."""

import pytest
import torch

import structvi as vi
from structvi.models.likelihoods.student_t import StudentTNoise, students_t_cdf

stats = pytest.importorskip("scipy.stats")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("df", [0.5, 1.0, 2.5, 4.0, 30.0, 900.0])
def test_log_density_and_gradients_are_those_of_torch(df):
    y, t = (torch.randn(50, 1, generator=generator(s), dtype=torch.float64) for s in (0, 1))
    y.requires_grad_()
    ours = vi.likelihoods.StudentT(0.7, df)(y, 5 * t)
    truth = torch.distributions.StudentT(torch.tensor(df, dtype=torch.float64), y, 0.7).log_prob(5 * t)
    torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(value.sum(), y)[0] for value in (ours, truth)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_few_digits_are_lost_in_single_precision():
    """The difference of two log Γ of 2600 has an error of 2e-4 in float32; ours is taken in float64."""
    likelihood = vi.likelihoods.StudentT(initial=0.5)
    likelihood.log_excess.data.fill_(698.0).log_()
    t = 0.5 * torch.randn(200, 1, generator=generator())
    value = likelihood(torch.zeros(200, 1), t).mean()
    exact = torch.distributions.StudentT(torch.tensor(700.0).double(), 0.0, 0.5).log_prob(t.double()).mean()
    assert value.item() == pytest.approx(exact.item(), abs=1e-5)
    value.backward()
    assert likelihood.log_noise.grad.isfinite()
    assert likelihood.log_excess.grad.isfinite()


@pytest.mark.parametrize("df", [0.3, 1.0, 2.1, 4.0, 7.5, 60.0, 1000.0])
def test_distribution_function_and_quantiles_are_those_of_scipy(df):
    z = torch.cat([-torch.logspace(-6, 6, 60), torch.zeros(1), torch.logspace(-6, 6, 60)]).double()
    found = students_t_cdf(z, torch.tensor(df, dtype=torch.float64))
    torch.testing.assert_close(found, torch.from_numpy(stats.t.cdf(z.numpy(), df)), rtol=1e-9, atol=1e-12)
    scale = torch.tensor([1.0, 2.0, 3.0]).double()
    noise = StudentTNoise(torch.tensor(df).double(), torch.zeros(3).double(), scale)
    for p in (0.001, 0.3, 0.5, 0.975):
        found = noise.icdf(torch.tensor(p, dtype=torch.float64))
        torch.testing.assert_close(found, stats.t.ppf(p, float(noise.df[0])) * scale, rtol=1e-9, atol=1e-9)


def test_heads_and_masks():
    output, t = torch.randn(5, 2, generator=generator()), torch.randn(5, 1, generator=generator(1))
    found = vi.likelihoods.StudentT("head", 4.0)(output, t)
    truth = torch.distributions.StudentT(4.0, output[:, :1], output[:, 1:].exp()).log_prob(t)
    torch.testing.assert_close(found, truth)
    mask = torch.tensor([[True], [False], [True], [True], [False]])
    masked = vi.likelihoods.StudentT("head", 4.0)(output, (t, mask))
    torch.testing.assert_close(masked, truth * mask)
