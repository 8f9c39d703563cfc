"""Starts near an optimum of a low-rank family: each way changes what it says, and together they leave a poor one."""

import pytest
import torch

import structvi as vi
from structvi.density.approximation import Approximation
from structvi.density.coordinates import Moved, standard
from structvi.density.hops import LET_GO, WAYS, Hops
from structvi.density.newton import Normal


def noise(P, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.randn(P, generator=generator, dtype=torch.float64)


def precision(P, seed=1):
    root = noise(P * P, seed)().view(P, P)
    return root @ root.mT / P + torch.eye(P, dtype=torch.float64)


@pytest.mark.parametrize("of_precision", [False, True])
def test_what_each_way_changes(of_precision):
    P = 40
    hops = Hops(precision(P), of_precision, noise(P))
    held = torch.arange(P) < 6
    far = hops.marginal + 3 if of_precision else hops.conditional - 3
    scales = torch.where(held, far, torch.lerp(hops.conditional, hops.marginal, 0.5))
    factor = torch.zeros(P, 2, dtype=torch.float64)
    factor[10:13, 0], factor[20:22, 1] = 1.0, 0.5
    assert torch.equal(hops.held(scales), held)
    for index in range(5 * WAYS):
        new = hops.start(index, scales, factor)
        changed = new != scales
        let_go, taken = changed & held & ~hops.held(new), changed & ~held & hops.held(new)
        if index % WAYS == 1:
            rows = range(10, 13) if changed[10] else range(20, 22)
            assert changed.nonzero().flatten().tolist() == list(rows)
        elif index % WAYS == 2:
            assert (int(let_go.sum()), int(taken.sum()), int(changed.sum())) == (1, 1, 2)
        elif index % WAYS == 3:
            assert int(let_go.sum()) == int(changed.sum()) == LET_GO
        within = changed & ~taken  # what begins again is between conditional and margin
        assert bool(((new >= hops.conditional) & (new <= hops.marginal))[within].all())


def test_nothing_is_held():
    hops = Hops(precision(5), True, noise(5))
    new = hops.start(3, hops.conditional, torch.ones(5, 1, dtype=torch.float64))
    assert torch.equal(new, hops.conditional)


def test_a_number_held_by_mistake_is_let_go():
    """Λ = I + 8 uuᵀ, u of twelve numbers, and a start at which the one column holds a number outside of them."""
    P = 30
    u = (torch.arange(P) < 12).double()
    matrix = torch.eye(P, dtype=torch.float64) + 8 * torch.outer(u, u) / 12
    space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})
    target = vi.LogDensity(lambda p: -p["z"].square().sum(), space)
    place = Moved(target, torch.zeros(P, dtype=torch.float64), torch.ones(P, dtype=torch.float64))
    q = standard(vi.LowRankPrecision(1), place.space, torch.Generator().manual_seed(0))
    shape = Approximation(q, place, noise(P), lambda *_: 0.0)
    normal = Normal(torch.zeros(P, dtype=torch.float64), torch.linalg.cholesky(torch.linalg.inv(matrix)))
    shape.from_starts(normal)
    wrong = torch.zeros(P, dtype=torch.float64)
    wrong[25] = 8.0
    with torch.no_grad():
        q.log_scale.copy_(wrong)
        q.take_scales(wrong, matrix)
    shape.load(tuple(p.detach().clone() for p in q.parameters()))
    shape.hop(normal)
    found = shape.normal()
    assert abs(found.entropy() - normal.entropy()) < 1e-3  # the family holds the normal, and is it again
