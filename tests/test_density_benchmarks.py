"""The benchmarks of single questions about log densities: targets are what they say."""

import pytest
import torch

import structvi as vi
from benchmarks import awkward_densities, multimodal_others, network_posterior
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


def test_awkward_log_densities_are_what_they_say():
    """Exact moments against a grid over the number that they are of, where it is the only one."""
    cases = {case.name: case for case in awkward_densities.every()}
    assert len(cases) == 23
    u = torch.linspace(0, 1, 200_002, dtype=torch.float64)[1:-1]
    exact = torch.distributions.Beta(*torch.tensor([0.3, 3.0], dtype=torch.float64))
    _, mean, sd = cases["interval, simplex, correlation"].truth
    assert mean.item() == pytest.approx(exact.mean.item())
    weights = (2 * torch.log1p(-u) + -0.7 * u.log()).softmax(0)
    assert sd.item() == pytest.approx((weights @ (u - mean).square()).sqrt().item(), rel=0.02)
    for name in ("scales of 10⁶ and 10⁻⁶", "integer data and start", "float32, 10⁷ added"):
        missed, told, _ = awkward_densities.judged(cases[name], vi.MeanField())
        assert (missed, told) == ("", "")
    for name in ("not summed", "start outside of the support"):
        missed, told, _ = awkward_densities.judged(cases[name], vi.MeanField())
        assert missed == "miss"
        assert told


def test_the_networks_mixture_starts_at_its_normal():
    """All parts together, no step yet: the spread is that of the normal, their means half of it aside."""
    network = Network(0)
    family = vi.FullNormal(initial_scale=0.1).bind(network.space)
    mixture, evaluations = network_posterior.joint(network, family, 3, 1, 0)
    parts, weights = mixture.mixture_parts()
    assert evaluations == 2 * 8 * 3
    assert torch.allclose(weights, torch.full((3,), 1 / 3, dtype=torch.float64), atol=0.01)
    spread = family().variance.sqrt()
    away = torch.stack([(part().mean - family().mean) / spread for part in parts])
    assert 0.3 < away.std() < 0.7
    assert ((parts[0]().variance.sqrt() / spread).log().abs() < 0.1).all()
