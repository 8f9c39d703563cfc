"""`vi.fit_density` of many numbers: right, with few evaluations, and without a P×P matrix."""

from math import log, pi

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import structvi as vi
from structvi.density.fixed_draws import FixedDraws
from structvi.density.result import FRESH
from structvi.families.gaussian import LowRankDensity


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)


class Exact:
    """A normal of one of the two forms, scales from about 0.1 to 10, factors of 10 to 2 times the diagonal."""

    def __init__(self, P, K, of_precision):
        factor = numbers(P, K) / P**0.5 * torch.logspace(1, 0.3, K, dtype=torch.float64)
        log_scale = numbers(P, seed=1)
        scale = log_scale.exp()
        self.density = LowRankDensity(numbers(P, seed=2) * scale, log_scale, factor, scale, of_precision)
        self.space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})

    def log_joint(self, theta, batch=None):
        return self.density.log_prob(theta)

    def kl(self, q):
        with torch.no_grad():
            return vi.kl(q(), self.density).item()

    def best_mean_field(self):
        q = vi.MeanField().bind(self.space)
        with torch.no_grad():
            q.mean.copy_(self.density.mean)
            q.log_scale.copy_(-0.5 * self.density.precision_diagonal().log())
        return self.kl(q)


def target(log_density, P=300, dtype=torch.float64):
    return vi.LogDensity(lambda p: log_density(p["z"]), vi.Parameters({"z": torch.zeros(P, dtype=dtype)}))


def fit(*args, **options):
    return vi.fit_density(*args, progress=False, **options)


class NoMatrix(TorchDispatchMode):
    """An error where a tensor with as many elements is made."""

    def __init__(self, elements):
        super().__init__()
        self.elements = elements

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor) and one.untyped_storage().nbytes() >= self.elements * one.element_size():
                raise AssertionError(f"{func} made a tensor of shape {tuple(one.shape)}")
        return result


@pytest.mark.parametrize("of_precision", [False, True])
def test_a_target_of_the_familys_form_is_found(of_precision):
    exact = Exact(300, 4, of_precision)
    result = fit(exact, (vi.LowRankPrecision if of_precision else vi.LowRankNormal)(4))
    assert exact.kl(result.family) < 0.01 * exact.best_mean_field()
    assert result.converged, result.verdict
    assert result.evaluations < 6000


def test_mean_field_has_the_conditional_scales():
    exact = Exact(300, 4, True)
    result = fit(exact, vi.MeanField())
    assert exact.kl(result.family) - exact.best_mean_field() < 0.05
    assert result.converged, result.verdict


@pytest.mark.parametrize(("recipe", "of_precision"), [(vi.MeanField(), True), (vi.LowRankNormal(4), False)])
def test_no_matrix_of_all_numbers_by_all_is_ever_made(recipe, of_precision):
    P, exact = 300, Exact(300, 4, of_precision)
    with NoMatrix(P * P):
        result = fit(exact, recipe)
    assert result.converged, result.verdict
    with pytest.raises(AssertionError, match="made a tensor"), NoMatrix(P * P):
        torch.zeros(P, 1) @ torch.zeros(1, P)


def test_what_is_not_normal_is_fitted_as_well_as_with_dense_matrices(monkeypatch):
    recipe = vi.LowRankNormal(3)
    X, signs = numbers(80, 40, seed=3) @ torch.diag(numbers(40, seed=4).exp()), numbers(80, seed=5).sign()
    logistic = target(lambda z: torch.nn.functional.logsigmoid(signs * (X @ z)).sum() - z.square().sum() / 2, P=40)
    dense = fit(logistic, recipe, tolerance=1e-2)
    monkeypatch.setattr("structvi.density.large.LARGE", 39)
    large = fit(logistic, recipe, tolerance=1e-2)
    noise = FixedDraws(4096, seed=9)

    def elbo(q):
        with torch.no_grad():
            draws = q.draw(1, noise).theta
            return (logistic.log_joint(draws) - q.log_prob(draws)).mean().item()

    assert large.converged, large.verdict
    # ten tolerances may be left
    assert elbo(large.family()) > elbo(dense.family()) - 0.1


def test_a_bound_family_goes_on_from_where_it_is():
    exact = Exact(300, 4, True)
    first = fit(exact, vi.LowRankPrecision(4))
    second = fit(exact, first.family)
    assert exact.kl(second.family) < exact.kl(first.family) + 0.01
    assert second.evaluations < 0.5 * first.evaluations
    assert second.family is not first.family


def test_a_limit_of_evaluations_is_kept_and_said():
    exact = Exact(300, 4, True)
    result = fit(exact, vi.LowRankPrecision(4), max_evaluations=FRESH + 4096, tolerance=1e-12)
    assert result.evaluations <= 4096
    assert exact.kl(result.family) < 0.05 * exact.best_mean_field()
    tight = fit(
        target(lambda z: -(z - 3).square().square().sum(), P=300), vi.MeanField(), starts=64, max_evaluations=5120
    )
    assert tight.status == "stopped"
    assert tight.evaluations <= 4096
    with pytest.raises(ValueError, match="max_evaluations must be"):
        fit(exact, vi.MeanField(), max_evaluations=2000)


def test_the_same_seed_gives_the_same_fit():
    exact = Exact(300, 4, False)
    one, other = (fit(exact, vi.MeanField(), seed=3, tolerance=0.1) for _ in range(2))
    torch.testing.assert_close(one.family().mean, other.family().mean, rtol=0, atol=0)


def test_points_without_a_value_are_survived():
    # Gamma(3, 1) for every number, without a value below zero: a normal reaches there and the verdict says so
    result = fit(target(lambda z: (2 * (z + 3).log() - (z + 3)).sum()), vi.MeanField())
    assert result.family().mean.isfinite().all()
    assert not result.converged
    with pytest.raises(vi.NonFiniteError, match="any of 4 starts"):
        fit(target(lambda z: z.sum() * torch.nan), vi.MeanField())


def test_heavy_tails_are_no_wreck():
    # independent Student-t numbers, 4 degrees of freedom: the best normal has no correlations
    result = fit(target(lambda z: -2.5 * torch.log1p(z.square() / 4).sum()), vi.MeanField(), max_evaluations=9000)
    z = torch.special.ndtri((torch.arange(4000, dtype=torch.float64) + 0.5) / 4000)
    scales = torch.linspace(1, 1.4, 41, dtype=torch.float64).unsqueeze(-1)
    each = -2.5 * torch.log1p((scales * z).square() / 4).mean(-1) + scales.squeeze(-1).log() + 0.5 * (1 + log(2 * pi))
    # 300 scales at 6 % of noise cost half a nat together, a limit of evaluations some more; a wreck would lose hundreds
    assert result.elbo.value > 300 * each.max().item() - 2
    assert result.status in ("converged", "stopped"), result.verdict


def test_a_density_without_end_is_noticed():
    result = fit(target(lambda z: -(z[1:] - 1).square().sum() / 2), vi.MeanField())
    assert result.status == "diverged"
    assert "z[0]" in result.verdict


def test_single_precision_is_fitted_too():
    result = fit(target(lambda z: -(z - 2).square().sum() / 2, dtype=torch.float32), vi.LowRankNormal(2))
    assert result.converged, result.verdict
    assert result.family().mean.dtype == torch.float32
    assert (result.family().mean - 2).abs().max() < 0.05
