"""A note where the starts of a fit end on several hills, and none where there is one."""

import torch

import structvi as vi
from structvi.density.hills import hills
from structvi.density.newton import Normal


def fitted(centres):
    """½ N(c, 1) + ½ N(c′, 1) in three numbers, from four starts."""
    space = vi.Parameters({"z": torch.zeros(3, dtype=torch.float64)})

    def log_density(p):
        return torch.stack([-0.5 * (p["z"] - c).square().sum() for c in centres]).logsumexp(0)

    return vi.fit_density(vi.LogDensity(log_density, space), vi.FullNormal(), starts=8, progress=False)


def test_two_hills_are_told_and_one_is_not():
    two = fitted((-6.0, 6.0))
    assert any("ended on 2 hills" in note for note in two.notes), two.notes
    assert two.converged  # it is the best normal near where it is
    assert fitted((1.0, 1.0)).notes == []


def test_normals_without_a_valley_between_are_one_hill():
    near, far = (Normal(torch.full((2,), x), torch.eye(2)) for x in (0.0, 9.0))
    fits = [(-1.0, near), (-1.5, far)]
    assert hills(fits, lambda theta: -theta.square().sum(-1)) == 1
    assert hills(fits, lambda theta: (theta - 4.5).square().sum(-1)) == 2
    assert hills([(-1.0, near), (-9.0, far)], lambda theta: (theta - 4.5).square().sum(-1)) == 1  # too light
    assert hills([], lambda theta: theta.sum(-1)) == 0
