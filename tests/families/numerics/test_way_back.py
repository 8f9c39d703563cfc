"""The way back in torch: what is for a captured step, and for mean field, against one draw after the other."""

import pytest
import torch

from structvi.families.numerics import fused, way_back
from tests.families.numerics.test_fused import P, close


@pytest.mark.parametrize("rank", [0, 3])
def test_all_draws_at_once_give_what_one_after_the_other_gives(rank):
    """A captured step in float64 takes them at once: nothing may be read by the host there."""
    generator = torch.Generator().manual_seed(0)
    S = 4
    scale, unit = (0.5 + torch.rand(P, generator=generator, dtype=torch.float64) for _ in range(2))
    factor = torch.randn(P, rank, generator=generator, dtype=torch.float64)
    epsilon, g = (torch.randn(S, P, generator=generator, dtype=torch.float64) for _ in range(2))
    u, g_q = (
        torch.randn(S, rank, generator=generator, dtype=torch.float64),
        torch.randn(S, generator=generator).double(),
    )
    one_by_one = fused._Slabs.back_covariance(scale, factor, unit, epsilon, u, u, g, g_q, g, g_q)
    at_once = way_back.back_at_once(scale, factor, unit, epsilon, u, g, g_q)
    for got, expected in zip(at_once[:3], one_by_one[:3], strict=True):
        close(got, expected, 1e-12)


@pytest.mark.parametrize("S", [1, 4])
def test_where_nobody_else_has_it_the_gradient_is_written_over(S):
    generator = torch.Generator().manual_seed(0)
    scale = 0.5 + torch.rand(P, generator=generator, dtype=torch.float64)
    epsilon, g = (torch.randn(S, P, generator=generator, dtype=torch.float64) for _ in range(2))
    g_q, before = torch.randn(S, generator=generator).double(), g.clone()
    kept = way_back.back_diagonal(scale, epsilon, g, g_q, spare=False)
    assert torch.equal(g, before)
    for got, expected in zip(way_back.back_diagonal(scale, epsilon, g, g_q, spare=True), kept, strict=True):
        assert torch.equal(got, expected)
    assert not torch.equal(g, before)
