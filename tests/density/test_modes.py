"""Modes are found wherever they lie, told apart, counted and weighed."""

from math import log, pi

import pytest
import torch

import structvi as vi
from structvi.density.coordinates import Counted, Limit
from structvi.density.modes import Modes
from structvi.density.units import View


class Normals:
    """Σ w_c N(mean_c, sd_c²), round, or a sum of other log densities."""

    def __init__(self, means, sds, weights):
        self.means, self.sds = (torch.as_tensor(x, dtype=torch.float64) for x in (means, sds))
        self.weights = torch.as_tensor(weights, dtype=torch.float64)
        self.space = vi.Parameters({"z": torch.zeros(self.means.shape[-1], dtype=torch.float64)})

    def log_joint(self, theta, batch=None):
        squares = (theta.unsqueeze(1) - self.means).square().sum(-1) / self.sds.square()
        P = self.means.shape[-1]
        return (self.weights.log() - squares / 2 - P * self.sds.log() - P / 2 * log(2 * pi)).logsumexp(-1)


def search(target, seed=0, limit=float("inf")):
    counted = Counted(target, limit)
    modes = Modes(View(counted, target.space.initial, target.space.scale), torch.Generator().manual_seed(seed))
    modes.search()
    return modes, counted


def apart(C, P, distance, seed=0):
    directions = torch.randn(C, P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return distance * directions / directions.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("P", [2, 10])
def test_all_modes_are_found_with_their_weights(P):
    sds, weights = [1.0, 0.5, 1.5], [0.6, 0.3, 0.1]
    target = Normals(apart(3, P, 7.0), sds, weights)
    modes, counted = search(target)
    found = modes.found()
    assert len(found) == 3
    assert [m.log_mass for m in found] == pytest.approx([log(w) for w in weights], abs=0.05)  # overlap
    at = torch.stack([mode.theta for mode in found])
    torch.testing.assert_close(at, target.means, atol=0.05, rtol=0)
    assert sum(mode.reached for mode in found) <= modes.searches
    assert min(mode.reached for mode in found) >= 1
    assert counted.evaluations < 100_000


def test_far_from_the_start_and_of_any_scale():
    means = torch.tensor([[90.0, 90.0], [90.0, 91.0]], dtype=torch.float64)
    modes, _ = search(Normals(means, [0.1, 0.1], [0.5, 0.5]))
    assert len(modes.found()) == 2


def test_a_wide_part_in_the_tail_of_a_narrow_one_is_a_shoulder():
    # at the wide part's centre the narrow one's density is far above: there is one maximum
    means = torch.zeros(2, 20, dtype=torch.float64)
    means[1, 0] = 4.0
    modes, _ = search(Normals(means, [1.0, 3.0], [0.6, 0.4]))
    assert len(modes.peaks) == 1
    assert len(modes.shoulders) >= 1
    heaviest = max(modes.parts[1:], key=lambda part: part.log_mass)
    theta = modes.view.theta(heaviest.at)
    torch.testing.assert_close(theta, means[1], atol=0.1, rtol=0)
    assert heaviest.log_mass + modes.view.root.log().sum().item() == pytest.approx(log(0.4), abs=0.02)


def test_one_mode_is_one():
    modes, _ = search(Normals(torch.zeros(1, 5), [1.0], [1.0]))
    assert len(modes.found()) == 1
    assert not modes.shoulders
    assert modes.found()[0].log_mass == pytest.approx(0, abs=1e-6)


def test_a_seed_gives_the_same_search():
    first, second = (search(Normals(apart(2, 2, 8.0), [1.0, 1.0], [0.5, 0.5]), seed=3)[0].found() for _ in range(2))
    assert [mode.reached for mode in first] == [mode.reached for mode in second]
    assert all(torch.equal(a.theta, b.theta) for a, b in zip(first, second, strict=True))


def test_the_limit_of_evaluations_is_kept():
    target = Normals(apart(2, 3, 5.0), [1.0, 1.0], [0.5, 0.5])
    counted = Counted(target, 3000)
    modes = Modes(View(counted, target.space.initial, target.space.scale), torch.Generator().manual_seed(0))
    with pytest.raises(Limit):
        modes.search()
    assert counted.evaluations <= 3000
    assert modes.peaks


def test_no_mode_no_search():
    class Slope:
        space = vi.Parameters({"z": torch.zeros(2, dtype=torch.float64)})

        def log_joint(self, theta, batch=None):
            return theta.sum(-1)

    assert search(Slope())[0].found() == []
