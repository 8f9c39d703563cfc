"""Parts chosen by the ELBO of their mixture, on draws that are kept."""

from math import log, pi

import pytest
import torch

import structvi as vi
from structvi.density.choosing import Kept, weighted

SPACE = vi.Parameters({"z": torch.zeros(2, dtype=torch.float64)})
MEANS = torch.tensor([[-4.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
WEIGHTS = torch.tensor([0.25, 0.75], dtype=torch.float64)


class Two:
    """¼ N((−4, 0), I) + ¾ N((4, 0), I)."""

    space = SPACE

    def log_joint(self, theta, batch=None):
        squares = (theta.unsqueeze(1) - MEANS).square().sum(-1)
        return (WEIGHTS.log() - squares / 2 - log(2 * pi)).logsumexp(-1)


def part(*mean, scale=1.0):
    q = vi.MeanField().bind(SPACE)
    with torch.no_grad():
        q.place_at(torch.tensor(mean, dtype=torch.float64), torch.full((2,), scale, dtype=torch.float64))
    return q


def test_the_best_weights_are_those_of_the_target():
    kept = Kept.of([part(-4.0, 0.0), part(4.0, 0.0)], Two(), draws=256, seed=0)
    value, log_weights = kept.elbo([0, 1])
    assert value == pytest.approx(0, abs=1e-3)
    torch.testing.assert_close(log_weights.exp(), WEIGHTS, atol=1e-3, rtol=0)
    assert kept.elbo([1])[0] == pytest.approx(log(0.75), abs=1e-3)  # mass that is not there


def test_greedy_takes_what_gains_most():
    parts = [part(0.0, 8.0), part(-4.0, 0.0), part(4.0, 0.3), part(4.0, 0.0)]
    kept = Kept.of(parts, Two(), draws=256, seed=0)
    assert kept.greedy(2, []) == [3, 1]
    assert kept.greedy(2, [2]) == [2, 1]


def test_elbo_and_evidence_of_fresh_draws():
    exact = vi.Mixture([part(-4.0, 0.0), part(4.0, 0.0)])
    with torch.no_grad():
        exact.raw_logits.copy_(WEIGHTS.log() / 0.2)
    assert weighted(exact, Two(), seed=0) == pytest.approx((0, 0), abs=1e-9)
    elbo, evidence = weighted(part(4.0, 0.0, scale=1.3), Two(), seed=0)
    # KL[N(0, 1.69 I) ‖ N(0, I)] = 1.69 − 1 − log 1.69; 1024 draws of a bounded weight
    assert elbo == pytest.approx(log(0.75) - (0.69 - log(1.69)), abs=0.05)
    assert evidence == pytest.approx(log(0.75), abs=0.05)
