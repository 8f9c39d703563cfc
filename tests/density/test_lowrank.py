"""Diagonal plus low rank, against the dense matrices that it never makes."""

import pytest
import torch

from structvi.density.lowrank import Approximation, LowRankMatrix, independent
from structvi.families.normal import LowRank


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(P=9, r=3, seed=0):
    U = torch.linalg.qr(numbers(P, r, seed=seed + 1)).Q
    return LowRankMatrix(numbers(P, seed=seed).exp(), U, numbers(r, seed=seed + 2).exp() - 0.9)


def dense(M):
    size = M.a.sqrt().unsqueeze(-1)
    return size * (torch.eye(len(M.a), dtype=torch.float64) + (M.U * M.v) @ M.U.mT) * size.mT


def test_everything_is_what_the_dense_matrix_says():
    M, N, x = made(), made(seed=7), numbers(4, 9, seed=3)
    full = dense(M)
    torch.testing.assert_close(M.product(x), x @ full, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dense(M.inverse()), torch.linalg.inv(full), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(M.diagonal(), full.diagonal(), rtol=1e-10, atol=1e-10)
    assert abs(M.log_det() - torch.logdet(full).item()) < 1e-10
    assert abs(M.trace_of(N) - (full * dense(N)).sum().item()) < 1e-8
    root = M.root(torch.eye(9, dtype=torch.float64)).mT
    torch.testing.assert_close(root @ root.mT, full, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(M.root_transposed(x), x @ root, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dense(M.mixed(N, 0.3, 6)), 0.7 * full + 0.3 * dense(N), rtol=1e-10, atol=1e-10)


def test_of_a_sum_the_parts_that_say_most_are_kept_and_negative_ones_are_turned():
    a, columns = torch.ones(6, dtype=torch.float64), torch.eye(6, dtype=torch.float64)[:, :3]
    inner = torch.diag(torch.tensor([5.0, 0.1, -3.0], dtype=torch.float64))
    kept = LowRankMatrix.of(a, columns, inner, rank=2)
    # 1 − 3 is negative and stands for 0.25 at most; 1.1 says least
    assert sorted((1 + kept.v).tolist()) == pytest.approx([0.25, 6.0])
    exact = torch.diag(a) + columns @ inner.abs() @ columns.mT
    torch.testing.assert_close(dense(LowRankMatrix.of(a, columns, inner.abs(), 3)), exact)


def test_columns_that_are_sums_of_others_are_left_out():
    columns = numbers(8, 3)
    basis = independent(torch.cat([columns, columns @ numbers(3, 4, seed=1)], dim=-1))
    assert basis.shape == (8, 3)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(basis @ (basis.mT @ columns), columns)


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_eigenvectors_of_a_diagonal_plus_low_rank(spread):
    d, X, v = (spread * numbers(60, seed=4)).exp(), numbers(60, 5, seed=5), numbers(5, seed=6).exp()
    exact = torch.linalg.eigvalsh(torch.diag(d) + (X * v) @ X.mT).flip(0)
    matrix = LowRankMatrix.of(d, X, v.diag(), 5)
    values, vectors, _ = matrix.top(6, None)
    torch.testing.assert_close(values, exact[:6], rtol=1e-8, atol=0)
    product = d.unsqueeze(-1) * vectors + (X * v) @ (X.mT @ vectors)
    torch.testing.assert_close(product, vectors * values, rtol=0, atol=1e-3)


@pytest.mark.parametrize("of_precision", [False, True])
def test_the_precision_of_a_root(of_precision):
    scale, factor = numbers(6).exp(), numbers(6, 2, seed=1)
    matrix = torch.eye(6, dtype=torch.float64) + factor @ factor.mT
    exact = (
        matrix / scale / scale.unsqueeze(-1) if of_precision else torch.linalg.inv(matrix * scale * scale.unsqueeze(-1))
    )
    torch.testing.assert_close(dense(LowRankMatrix.precision_of(LowRank(scale, factor, of_precision))), exact)


@pytest.mark.parametrize("of_precision", [False, True])
def test_the_best_factor_has_the_kl_and_gradient_of_autograd_dense_or_not(of_precision):
    M, rank = made(P=12, r=4), 2
    approximation, log_scale = Approximation(rank, of_precision), (0.3 * numbers(1, 12, seed=8)).requires_grad_()
    kl, gradient, held, vectors = approximation.kl(log_scale, dense(M))
    factor = vectors[0] * (held[0] - 1).clamp(min=0).sqrt()
    matrix = torch.eye(12, dtype=torch.float64) + factor.detach() @ factor.detach().mT
    scale = log_scale[0].exp()
    covariance = torch.linalg.inv(matrix) if of_precision else matrix
    covariance = covariance * scale * scale.unsqueeze(-1)
    exact = 0.5 * ((dense(M) * covariance).sum() - 12 - torch.logdet(covariance) - torch.logdet(dense(M)))
    torch.testing.assert_close(kl[0], exact)
    (slope,) = torch.autograd.grad(exact, log_scale)  # at fixed factor: the best one has no gradient of its own
    torch.testing.assert_close(gradient, slope)
    others = Approximation(rank, of_precision).kl(log_scale, M)
    torch.testing.assert_close(others[0], kl)
    torch.testing.assert_close(others[1], gradient, atol=1e-6, rtol=0)


@pytest.mark.parametrize("of_precision", [False, True])
def test_a_normal_of_the_form_is_its_own_best(of_precision):
    scale, factor = numbers(8).exp(), 3 * numbers(8, 2, seed=1)
    matrix = LowRankMatrix.precision_of(LowRank(scale, factor, of_precision))
    starts = torch.stack([matrix.diagonal().rsqrt(), scale])
    for precision in (dense(matrix), matrix):
        root, kl = Approximation(2, of_precision).best(precision, starts, 1e-9, 1000)
        assert kl < 1e-6
        torch.testing.assert_close(dense(LowRankMatrix.precision_of(root)), dense(matrix), rtol=0.02, atol=0.02)
