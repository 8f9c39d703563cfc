"""A normal on draws that are new at every step."""

import torch

import structvi as vi
from structvi.density.averaging import LEFT, ascend_on_fresh_draws, more_draws
from structvi.density.fixed_draws import FixedDraws
from structvi.density.newton import Local, Normal, averaged, full


def target(log_density, P):
    return vi.LogDensity(lambda p: log_density(p["z"]), vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)}))


def local(curvature, slope):
    P = len(slope)
    eye = torch.eye(P, dtype=torch.float64)
    return Local(Normal(torch.zeros(P, dtype=torch.float64), eye), 0.0, 0.0, slope, curvature, 0.0)


def test_a_step_averages_precisions_so_that_noise_has_no_bias():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2000, 3, 3, generator=generator, dtype=torch.float64)
    noise = 0.3 * (noise + noise.mT)
    eye, share = torch.eye(3, dtype=torch.float64), 0.1
    each = [averaged(local(eye + one, torch.zeros(3, dtype=torch.float64)), full, share).precision() for one in noise]
    # E [(1 − ρ)I + ρ(I + noise)] = I; the standard error of a diagonal entry is ρ 0.6/√2000 = 0.0013
    torch.testing.assert_close(torch.stack(each).mean(0), eye, atol=0.006, rtol=0)


def test_a_whole_step_on_a_quadratic_is_its_normal():
    A = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    b = torch.tensor([1.0, -3.0], dtype=torch.float64)
    new = averaged(local(A, b), full, 1.0)
    torch.testing.assert_close(new.precision(), A)
    torch.testing.assert_close(new.mean, torch.linalg.solve(A, b))


def test_more_draws_are_as_many_as_leave_enough():
    total = 4096
    for left in (0.6, 0.8, 0.99):
        more = more_draws(total, left)
        assert left * total / (total + more) < LEFT * 1.01
    assert more_draws(total, 100.0) == 4096  # no more than a fit takes at once


def test_a_fit_that_fixed_draws_would_over_fit_comes_to_its_optimum():
    # eight numbers with tails: 44 parameters on 64 draws of each step
    def log_density(z):
        return -2.5 * torch.log1p((z - 1).square() / 4).sum() - 0.5 * (z[1:] - z[:-1]).square().sum()

    p = target(log_density, 8)
    start = Normal(p.space.initial.clone(), 0.3 * torch.eye(8, dtype=torch.float64))

    def draws(step):
        return FixedDraws(64, step)(1, 8, 0, dtype=torch.float64).diagonal

    elbos = []
    end = ascend_on_fresh_draws(p, start, draws, lambda at: elbos.append(at.elbo), enough=5e-3, most=1 << 14)
    assert end.left < 5e-3
    # at the optimum b = 0 and A = I; of 2¹⁵ draws, ½|b|² + ¼|A − I|² nats are left beside their own noise of 0.002
    z = FixedDraws(1 << 15, 999)(1, 8, 0, dtype=torch.float64).diagonal.requires_grad_()
    theta = end.normal.mean + z @ end.normal.root.mT
    (g,) = torch.autograd.grad(p.log_joint(theta).sum(), z)
    A = -(g.mT @ z.detach()) / len(z)
    off = (A + A.mT) / 2 - torch.eye(8, dtype=torch.float64)
    assert 0.5 * g.mean(0).square().sum() + 0.25 * off.square().sum() < 0.02


def test_a_network_is_fitted_beyond_what_fixed_draws_allow_and_is_not_called_converged():
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(30, generator=generator, dtype=torch.float64) - 2
    y = x.sin() + 0.1 * torch.randn(30, generator=generator, dtype=torch.float64)

    def log_density(z):
        first, bias, last = z.view(3, 8)
        f = (x.unsqueeze(-1) * first + bias).tanh() @ last
        return -0.5 * ((y - f) / 0.1).square().sum() - 0.5 * z.square().sum()

    p = target(log_density, 24)
    result = vi.fit_density(p, vi.FullNormal(), max_evaluations=40_000, progress=False)
    fixed = vi.fit_density(p, vi.FullNormal(), max_evaluations=40_000, draws=512, progress=False)
    # fixed draws are over-fitted by nats; both on the same fresh draws' errors of about 0.1
    assert result.elbo.value > fixed.elbo.value + 1
