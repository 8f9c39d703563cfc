"""Mixtures where the curvature at a mode says nothing of the mass around it."""

import torch

import structvi as vi
from structvi.density.modes import Modes
from structvi.density.units import View


def density(log_density, P):
    return vi.LogDensity(lambda p: log_density(p["z"]), vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)}))


def network(units=6):
    """Weights of a 1-6-1 network, 18 numbers: the normal of a mode's curvature is hundreds of nats off."""
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(30, generator=generator, dtype=torch.float64) - 2
    y = x.sin() + 0.1 * torch.randn(30, generator=generator, dtype=torch.float64)

    def log_density(z):
        first, bias, last = z.view(3, units)
        f = (x.unsqueeze(-1) * first + bias).tanh() @ last
        return -0.5 * ((y - f) / 0.1).square().sum() - 0.5 * z.square().sum()

    return density(log_density, 3 * units)


def searched(target):
    seen = Modes(View(target, target.space.initial, target.space.scale), torch.Generator().manual_seed(0))
    seen.climb(torch.cat([size * seen.noise(8) for size in (0.1, 0.3, 1.0, 3.0)]))
    return seen


def test_rough_is_a_network_and_not_a_normal_or_a_student():
    assert searched(network()).rough
    assert not searched(density(lambda z: -0.5 * (z - 1).square().sum(), 5)).rough
    assert not searched(density(lambda z: -2.5 * torch.log1p(z.square() / 4).sum(), 5)).rough


def test_a_mixture_over_a_network_is_no_less_than_a_normal():
    p, limit = network(), 36_000
    alone = vi.fit_density(p, vi.FullNormal(), max_evaluations=limit, progress=False)
    mixed = vi.fit_density(p, vi.Mixture(vi.FullNormal(), 2), max_evaluations=limit, progress=False)
    # other starts, other optima: within two nats; the curvature's normals end hundreds of nats below
    assert mixed.elbo.value > alone.elbo.value - 2
    assert mixed.evaluations <= limit
    assert any("parts are fits from several starts" in note for note in mixed.notes)
    _, weights = mixed.family.mixture_parts()
    assert len(weights) == 2
    torch.testing.assert_close(weights.sum().item(), 1.0)


def test_a_mixture_around_one_fit_gains_too():
    """Neal's funnel: fits from all starts end at one normal, and parts that were its copies gained nothing."""

    def funnel(z):
        return -0.5 * (z[0] / 3).square() - 0.5 * (z[1:].square() * (-z[0]).exp() + z[0]).sum()

    target = density(funnel, 6)
    assert searched(target).rough
    alone = vi.fit_density(target, vi.FullNormal(), progress=False)
    two = vi.fit_density(target, vi.Mixture(vi.FullNormal(), components=2), progress=False)
    assert two.elbo.value > alone.elbo.value + 0.3  # errors of 0.03
    means = [part().mean[0].item() for part in two.family.mixture_parts()[0]]
    assert abs(means[0] - means[1]) > 1  # one for the neck
