"""Diagonal plus low rank, against the dense matrices that it never makes."""

import pytest
import torch

from structvi.density.low_rank_matrix import LowRankMatrix, independent, top_eigenvectors


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
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(M.product(x), x @ full, **close)
    torch.testing.assert_close(dense(M.inverse()), torch.linalg.inv(full), **close)
    torch.testing.assert_close(M.diagonal(), full.diagonal(), **close)
    assert abs(M.log_det() - torch.logdet(full).item()) < 1e-10
    assert abs(M.trace_of(N) - (full * dense(N)).sum().item()) < 1e-8
    root = M.root(torch.eye(9, dtype=torch.float64)).mT
    torch.testing.assert_close(root @ root.mT, full, **close)
    torch.testing.assert_close(M.root_transposed(x), x @ root, **close)
    torch.testing.assert_close(dense(M.mixed(N, 0.3, 6)), 0.7 * full + 0.3 * dense(N), **close)


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
    values, vectors, _ = top_eigenvectors(d, X, v, 6, None)
    torch.testing.assert_close(values, exact[:6], rtol=1e-8, atol=0)
    product = d.unsqueeze(-1) * vectors + (X * v) @ (X.mT @ vectors)
    torch.testing.assert_close(product, vectors * values, rtol=0, atol=1e-3)
