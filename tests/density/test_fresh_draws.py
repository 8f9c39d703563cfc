"""One seed gives the same draws on every device: they are made on the CPU and moved."""

from types import SimpleNamespace

import pytest
import torch

import structvi as vi
from structvi.couplings import naive
from structvi.density import choosing, fit, fixed_draws, fresh_draws, units
from structvi.density.drawing import resampled
from structvi.density.modes import Modes

GPU = SimpleNamespace(type="cuda")


def as_on_a_gpu(seed, device):
    """The coupling of another device; its generator stands in for that device's, with another stream."""
    real = torch.Generator
    try:
        fresh_draws.torch.Generator = lambda device="cpu": real()
        coupling, _ = fresh_draws.fresh_draws(seed, GPU)
    finally:
        fresh_draws.torch.Generator = real
    return coupling, torch.Generator().manual_seed(seed + 1000)


def test_noise_is_that_of_the_cpu_whatever_generator_comes():
    coupling, generator = as_on_a_gpu(3, GPU)
    own = torch.Generator().manual_seed(3)
    for _ in range(2):  # it goes on
        got = coupling(4, 5, 2, generator, torch.float64, torch.device("cpu"))
        for one, other in zip(got, naive(4, 5, 2, own, torch.float64), strict=True):
            assert torch.equal(one, other)
    moved = coupling(4, 5, 2, generator, torch.float64, torch.device("meta"))
    assert {x.device.type for x in moved} == {"meta"}


def test_on_a_cpu_it_is_the_generator_itself():
    coupling, generator = fresh_draws.fresh_draws(3, torch.device("cpu"))
    assert coupling is naive
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())


@pytest.mark.parametrize("family", [vi.LowRankNormal(1), vi.Mixture(vi.FullNormal(), 2)], ids=["one", "two"])
def test_a_fit_is_the_same_with_it(family, monkeypatch):
    def log_p(p):
        return torch.logaddexp(-0.5 * (p["z"] - 2).square().sum(), -0.5 * (p["z"] + 2).square().sum())

    def result():
        space = vi.Parameters({"z": torch.zeros(2, dtype=torch.float64)})
        return vi.fit_density(vi.LogDensity(log_p, space), family, progress=False, max_evaluations=20_000)

    plain = result()
    for module in (choosing, fit, fixed_draws, units):
        monkeypatch.setattr(module, "fresh_draws", as_on_a_gpu)
    moved = result()
    assert torch.equal(moved.elbo.per_group, plain.elbo.per_group)
    for one, other in zip(plain.family.parameters(), moved.family.parameters(), strict=True):
        assert torch.equal(one, other)


def test_points_around_modes_are_where_the_modes_are():
    modes = Modes.__new__(Modes)
    peak = SimpleNamespace(at=torch.zeros(2, device="meta"), root=torch.zeros(2, 2, device="meta"))
    modes.parts, modes.generator = [peak, peak], torch.Generator().manual_seed(0)
    modes.view = SimpleNamespace(centre=peak.at)
    assert modes.points(8).device.type == "meta"


def test_resampled_by_a_generator_of_the_cpu():
    """Indices are the same whether the weights are on its device or not; on "meta" only where they are can be told."""
    weights = torch.tensor([0.5, 0.0, 0.5])
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    assert resampled(weights, 6, generators[0]).sort().values.tolist() == [0, 0, 0, 2, 2, 2]
    assert resampled(weights.to("meta"), 6, generators[1]).device.type == "meta"
