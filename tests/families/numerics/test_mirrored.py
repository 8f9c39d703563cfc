"""Mirrored pairs against `fused` with the noise of both draws."""

import pytest
import torch

import structvi as vi
from structvi.families.numerics import fused, mirrored
from tests.families.numerics.test_fused import P, close, family


def inputs(rank, groups):
    generator = torch.Generator().manual_seed(1)
    half = vi.couplings.naive(groups, P, rank, torch.Generator().manual_seed(0), torch.float64)
    both = vi.couplings.paired(groups, P, rank, torch.Generator().manual_seed(0), torch.float64)
    S = 2 * groups
    return half, both, *(torch.randn(*n, generator=generator).double() for n in ((S, P), (S,), (S,)))


@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("rank", [0, 3])
def test_pairs_are_what_two_draws_are(rank, groups, sloped):
    q = family(vi.LowRankNormal(rank) if rank else vi.MeanField())
    state = q().state()
    assert mirrored.serve(state)
    half, both, g, g_q, slope = inputs(rank, groups)
    with torch.no_grad():
        theta, log_q, saved = mirrored.forward(state, *half)
        expected_theta, expected_log_q, _, whole = fused.forward(state, *both)
    close(theta, expected_theta, 1e-13)
    close(log_q, expected_log_q, 1e-13)
    more = (theta, slope) if sloped else ()
    got, expected = mirrored.backward(saved, g.clone(), g_q, *more), fused.backward(whole, g.clone(), g_q, *more)
    for one, other in zip(got[:2], expected[:2], strict=True):
        close(one, other, 1e-12)
    if rank:
        assert len(got[2].A) == groups
        close(got[2].dense(), expected[2].dense(), 1e-12)
        close(got[2].squared_norm(), expected[2].dense().square().sum(), 1e-12)


def test_what_is_not_ours_is_left_as_it_is():
    half, _, g, g_q, _ = inputs(3, 1)
    with torch.no_grad():
        _, _, saved = mirrored.forward(family(vi.LowRankNormal(3))().state(), *half)
    before = g.clone()
    mirrored.backward(saved, g, g_q)
    assert torch.equal(g, before)


def test_the_precision_form_is_left_to_others():
    assert not mirrored.serve(family(vi.LowRankPrecision(3))().state())


def test_a_step_draws_them(monkeypatch):
    """Of the coupling of `fit`, and no other."""
    asked = []
    own = mirrored.forward
    monkeypatch.setattr(mirrored, "forward", lambda *given: asked.append(1) or own(*given))
    density = family(vi.LowRankNormal(3))()
    for coupling in (vi.couplings.naive, vi.couplings.paired):
        detached = density.draw_detached(2, coupling, torch.Generator().manual_seed(0))
        expected = density.draw(2, coupling, torch.Generator().manual_seed(0)).theta
        close(detached.draws.theta.detach(), expected.detach(), 1e-13)
    assert asked == [1]
