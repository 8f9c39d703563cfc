"""Mass around the parts of a mixture, against what is known of it."""

from math import log

import pytest
import torch

import structvi as vi
from structvi.density.wider import TIMES, wider


def mixture(P):
    """N(0, I), in two parts."""
    space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})
    parts = [vi.FullNormal().bind(space) for _ in range(2)]
    for part in parts:
        part.standardise(None)
    return space, vi.Mixture(parts)


@pytest.mark.parametrize("P", [2, 10])
def test_the_mass_that_is_left(P):
    """½ N(0, 1) + ½ N(0, 2.5²) beside N(0, 1), whose share is known: half is left, found to 10 % by 64 draws."""
    space, family = mixture(P)
    normals = [torch.distributions.Normal(0.0, sd) for sd in (1.0, 2.5)]

    def log_density(p):
        return torch.stack([log(0.5) + one.log_prob(p["z"]).sum() for one in normals]).logsumexp(0)

    made = wider(family, vi.LogDensity(log_density, space), log(0.5), seed=0)
    assert len(made) == 2 * len(TIMES)
    exact = [peak.log_mass for peak in made if abs(peak.root[0, 0].item() - 2.5) < 1e-6]
    assert len(exact) == 2
    assert exact == pytest.approx([log(0.5)] * 2, abs=0.1)


def test_nothing_is_left_of_the_mixture_itself():
    space, family = mixture(3)
    target = vi.LogDensity(lambda p: torch.distributions.Normal(0.0, 1.0).log_prob(p["z"]).sum(), space)
    assert all(peak.log_mass < -20 for peak in wider(family, target, 0.0, seed=0))
