"""The benchmarks of single questions about log densities: targets are what they say."""

import pytest
import torch

from benchmarks import multimodal_others
from benchmarks.hard_densities import Network
from benchmarks.network_integrated import Integrated


@pytest.mark.parametrize("apart", ["mean", "widest", "narrowest"])
def test_parts_are_as_far_apart_as_told(apart):
    sds = torch.tensor([[1.0, 2.0], [3.0, 3.0]], dtype=torch.float64)
    expected = {"mean": 2.25, "widest": 3.0, "narrowest": 1.0}[apart]
    assert multimodal_others.in_units(sds, apart)[0, 1].item() == expected
    target = multimodal_others.gaussians(2, True, apart, 3)
    grid = torch.linspace(-80, 80, 801, dtype=torch.float64)
    mass = target.log_density(torch.cartesian_prod(grid, grid)).exp().sum() * 0.2**2
    assert mass.item() == pytest.approx(1, abs=1e-6)  # its evidence


def test_the_last_layer_is_integrated_out():
    """log p(a, b) − log N(b; given a) is log ∫ p(a, b) db at any b; and draws of b have the mean that this says."""
    network = Network(0)
    target, generator = Integrated(network), torch.Generator().manual_seed(0)
    a = torch.randn(3, 30, generator=generator, dtype=torch.float64)
    root, slope = target.conditional(a)
    mean = torch.cholesky_solve(slope.unsqueeze(-1), root).squeeze(-1)
    given = torch.distributions.MultivariateNormal(mean, precision_matrix=root @ root.mT)
    theta = target.completed(a, generator)
    assert torch.equal(theta[:, :30], a)
    whole = network.log_joint(theta) - given.log_prob(theta[:, 30:])
    torch.testing.assert_close(whole, target.log_joint(a))
    many = target.completed(a[:1].expand(20000, -1), generator)[:, 30:]
    error = given.stddev[0] / 20000**0.5
    assert ((many.mean(0) - mean[0]).abs() < 5 * error).all()


def test_a_benchmark_runs(capsys, monkeypatch):
    monkeypatch.setattr(multimodal_others, "DIMENSIONS", (2, 5))
    counts = multimodal_others.main(["--last", "1", "--apart", "mean"])
    assert {name: own[0] for name, own in counts.items()} == {f"mean, {P} numbers": 2 for P in (2, 5)}
    assert "| mean, 5 numbers | 2 | 0 | 0 |" in capsys.readouterr().out
