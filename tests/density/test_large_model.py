"""What products with a curvature tell of it: exact where it is a diagonal plus few directions."""

import torch

from structvi.density.large_model import Products, sound_directions, updated
from structvi.density.low_rank_matrix import LowRankMatrix


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


P = 50
VALUES = torch.tensor([40.0, 5.0, -0.8], dtype=torch.float64)
TRUTH = LowRankMatrix(numbers(P).exp(), torch.linalg.qr(numbers(P, 3, seed=1)).Q, VALUES)
STEPS = torch.linalg.qr(numbers(P, 6, seed=2)).Q.mT


def dense(M):
    return M.product(torch.eye(P, dtype=torch.float64))


def learned(a, steps, draws=40):
    """At q = N(0, diag(1/a))."""
    q = LowRankMatrix.diag(a)
    steps = steps / a.sqrt()  # orthonormal in units of q
    drawn = numbers(draws, P, seed=3) / a.sqrt()
    chosen = sound_directions(Products(steps, TRUTH.product(steps)), q)
    return updated(a, q, Products(drawn, TRUTH.product(drawn)), chosen, rank=12)


def test_along_the_directions_the_model_is_right():
    a = (0.3 * numbers(P, seed=4)).exp() * TRUTH.diagonal()
    model, steps = learned(a, STEPS), STEPS / a.sqrt()
    torch.testing.assert_close(model.product(steps), TRUTH.product(steps), rtol=1e-6, atol=1e-6)


def test_a_diagonal_plus_low_rank_is_known_when_its_directions_are():
    model = learned(TRUTH.a, TRUTH.U.mT)
    torch.testing.assert_close(dense(model), dense(TRUTH), rtol=1e-8, atol=1e-8)


def test_draws_correct_a_diagonal_that_is_wrong():
    wrong = 1.5 * TRUTH.a
    model = learned(wrong, torch.linalg.qr(TRUTH.U * wrong.sqrt().unsqueeze(-1) / TRUTH.a.sqrt().unsqueeze(-1)).Q.mT)
    before, after = (x.log().abs().mean().item() for x in (wrong / TRUTH.a, model.a / TRUTH.a))
    assert after < 0.1 * before


def test_noise_alone_changes_the_diagonal_little():
    # ten draws of a curvature with many correlations that no direction was chosen for
    root = numbers(P, P, seed=5) / P**0.5
    A = torch.eye(P, dtype=torch.float64) + root @ root.mT
    a, drawn = A.diagonal(), numbers(10, P, seed=6) / A.diagonal().sqrt()
    q, step = LowRankMatrix.diag(a), torch.eye(P, dtype=torch.float64)[:1] / a.sqrt()
    chosen = sound_directions(Products(step, step @ A), q)
    model = updated(a, q, Products(drawn, drawn @ A), chosen, rank=12)
    # the sample's own estimate, believed to the full, is off by this much
    each = (drawn @ A - a * drawn) * drawn * a
    assert (model.a / a).log()[1:].square().mean() < 0.3 * (each.mean(0) / a)[1:].square().mean()


def test_where_the_curvature_is_not_positive_q_is_made_wider():
    q = LowRankMatrix.diag(torch.ones(P, dtype=torch.float64))
    steps = torch.eye(P, dtype=torch.float64)[:2]
    found = sound_directions(Products(steps, torch.tensor([[-2.0], [3.0]], dtype=torch.float64) * steps), q)
    assert sorted(found.values.tolist()) == [0.25, 3.0]
    torch.testing.assert_close((found.steps * found.curved).sum(-1), found.values)
