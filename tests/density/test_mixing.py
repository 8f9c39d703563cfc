"""Parts at given places: each the family's best there, chosen by what they gain together."""

from math import log, pi

import pytest
import torch

import structvi as vi
from structvi.density.mixing import Mixing, halves
from structvi.density.peaks import Peak
from structvi.density.search import Search

SPACE = vi.Parameters({"z": torch.zeros(2, dtype=torch.float64)})
COVARIANCE = torch.tensor([[2.0, 0.9], [0.9, 0.5]], dtype=torch.float64)


class Normal:
    """N(0, COVARIANCE), normalised."""

    space = SPACE

    def log_joint(self, theta, batch=None):
        squares = (torch.linalg.solve(COVARIANCE, theta.mT).mT * theta).sum(-1)
        return -squares / 2 - log(2 * pi) - COVARIANCE.logdet() / 2


def mixing(recipe, places):
    run = Search(Normal(), float("inf"), seed=0, tolerance=1e-3, progress=False)
    return Mixing(run, recipe, recipe.parts_sought(), places)


def place(x=0.0, y=0.0, weight=1.0):
    at = torch.tensor([x, y], dtype=torch.float64)
    value = log(weight) - log(2 * pi) - COVARIANCE.logdet().item() / 2
    return Peak(at, value, torch.linalg.cholesky(COVARIANCE))


def test_a_full_part_is_the_normal_itself():
    places = [place(10.0, -3.0), place()]
    own = mixing(vi.Mixture(vi.FullNormal(), 2), places)
    chosen = own.chosen(places, [], 2)
    q = vi.Mixture(vi.FullNormal(), 2).of_parts(*chosen)
    q.space = SPACE
    own.to_theta(q)
    for part, one in zip(q.part, places, strict=True):
        torch.testing.assert_close(part().mean, one.at)
        torch.testing.assert_close(part().covariance(), COVARIANCE)
    assert q.proportions.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("recipe", [vi.MeanField(), vi.LowRankPrecision(1)])
def test_other_parts_are_their_best(recipe):
    own = mixing(vi.Mixture(recipe, 1), [place(1.0, 2.0)])
    part = own.part(0, place(1.0, 2.0))
    own.to_theta(part)
    torch.testing.assert_close(part().mean, torch.tensor([1.0, 2.0], dtype=torch.float64), atol=1e-2, rtol=0)
    # the best of both forms has the precision's diagonal
    diagonal = torch.linalg.inv(torch.linalg.inv(COVARIANCE) if recipe.rank else COVARIANCE).diagonal()
    got = part().variance if recipe.rank else 1 / part().variance
    torch.testing.assert_close(got, diagonal, atol=1e-2, rtol=0.05)


def test_halves_keep_the_mass_and_lie_on_the_longest_axis():
    light, heavy = place(10.0, 0.0, 0.3), place(weight=0.7)
    made = halves([heavy, light])
    assert made[0] == light
    assert [one.log_mass for one in made[1:]] == pytest.approx([heavy.log_mass - log(2)] * 2)
    step = made[1].at - made[2].at
    longest = torch.linalg.eigh(COVARIANCE).eigenvectors[:, -1]
    assert (step @ longest).abs().item() == pytest.approx(step.norm().item())


def test_parts_that_are_worth_nothing_are_left_out():
    own = mixing(vi.Mixture(vi.FullNormal(), "auto"), [place(), place(0.0, 0.0)])
    chosen = own.chosen([place(), place(0.0, 0.0)], [], 2)
    assert len(own.worth(chosen).parts) == 1


def test_of_more_modes_than_parts_those_with_the_highest_elbo():
    places = [place(40.0, 0.0, 2.0), place()]  # where there is nothing, and where there is all
    own = mixing(vi.Mixture(vi.FullNormal(), 1), places)
    chosen = own.chosen(places, [], 1)
    assert len(chosen.parts) == 1
    own.to_theta(chosen.parts[0])
    torch.testing.assert_close(chosen.parts[0]().mean, torch.zeros(2, dtype=torch.float64), atol=0.1, rtol=0)
