"""The best member of a family without a P×P matrix: that of the dense search, at few numbers."""

import pytest
import torch

import structvi as vi
from structvi.density.large_member import Member, Members, large_form
from structvi.density.low_rank_matrix import LowRankMatrix
from structvi.families.low_rank import profile


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def precision(P=30, r=6):
    U = torch.linalg.qr(numbers(P, r, seed=1)).Q
    return LowRankMatrix(numbers(P).exp(), U, torch.tensor([30.0, 9.0, 2.0, -0.5, -0.9, -0.97], dtype=torch.float64))


def dense(M):
    return M.product(torch.eye(len(M.a), dtype=torch.float64))


@pytest.mark.parametrize("of_precision", [False, True])
def test_the_kl_at_given_scales_is_that_of_the_dense_profile(of_precision):
    M, log_scale = precision(), 0.3 * numbers(30, seed=2) - 0.5 * precision().diagonal().log()
    exact = profile(log_scale, dense(M), 2, of_precision)
    kl, gradient, held, vectors = Members(2, of_precision).kl(log_scale, M)
    assert abs(kl - exact.kl) < 1e-6
    torch.testing.assert_close(gradient, exact.gradient, rtol=0, atol=1e-5)
    factor = vectors * (held - 1).sqrt()
    torch.testing.assert_close(factor @ factor.mT, exact.factor @ exact.factor.mT, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of_precision", [False, True])
def test_a_family_that_holds_the_normal_becomes_it(of_precision):
    U, size = torch.linalg.qr(numbers(40, 3, seed=1)).Q, torch.tensor([50.0, 8.0, 2.0], dtype=torch.float64)
    M = LowRankMatrix(numbers(40).exp(), U, size)
    M = M if of_precision else M.inverse()
    member = Members(3, of_precision).best(M, [M.diagonal().rsqrt()], 1e-8, 200)
    # a start at other scales: the penalty of 1e-6 on log scales that have moved by about one leaves 1e-4
    torch.testing.assert_close(dense(member.precision()), dense(M), rtol=2e-3, atol=2e-3)


def test_mean_field_has_the_conditional_variances():
    M = precision()
    member = Members(0, False).best(M, [M.a], 1e-3, 10)
    torch.testing.assert_close(member.scale, M.diagonal().rsqrt())


@pytest.mark.parametrize("recipe", [vi.MeanField(), vi.LowRankNormal(2), vi.LowRankPrecision(2)])
def test_a_family_takes_the_form_that_it_gives(recipe):
    spaces = (vi.Parameters({"z": numbers(7, seed=seed)}) for seed in (1, 2))
    q, other = (recipe.bind(space, torch.Generator().manual_seed(0)) for space in spaces)
    with torch.no_grad():
        for parameter in q.parameters():
            parameter.add_(0.3 * numbers(*parameter.shape, seed=3))
    other.take_relative_form(q.relative_form())
    torch.testing.assert_close(other().mean, q().mean)
    torch.testing.assert_close(other().covariance(), q().covariance())
    member = Member.of(q.relative_form())
    torch.testing.assert_close(dense(member.precision().inverse()), q().covariance())


def test_only_large_families_that_are_a_diagonal_plus_low_rank_have_a_form(monkeypatch):
    space = vi.Parameters({"z": torch.zeros(6)})
    assert large_form(vi.MeanField().bind(space)) is None
    monkeypatch.setattr("structvi.density.large_member.LARGE", 5)
    assert large_form(vi.MeanField().bind(space)) is not None
    assert large_form(vi.LowRankNormal(1).bind(space)).factor.shape == (6, 1)
    assert large_form(vi.FullNormal().bind(space)) is None
