"""A note where the starts of a fit end on several hills, and none where there is one."""

import torch

import structvi as vi


def fitted(centres):
    """½ N(c, 1) + ½ N(c′, 1) in three numbers, from four starts."""
    space = vi.Parameters({"z": torch.zeros(3, dtype=torch.float64)})

    def log_density(p):
        return torch.stack([-0.5 * (p["z"] - c).square().sum() for c in centres]).logsumexp(0)

    return vi.fit(vi.LogDensity(log_density, space), vi.FullNormal(), starts=8, progress=False)


def test_two_hills_are_told_and_one_is_not():
    two = fitted((-6.0, 6.0))
    assert any("ended on 2 hills" in note for note in two.notes), two.notes
    assert two.converged  # it is the best normal near where it is
    assert fitted((1.0, 1.0)).notes == []
